"""What a client is told of the reuse of its own prompts.

Responsible for the JSON of a finished call's reuse and misses, in our own form, in OpenAI's and in Anthropic's, and for
the last calls of each API key. Knows nothing of HTTP and of how a reason is found.

Invariant: a text of a prompt goes to the API key that sent it, and nowhere else; the other side of a difference is of
the same namespace, so of the same key.

Sources: ``prompt_cache_diagnostics`` of OpenAI's Responses API, openai-python 3.57 ``types/responses/response.py``;
``diagnostics`` of Anthropic's Messages API, anthropic-sdk-python 2.14 ``types/diagnostics.py``. Both compare with an
earlier response that the client names; here it is the nearest earlier prompt.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any

from kvist.server.breakers import MAX_BEFORE_LEN, Difference
from kvist.server.parts import SYSTEM, TEMPLATE, TOOLS
from kvist.types import MissReason

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvist.server.endpoints import Job
    from kvist.server.generation import ChoiceOutput
    from kvist.server.ports import ServedTokenizer
    from kvist.server.prompts import Prompt
    from kvist.types import MissReport, MissSpan, TokenId, Usage

    Json = dict[str, Any]  # Any: a JSON document

MAX_RECENT = 20
"""Finished calls shown beside the statistics."""
MAX_HISTORY = 1024
"""Finished calls that can be asked about; each is about a kilobyte."""
NUM_BEFORE = 8
"""Tokens shown of what both sides have before a difference."""
NUM_RECEIVED = 16
"""Tokens shown of each side from the difference on."""

_OPENAI_REASONS = {
    MissReason.TOKENS_DIFFER: "input_changed",
    MissReason.MODEL_CHANGED: "model_changed",
    MissReason.NAMESPACE_DIFFERS: "prompt_cache_key_changed",
}
"""Those that OpenAI has a word for. A new prompt has nothing to compare with, and for the others, which are the
cache's own doing, OpenAI's answer is that none is available."""
_ANTHROPIC_PARTS = {SYSTEM: "system_changed", TOOLS: "tools_changed", TEMPLATE: None, None: None}
"""What changed, by the part that the difference is in; any other part is a message. None: there is no word for it."""


def explain_call(job: Job, outputs: Sequence[ChoiceOutput], tokenizer: ServedTokenizer) -> Json:
    """Return what is told of a finished call: of its only prompt, or of all of them and of each.

    Takes up to some milliseconds when a prompt was missed, so call it from a worker thread then.
    """
    each = []
    for prompt, usages in zip(job.prompts, _usages(job, outputs), strict=True):
        document = explain_prompt(prompt, _first(usages), tokenizer)
        document["recomputed_tokens"] = sum(usage.num_recomputed_tokens for usage in usages)
        each.append(document)
    if len(each) == 1:
        return each[0]
    totals = {
        name: sum(document[name] for document in each)
        for name in ("reused_tokens", "computed_tokens", "recomputed_tokens")
    }
    miss = next((document["miss"] for document in each if document["miss"]), None)
    return {**totals, "miss": miss, "prompts": each, "rerendered": None}


def differences(
    job: Job, outputs: Sequence[ChoiceOutput], explanation: Json, tokenizer: ServedTokenizer
) -> Iterator[Difference]:
    """Yield the places where a call's prompts went on differently from earlier ones, with more text than is told.

    Args:
        job: What was asked.
        outputs: Of the finished call.
        explanation: What ``explain_call`` made of it.
        tokenizer: The model's.
    """
    documents = explanation.get("prompts", [explanation])
    for prompt, usages, document in zip(job.prompts, _usages(job, outputs), documents, strict=True):
        report = _first(usages).miss
        if report is None:
            continue
        for span, told in zip(report.spans, document["spans"], strict=True):
            if span.reason is MissReason.TOKENS_DIFFER:
                start = span.start
                reversed_before = prompt.token_ids[max(0, start - MAX_BEFORE_LEN) : start][::-1]
                before = _bytes(_message_tokens(reversed_before, tokenizer)[::-1], tokenizer)
                following = prompt.token_ids[start : start + len(report.expected_token_ids)]
                received = _bytes(_message_tokens(following, tokenizer), tokenizer)
                expected = _bytes(_message_tokens(report.expected_token_ids, tokenizer), tokenizer)
                num_common = _num_common(received, expected)
                yield Difference(
                    part=told["part"],
                    before=(before + received[:num_common]).decode(errors="replace"),
                    expected=expected[num_common:].decode(errors="replace"),
                    received=received[num_common:].decode(errors="replace"),
                    tokens_lost=told["tokens_lost"],
                )


def _message_tokens(token_ids: Sequence[int], tokenizer: ServedTokenizer) -> Sequence[int]:
    """Return the tokens up to the first control token: what follows it, templates write alike for everybody."""
    length = len(token_ids)
    return token_ids[
        : next((i for i in range(length) if tokenizer.is_special(token_ids[i])), length)
    ]


def _usages(job: Job, outputs: Sequence[ChoiceOutput]) -> list[list[Usage]]:
    """Return the usage of every sequence, by prompt."""
    n = job.params.n
    return [
        [output.usage for output in outputs[start : start + n] if output.usage is not None]
        for start in range(0, len(outputs), n)
    ]


def _first(usages: Sequence[Usage]) -> Usage:
    """Return what was there: of several sequences the others find what the first to start computed."""
    return min(usages, key=lambda usage: usage.num_cached_tokens)


def has_miss(outputs: Sequence[ChoiceOutput]) -> bool:
    """Return whether there is anything to explain about a finished call."""
    return any(output.usage is not None and output.usage.miss is not None for output in outputs)


def explain_prompt(prompt: Prompt, usage: Usage, tokenizer: ServedTokenizer) -> Json:
    """Return what is told of one prompt."""
    spans = [] if usage.miss is None else _spans(prompt, usage.miss, tokenizer)
    return {
        "reused_tokens": usage.num_cached_tokens,
        "computed_tokens": usage.num_prompt_tokens - usage.num_cached_tokens,
        "recomputed_tokens": usage.num_recomputed_tokens,
        # The one that cost the most; of equals the first.
        "miss": max(spans, key=lambda span: int(span["tokens_lost"]), default=None),
        "spans": spans,
        # Filled in by ``rerender``, where the prompt is a chat.
        "rerendered": None,
    }


def openai_diagnostics(explanation: Json) -> Json:
    """Return OpenAI's ``prompt_cache_diagnostics`` for what ``explain_call`` says."""
    miss = explanation["miss"]
    if miss is None:
        return {"type": "cache_hit"}
    reason = MissReason(miss["reason"])
    if reason is MissReason.NEW_PROMPT:
        # Past the beginning it is an earlier prompt that goes on, so all that there was to reuse was reused.
        return {"type": "cache_hit" if miss["position"] else "comparison_response_not_found"}
    if reason not in _OPENAI_REASONS:
        return {"type": "unavailable"}
    are_tools = reason is MissReason.TOKENS_DIFFER and miss["part"] == TOOLS
    return {
        "type": "cache_miss",
        "reason": "tools_changed" if are_tools else _OPENAI_REASONS[reason],
        "cache_missed_tokens": miss["tokens_lost"],
        "comparison_reusable_tokens": miss["position"],
    }


