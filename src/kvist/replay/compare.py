"""One trace through several settings.

Responsible for running them one after another, each from empty, and for their documents. Knows no command line.
"""

from __future__ import annotations

import gc
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvist.replay.belady import belady
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

BELADY = "belady"
"""Not a strategy of the cache: the ceiling of hits, which knows the future."""


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
) -> Document:
    """Take a trace through one engine and return what came of it.

    Args:
        records: The trace.
        setting: The engine.
        timing: None: prompts one after another, for hit shares alone (``hits``).
        on_finished: Called after every request.

    Raises:
        ConfigError: The setting cannot work.
        TraceError: The trace cannot be simulated.

    Side effects: pauses the garbage collector of the process.
    """
    stopwatch = _Stopwatch()
    with _collector_paused():
        document = _replay(records, setting, timing, on_finished)
    return document | stopwatch.read(len(records))


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


def replay_belady(records: Sequence[TraceRequest], num_blocks: int) -> Document:
    """Return the document of the clairvoyant ceiling: hits only, prompts one after another.

    Raises:
        TraceError: An id of the trace follows different ids in different prompts.
    """
    stopwatch = _Stopwatch()
    ceiling = belady(records, num_blocks)
    return {
        "mode": "hits",
        "eviction": BELADY,
        "schedule": None,
        "num_blocks": num_blocks,
        "requests": ceiling.num_requests + ceiling.num_refused,
        "refused": {"PromptTooLong": ceiling.num_refused} if ceiling.num_refused else {},
        "hit_share": ceiling.hit_share,
        "hit_tokens": ceiling.num_hit_tokens,
        "prompt_tokens": ceiling.num_input_tokens,
        **stopwatch.read(len(records)),
    }


class _Stopwatch:
    """Runs from when it is made."""

    def __init__(self) -> None:
        self._wall_ns = time.perf_counter_ns()
        self._cpu_ns = time.process_time_ns()

    def read(self, num_requests: int) -> Document:
        """Return how long a replay of so many requests took on this machine: on the wall, and of one core."""
        wall_s = (time.perf_counter_ns() - self._wall_ns) / 1e9
        cpu_s = (time.process_time_ns() - self._cpu_ns) / 1e9
        return {
            "wall_s": wall_s,
            "cpu_s": cpu_s,
            "requests_per_wall_minute": 60 * num_requests / wall_s if wall_s else None,
            "requests_per_cpu_minute": 60 * num_requests / cpu_s if cpu_s else None,
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
