"""The way of a request's output from the engine thread to whoever waits for it.

Responsible for ``RequestStream``: one buffer that can be read with ``for`` from any thread and with ``async for`` from
any event loop. Knows nothing of schedulers, models or queues of the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

    from kvist.errors import EngineError
    from kvist.types import OutputChunk


class RequestStream:
    """The output of one request, all of its sequences, as it is produced.

    Iterate it once, either synchronously or asynchronously. It ends after the last sequence's final chunk (the one with
    a ``finish_reason``), and raises ``EngineError`` when the engine could not go on with the request. As a context
    manager, sync or async, it cancels the request when the block is left early.

    Threads: ``put`` and ``fail`` are the engine thread's; everything else may be called from any thread. One consumer.

    Invariants:
        1. Chunks come out in the order they were put.
        2. After the last final chunk or an error nothing follows.
    """

    def __init__(
        self, request_id: str, num_sequences: int, request_cancel: Callable[[RequestStream], None]
    ) -> None:
        """Make an empty stream.

        Args:
            request_id: The client call.
            num_sequences: Sequences that will each end with a final chunk.
            request_cancel: Called with this stream, from the cancelling thread; must be idempotent.
        """
        self.request_id = request_id
        self._request_cancel = request_cancel
        self._num_open = num_sequences
        self._chunks: deque[OutputChunk] = deque()
        self._error: EngineError | None = None
        self._changed = threading.Condition()
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will be put into the stream; unread chunks may remain."""
        with self._changed:
            return self._has_ended

    def cancel(self) -> None:
        """Ask the engine to end the request and free its blocks; idempotent, from any thread, returns at once.

        Sequences that had not ended finish with ``FinishReason.ABORT``; whoever still reads gets those chunks.
        """
        if not self.is_finished:
            self._request_cancel(self)

    def put(self, chunk: OutputChunk) -> None:
        """Append a chunk and wake the reader."""
        with self._changed:
            if self._has_ended:
                return
            self._chunks.append(chunk)
            self._num_open -= chunk.finish_reason is not None
            self._wake()

    def fail(self, error: EngineError) -> None:
        """End the stream with an error, raised after the chunks already put; no effect on an ended stream."""
        with self._changed:
            if self._has_ended:
                return
            self._error = error
            self._wake()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> OutputChunk:
        with self._changed:
            self._changed.wait_for(self._can_read)
            chunk = self._take()
        if chunk is None:
            raise StopIteration
        return chunk

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> OutputChunk:
        while True:
            with self._changed:
                if self._can_read():
                    chunk = self._take()
                    break
                waiter = asyncio.get_running_loop().create_future()
                self._waiters.append(waiter)
            await waiter
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()

    # The rest is called with ``_changed`` held.

    @property
    def _has_ended(self) -> bool:
        return self._num_open == 0 or self._error is not None

    def _can_read(self) -> bool:
        return bool(self._chunks) or self._has_ended

    def _take(self) -> OutputChunk | None:
        """Return the next chunk, None at the end, or raise what the engine failed with."""
        if self._chunks:
            return self._chunks.popleft()
        if self._error is not None:
            raise self._error
        return None

    def _wake(self) -> None:
        self._changed.notify_all()
        for waiter in self._waiters:
            # RuntimeError: the reader's event loop was closed, so nobody waits there any more.
            with contextlib.suppress(RuntimeError):
                waiter.get_loop().call_soon_threadsafe(_resolve, waiter)
        self._waiters.clear()


def _resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():  # the waiting task may have been cancelled
        waiter.set_result(None)
