"""The engine as a Python object: text in, text out.

Responsible for the synchronous public API. It is a thin layer over ``AsyncEngine``; batching, order and cancellation
happen there. Knows nothing of the command line or HTTP.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvist.config import EngineConfig
from kvist.engine.build import build_engine
from kvist.errors import EngineOverloaded, RequestError, UnsupportedParameter
from kvist.types import SamplingParams

if TYPE_CHECKING:
    from typing import Self

    from kvist.engine.async_engine import AsyncEngine, EngineStats, RequestStream
    from kvist.model.tokenizer import Tokenizer
    from kvist.plan import EnginePlan
    from kvist.types import (
        CacheReset,
        FinishDetails,
        FinishReason,
        OutputChunk,
        TokenId,
        TokenLogprobs,
        Usage,
    )

Prompt = str | Sequence[int]
"""Text, or token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One of the sequences generated from a prompt."""

    index: int
    """[0, n)."""
    text: str
    token_ids: tuple[TokenId, ...]
    """All tokens produced, the one that ended the sequence included."""
    finish_reason: FinishReason
    stop_reason: str | int | None
    """The stop string or stop token id that ended it, if one of the request's own did."""
    logprobs: tuple[TokenLogprobs, ...]
    """One entry per token when asked for, else empty."""
    usage: Usage
    finish_details: FinishDetails | None = None
    """Set when the output went round in circles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """What was generated from one prompt; the properties are those of the first choice."""

    prompt_token_ids: tuple[TokenId, ...]
    choices: tuple[Choice, ...]
    """The n sequences, by index."""

    @property
    def text(self) -> str:
        """Generated text."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[TokenId, ...]:
        """Generated token ids, the one that ended the sequence included."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why it ended."""
        return self.choices[0].finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        """The request's own stop string or stop token id that ended it."""
        return self.choices[0].stop_reason

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        """One entry per token when asked for, else empty."""
        return self.choices[0].logprobs

    @property
    def usage(self) -> Usage:
        """What it cost."""
        return self.choices[0].usage

    @property
    def finish_details(self) -> FinishDetails | None:
        """Set when the output went round in circles."""
        return self.choices[0].finish_details


class Engine:
    """A model, its prompt cache and a thread that runs it.

    Use it as a context manager or call ``close``. Calls from several threads are batched together.

        with Engine.from_pretrained("smollm2-135m") as engine:
            print(engine.generate("The capital of France is", max_tokens=8, temperature=0)[0].text)
    """

    def __init__(self, engine: AsyncEngine) -> None:
        """Take over an engine and start it; ``from_pretrained`` is the usual way to get one."""
        self._engine = engine
        engine.start()

    @classmethod
    def from_pretrained(cls, model: str, **options: Any) -> Self:  # noqa: ANN401  # checked by EngineConfig
        """Load a model and start the engine.

        Args:
            model: Known name, hub id, folder, or .gguf file, as ``--model``.
            options: Any option of ``EngineConfig`` by its flat name: ``memory_gib=2.0``, ``block_size=32``, ...

        Raises:
            ConfigError: An option is unknown or cannot work on this machine.
            ModelLoadError: The model is missing, corrupt or unsupported.
        """
        return cls(build_engine(EngineConfig.from_options(model=model, **options)))

    @property
    def plan(self) -> EnginePlan:
        """What the engine decided to do."""
        return self._engine.plan

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokeniser."""
        return self._engine.tokenizer

    @property
    def model_name(self) -> str:
        """The model as it was named."""
        return self._engine.model_name

    def stats(self) -> EngineStats:
        """Return the counters after the latest step."""
        return self._engine.stats()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | None = None,
        **sampling: Any,  # noqa: ANN401  # the fields of SamplingParams, checked by name
    ) -> list[GenerationResult]:
        """Generate from one prompt or several at once; results are in the order of the prompts.

        Args:
            prompts: A text, a list of token ids, or a sequence of those.
            params: How to choose output tokens; None starts from the defaults.
            sampling: Fields of ``SamplingParams`` that replace those of ``params``.

        Raises:
            RequestError: A prompt or a sampling value is invalid; the other prompts of the call are cancelled.
            EngineError: The engine could not go on.
        """
        chosen = sampling_params(params, **sampling)
        token_ids = [self.encode(prompt) for prompt in _as_list(prompts)]
        pending: deque[_Collector] = deque()
        done: list[GenerationResult] = []
        try:
            for prompt in token_ids:
                self._submit_waiting(prompt, chosen, pending, done)
            while pending:
                done.append(pending.popleft().result())
        except BaseException:  # an interrupt too must not leave requests running
            for collector in pending:
                collector.stream.cancel()
            raise
        return done

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        **sampling: Any,  # noqa: ANN401  # the fields of SamplingParams, checked by name
    ) -> OutputIterator:
        """Generate from one prompt and yield the output as it is produced.

        Leaving the loop early, or dropping the iterator, ends the request. The request is checked and queued when this
        is called, not at the first iteration.

        Raises:
            RequestError: The prompt or a sampling value is invalid.
            EngineError: The engine could not go on.
        """
        stream = self._engine.submit(self.encode(prompt), sampling_params(params, **sampling))
        return OutputIterator(stream)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        **sampling: Any,  # noqa: ANN401  # the fields of SamplingParams, checked by name
    ) -> GenerationResult:
        """Generate the assistant's next message.

        Args:
            messages: Each with ``role`` and ``content``.
            params: As in ``generate``.
            sampling: As in ``generate``.
        """
        return self.generate(self.encode_chat(messages), params, **sampling)[0]

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt: text is tokenised with the model's special tokens, ids are passed on."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, add_special_tokens=True)
        _check_is_prompt(prompt)
        return list(prompt)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the token ids of a conversation, ready for the assistant's turn.

        Only the model's template can place control tokens: what a message says is read as ordinary text.

        Raises:
            RequestError: The model has no chat template, or the template refuses the messages.
        """
        return self.tokenizer.encode_chat(messages)

    def reset_cache(self, prompt: Prompt | None = None) -> CacheReset:
        """Forget what is cached; running requests keep what they hold.

        Args:
            prompt: Only what begins with this prompt, from the block of its last token on; None: everything.

        Raises:
            RequestError: The prompt is empty or invalid.
            EngineStopped: The engine was closed or has failed.
        """
        token_ids = None if prompt is None else self.encode(prompt)
        return self._engine.reset_cache("", token_ids).result()

    def close(self) -> None:
        """End running requests and the engine's thread. Idempotent."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit_waiting(
        self,
        prompt: list[int],
        params: SamplingParams,
        pending: deque[_Collector],
        done: list[GenerationResult],
    ) -> None:
        """Submit one prompt; while the queue is full, wait for the oldest of this call's own requests."""
        while True:
            try:
                pending.append(_Collector(self._engine.submit(prompt, params), prompt))
            except EngineOverloaded:
                if not pending:
                    raise
                done.append(pending.popleft().result())
            else:
                return


