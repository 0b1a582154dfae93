"""The requests as the client writes them: pydantic models that accept nothing they do not use.

Responsible for types, names and combinations of parameters, and for turning them into ``SamplingParams``. Ranges of
sampling values are checked there, once for every front end. Knows nothing of tokens, engines or HTTP.

Invariant: every field declared here changes what the engine is asked to do or what the client receives; everything
else is refused by name (see ``unimplemented``). A null means the default, as in OpenAI's API.
"""

from __future__ import annotations

import dataclasses
import difflib
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError

from kvist.errors import RequestError, UnsupportedParameter
from kvist.server import unimplemented
from kvist.server.errors import cut, describe, shorten
from kvist.server.unimplemented import Unimplemented, drop_neutral
from kvist.types import MAX_LOGPROBS, Keep, SamplingParams

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of ``max_tokens`` in /v1/completions."""

DEFAULT_TTL = "5m"
"""Anthropic's default of ``cache_control.ttl``."""
_UNIT_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}

PromptInput = str | list[int]
"""One prompt as given: text, or token ids."""

_MAX_TOKEN_ID = 2**31
"""Ids at or past this fit no vocabulary; refused here because lists of them are passed on unexamined."""

_Model = TypeVar("_Model", bound="WireModel")


class WireModel(BaseModel):
    """Base of every object in a request: strict types, no unknown names."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    refused: ClassVar[dict[str, Unimplemented]] = {}
    """Known parameters that are not implemented."""


def _strings(value: object) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return value
    raise RequestError(
        f"[request] stop must be a string or an array of strings, received {describe(value)}",
        param="stop",
        code="invalid_type",
    )


def _token_ids(value: object) -> list[int]:
    if not isinstance(value, list) or not _is_ids(value):
        raise RequestError(
            "[request] stop_token_ids must be an array of token ids (integers, 0 or more), "
            f"received {describe(value)}",
            param="stop_token_ids",
            code="invalid_type",
        )
    return value


def _bias(value: object) -> dict[int, float]:
    if not isinstance(value, dict):
        raise RequestError(
            "[request] logit_bias must be an object that maps token ids to numbers, "
            f"received {describe(value)}",
            param="logit_bias",
            code="invalid_type",
        )
    bias: dict[int, float] = {}
    for key, number in value.items():
        is_id = key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) < _MAX_TOKEN_ID
        if not is_id or int(key) in bias:
            raise RequestError(
                f"[request] logit_bias has the key {shorten(key)}, which is no token id or given twice; "
                'keys are token ids written as strings, for example {"50256": -100}',
                param="logit_bias",
                code="invalid_value",
            )
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise RequestError(
                f"[request] logit_bias[{key}] must be a number, received {describe(number)}",
                param="logit_bias",
                code="invalid_type",
            )
        # Capped before float(), which overflows on huge integers; the range check refuses it all the same.
        bias[int(key)] = float(max(-1000, min(1000, number))) if abs(number) > 1000 else number
    return bias


class StreamOptions(WireModel):
    """``stream_options``."""

    refused: ClassVar[dict[str, Unimplemented]] = dict(unimplemented.STREAM_OPTIONS)

    include_usage: bool | None = None


def _stream_options(value: object) -> StreamOptions:
    return parse(StreamOptions, value, path="stream_options")


class CacheControl(WireModel):
    """``cache_control``, as Anthropic's API has it for a whole prompt; ``pinned`` is Kvist's own."""

    type: Literal["ephemeral", "pinned"]
    ttl: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,6}[smhd]$")] | None = None

    def keep(self) -> Keep:
        """Return what the engine is asked to do."""
        ttl = self.ttl or DEFAULT_TTL
        return Keep(ttl_s=int(ttl[:-1]) * _UNIT_S[ttl[-1]], is_pinned=self.type == "pinned")


def _cache_control(value: object) -> CacheControl:
    return parse(CacheControl, value, path="cache_control")


class SamplingFields(WireModel):
    """The parameters that both endpoints share."""

    model: str
    cache_control: Annotated[CacheControl, PlainValidator(_cache_control)] | None = None
    """How long the prompt is to stay in the cache; Anthropic's, and not OpenAI's."""
    frequency_penalty: float | None = None
    ignore_eos: bool | None = None
    kvist_explain: bool | None = None
    """Whether the answer says what was reused and why the rest was not; not OpenAI's."""
    logit_bias: Annotated[dict[int, float], PlainValidator(_bias)] | None = None
    max_tokens: int | None = None
    min_p: float | None = None
    n: int | None = None
    presence_penalty: float | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    """Lower goes first, as in vLLM; not OpenAI's."""
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Annotated[list[str], PlainValidator(_strings)] | None = None
    stop_degenerate: bool | None = None
    """Whether an output that goes round in circles is ended; not OpenAI's. Null: as the server's options say."""
    stop_token_ids: Annotated[list[int], PlainValidator(_token_ids)] | None = None
    stream: bool | None = None
    stream_options: Annotated[StreamOptions, PlainValidator(_stream_options)] | None = None
    temperature: float | None = None
    timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Seconds after which the answer ends with what there is (finish_reason "length"), or with 504 when there is
    nothing yet; not OpenAI's."""
    top_k: int | None = None
    top_p: float | None = None

    def keep(self) -> Keep | None:
        """Return how long the prompt is to stay in the cache; None: as the engine's options say."""
        return None if self.cache_control is None else self.cache_control.keep()

    @property
    def wants_usage_chunk(self) -> bool:
        """Whether the stream ends with a chunk of usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


def parse_prompts(value: object) -> list[PromptInput]:
    """Return ``prompt`` as a list of prompts; raise RequestError when it is none."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _is_ids(value):
            return [value]
        if all(isinstance(item, str) for item in value):
            return list(value)
        if all(isinstance(item, list) and item and _is_ids(item) for item in value):
            return list(value)
    given = "an empty or mixed array" if isinstance(value, list) else describe(value)
    raise RequestError(
        "[request] prompt must be a string, an array of strings, an array of token ids (integers, 0 or more), "
        f"or an array of arrays of token ids, received {given}",
        param="prompt",
        code="invalid_type",
    )


