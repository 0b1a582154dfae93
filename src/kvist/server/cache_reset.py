"""POST /v1/cache/reset: forget what is cached.

Responsible for what a client may ask to be forgotten and who may ask for how much, and for the answer. Knows nothing of
how the cache does it, nor of HTTP beyond status codes.

Who may what: an API key resets its own namespace, or a part of it; so does everybody where no keys are configured,
since all share one namespace then. The whole cache, that of other keys included, is reset by the keys of tenants that
``--admin`` names.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import PlainValidator

from kvist.errors import RequestError
from kvist.server.errors import HttpError
from kvist.server.prompts import encode_messages, encode_prompts
from kvist.server.protocol import (
    ChatMessage,
    PromptInput,
    WireModel,
    parse,
    parse_messages,
    parse_prompts,
)

if TYPE_CHECKING:
    from collections.abc import Collection

    from kvist.server.ports import ServedEngine
    from kvist.server.unimplemented import Unimplemented
    from kvist.types import CacheReset


class ResetRequest(WireModel):
    """The body."""

    refused: ClassVar[dict[str, Unimplemented]] = {}

    scope: Literal["all", "namespace", "prompt"]
    prompt: Annotated[list[PromptInput], PlainValidator(parse_prompts)] | None = None
    """With scope "prompt": the text or token ids that the sequences to forget begin with."""
    messages: Annotated[list[ChatMessage], PlainValidator(parse_messages)] | None = None
    """The same as a conversation's first messages."""


def parse_reset(document: dict[str, Any]) -> ResetRequest:  # Any: a JSON document
    """Return the checked request.

    Raises:
        RequestError: A name or value is wrong, or it does not say which prompt.
    """
    request = parse(ResetRequest, document)
    num_given = (request.prompt is not None) + (request.messages is not None)
    if num_given != (request.scope == "prompt"):
        raise RequestError(
            '[request] scope "prompt" needs one of prompt and messages, and the other scopes neither, '
            f"received scope {request.scope!r} with {num_given} of them",
            param="scope",
            code="invalid_value",
        )
    if request.prompt is not None and len(request.prompt) != 1:
        raise RequestError(
            f"[request] prompt must be one prompt, received {len(request.prompt)}; send a request for each",
            param="prompt",
            code="invalid_value",
        )
    return request


def check_may_reset(request: ResetRequest, tenant: str, admins: Collection[str]) -> None:
    """Raise HttpError 403 when a tenant asks for more than its own namespace and is not one of the admins."""
    if request.scope == "all" and tenant and tenant not in admins:
        raise HttpError(
            HTTPStatus.FORBIDDEN,
            '[auth] this API key may reset its own namespace only (scope "namespace"); the whole cache is reset by '
            "the keys of a tenant that the server was started with as --admin NAME",
            code="insufficient_permissions",
            param="scope",
        )


def prompt_of(request: ResetRequest, engine: ServedEngine) -> tuple[int, ...] | None:
    """Return the token ids that what is to be forgotten begins with; None: everything. Tokenises.

    Raises:
        RequestError: The prompt has no token, or the chat template refuses the messages.
    """
    if request.messages is not None:
        return encode_messages(request.messages, engine.tokenizer, is_answered=False).token_ids
    if request.prompt is not None:
        return encode_prompts(request.prompt, engine)[0].token_ids
    return None


def reset_json(request: ResetRequest, taken: CacheReset) -> dict[str, Any]:  # Any: JSON
    """Return the answer."""
    return {
        "object": "kvist.cache_reset",
        "scope": request.scope,
        "dropped_blocks": taken.num_dropped_blocks,
        "detached_blocks": taken.num_detached_blocks,
    }
