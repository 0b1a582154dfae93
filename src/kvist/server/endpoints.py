"""The two generating endpoints: what each asks of the engine, and how each writes its answer.

Responsible for the JSON of /v1/completions and /v1/chat/completions, whole and in pieces. Knows nothing of HTTP, of
waiting, or of how the pieces travel.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvist.server.errors import HttpError, encode_json, shorten
from kvist.server.logprobs import CompletionLogprobs, chat_logprobs
from kvist.server.prompts import Prompt, check_fit, encode_messages, encode_prompts
from kvist.server.protocol import parse_chat, parse_completion
from kvist.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvist.server.generation import CallUsage, ChoiceChunk, ChoiceOutput
    from kvist.server.ports import ServedEngine
    from kvist.server.protocol import ChatRequest, CompletionRequest
    from kvist.types import FinishDetails, Keep, SamplingParams

Json = dict[str, Any]  # Any: a JSON document


class Answer(ABC):
    """The JSON of one call's answer.

    Args:
        request_id: The ``id`` of the answer and all of its pieces.
        model: The name that this server gives its model.
    """

    def __init__(self, request_id: str, model: str) -> None:
        self._head: Json = {
            "id": request_id,
            "object": self._piece_object,
            # The wall clock: OpenAI defines it as a date. No duration is taken from it.
            "created": int(time.time()),
            "model": model,
        }
        self._encoded_head = encode_json(self._head).removesuffix(b"}")

    @abstractmethod
    def whole(self, outputs: Sequence[ChoiceOutput], usage: CallUsage) -> Json:
        """Return the answer of a finished call."""

    @abstractmethod
    def opening(self, num_choices: int) -> list[Json]:
        """Return the pieces sent before any output, each without what ``encoded`` puts before it."""

    @abstractmethod
    def pieces(self, item: ChoiceChunk) -> list[Json]:
        """Return the pieces that carry one chunk of output; none when it has nothing to show yet."""

    def usage_piece(self, usage: CallUsage) -> Json:
        """Return the last piece of a stream that was asked for usage."""
        return {"choices": [], "usage": usage_json(usage)}

    def encoded(self, piece: Json) -> bytes:
        """Return the JSON of a piece, with what all pieces of the answer begin with."""
        return self._encoded_head + b"," + encode_json(piece).removeprefix(b"{")

    @property
    @abstractmethod
    def _piece_object(self) -> str:
        """OpenAI's ``object`` of a piece."""

    def _document(self, kind: str, choices: list[Json]) -> Json:
        return {**self._head, "object": kind, "choices": choices}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A checked request: what to ask of the engine and how to answer."""

    request_id: str
    prompts: Sequence[Prompt]
    params: SamplingParams
    priority: int
    """Lower goes first."""
    timeout_s: float | None
    """Seconds after which it ends; None: never."""
    keep: Keep | None
    """How long the prompts are to stay in the cache; None: as the engine's options say."""
    answer: Answer
    is_stream: bool
    wants_usage_chunk: bool
    wants_explanation: bool


class CompletionAnswer(Answer):
    """The JSON of /v1/completions."""

    _piece_object = "text_completion"

    def __init__(
        self,
        request_id: str,
        model: str,
        request: CompletionRequest,
        engine: ServedEngine,
        prompts: Sequence[Prompt],
    ) -> None:
        super().__init__(request_id, model)
        self._echoes: list[str] = []
        self._logprobs: list[CompletionLogprobs | None] = []
        for prompt in prompts:
            echo = _echo(prompt, engine) if request.echo else ""
            for _ in range(request.n or 1):
                self._echoes.append(echo)
                self._logprobs.append(
                    None
                    if request.logprobs is None
                    else CompletionLogprobs(engine.tokenizer, request.logprobs, prompt)
                )

    def whole(self, outputs: Sequence[ChoiceOutput], usage: CallUsage) -> Json:
        """Return a ``text_completion`` with every choice."""
        choices = []
        for index, output in enumerate(outputs):
            writer = self._logprobs[index]
            choices.append(
                {
                    "index": index,
                    "text": self._echoes[index] + output.text,
                    "logprobs": None if writer is None else writer.piece(output.logprobs),
                    "finish_reason": _wire(output.finish_reason),
                    **_details(output.finish_details),
                }
            )
        return {**self._document("text_completion", choices), "usage": usage_json(usage)}

    def opening(self, num_choices: int) -> list[Json]:
        """Return the echoed prompts."""
        return [
            self._piece(index, self._echoes[index])
            for index in range(num_choices)
            if self._echoes[index]
        ]

    def pieces(self, item: ChoiceChunk) -> list[Json]:
        """Return at most one piece: text, log-probabilities and the reason of the end travel together."""
        chunk, writer = item.chunk, self._logprobs[item.choice_index]
        has_logprobs = writer is not None and chunk.logprobs
        if not (chunk.text or has_logprobs or chunk.finish_reason):
            return []
        piece = self._piece(item.choice_index, chunk.text)
        if writer is not None and has_logprobs:
            piece["choices"][0]["logprobs"] = writer.piece(chunk.logprobs)
        piece["choices"][0]["finish_reason"] = _wire(chunk.finish_reason)
        piece["choices"][0].update(_details(chunk.finish_details))
        return [piece]

    def _piece(self, index: int, text: str) -> Json:
        choice = {"index": index, "text": text, "logprobs": None, "finish_reason": None}
        return {"choices": [choice]}