class CompletionRequest(SamplingFields):
    """The body of POST /v1/completions."""

    refused: ClassVar[dict[str, Unimplemented]] = dict(unimplemented.COMPLETION)

    prompt: Annotated[list[PromptInput], PlainValidator(parse_prompts)]
    echo: bool | None = None
    logprobs: int | None = None

    def sampling_params(self) -> SamplingParams:
        """Return what the engine is asked to do; OpenAI's default of 16 tokens when ``max_tokens`` is not given."""
        max_tokens = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        return _sampling_params(self, max_tokens=max_tokens, logprobs=self.logprobs)


class TextPart(WireModel):
    """One part of a message's content."""

    refused: ClassVar[dict[str, Unimplemented]] = dict(unimplemented.TEXT_PART)

    type: Literal["text"]
    text: str


class ChatMessage(WireModel):
    """One message of a conversation; content parts are joined by newlines."""

    refused: ClassVar[dict[str, Unimplemented]] = dict(unimplemented.MESSAGE)

    role: Literal["system", "developer", "user", "assistant"]
    content: str


def parse_messages(value: object) -> list[ChatMessage]:
    """Return ``messages`` checked; raise RequestError where they are wrong."""
    if not isinstance(value, list) or not value:
        given = "an empty array" if value == [] else describe(value)
        raise RequestError(
            f"[request] messages must be an array with at least one message, received {given}",
            param="messages",
            code="invalid_type",
        )
    return [_message(item, f"messages[{index}]") for index, item in enumerate(value)]


def _message(value: object, path: str) -> ChatMessage:
    if isinstance(value, dict):
        role = value.get("role")
        # A tuple: looking up a list or an object in a set raises.
        if role in ("tool", "function"):
            raise UnsupportedParameter(
                f"[request] {path}.role is {role!r}, which is not implemented: Kvist takes no results of tools; "
                "use system, developer, user or assistant",
                param=f"{path}.role",
            )
        if isinstance(value.get("content"), list):
            value = {**value, "content": _joined_parts(value["content"], f"{path}.content")}
    return parse(ChatMessage, value, path=path)


