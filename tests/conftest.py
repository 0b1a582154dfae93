"""Fixtures shared by every test: the embedded model and the public data, each skipping with the reason."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvist.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Iterator


def pytest_configure() -> None:
    """Give each xdist worker one CPU of its own.

    An engine takes as many threads as it has CPUs. Two workers with two threads each on two CPUs spend most of their
    time waiting at each other's barriers.
    """
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker.startswith("gw") and hasattr(os, "sched_setaffinity"):
        cpus = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cpus[int(worker[2:]) % len(cpus)]})


@pytest.fixture(autouse=True)
def logging_as_found() -> Iterator[None]:
    """Undo what a command line run inside the test process does to the package's logger."""
    logger = logging.getLogger("kvist")
    level, handlers = logger.level, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """Return the GGUF file of the embedded default model; skip when it has not been pulled."""
    from kvist.model.catalog import resolve

    try:
        return resolve("smollm2-135m").path
    except ModelLoadError as error:
        pytest.skip(f"embedded model not pulled: {error}")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Return the folder of public data sets; skip when it is not there."""
    default = Path(__file__).resolve().parents[1].parent / "shared" / "data"
    folder = Path(os.environ.get("KVIST_TEST_DATA", default))
    if not folder.is_dir():
        pytest.skip(f"no public data at {folder}; set KVIST_TEST_DATA")
    return folder
