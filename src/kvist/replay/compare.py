"""One trace through several settings.

Responsible for running them one after another, each from empty, and for their documents. Knows no command line.
"""

from __future__ import annotations

import gc
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvist.replay.cost import CostModel
from kvist.replay.hits import replay_hits
from kvist.replay.metrics import Slo, describe_hits, describe_timeline
from kvist.replay.simulator import Simulator

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvist.replay.metrics import Document
    from kvist.replay.setting import Setting
    from kvist.replay.simulator import Load
    from kvist.replay.traces import TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What a replay with a clock needs beside the engine's numbers."""

    load: Load
    cost: CostModel = field(default_factory=CostModel)
    slo: Slo = field(default_factory=Slo)


def replay_trace(
    records: Sequence[TraceRequest],
    setting: Setting,
    timing: Timing | None,
    on_finished: Callable[[], None] = lambda: None,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> Document:
    """Take a trace through one engine and return what came of it.

    Args:
        records: The trace.
        setting: The engine.
        timing: None: prompts one after another, for hit shares alone (``hits``).
        on_finished: Called after every request.
        clock: Monotonic nanoseconds, for ``wall_s``.

    Raises:
        ConfigError: The setting cannot work.
        TraceError: The trace cannot be simulated.

    Side effects: pauses the garbage collector of the process.
    """
    started_ns = clock()
    with _collector_paused():
        document = _replay(records, setting, timing, on_finished)
    return document | wall_time(len(records), clock() - started_ns)


def _replay(
    records: Sequence[TraceRequest],
    setting: Setting,
    timing: Timing | None,
    on_finished: Callable[[], None],
) -> Document:
    if timing is None:
        manager = setting.make_manager()
        counts = replay_hits(records, manager, on_finished)
        manager.check_invariants()
        return describe_hits(setting, counts, manager.stats())
    simulator = Simulator(setting, cost=timing.cost, load=timing.load)
    timeline = simulator.run(records, on_finished)
    simulator.manager.check_invariants()
    return describe_timeline(setting, timeline, simulator.manager.stats(), timing.slo)


def wall_time(num_requests: int, duration_ns: int) -> Document:
    """Return how long a replay took on this machine."""
    wall_s = duration_ns / 1e9
    return {
        "wall_s": wall_s,
        "requests_per_wall_minute": 60 * num_requests / wall_s if wall_s else None,
    }


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Keep the garbage collector from walking through the whole tree again and again: a quarter of the time.

    Nothing that a replay drops is part of a cycle, so reference counts free all of it.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
