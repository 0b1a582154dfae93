"""Server-sent events: a call's answer in pieces, as they are computed.

Responsible for the framing, for the usage piece and the end marker, for telling an error in mid-stream, and for ending
the call however the connection ends. Knows nothing of what the pieces say.
"""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from kvist.server.errors import ClientDisconnected, encode_json, to_reply
from kvist.server.generation import call_usage, watched

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from starlette.types import Receive, Scope, Send

    from kvist.server.endpoints import Job
    from kvist.server.generation import Call

logger = logging.getLogger(__name__)

END = b"data: [DONE]\n\n"


class EventStream(Response):
    """The streamed response of a call that was submitted.

    Not starlette's StreamingResponse: that leaves the body generator to the garbage collector when a client goes away
    while it is suspended, and the call's blocks with it.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        job: Job,
        call: Call,
        explain: Callable[[], Awaitable[dict[str, Any]]],  # Any: JSON
        note_error: Callable[[Exception], None],
        after: Callable[[], None],
    ) -> None:
        """Make the response.

        Args:
            job: What was asked.
            call: Submitted.
            explain: Called once the call is finished; returns what the last piece has beside the output.
            note_error: Told of what ended the stream before its end, unless the client did.
            after: Called once a complete answer was sent.
        """
        super().__init__(
            headers={
                "Cache-Control": "no-cache",
                # Reverse proxies of the nginx family hold small responses back unless told not to.
                "X-Accel-Buffering": "no",
                "X-Request-Id": job.request_id,
            }
        )
        # The base class states the length of an empty body.
        del self.headers["content-length"]
        self._job = job
        self._call = call
        self._explain = explain
        self._note_error = note_error
        self._after = after

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002  # ASGI
        """Send the answer while it is computed; returns when it is complete or nobody listens."""
        async with watched(self._call, receive) as call:
            try:
                await send(
                    {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
                )
                await self._send_pieces(call, send)
                end = END
            except ClientDisconnected:
                return
            except Exception as error:
                # Too late for a status code: the boundary of the process is here, and the client hears of it here.
                self._note_error(error)
                reply = to_reply(error)
                if reply.status == HTTPStatus.INTERNAL_SERVER_ERROR:
                    logger.exception("[server] %s failed in mid-stream", self._job.request_id)
                end = _event(encode_json(reply.envelope))
            await send({"type": "http.response.body", "body": end, "more_body": False})
            if end is END:
                self._after()

    async def _send_pieces(self, call: Call, send: Send) -> None:
        answer = self._job.answer
        await self._send(answer.opening(len(call.outputs)), send)
        async for batch in call.batches():
            pieces = [piece for item in batch for piece in answer.pieces(item)]
            if call.is_finished:
                # All of the output goes out before anything is explained.
                await self._send(pieces[:-1], send)
                del pieces[:-1]
                extras = await self._explain()
                if self._job.wants_usage_chunk:
                    pieces.append(answer.usage_piece(call_usage(call.outputs, call.n)))
                pieces[-1].update(extras)
            await self._send(pieces, send)

    async def _send(self, pieces: Iterable[dict[str, Any]], send: Send) -> None:  # Any: JSON
        if self._job.wants_usage_chunk:
            # OpenAI: "all other chunks will also include a usage field, but with a null value".
            pieces = [{**piece, "usage": piece.get("usage")} for piece in pieces]
        body = b"".join([_event(self._job.answer.encoded(piece)) for piece in pieces])
        if body:
            await send({"type": "http.response.body", "body": body, "more_body": True})


def _event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
