"""What a command writes, where, and the code it exits with.

Results go to stdout, everything else (progress, notes, errors) to stderr, so that a pipe sees only results. Exit codes:
0 ok, 1 failed, 2 usage, 130 interrupted. Knows no command and no engine.

Invariants:
    1. With ``--json``, stdout holds exactly one line, the JSON document.
    2. An ``EngineError`` becomes one line on stderr; a traceback is shown only with ``--debug``.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NoReturn

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from kvist.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from rich.progress import TaskID

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""

logger = logging.getLogger("kvist.cli")


def result_console() -> Console:
    """Return a console on stdout. Made per call, so that a redirected stdout is respected."""
    return Console(file=sys.stdout, highlight=False, soft_wrap=True)


def note_console() -> Console:
    """Return a console on stderr for progress and notes."""
    return Console(file=sys.stderr, highlight=False, soft_wrap=True)


def note(message: str, *, style: str = "dim") -> None:
    """Write one line of progress or explanation to stderr."""
    note_console().print(Text(message, style=style))


@contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """Show on a terminal that something takes its time, while the block runs; yields what to call with news of it.

    News are written as lines where there is no terminal.
    """
    console = note_console()
    if not console.is_terminal:
        yield note
        return
    with console.status(Text(what)) as status:
        yield lambda news: status.update(Text(news))


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Show on a terminal how far something is; yields what to call with its name, what is done and the total."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    console = note_console()
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        tasks: dict[str, TaskID] = {}

        def show(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=total)
            bar.update(tasks[name], completed=done, total=total)

        yield show


def print_json(document: Mapping[str, object]) -> None:
    """Write the document to stdout as one line of JSON."""
    sys.stdout.write(json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n")
    sys.stdout.flush()


def fail(message: str, *, exit_code: int = EXIT_FAILED) -> NoReturn:
    """Write one error line to stderr and leave the command with the exit code."""
    line = " ".join(message.split())
    note_console().print(Text.assemble(("kvist: ", "bold red"), line))
    raise typer.Exit(exit_code)


def ignore_interrupts() -> None:
    """Let neither SIGTERM nor SIGINT end the process any more: what is left to do is short and bounded."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def end_process() -> NoReturn:
    """Leave the process with exit code 0, now that everything in it has been closed.

    Not through the interpreter's own end: with a model library loaded that takes seconds on a busy machine, and would
    wait for threads that read requests nobody waits for any more.
    """
    for stream in (sys.stdout, sys.stderr):
        # OSError: whoever read it has gone.
        with suppress(OSError):
            stream.flush()
    os._exit(0)


def set_up_logging(*, level: int) -> None:
    """Send the log of the package to stderr, from the given level on.

    Side effects: Configures the ``kvist`` logger. Only the command line does this; the library configures nothing.
    """
    root = logging.getLogger("kvist")
    if not root.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        root.addHandler(handler)
    root.setLevel(level)


def is_debugging() -> bool:
    """Whether ``--debug`` was given."""
    return logging.getLogger("kvist").level == logging.DEBUG


@contextmanager
def reported_errors() -> Iterator[None]:
    """Turn what a command raises into one line on stderr and the right exit code.

    Raises:
        typer.Exit: With 1 after an error, 130 after an interrupt.
    """
    try:
        yield
    except KeyboardInterrupt:
        note("interrupted")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except EngineError as error:
        if is_debugging():
            raise
        fail(str(error))
    except BrokenPipeError:
        # The reader of stdout has gone (`kvist ... | head`); writing more can only fail again.
        sys.stderr.close()
        raise typer.Exit(EXIT_FAILED) from None
    except OSError as error:
        if is_debugging():
            raise
        fail(f"[{error.filename or 'system'}] {error.strerror or error}")
