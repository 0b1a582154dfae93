"""The server as a process: socket, signals and an orderly end, by default within five seconds.

Responsible for listening, for saying when the server is ready, and for the order of its end. Knows nothing of routes.

The end, from the first SIGTERM or SIGINT on:
    1. at once       new requests are refused with 503 and /health says "draining", so that a load balancer sees it;
                     requests that run go on
    2. when none is left, after --drain-s, or at a second signal
                     nothing is listened on any more; those left are aborted, and their clients told so
    3. after FLUSH_S more  connections that still do not take their answer are dropped
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import signal
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import uvicorn

from kvist.errors import ConfigError
from kvist.server.app import create_app
from kvist.server.tracing import open_tracing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from fastapi import FastAPI

    from kvist.config import ServerConfig
    from kvist.server.generation import Gate
    from kvist.server.ports import ServedEngine

logger = logging.getLogger(__name__)

FLUSH_S = 1.0
# With the default of --drain-s well below five seconds: the step in progress comes after them, and
# ``AsyncEngine.close`` may wait two more.
BACKLOG = 2048
"""Connections that may wait to be accepted; the operating system caps it."""
KEEP_ALIVE_S = 30
"""Idle connections are kept this long: clients that send a request every few seconds need not connect again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    """A server that accepts requests."""

    url: str
    """Its address, ``http://HOST:PORT``."""
    port: int
    """The port listened on, also when any free one was asked for."""
    stop: Callable[[], None]
    """Ends the server as SIGTERM does; returns at once, from any thread."""


def serve(
    engine: ServedEngine,
    config: ServerConfig,
    on_ready: Callable[[RunningServer], None] | None = None,
) -> None:
    """Serve until SIGTERM, SIGINT or ``RunningServer.stop``; return when every connection has ended.

    Args:
        engine: Started by the caller, who also stops it afterwards.
        config: Address, keys and limits.
        on_ready: Called once requests are accepted; None prints one line to standard output.

    Raises:
        ConfigError: The address cannot be listened on, or the keys cannot be used.

    Side effects: When called in the main thread, signal handlers are set while it runs, and what exists already is
        taken out of garbage collection for good.
    """
    tracing = open_tracing(config, config.served_name or engine.model_name)
    try:
        app = create_app(engine, config, tracing)
        listener = _listen(config.host, config.port)
        _serve(app, config, listener, on_ready or _print_ready)
    finally:
        if tracing is not None:
            tracing.close()


def _serve(
    app: FastAPI,
    config: ServerConfig,
    listener: socket.socket,
    on_ready: Callable[[RunningServer], None],
) -> None:
    if _is_main_thread():
        # A loaded model library is about a million objects that live as long as the process. Not walking
        # them saves every stream a stall at each full collection.
        gc.freeze()
    try:
        asyncio.run(_run(app, config.drain_s, listener, on_ready))
    finally:
        listener.close()


async def _run(
    app: FastAPI,
    drain_s: float,
    listener: socket.socket,
    on_ready: Callable[[RunningServer], None],
) -> None:
    loop = asyncio.get_running_loop()
    gate: Gate = app.state.gate
    loop.set_default_executor(_Readers(thread_name_prefix="kvist-reader"))
    server = _Server(
        uvicorn.Config(
            app,
            # What is tested is what runs: uvicorn would otherwise choose by what else is installed.
            http="h11",
            loop="asyncio",
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            log_level="warning",
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=int(FLUSH_S),
            backlog=BACKLOG,
        )
    )

    draining: set[asyncio.Task[None]] = set()

    def stop() -> None:
        if draining:
            end()
            return
        logger.info("[server] stopping; requests that run have %g s to finish", drain_s)
        gate.close()
        draining.add(asyncio.create_task(drain()))

    async def drain() -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(gate.drained(), drain_s)
        end()

    def end() -> None:
        server.should_exit = True
        gate.abort()

    with _signals(loop, stop):
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await asyncio.wait(
            {serving, asyncio.ensure_future(server.listening.wait())},
            return_when=asyncio.FIRST_COMPLETED,
        )
        if server.listening.is_set():
            host, port = listener.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            on_ready(
                RunningServer(
                    url=f"http://{shown}:{port}",
                    port=port,
                    stop=lambda: _call_soon(loop, stop),
                )
            )
        await serving
        for task in draining:
            task.cancel()


class _Readers(ThreadPoolExecutor):
    """The threads that read requests.

    The end of the event loop does not wait for them: nobody wants their results any more, and a prompt of megabytes
    takes seconds.
    """

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002, FBT001, FBT002  # the base's signature
        super().shutdown(wait=False, cancel_futures=True)


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handling, which would end the process by the signal and not with code 0."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def _signals(loop: asyncio.AbstractEventLoop, stop: Callable[[], None]) -> Iterator[None]:
    """Call ``stop`` on SIGTERM and SIGINT inside the block; no effect outside the main thread."""
    if not _is_main_thread():
        yield
        return
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    # RuntimeError: the loop has ended, and with it the server.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # A dual-stack socket would also take the port on addresses that were not asked for.
        return socket.create_server(address[:2], family=family, backlog=BACKLOG)
    except socket.gaierror as error:
        raise ConfigError(
            f"[server] --host {host} is no address of this machine ({error.strerror}); "
            "use 127.0.0.1, or 0.0.0.0 for every address"
        ) from error
    except OSError as error:
        raise ConfigError(_listen_problem(host, port, error)) from error


def _listen_problem(host: str, port: int, error: OSError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return (
                f"[server] port {port} on {host} is already in use; "
                "choose another with --port, or --port 0 for a free one"
            )
        case errno.EACCES:
            return f"[server] this user may not listen on port {port}; choose one above 1023 with --port"
        case errno.EADDRNOTAVAIL:
            return (
                f"[server] --host {host} is no address of this machine; "
                "use 127.0.0.1, or 0.0.0.0 for every address"
            )
        case _:
            return f"[server] cannot listen on {host} port {port} ({error.strerror}); check --host and --port"


def _print_ready(server: RunningServer) -> None:
    sys.stdout.write(f"ready: {server.url}\n")
    sys.stdout.flush()