def anthropic_diagnostics(explanation: Json) -> Json | None:
    """Return Anthropic's ``diagnostics`` for what ``explain_call`` says; None: a prompt goes on as an earlier one did.

    As there, it is about what was sent: that blocks were evicted is no difference.
    """
    for prompt in explanation.get("prompts", [explanation]):
        for span in prompt["spans"]:
            reason = _anthropic_reason(span)
            if reason is not None:
                return {"cache_miss_reason": reason}
    return None


def _anthropic_reason(span: Json) -> Json | None:
    match MissReason(span["reason"]):
        case MissReason.TOKENS_DIFFER:
            kind = _ANTHROPIC_PARTS.get(span["part"], "messages_changed")
        case MissReason.MODEL_CHANGED:
            kind = "model_changed"
        case MissReason.NAMESPACE_DIFFERS:
            return {"type": "previous_message_not_found"}
        case MissReason.NEW_PROMPT if span["position"] == 0:
            return {"type": "previous_message_not_found"}
        case _:
            return None
    if kind is None:
        return {"type": "unavailable"}
    return {"type": kind, "cache_missed_input_tokens": span["tokens_lost"]}


class History:
    """The explanations of the last calls, each for its own tenant. One event loop."""

    def __init__(self, max_calls: int = MAX_HISTORY) -> None:
        self._max_calls = max_calls
        self._calls: OrderedDict[str, tuple[str, Json]] = OrderedDict()

    def add(self, request_id: str, tenant: str, explanation: Json) -> None:
        """Keep one, and forget the oldest when there are too many."""
        self._calls[request_id] = tenant, explanation
        if len(self._calls) > self._max_calls:
            self._calls.popitem(last=False)

    def get(self, request_id: str, tenant: str) -> Json | None:
        """Return the explanation of a call of this tenant; None for what is unknown and for anybody else's."""
        owner, explanation = self._calls.get(request_id, ("", None))
        return explanation if owner == tenant else None

    def recent(self, tenant: str) -> list[Json]:
        """Return a line about each of this tenant's latest calls, the latest first. O(calls of everybody)."""
        own = (
            summary(request_id, explanation)
            for request_id, (owner, explanation) in reversed(self._calls.items())
            if owner == tenant
        )
        return list(islice(own, MAX_RECENT))