class _Collector:
    """Puts the chunks of one request together."""

    def __init__(self, stream: RequestStream, prompt_token_ids: Sequence[int]) -> None:
        self.stream = stream
        self._prompt_token_ids = prompt_token_ids

    def result(self) -> GenerationResult:
        """Wait for the request to end and return its result."""
        chunks: dict[int, list[OutputChunk]] = {}
        for chunk in self.stream:
            chunks.setdefault(chunk.index, []).append(chunk)
        return GenerationResult(
            prompt_token_ids=tuple(self._prompt_token_ids),  # type: ignore[arg-type]  # checked at submit
            choices=tuple(_choice(chunks[index]) for index in sorted(chunks)),
        )


def sampling_params(params: SamplingParams | None = None, **sampling: Any) -> SamplingParams:  # noqa: ANN401  # checked by name
    """Return ``params`` (or the defaults) with the given fields replaced.

    A single string is accepted for ``stop``, and lists for the tuples.

    Raises:
        UnsupportedParameter: A name is not a sampling parameter; the message suggests the closest one.
        InvalidSamplingParams: A value is out of range.
    """
    names = [f.name for f in dataclasses.fields(SamplingParams)]
    for name in sampling:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"
            raise UnsupportedParameter(f"[sampling] unknown parameter {name!r}; {hint}", param=name)
    if isinstance(sampling.get("stop"), str):
        sampling["stop"] = (sampling["stop"],)
    for name in ("stop", "stop_token_ids"):
        if isinstance(sampling.get(name), Iterable):  # what is not is refused with the others
            sampling[name] = tuple(sampling[name])
    return dataclasses.replace(params if params is not None else SamplingParams(), **sampling)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts of one call: a text and a list of integers are one prompt each."""
    if isinstance(prompts, str):
        return [prompts]
    _check_is_prompt(prompts)
    if not len(prompts):
        raise RequestError(
            "[engine] expected a prompt, received an empty sequence; pass text or token ids",
            param="prompt",
        )
    kinds = {isinstance(prompt, (str, Sequence)) for prompt in prompts}
    if len(kinds) == 2:
        raise RequestError(
            "[engine] expected text, token ids, or a sequence of those, received token ids mixed with prompts",
            param="prompt",
        )
    return list(prompts) if kinds == {True} else [prompts]  # type: ignore[arg-type,list-item]  # told apart above


def _check_is_prompt(prompt: object) -> None:
    # Arrays of numbers are no Sequence, and welcome; iterating over bytes or a mapping is a slip.
    if isinstance(prompt, (bytes, bytearray, Mapping)) or not isinstance(prompt, Collection):
        raise RequestError(
            f"[engine] expected text, token ids, or a sequence of those, received {type(prompt).__name__}",
            param="prompt",
        )


def _choice(chunks: list[OutputChunk]) -> Choice:
    last = chunks[-1]
    assert last.finish_reason is not None  # streams end with the last sequence's final chunk
    assert last.usage is not None
    return Choice(
        index=last.index,
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        logprobs=tuple(entry for chunk in chunks for entry in chunk.logprobs),
        usage=last.usage,
        finish_details=last.finish_details,
    )


class OutputIterator:
    """The output of ``Engine.stream``; the request ends when this is closed, or no longer held by anybody.

    Not a generator: one that is dropped before its first step never runs the code that would end its request.
    """

    def __init__(self, stream: RequestStream) -> None:
        self._stream = stream

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> OutputChunk:
        return next(self._stream)

    def close(self) -> None:
        """End the request; idempotent. Chunks that were there already can still be read."""
        self._stream.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._stream.cancel()
