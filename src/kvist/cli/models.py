"""Bringing a model to a command: pulled with progress where that is right, loaded, and closed again.

Only the embedded default is fetched without being asked for: it is small, and its licence and checksum are known. Any
other missing model is an error that says how to pull it.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from kvist.cli.console import note, note_console, working
from kvist.config import ModelConfig
from kvist.model import catalog, pull

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.progress import TaskID

    from kvist.config import EngineConfig
    from kvist.engine.async_engine import AsyncEngine
    from kvist.model.pull import PullProgress, PullStage

LINE_INTERVAL_S = 5.0
"""Seconds between progress lines where there is no terminal to draw a bar on."""


def pull_with_progress(name: str) -> catalog.ResolvedModel:
    """Fetch a model, or verify the one that is here, with a bar on a terminal and lines elsewhere.

    Raises:
        ModelLoadError: As ``kvist.model.pull.pull``.
    """
    console = note_console()
    if not console.is_terminal:
        return pull.pull(name, _ProgressLines(name))
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        return pull.pull(name, _ProgressBars(name, progress))


def ensure_available(name: str) -> None:
    """Make sure that a model is on this machine: pull the embedded default if it is missing, and no other.

    Raises:
        ModelLoadError: Another model is missing; found out here, before the seconds that loading torch takes.
    """
    default = catalog.KNOWN_MODELS.get(name)
    if default is not None and name == ModelConfig().model and not default.is_pulled:
        note(
            f"{name} is not on this machine yet; pulling it ({default.download_bytes / 1e6:.0f} MB)"
        )
        pull_with_progress(name)
    catalog.resolve(name)


@contextmanager
def running_engine(config: EngineConfig) -> Iterator[AsyncEngine]:
    """Load the model of the configuration and yield its started engine; close it at the end.

    Raises:
        ModelLoadError: The model is missing or cannot be loaded.
        ConfigError: The configuration cannot work on this machine.
    """
    ensure_available(config.model.model)
    with working(f"loading {config.model.model}") as show:
        engine = _build(config, show)
    try:
        engine.start()
        yield engine
    finally:
        engine.close()


def _build(config: EngineConfig, show: Callable[[str], None]) -> AsyncEngine:
    from kvist.engine.build import build_engine  # noqa: PLC0415  # loads torch

    def on_progress(name: str, done: int, total: int) -> None:
        show(f"{name}: {done:,} of {total:,} tokens")

    return build_engine(config, on_progress)


class _ProgressBars:
    """Progress reports as one bar per stage."""

    def __init__(self, name: str, progress: Progress) -> None:
        self._name = name
        self._progress = progress
        self._tasks: dict[PullStage, TaskID] = {}

    def __call__(self, report: PullProgress) -> None:
        task = self._tasks.get(report.stage)
        if task is None:
            task = self._progress.add_task(f"{report.stage.value} {self._name}", total=None)
            self._tasks[report.stage] = task
        self._progress.update(task, completed=report.done_bytes, total=report.total_bytes)


class _ProgressLines:
    """Progress reports as a line for each stage, and one every few seconds within it."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._stage: PullStage | None = None
        self._stage_start_s = 0.0
        self._line_at_s = 0.0

    def __call__(self, report: PullProgress) -> None:
        now_s = time.monotonic()
        if report.stage is not self._stage:
            self._stage, self._stage_start_s, self._line_at_s = report.stage, now_s, now_s
            note(f"{report.stage.value} {self._name}")
        elif now_s - self._line_at_s >= LINE_INTERVAL_S:
            self._line_at_s = now_s
            speed = report.done_bytes / (now_s - self._stage_start_s)
            total = "" if report.total_bytes is None else f" of {report.total_bytes / 1e6:.0f}"
            note(
                f"{report.stage.value} {self._name}: {report.done_bytes / 1e6:.0f}{total} MB, "
                f"{speed / 1e6:.1f} MB/s"
            )
