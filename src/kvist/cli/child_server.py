"""A real ``kvist serve`` in a process of its own, for as long as a ``with`` block lasts.

Responsible for knowing when the server is ready or has died, and for ending it. Knows nothing of what is
asked of the server.
"""

from __future__ import annotations

import select
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvist.cli.console import working
from kvist.cli.options import flags_of
from kvist.cli.serve import READY
from kvist.config import EngineConfig
from kvist.errors import EngineError, EngineStopped

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

HOST = "127.0.0.1"
START_TIMEOUT_S = 180.0
POLL_INTERVAL_S = 1.0
STOP_TIMEOUT_S = 10.0
"""The server promises to end within 5 s of SIGTERM; past this it is killed and the command fails."""
LOG_TAIL_CHARS = 2000


@contextmanager
def child_server(config: EngineConfig, port: int) -> Iterator[str]:
    """Start ``kvist serve``, yield its address once it is ready, and end it afterwards.

    Args:
        config: Passed on as flags.
        port: Port to listen on; 0 picks a free one.

    Raises:
        EngineStopped: The server did not become ready (the port is taken, say), or did not end in time; the message has
            the end of its log.

    Side effects: While the block runs, SIGTERM to this process is an interrupt, so that the server is ended too.
    """
    arguments = [sys.executable, "-m", "kvist", "serve", "--host", HOST, "--port", str(port)]
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
            # A session of its own: Ctrl-C reaches this process only, which then ends the server in order.
            process = subprocess.Popen(  # noqa: S603  # our own interpreter and our own flags
                [*arguments, *engine_arguments(config)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
            try:
                with working("waiting for the server"):
                    url = _wait_until_ready(process, log)
                yield url
                _stop(process, log)
            finally:
                if process.poll() is None:
                    process.kill()
                process.wait()
                assert process.stdout is not None
                process.stdout.close()
    finally:
        signal.signal(signal.SIGTERM, previous)


def engine_arguments(config: EngineConfig) -> list[str]:
    """Return the command-line flags that make this configuration; options at their default are left out."""
    values: dict[str, Any] = {}  # Any: option values
    for group in (config.model, config.cache, config.scheduler):
        values |= {name: getattr(group, name) for name in group.__slots__}
    arguments: list[str] = []
    for flag in flags_of(EngineConfig):
        value = values[flag.field_name]
        if flag.key_kind is not None:
            for key, number in value.items():
                arguments += [flag.name, f"{key}={number}"]
        elif value != flag.default:
            arguments += [flag.name, str(value)]
    return arguments


def _wait_until_ready(process: subprocess.Popen[bytes], log: Any) -> str:  # noqa: ANN401  # temporary file
    """Return the address that the server writes once it accepts requests."""
    assert process.stdout is not None
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        readable, _, _ = select.select([process.stdout], [], [], POLL_INTERVAL_S)
        if readable:
            line = process.stdout.readline().decode(errors="replace")
            if line.startswith(READY):
                return line.removeprefix(READY).strip()
            if not line:
                raise _error(f"ended with exit code {process.wait()} before it was ready", log)
    raise _error(f"was not ready after {START_TIMEOUT_S:.0f} s", log)


def _stop(process: subprocess.Popen[bytes], log: Any) -> None:  # noqa: ANN401  # temporary file
    if process.poll() is not None:
        raise _error(f"ended by itself with exit code {process.returncode}", log)
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise _error(f"did not end within {STOP_TIMEOUT_S:.0f} s of SIGTERM", log) from None


def _error(what: str, log: Any) -> EngineError:  # noqa: ANN401  # temporary file
    log.seek(0)
    tail = log.read()[-LOG_TAIL_CHARS:].strip()
    return EngineStopped(f"[server] kvist serve {what}; its last words: {tail or '(none)'}")


def _interrupt(signal_number: int, frame: FrameType | None) -> None:
    del signal_number, frame
    raise KeyboardInterrupt
