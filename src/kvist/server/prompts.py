"""From prompts as given to token ids that fit the context.

Responsible for tokenising text, rendering conversations through the model's own chat template, and refusing a whole
call when any of its prompts cannot run. Knows nothing of HTTP. Runs in worker threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvist.errors import PromptTooLong, RequestError
from kvist.server.parts import ChatParts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvist.server.ports import ServedEngine, ServedTokenizer
    from kvist.server.protocol import ChatMessage, PromptInput
    from kvist.types import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt, ready to submit."""

    token_ids: tuple[int, ...]
    """At least one."""
    text: str | None = None
    """As the client wrote it; None when it gave token ids or messages."""
    parts: ChatParts | None = None
    """Where the messages are in it; None: there are none."""


def encode_prompts(inputs: Sequence[PromptInput], engine: ServedEngine) -> list[Prompt]:
    """Return the prompts of /v1/completions.

    Raises:
        RequestError: A prompt is empty or holds a token id outside the vocabulary.
    """
    prompts = []
    for index, given in enumerate(inputs):
        where = "prompt" if len(inputs) == 1 else f"prompt[{index}]"
        if isinstance(given, str):
            ids = engine.tokenizer.encode(given, add_special_tokens=True)
            prompts.append(Prompt(token_ids=tuple(ids), text=given))
        else:
            largest = max(given)
            if largest >= engine.plan.vocab_size:
                raise RequestError(
                    f"[request] {where} holds the token id {largest}, the vocabulary ends at "
                    f"{engine.plan.vocab_size - 1}; check that the ids come from this model's tokeniser",
                    param="prompt",
                    code="invalid_value",
                )
            prompts.append(Prompt(token_ids=tuple(given)))
        if not prompts[-1].token_ids:
            raise RequestError(
                f"[request] {where} holds no token; write at least one character",
                param="prompt",
                code="invalid_value",
            )
    return prompts


def encode_messages(
    messages: Sequence[ChatMessage],
    tokenizer: ServedTokenizer,
    tools: Sequence[Mapping[str, Any]] | None = None,  # Any: a JSON schema
    *,
    is_answered: bool = True,
) -> Prompt:
    """Return the prompt that the model's chat template makes of a conversation.

    Args:
        messages: At least one.
        tokenizer: Has the template.
        tools: As ``protocol`` has checked them; None or empty: there are none.
        is_answered: Whether the prompt ends with the opening of an answer.

    Raises:
        RequestError: The model has no template, or its template refuses this conversation.
        UnsupportedParameter: There are tools, and the template has no place for them.
    """
    tools = tools or None
    # Templates know the role that OpenAI calls developer by its older name.
    turns = [
        {"role": "system" if m.role == "developer" else m.role, "content": m.content}
        for m in messages
    ]
    try:
        ids = tokenizer.encode_chat(turns, is_answered, tools=tools)
    except RequestError as error:
        error.param = error.param or "messages"
        raise
    if not ids:
        raise RequestError(
            "[request] messages make an empty prompt in this model's chat template; add content",
            param="messages",
            code="invalid_value",
        )
    return Prompt(token_ids=tuple(ids), parts=ChatParts(turns, tokenizer, tools))


def check_fit(
    prompts: Sequence[Prompt],
    params: SamplingParams,
    engine: ServedEngine,
    *,
    param: str,
    output_param: str | None,
) -> None:
    """Refuse the whole call when a part of it can never run, before any of it runs.

    Args:
        prompts: All prompts of the call.
        params: Its ``max_tokens`` and ``n`` count too.
        engine: Its plan has the limits.
        param: The request parameter that holds the prompts.
        output_param: The one that limits the output; None: the client gave none.

    Raises:
        PromptTooLong: A prompt plus its output exceeds the context; the message has both numbers.
        RequestError: The call makes more sequences than the queue holds, so that retrying could not help.
    """
    limit = engine.plan.max_context_len
    # Without max_tokens there must be room for one token of output, or there is nothing to ask for.
    num_output_tokens = 1 if params.max_tokens is None else params.max_tokens
    for index, prompt in enumerate(prompts):
        num_prompt_tokens = len(prompt.token_ids)
        if num_prompt_tokens + num_output_tokens > limit:
            which = f"{param}[{index}]" if len(prompts) > 1 else "the prompt"
            wanted = "at least 1" if params.max_tokens is None else str(num_output_tokens)
            raise PromptTooLong(
                f"[request] this model's context is {limit} tokens at most, but {which} has "
                f"{num_prompt_tokens} tokens and {wanted} of output would follow; "
                "shorten it or lower the output limit",
                param=param if output_param is None or num_prompt_tokens >= limit else output_param,
            )
    num_sequences = len(prompts) * params.n
    if num_sequences > engine.plan.max_queue:
        raise RequestError(
            f"[request] {len(prompts)} prompts with n={params.n} make {num_sequences} sequences, the queue holds "
            f"{engine.plan.max_queue}; send fewer at once, or start the server with a larger --max-queue",
            param="n" if len(prompts) == 1 else param,
            code="invalid_value",
        )