class ChatAnswer(Answer):
    """The JSON of /v1/chat/completions."""

    _piece_object = "chat.completion.chunk"

    def __init__(
        self, request_id: str, model: str, request: ChatRequest, engine: ServedEngine
    ) -> None:
        super().__init__(request_id, model)
        self._has_logprobs = bool(request.logprobs)
        self._tokenizer = engine.tokenizer

    def whole(self, outputs: Sequence[ChoiceOutput], usage: CallUsage) -> Json:
        """Return a ``chat.completion`` with every choice."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": output.text, "refusal": None},
                "logprobs": chat_logprobs(self._tokenizer, output.logprobs)
                if self._has_logprobs
                else None,
                "finish_reason": _wire(output.finish_reason),
                **_details(output.finish_details),
            }
            for index, output in enumerate(outputs)
        ]
        return {**self._document("chat.completion", choices), "usage": usage_json(usage)}

    def opening(self, num_choices: int) -> list[Json]:
        """Return the role of every message."""
        delta = {"role": "assistant", "content": ""}
        return [self._piece(index, delta) for index in range(num_choices)]

    def pieces(self, item: ChoiceChunk) -> list[Json]:
        """Return a piece with the new text and, at the end, one with the reason alone."""
        chunk, pieces = item.chunk, []
        if chunk.text or (self._has_logprobs and chunk.logprobs):
            piece = self._piece(item.choice_index, {"content": chunk.text})
            if self._has_logprobs and chunk.logprobs:
                piece["choices"][0]["logprobs"] = chat_logprobs(self._tokenizer, chunk.logprobs)
            pieces.append(piece)
        if chunk.finish_reason is not None:
            piece = self._piece(item.choice_index, {})
            piece["choices"][0]["finish_reason"] = _wire(chunk.finish_reason)
            piece["choices"][0].update(_details(chunk.finish_details))
            pieces.append(piece)
        return pieces

    def _piece(self, index: int, delta: Json) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return {"choices": [choice]}


def prepare_completion(document: Json, engine: ServedEngine, model: str) -> Job:
    """Check a body of /v1/completions in full. Tokenises, so call it from a worker thread.

    Raises:
        RequestError: Something in it is invalid.
        HttpError: 404, when it names another model.
    """
    request = parse_completion(document)
    _check_model(request.model, model)
    params = request.sampling_params()
    prompts = encode_prompts(request.prompt, engine)
    output_param = None if request.max_tokens is None else "max_tokens"
    check_fit(prompts, params, engine, param="prompt", output_param=output_param)
    request_id = f"cmpl-{uuid.uuid4().hex}"
    return Job(
        request_id=request_id,
        prompts=prompts,
        params=params,
        priority=request.priority or 0,
        timeout_s=request.timeout_s,
        keep=request.keep(),
        answer=CompletionAnswer(request_id, model, request, engine, prompts),
        is_stream=bool(request.stream),
        wants_usage_chunk=request.wants_usage_chunk,
        wants_explanation=bool(request.kvist_explain),
    )


def prepare_chat(document: Json, engine: ServedEngine, model: str) -> Job:
    """Check a body of /v1/chat/completions in full; as ``prepare_completion``."""
    request = parse_chat(document)
    _check_model(request.model, model)
    params = request.sampling_params()
    prompts = [encode_messages(request.messages, engine.tokenizer, request.tools)]
    output_param = None if params.max_tokens is None else request.max_tokens_name
    check_fit(prompts, params, engine, param="messages", output_param=output_param)
    request_id = f"chatcmpl-{uuid.uuid4().hex}"
    return Job(
        request_id=request_id,
        prompts=prompts,
        params=params,
        priority=request.priority or 0,
        timeout_s=request.timeout_s,
        keep=request.keep(),
        answer=ChatAnswer(request_id, model, request, engine),
        is_stream=bool(request.stream),
        wants_usage_chunk=request.wants_usage_chunk,
        wants_explanation=bool(request.kvist_explain),
    )


def usage_json(usage: CallUsage) -> Json:
    """Return OpenAI's ``usage``: ``prompt_tokens`` includes the cached ones.

    Kvist's own are what was to be kept, and, where blocks have several codecs, in which the cached tokens were.
    """
    details: Json = {"cached_tokens": usage.num_cached_tokens}
    if usage.cached_by_codec:
        details["cached_tokens_by_codec"] = dict(usage.cached_by_codec)
    if usage.num_retained_tokens is not None:
        details["retained_tokens"] = usage.num_retained_tokens
    if usage.num_pinned_tokens is not None:
        details["pinned_tokens"] = usage.num_pinned_tokens
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_output_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        "prompt_tokens_details": details,
    }


def unknown_model(name: str, model: str) -> HttpError:
    """Return the 404 error that tells the name of the model served here."""
    return HttpError(
        404,
        f"[server] the model {shorten(name)} does not exist here; this server serves {model!r}",
        code="model_not_found",
        param="model",
    )


def _check_model(name: str, model: str) -> None:
    if name != model:
        raise unknown_model(name, model)


def _echo(prompt: Prompt, engine: ServedEngine) -> str:
    return engine.tokenizer.decode(prompt.token_ids) if prompt.text is None else prompt.text


def _details(details: FinishDetails | None) -> Json:
    """Return what a choice says of its end beyond the reason; nothing when there is nothing to say."""
    if details is None:
        return {}
    found = details.degeneration
    return {
        "finish_details": {
            "type": found.kind,
            "start": found.start,
            "period": found.period,
            "entropy_bits": found.entropy_bits,
            "stopped": details.is_stopped,
        }
    }


def _wire(reason: FinishReason | None) -> str | None:
    if reason is FinishReason.TIMEOUT:
        # Clients know a closed set of reasons. Output that a limit of the client's own has cut is "length" to them.
        return str(FinishReason.LENGTH.value)
    return None if reason is None else str(reason.value)
