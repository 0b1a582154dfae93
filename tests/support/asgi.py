"""One HTTP exchange with an ASGI application, message by message.

For what a real client hides: the exact bytes of a stream, a body in pieces, and going away at a chosen moment.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

JSON_HEADERS = {"content-type": "application/json"}


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error in the envelope, which must hold exactly OpenAI's four fields."""
        document = self.json()
        assert set(document) == {"error"}
        assert set(document["error"]) == {"message", "type", "param", "code"}
        return document["error"]


class Connection:
    """The client's side of one exchange."""

    def __init__(self, *, is_reading: bool) -> None:
        self.incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.outgoing: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._gone = asyncio.Event()
        self.stuck = asyncio.Event()
        """Set when the application waits in ``send`` for a client that does not read."""
        self.unblocked = asyncio.Event()
        if is_reading:
            self.unblocked.set()
        self.num_body_messages_taken = 0
        self.has_taken_body = asyncio.Event()

    def disconnect(self) -> None:
        self._gone.set()
        self.incoming.put_nowait({"type": "http.disconnect"})

    async def receive(self) -> dict[str, Any]:
        message = await self.incoming.get()
        if message["type"] == "http.request":
            self.num_body_messages_taken += 1
            self.has_taken_body.set()
        if message["type"] == "http.disconnect":
            self.incoming.put_nowait(message)
        return message

    async def send(self, message: dict[str, Any]) -> None:
        if not self.unblocked.is_set():
            self.stuck.set()
            await self.unblocked.wait()
        if not self._gone.is_set():
            self.outgoing.put_nowait(message)

    async def start(self) -> dict[str, Any]:
        message = await self.outgoing.get()
        assert message["type"] == "http.response.start"
        return message

    async def next_body(self) -> bytes:
        message = await self.outgoing.get()
        assert message["type"] == "http.response.body"
        return message.get("body", b"")

    async def answer(self) -> Answer:
        start = await self.start()
        body = b""
        while True:
            message = await self.outgoing.get()
            body += message.get("body", b"")
            if not message.get("more_body", False):
                break
        headers = {name.decode().lower(): value.decode() for name, value in start["headers"]}
        return Answer(start["status"], headers, body)


@asynccontextmanager
async def exchange(
    app: Any,
    method: str,
    path: str,
    *,
    headers: dict[str, str] | None = None,
    body: Sequence[bytes] = (b"",),
    is_body_complete: bool = True,
    is_reading: bool = True,
) -> AsyncIterator[tuple[Connection, asyncio.Task[None]]]:
    """Yield the connection and the task that runs the application on it; the task must have ended at the end."""
    raw_path, _, query = path.partition("?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": raw_path,
        "raw_path": raw_path.encode(),
        "root_path": "",
        "query_string": query.encode(),
        "headers": [
            (name.lower().encode(), value.encode("utf-8"))
            for name, value in (headers or {}).items()
        ],
        "server": ("test", 80),
        "client": ("127.0.0.1", 1),
        "state": {},
    }
    connection = Connection(is_reading=is_reading)
    for index, piece in enumerate(body):
        more = index < len(body) - 1 or not is_body_complete
        connection.incoming.put_nowait({"type": "http.request", "body": piece, "more_body": more})
    task = asyncio.create_task(app(scope, connection.receive, connection.send))
    try:
        yield connection, task
        await asyncio.wait_for(task, 5)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def request(
    app: Any,
    method: str,
    path: str,
    document: object = None,
    *,
    headers: dict[str, str] | None = None,
    raw: Sequence[bytes] | None = None,
) -> Answer:
    """Return the answer to one whole request, in an event loop of its own."""
    return asyncio.run(arequest(app, method, path, document, headers=headers, raw=raw))


async def arequest(
    app: Any,
    method: str,
    path: str,
    document: object = None,
    *,
    headers: dict[str, str] | None = None,
    raw: Sequence[bytes] | None = None,
) -> Answer:
    """Return the answer to one whole request."""
    body = raw if raw is not None else [b"" if document is None else json.dumps(document).encode()]
    given = JSON_HEADERS if headers is None else headers
    if "content-length" not in given and "transfer-encoding" not in given and method == "POST":
        given = {**given, "content-length": str(sum(map(len, body)))}
    async with exchange(app, method, path, headers=given, body=body) as (connection, _):
        return await connection.answer()


def events(body: bytes) -> list[Any]:
    """Return the documents of a stream of server-sent events; the end marker is the string ``[DONE]``."""
    assert body.endswith(b"\n\n")
    documents: list[Any] = []
    for event in body.decode().removesuffix("\n\n").split("\n\n"):
        assert event.startswith("data: ")
        text = event.removeprefix("data: ")
        documents.append(text if text == "[DONE]" else json.loads(text))
    return documents