def _joined_parts(parts: list[object], path: str) -> str:
    texts = []
    for index, part in enumerate(parts):
        where = f"{path}[{index}]"
        kind = part.get("type") if isinstance(part, dict) else "text"
        if isinstance(kind, str) and kind != "text":
            raise UnsupportedParameter(
                f"[request] {where}.type is {shorten(kind)}, which is not implemented: Kvist reads text only; "
                'send parts of the form {"type": "text", "text": ...}',
                param=f"{where}.type",
            )
        texts.append(parse(TextPart, part, path=where).text)
    return "\n".join(texts)


class FunctionDefinition(WireModel):
    """``function`` of a tool."""

    refused: ClassVar[dict[str, Unimplemented]] = dict(unimplemented.FUNCTION)

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None  # Any: a JSON schema
    """Passed to the template as it is."""


class FunctionTool(WireModel):
    """One of ``tools``."""

    type: Literal["function"]
    function: dict[str, Any]  # Any: as FunctionDefinition


Tool = dict[str, Any]
"""A tool as the client wrote it, in its order of keys, without what asks for nothing. Any: a JSON schema."""


def _tools(value: object) -> list[Tool]:
    if not isinstance(value, list):
        raise RequestError(
            f"[request] tools must be an array of functions, received {describe(value)}",
            param="tools",
            code="invalid_type",
        )
    return [_tool(item, f"tools[{index}]") for index, item in enumerate(value)]


def _tool(value: object, path: str) -> Tool:
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind != "function":
        raise UnsupportedParameter(
            f"[request] {path}.type is {shorten(kind)}, which is not implemented: Kvist shows functions to the model "
            "and nothing else",
            param=f"{path}.type",
        )
    tool = parse(FunctionTool, value, path=path)
    where = f"{path}.function"
    parse(FunctionDefinition, tool.function, path=where)
    kept = drop_neutral(tool.function, FunctionDefinition.refused, f"{where}.")
    # The model was trained on descriptions in the client's own order, which a checked object has lost.
    function = {name: item for name, item in kept.items() if item is not None}
    assert isinstance(value, dict)  # or it would not have been parsed
    return {name: function if name == "function" else item for name, item in value.items()}


class ChatRequest(SamplingFields):
    """The body of POST /v1/chat/completions."""

    refused: ClassVar[dict[str, Unimplemented]] = dict(unimplemented.CHAT)

    messages: Annotated[list[ChatMessage], PlainValidator(parse_messages)]
    logprobs: bool | None = None
    max_completion_tokens: int | None = None
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    tools: Annotated[list[Tool], PlainValidator(_tools)] | None = None
    """Shown to the model by its chat template. What it writes is returned as content: calls are not parsed."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    def sampling_params(self) -> SamplingParams:
        """Return what the engine is asked to do; without a limit, output may go on to the end of the context."""
        limit = self.max_completion_tokens
        return _sampling_params(
            self,
            max_tokens=self.max_tokens if limit is None else limit,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )

    @property
    def max_tokens_name(self) -> str:
        """Which of the two names of the limit the client gave."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def keep(self) -> Keep | None:
        """Return how long the prompt is to stay in the cache, by either of two parameters."""
        if self.prompt_cache_retention == "24h":
            return Keep(ttl_s=24 * 3600.0)
        return super().keep()


def parse_completion(document: dict[str, Any]) -> CompletionRequest:  # Any: a JSON document
    """Return the checked request.

    Raises:
        RequestError: A parameter is missing, unknown, not implemented, of a wrong type or in conflict with another.
    """
    best_of = document.get("best_of")
    if type(best_of) is int and best_of == (document.get("n") or 1):
        document = {name: value for name, value in document.items() if name != "best_of"}
    request = parse(CompletionRequest, document)
    if request.echo and request.logprobs is not None:
        raise UnsupportedParameter(
            "[request] echo with logprobs is not implemented: Kvist does not report log-probabilities of "
            "prompt tokens; leave one of them out",
            param="echo",
        )
    _check_stream_options(request)
    return request


