"""The outermost layer of every HTTP exchange.

Responsible for what must hold whatever a route does: an unforeseen exception becomes a 500 with the error envelope
and one log entry; a body that nobody read is read to its end, for a while, so that the client gets to see the answer.
Knows nothing of routes.
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from kvist.server.errors import to_reply

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

DISCARD_S = 2.0
"""How long an unread body is read and thrown away after the answer was sent. Closing the connection at once would
reset it, and a client that is still sending would lose the answer that tells it why to stop."""


class Exchange:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one exchange."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(scope, receive)
        status = 0  # of the answer, once it was begun

        async def guarded_send(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            is_last = message["type"] == "http.response.body" and not message.get("more_body")
            # A server that is ending (503) waits for nobody.
            if is_last and body.should_discard and status < HTTPStatus.INTERNAL_SERVER_ERROR:
                # All of the answer goes out first; only its end waits for the body's.
                await send({**message, "more_body": True})
                await body.discard()
                message = {"type": "http.response.body", "body": b"", "more_body": False}
            await send(message)

        try:
            await self._app(scope, body.receive, guarded_send)
        except Exception as error:
            logger.exception("[server] %s %s failed", scope["method"], scope["path"])
            if status:
                raise
            await to_reply(error).to_response()(scope, receive, guarded_send)


class _Body:
    """A request's body, and how far it has been received."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        names = {name.lower(): value for name, value in scope["headers"]}
        self._receive = receive
        self._is_received = not (
            b"transfer-encoding" in names or names.get(b"content-length", b"0") != b"0"
        )
        # A client that waits for "100 Continue" sends nothing unless it is asked to, so there is nothing to discard.
        self._is_held_back = names.get(b"expect", b"").lower() == b"100-continue"

    @property
    def should_discard(self) -> bool:
        """Whether the client may still be sending."""
        return not self._is_received and not self._is_held_back

    async def receive(self) -> dict[str, Any]:  # Any: ASGI's own message type
        """Return the next message."""
        self._is_held_back = False
        message = await self._receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            self._is_received = True
        return dict(message)

    async def discard(self) -> None:
        """Receive the rest of the body and forget it; give up after DISCARD_S."""
        try:
            async with asyncio.timeout(DISCARD_S):
                while not self._is_received:
                    await self.receive()
        except TimeoutError:
            self._is_received = True
