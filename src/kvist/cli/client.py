"""Asking a running server over HTTP, with every time taken here, at the client.

Responsible for one streamed chat completion and its numbers. Knows nothing of the engine.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import httpx

from kvist.errors import EngineError, EngineStopped

if TYPE_CHECKING:
    from collections.abc import Sequence

TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One streamed answer, as the client saw it. Times are in seconds of one monotonic clock."""

    text: str
    start_s: float
    """When the request was sent."""
    first_s: float
    """When the first text arrived."""
    last_s: float
    """When the last text arrived."""
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens that the server took from its cache, by its own count."""
    num_output_tokens: int

    @property
    def ttft_s(self) -> float:
        """Time from sending to the first text."""
        return self.first_s - self.start_s

    @property
    def num_computed_tokens(self) -> int:
        """Prompt tokens that were computed for this answer."""
        return self.num_prompt_tokens - self.num_cached_tokens

    @property
    def output_tokens_per_s(self) -> float | None:
        """Speed after the first token; None for fewer than two."""
        decode_s = self.last_s - self.first_s
        return (self.num_output_tokens - 1) / decode_s if decode_s > 0 else None


class Client:
    """A client of one server, asking the first model it serves. An async context manager of one event loop."""

    def __init__(self, url: str) -> None:
        self._model = ""
        self._http = httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S)

    async def __aenter__(self) -> Self:
        response = await self._http.get("/v1/models")
        _check(response.status_code, response.text)
        self._model = response.json()["data"][0]["id"]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def warm_up(self) -> None:
        """Make the server do once what only the first request pays for; shares no prefix with a chat."""
        body = {"model": self._model, "prompt": "Once upon a time", "max_tokens": 4}
        response = await self._http.post("/v1/completions", json=body)
        _check(response.status_code, response.text)

    async def ask(self, messages: Sequence[dict[str, str]], max_tokens: int) -> Answer:
        """Send one chat completion (greedy, streamed) and return the answer.

        Raises:
            EngineStopped: The server refused, failed, or went away.
        """
        body: dict[str, Any] = {  # Any: JSON values
            "model": self._model,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            return await self._stream(body)
        except httpx.HTTPError as error:
            raise EngineStopped(
                f"[client] the connection to the server failed: {error!r}"
            ) from error

    async def ask_all(
        self, conversations: Sequence[Sequence[dict[str, str]]], max_tokens: int
    ) -> list[Answer]:
        """Send several chat completions at the same time and return the answers in order."""
        return await asyncio.gather(*(self.ask(c, max_tokens) for c in conversations))

    async def _stream(self, body: dict[str, Any]) -> Answer:
        parts: list[str] = []
        usage: dict[str, Any] | None = None
        start_s = time.perf_counter()
        first_s = last_s = 0.0
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                _check(response.status_code, (await response.aread()).decode(errors="replace"))
            async for line in response.aiter_lines():
                now_s = time.perf_counter()
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise EngineStopped(f"[server] {event['error']['message']}")
                usage = event.get("usage") or usage
                text = "".join(c["delta"].get("content") or "" for c in event["choices"])
                if text:
                    first_s, last_s = first_s or now_s, now_s
                    parts.append(text)
        if usage is None:
            raise EngineStopped(
                "[client] expected a usage chunk at the end of the stream, received none"
            )
        end_s = time.perf_counter()
        return Answer(
            text="".join(parts),
            start_s=start_s,
            first_s=first_s or end_s,
            last_s=last_s or end_s,
            num_prompt_tokens=usage["prompt_tokens"],
            num_cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
            num_output_tokens=usage["completion_tokens"],
        )


def _check(status_code: int, text: str) -> None:
    if status_code == httpx.codes.OK:
        return
    try:
        text = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        text = text[:500]
    error: EngineError = EngineStopped(f"[server] answered {status_code}: {text}")
    raise error