def parse_chat(document: dict[str, Any]) -> ChatRequest:  # Any: a JSON document
    """Return the checked request; errors as in ``parse_completion``."""
    request = parse(ChatRequest, document)
    both = (request.max_tokens, request.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise RequestError(
            f"[request] max_tokens is {both[0]} and max_completion_tokens is {both[1]}; they mean the same, "
            "give only max_completion_tokens",
            param="max_tokens",
            code="invalid_value",
        )
    if request.cache_control is not None and request.prompt_cache_retention == "24h":
        raise RequestError(
            "[request] cache_control and prompt_cache_retention both say how long the prompt is kept; give one of them",
            param="prompt_cache_retention",
            code="invalid_value",
        )
    if request.top_logprobs is not None and not request.logprobs:
        raise RequestError(
            '[request] top_logprobs has no effect without logprobs; add "logprobs": true or leave it out',
            param="top_logprobs",
            code="invalid_value",
        )
    _check_stream_options(request)
    return request


def parse(kind: type[_Model], value: object, *, path: str = "") -> _Model:
    """Return ``value`` as a checked object of the request.

    Args:
        kind: What it must be.
        value: A JSON value of the client's.
        path: Where it is in the request, for messages; empty at the top.

    Raises:
        UnsupportedParameter: A name is unknown (with a suggestion) or not implemented.
        RequestError: A value is missing or of a wrong type.
    """
    if not isinstance(value, dict):
        raise RequestError(
            f"[request] {path or 'the body'} must be an object, received {describe(value)}",
            param=path or None,
            code="invalid_type",
        )
    prefix = f"{path}." if path else ""
    kept = drop_neutral(value, kind.refused, prefix)
    try:
        return kind.model_validate(kept)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=True)
    # An unknown name first: it is often why a required one is missing.
    problems.sort(key=lambda problem: problem["type"] != "extra_forbidden")
    first = problems[0]
    name = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        raise _unknown(name, kind, prefix)
    raise _invalid(dict(first), prefix + name)


def _unknown(name: str, kind: type[WireModel], prefix: str) -> UnsupportedParameter:
    close = difflib.get_close_matches(name[:100], kind.model_fields, n=1)
    siblings: dict[type[WireModel], tuple[type[WireModel], str]] = {
        CompletionRequest: (ChatRequest, "/v1/chat/completions"),
        ChatRequest: (CompletionRequest, "/v1/completions"),
    }
    other, other_path = siblings.get(kind, (WireModel, ""))
    if name in other.model_fields or name in other.refused:
        hint = f"; it belongs to {other_path}"
    elif prefix and name in ChatRequest.model_fields:
        hint = "; it belongs beside messages"
    elif close:
        hint = ""
    else:
        hint = "; leave it out"
    if close:
        hint += f"; did you mean {close[0]!r}?"
    where = f" in {prefix[:-1]}" if prefix else ""
    return UnsupportedParameter(
        f"[request] unknown parameter {shorten(name)}{where}{hint}",
        param=prefix + cut(name),
        code="unknown_parameter",
    )


def _invalid(
    problem: dict[str, Any], param: str
) -> RequestError:  # Any: pydantic's own error record
    if problem["type"] == "missing":
        return RequestError(
            f"[request] {param} is required and missing",
            param=param,
            code="missing_required_parameter",
        )
    expected = str(problem["msg"]).replace("Input should be", "must be", 1)
    return RequestError(
        f"[request] {param} {expected}, received {describe(problem['input'])}",
        param=param,
        code="invalid_type" if problem["type"].endswith("_type") else "invalid_value",
    )


def _sampling_params(
    request: SamplingFields, *, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    given: dict[str, Any] = {}  # Any: each field has its own type
    for sampling_field in dataclasses.fields(SamplingParams):
        value = getattr(request, sampling_field.name, None)
        if value is not None:
            given[sampling_field.name] = tuple(value) if isinstance(value, list) else value
    given["max_tokens"] = max_tokens
    given["logprobs"] = logprobs
    return SamplingParams(**given)


def _check_stream_options(request: SamplingFields) -> None:
    if request.stream_options is not None and not request.stream:
        raise RequestError(
            '[request] stream_options has no effect without "stream": true; add it or leave both out',
            param="stream_options",
            code="invalid_value",
        )


def _is_ids(values: list[Any]) -> bool:  # Any: JSON values under examination
    # type(), not isinstance(): JSON's true and false are no token ids.
    return all(type(value) is int and 0 <= value < _MAX_TOKEN_ID for value in values)