def summary(request_id: str, explanation: Json) -> Json:
    """Return a line about a finished call: counts and its costliest miss, without a word of the prompt."""
    miss = explanation["miss"]
    return {
        "id": request_id,
        "reused_tokens": explanation["reused_tokens"],
        "computed_tokens": explanation["computed_tokens"],
        "recomputed_tokens": explanation["recomputed_tokens"],
        "miss": None
        if miss is None
        else {name: miss[name] for name in ("reason", "part", "position", "tokens_lost")},
    }


def _spans(prompt: Prompt, report: MissReport, tokenizer: ServedTokenizer) -> list[Json]:
    lengths = map(len, map(tokenizer.token_bytes, prompt.token_ids))
    ends = list(accumulate(lengths, initial=0))
    return [_span(prompt, report, span, ends, tokenizer) for span in report.spans]


def _span(
    prompt: Prompt,
    report: MissReport,
    span: MissSpan,
    ends: Sequence[int],
    tokenizer: ServedTokenizer,
) -> Json:
    """Return what is told of one span; ``ends`` are the bytes before each token, and those of all."""
    received = expected = before = None
    num_before = ends[span.start]
    if span.reason is MissReason.TOKENS_DIFFER:
        start = span.start
        before = _bytes(prompt.token_ids[max(0, start - NUM_BEFORE) : start], tokenizer)
        received = _bytes(prompt.token_ids[start : start + NUM_RECEIVED], tokenizer)
        expected = _bytes(report.expected_token_ids[:NUM_RECEIVED], tokenizer)
        # Tokens that differ may begin alike: the difference is in the part where the texts do.
        num_before += _num_common(received, expected)
    has_left = span.reason in (MissReason.EVICTED, MissReason.EXPIRED)
    left_s_ago = report.left_s_ago if has_left else None
    return {
        "reason": span.reason.value,
        "part": None if prompt.parts is None else prompt.parts.at(num_before, ends[-1]),
        "position": span.start,
        "tokens_lost": span.end - span.start,
        "before": _text(before),
        "expected": _text(expected),
        "received": _text(received),
        "left_s_ago": None if left_s_ago is None else round(left_s_ago, 3),
    }


def _bytes(token_ids: Sequence[int] | Sequence[TokenId], tokenizer: ServedTokenizer) -> bytes:
    return b"".join(map(tokenizer.token_bytes, token_ids))


def _text(data: bytes | None) -> str | None:
    return None if data is None else data.decode(errors="replace")


def _num_common(left: bytes, right: bytes) -> int:
    """Return how many bytes two texts begin alike with, whole characters only."""
    num_common = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        num_common += 1
    return len(left[:num_common].decode(errors="ignore").encode())
