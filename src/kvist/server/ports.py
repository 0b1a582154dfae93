"""What the server needs of an engine, and nothing more.

Responsible for the shape of the engine, its tokeniser and its plan as the HTTP front end uses them;
``kvist.engine.async_engine.AsyncEngine`` is the one in production. Knows no implementation, so that the server is
tested without a model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from kvist.engine.detokenizer import TokenText

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence
    from concurrent.futures import Future

    from kvist.cache.survey import CacheSurvey
    from kvist.types import CacheReset, Keep, OutputChunk, SamplingParams


class ServedTokenizer(TokenText, Protocol):
    """Text to token ids and back. Called from worker threads, several at once."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of ``text``."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of ``token_ids``."""
        ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, str]],
        add_generation_prompt: bool = True,  # noqa: FBT001, FBT002  # the name users know
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,  # Any: a JSON schema
    ) -> str:
        """Return the text that the model's own chat template makes of ``messages`` and ``tools``."""
        ...

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        add_generation_prompt: bool = True,  # noqa: FBT001, FBT002  # as apply_chat_template
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,  # Any: as above
    ) -> list[int]:
        """Return the prompt that the model's own chat template makes of ``messages`` and ``tools``."""
        ...


class ServedPlan(Protocol):
    """The part of an engine's plan that requests are checked against."""

    @property
    def max_context_len(self) -> int:
        """Tokens of prompt and output together at most."""
        ...

    @property
    def max_queue(self) -> int:
        """Sequences waiting at most."""
        ...

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        ...

    @property
    def codec(self) -> str:
        """In which blocks are written."""
        ...

    @property
    def kv_format(self) -> str:
        """In which they are kept: a codec, or the rule by which theirs changes."""
        ...


class ServedStream(Protocol):
    """The output of one submitted prompt: chunks of all its ``n`` sequences, each ending with a final one."""

    def __aiter__(self) -> AsyncIterator[OutputChunk]:
        """Iterate once; an engine failure is raised from the iteration."""
        ...

    def cancel(self) -> None:
        """Stop and free the blocks at once; idempotent, from any thread."""
        ...


class ServedEngine(Protocol):
    """An engine that serves one model."""

    @property
    def model_name(self) -> str:
        """The name that requests give by default."""
        ...

    @property
    def is_running(self) -> bool:
        """Whether requests are taken and worked on; False after a failure or a stop."""
        ...

    @property
    def has_stopped(self) -> bool:
        """Whether requests will never be taken again."""
        ...

    @property
    def tokenizer(self) -> ServedTokenizer:
        """The model's tokeniser."""
        ...

    @property
    def plan(self) -> ServedPlan:
        """What was resolved at start."""
        ...

    def submit(  # noqa: PLR0913  # one for each thing that a client may say of a request
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        tenant: str = "",
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        keep: Keep | None = None,
    ) -> ServedStream:
        """Validate and queue one prompt; raises ``RequestError``, ``EngineOverloaded`` or ``EngineStopped`` at once."""
        ...

    def reset_cache(
        self, tenant: str | None, prompt_token_ids: Sequence[int] | None = None
    ) -> Future[CacheReset]:
        """Forget what is cached: everybody's, a tenant's, or what of it begins with a prompt."""
        ...

    def stats(self) -> Any:  # noqa: ANN401  # a frozen dataclass that the server only turns into JSON
        """Return a snapshot of the counters."""
        ...

    def survey(self) -> Future[CacheSurvey]:
        """Ask for what every block of the cache holds; raises ``EngineStopped`` at once or from the future."""
        ...
