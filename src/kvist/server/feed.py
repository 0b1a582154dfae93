"""A document that changes about once a second, sent to whoever watches as what is new in it.

Responsible for composing it only while somebody watches, once for all watchers of a tenant; for differences; and for
the stream of server-sent events. Knows nothing of what is in a document.

    document    {section: {key: value}}; a value is any JSON and is replaced as a whole
    first       event "full", the document
    then        event "delta": {section: {"set": {key: value}, "drop": [key, ...]}}, sections without news left out

Invariants:
    1. Nothing is queued: a watcher who does not read in time gets a whole document next, never a backlog.
    2. A tenant's document goes to that tenant alone.
    3. Without watchers nothing runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from kvist.server.errors import HttpError, encode_json, to_reply

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence

    from starlette.types import Receive, Scope, Send

    from kvist.server.generation import Gate

    Section = Mapping[str, Any]  # Any: JSON
    Document = Mapping[str, Section]
    Compose = Callable[[Sequence[str]], Awaitable[Mapping[str, Document]]]

logger = logging.getLogger(__name__)

INTERVAL_S = 0.8
"""Between two documents; with what it takes to compose and draw one, news is on the screen within a second."""
MIN_PAUSE_S = 0.2
"""Between two documents, when a new watcher asks for one sooner."""
MAX_WATCHERS = 32
"""Streams at once, of all tenants."""


class _Channel:
    """The document of one tenant."""

    def __init__(self) -> None:
        self.num_watchers = 0
        self.tick = 0
        """How many documents there were."""
        self.delta = b""
        """What the last one brought; empty for the first."""
        self.error: Exception | None = None
        """Why there will be no further one."""
        self._document: Document = {}
        self._full = b""

    def publish(self, document: Document) -> None:
        """Replace the document."""
        self.delta = _event("delta", difference(self._document, document)) if self.tick else b""
        self._document = document
        self._full = b""
        self.tick += 1

    def full(self) -> bytes:
        """Return the whole document as an event."""
        self._full = self._full or _event("full", self._document)
        return self._full


class Feed:
    """Documents by tenant, and who watches them. One event loop.

    Args:
        compose: Returns the documents of the tenants that are named.
        interval_s: Seconds from one of them to the next, when composing takes no longer.
    """

    def __init__(self, compose: Compose, interval_s: float) -> None:
        self._compose = compose
        self._interval_s = interval_s
        self._channels: dict[str, _Channel] = {}
        self._is_urgent = asyncio.Event()
        self._news = asyncio.Event()
        self._composing: asyncio.Task[None] | None = None

    @property
    def num_watchers(self) -> int:
        """Streams that are open."""
        return sum(channel.num_watchers for channel in self._channels.values())

    def check_room(self) -> None:
        """Raise HttpError 429 when there are as many watchers as there may be."""
        if self.num_watchers >= MAX_WATCHERS:
            raise HttpError(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"[dashboard] {MAX_WATCHERS} dashboards are open on this server, which is all it serves; close one",
                code="rate_limit_exceeded",
                headers={"Retry-After": "10"},
            )

    async def watch(self, tenant: str) -> AsyncGenerator[bytes, None]:
        """Yield the events of a tenant's document, for ever. Close the iterator to stop watching.

        Raises:
            Exception: What ``compose`` raised.
        """
        channel = self._channels.setdefault(tenant, _Channel())
        channel.num_watchers += 1
        tick = 0
        try:
            self._start(channel)
            while True:
                # Before anything is awaited: news that comes after this line sets this event.
                news = self._news
                if channel.error is not None:
                    raise channel.error
                if tick == channel.tick:
                    await news.wait()
                    continue
                is_next = tick and tick + 1 == channel.tick
                tick = channel.tick
                yield channel.delta if is_next else channel.full()
        finally:
            channel.num_watchers -= 1
            if not channel.num_watchers and self._channels.get(tenant) is channel:
                del self._channels[tenant]

    def _start(self, channel: _Channel) -> None:
        if self._composing is None or self._composing.done():
            self._is_urgent = asyncio.Event()
            self._composing = asyncio.create_task(self._run())
        if not channel.tick:
            self._is_urgent.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._channels:
                start_s = loop.time()
                await self._publish()
                await asyncio.sleep(MIN_PAUSE_S)
                rest_s = self._interval_s - (loop.time() - start_s)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._is_urgent.wait(), rest_s)
        except Exception as error:  # noqa: BLE001  # those who watch raise it where it is reported
            channels, self._channels = self._channels, {}
            for channel in channels.values():
                channel.error = error
            self._announce()

    async def _publish(self) -> None:
        self._is_urgent.clear()
        documents = await self._compose(list(self._channels))
        for tenant, document in documents.items():
            if tenant in self._channels:
                self._channels[tenant].publish(document)
        self._announce()

    def _announce(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class FeedStream(Response):
    """The stream of one watcher; ends when the client goes away or the server does."""

    media_type = "text/event-stream"

    def __init__(self, feed: Feed, tenant: str, gate: Gate) -> None:
        super().__init__(
            headers={
                "Cache-Control": "no-store",
                # Reverse proxies of the nginx family hold small responses back unless told not to.
                "X-Accel-Buffering": "no",
            }
        )
        # The base class states the length of an empty body.
        del self.headers["content-length"]
        self._feed = feed
        self._tenant = tenant
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002  # ASGI
        """Send events until nobody listens."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        sending = asyncio.create_task(self._send_events(send))
        leaving = asyncio.create_task(_until_gone(receive))
        ending = self._gate.until_aborted()
        try:
            either: set[asyncio.Future[Any]] = {sending, leaving, ending}  # Any: several types
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ending.cancel()
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
        await send({"type": "http.response.body", "body": self._last(sending), "more_body": False})

    async def _send_events(self, send: Send) -> None:
        async with contextlib.aclosing(self._feed.watch(self._tenant)) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})

    def _last(self, sending: asyncio.Task[None]) -> bytes:
        error = None if sending.cancelled() else sending.exception()
        if error is None:
            return _event("end", {})
        logger.error("[dashboard] the feed failed", exc_info=error)
        assert isinstance(error, Exception)  # an exit would have ended the loop
        return _event("end", to_reply(error).envelope)


def difference(old: Document, new: Document) -> dict[str, Any]:  # Any: JSON
    """Return what turns one document into another. O(keys) of the sections that are not the same object."""
    changes: dict[str, Any] = {}
    for name in old.keys() | new.keys():
        before, after = old.get(name, {}), new.get(name, {})
        if before is after:
            continue
        changed = {
            key: value for key, value in after.items() if key not in before or before[key] != value
        }
        gone = [key for key in before if key not in after]
        if changed or gone:
            changes[name] = {"set": changed, "drop": gone}
    return changes


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _event(name: str, document: object) -> bytes:
    return f"event: {name}\ndata: ".encode() + encode_json(document) + b"\n\n"
