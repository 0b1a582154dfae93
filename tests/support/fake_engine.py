"""An engine without a model: what it answers is scripted, and everything asked of it is recorded.

It implements what ``kvist.server.ports`` describes. Its tokeniser knows one token per byte, so texts, token ids and
offsets can be read off each other. Nothing sleeps: a held reply goes on when the test releases it.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvist.errors import RequestError
from kvist.types import FinishReason, Keep, OutputChunk, TokenLogprobs, Usage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from kvist.types import SamplingParams

EOS, BOS = 256, 257
VOCAB_SIZE = 258


class FakeTokenizer:
    """Bytes are tokens; text is preceded by BOS when special tokens are asked for."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [BOS] * add_special_tokens * bool(text) + list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_id for token_id in token_ids if token_id < 256).decode(
            "utf-8", "replace"
        )

    def token_bytes(self, token_id: int) -> bytes:
        return {EOS: b"<eos>", BOS: b"<bos>"}.get(token_id) or bytes([token_id])

    strips_leading_space = False

    def is_special(self, token_id: int) -> bool:
        return token_id >= 256

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, str]],
        add_generation_prompt: bool = True,
        *,
        tools=None,
    ) -> str:
        if messages[0]["role"] == "assistant":
            raise RequestError("[chat] the template wants a user first")
        turns = "" if tools is None else f"<tools>{json.dumps(tools)}\n"
        turns += "".join(f"<{m['role']}>{m['content']}\n" for m in messages)
        return f"{turns}<assistant>" if add_generation_prompt else turns

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        add_generation_prompt: bool = True,
        *,
        tools=None,
    ) -> list[int]:
        rendered = self.apply_chat_template(messages, add_generation_prompt, tools=tools)
        return list(rendered.encode())


@dataclass(frozen=True)
class FakePlan:
    max_context_len: int = 1000
    max_queue: int = 100
    vocab_size: int = VOCAB_SIZE
    codec: str = "float32"


@dataclass(frozen=True)
class FakeStats:
    cache: dict[str, int]
    num_steps: int


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What each sequence of a prompt answers."""

    text: str = "Hej!"
    """One chunk per byte; the text of a character comes with its last byte."""
    finish_reason: FinishReason = FinishReason.STOP
    hold_after: int | None = None
    """Chunks after which the stream waits for ``FakeEngine.release``."""
    error: Exception | None = None
    """Raised instead of the last chunk."""
    num_cached_tokens: int = 0
    """Of the first sequence; the others report the whole prompt but one token."""
    num_pinned_tokens: int | None = None
    """Of every sequence that was to be kept."""


@dataclass(frozen=True, kw_only=True)
class Submission:
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    tenant: str
    request_id: str
    stream: FakeStream
    priority: int
    deadline_s: float | None
    keep: Keep | None


@dataclass
class FakeEngine:
    reply: Reply = field(default_factory=Reply)
    refusals: deque[Exception | None] = field(default_factory=deque)
    """Raised by the next calls of ``submit``, in order; None lets one through."""
    plan: FakePlan = field(default_factory=FakePlan)
    model_name: str = "fake-1"
    is_running: bool = True
    has_stopped: bool = False
    tokenizer: FakeTokenizer = field(default_factory=FakeTokenizer)
    submissions: list[Submission] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.released = asyncio.Event()
        self.held = asyncio.Event()
        """Set when a stream waits."""

    def release(self) -> None:
        self.released.set()

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        tenant: str = "",
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        keep: Keep | None = None,
    ) -> FakeStream:
        refusal = self.refusals.popleft() if self.refusals else None
        if refusal is not None:
            raise refusal
        assert request_id is not None
        stream = FakeStream(self, request_id, len(prompt_token_ids), params)
        self.submissions.append(
            Submission(
                prompt_token_ids=tuple(prompt_token_ids),
                params=params,
                tenant=tenant,
                request_id=request_id,
                stream=stream,
                priority=priority,
                deadline_s=deadline_s,
                keep=keep,
            )
        )
        return stream

    def stats(self) -> FakeStats:
        return FakeStats(cache={"num_hits": 3}, num_steps=len(self.submissions))


class FakeStream:
    def __init__(
        self, engine: FakeEngine, request_id: str, num_prompt_tokens: int, params: SamplingParams
    ) -> None:
        self.request_id = request_id
        self.is_cancelled = False
        self.is_finished = False
        self._engine = engine
        self._num_prompt_tokens = num_prompt_tokens
        self._params = params
        self.cancelled = asyncio.Event()

    def cancel(self) -> None:
        if not self.is_finished:
            self.is_cancelled = True
            self.cancelled.set()

    async def __aiter__(self) -> AsyncIterator[OutputChunk]:
        reply = self._engine.reply
        for step, chunk in enumerate(self._chunks()):
            if step == reply.hold_after:
                await self._hold()
            if self.is_cancelled:
                for index in range(self._params.n):
                    yield self._final(index, 0, FinishReason.ABORT)
                return
            if reply.error is not None and chunk.finish_reason is not None:
                self.is_finished = True
                raise reply.error
            self.is_finished = chunk.finish_reason is not None and chunk.index == self._params.n - 1
            yield chunk

    def _chunks(self) -> list[OutputChunk]:
        params, reply = self._params, self._engine.reply
        raw = list(reply.text.encode())
        is_cut = params.max_tokens is not None and len(raw) > params.max_tokens
        raw = raw[: params.max_tokens]
        reason = FinishReason.LENGTH if is_cut else reply.finish_reason
        chunks = []
        pending = b""
        for token_id in raw:
            pending += bytes([token_id])
            try:
                text, pending = pending.decode(), b""
            except UnicodeDecodeError:
                text = ""
            chunks += [
                OutputChunk(
                    request_id=self.request_id,
                    index=index,
                    text=text,
                    token_ids=(token_id,),
                    logprobs=self._logprobs(token_id),
                )
                for index in range(params.n)
            ]
        return chunks + [self._final(index, len(raw), reason) for index in range(params.n)]

    def _final(self, index: int, num_output_tokens: int, reason: FinishReason) -> OutputChunk:
        cached = self._engine.reply.num_cached_tokens if index == 0 else self._num_prompt_tokens - 1
        return OutputChunk(
            request_id=self.request_id,
            index=index,
            finish_reason=reason,
            usage=Usage(
                num_prompt_tokens=self._num_prompt_tokens,
                num_cached_tokens=cached,
                num_computed_tokens=self._num_prompt_tokens - cached + num_output_tokens,
                num_output_tokens=num_output_tokens,
                num_pinned_tokens=self._engine.reply.num_pinned_tokens,
            ),
        )

    def _logprobs(self, token_id: int) -> tuple[TokenLogprobs, ...]:
        if self._params.logprobs is None:
            return ()
        ranked = [(token_id, -0.25), (ord("x"), -1.5), (ord("y"), -2.5)]
        return (
            TokenLogprobs(
                token_id=token_id, logprob=-0.25, top=tuple(ranked[: self._params.logprobs])
            ),
        )

    async def _hold(self) -> None:
        self._engine.held.set()
        waits = [
            asyncio.ensure_future(event.wait()) for event in (self._engine.released, self.cancelled)
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
