"""Values that cross package boundaries: ids, sampling parameters, results.

Responsible for the vocabulary shared by the control plane, the data plane, the engine and its front ends. Knows no
tensor library and no HTTP. Everything here is immutable.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Literal, NamedTuple, NewType

from kvist.errors import InvalidSamplingParams
from kvist.typecheck import mismatch

if TYPE_CHECKING:
    from collections.abc import Mapping

TokenId = NewType("TokenId", int)
"""Integer in ``[0, vocab_size)``."""
BlockId = NewType("BlockId", int)
"""Index of a block in its arena, ``[0, num_blocks)``."""
RequestId = NewType("RequestId", str)
"""Identity of one sequence inside the engine (a client call with ``n > 1`` makes several)."""
BlockHash = NewType("BlockHash", bytes)
"""32-byte identity of a block and its whole prefix."""

MAX_LOGPROBS = 20
"""Largest number of alternatives per position, as OpenAI's ``top_logprobs`` allows."""


MAX_STOP_LEN = 1024
"""Characters of a stop string at most: each becomes a state of the automaton that looks for them (0.4 kB, 2 us), which
the engine thread builds while everybody waits."""


MAX_STOP_TOKEN_IDS = 256
"""Stop token ids of a request at most: each output token is compared with all of them."""


class FinishReason(Enum):
    """Why a sequence ended. The value is OpenAI's ``finish_reason`` where one exists."""

    STOP = "stop"
    """End-of-sequence token, stop token or stop string."""
    LENGTH = "length"
    """``max_tokens`` or the context limit was reached."""
    ABORT = "abort"
    """The client went away or cancelled."""
    TIMEOUT = "timeout"
    """The request's own deadline passed. On the wire "length": its output was cut by a limit that the client set."""
    ERROR = "error"
    """The engine could not continue; the stream raises the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose output tokens, and when to stop. Validated at construction.

    Raises:
        InvalidSamplingParams: A value is outside the range stated beside its field.
    """

    max_tokens: int | None = None
    """Output tokens at most, >= 0; None: up to the context limit. 0 computes the prompt and generates nothing."""
    temperature: float = 1.0
    """0 is greedy; otherwise logits are divided by it. [0, 2]."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this. (0, 1]."""
    min_p: float = 0.0
    """Drop tokens less likely than this times the most likely one. [0, 1]."""
    seed: int | None = None
    """Makes sampling repeatable, alone or in any batch; None draws one. [0, 2**63)."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens seen in prompt or output (CTRL). (0, 10]."""
    presence_penalty: float = 0.0
    """Subtracted from logits of tokens seen in the output. [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence in the output. [-2, 2]."""
    logit_bias: Mapping[int, float] = field(
        default_factory=dict, metadata={"metavar": "TOKEN_ID=NUMBER"}
    )
    """Added to the logits of the given token ids. Values in [-100, 100]."""
    logprobs: int | None = None
    """Alternatives reported per output token, [0, 20]; None reports no log-probabilities. They are those of
    the model's own distribution, before bias, penalties, temperature and truncation."""
    stop: tuple[str, ...] = ()
    """Strings that end the output; not part of it. Up to 16, none empty, each of MAX_STOP_LEN characters
    at most."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the output, beside the model's end-of-sequence ids; not part of the text. Up to 256."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence token (``stop`` and ``stop_token_ids`` still end it)."""
    n: int = 1
    """Sequences generated from one prompt, sharing its blocks. [1, 128]."""
    stop_degenerate: bool = False
    """End the output where it is seen to go round in circles; it is told of in any case (``Degeneration``)."""

    def __post_init__(self) -> None:
        wrong = mismatch(self)
        if wrong is not None:
            _check(False, wrong.name, repr(wrong.value), wrong.expected)
        _check(
            self.max_tokens is None or self.max_tokens >= 0, "max_tokens", self.max_tokens, ">= 0"
        )
        _check_range("temperature", self.temperature, 0.0, 2.0)
        _check(self.top_k >= 0, "top_k", self.top_k, ">= 0 (0 keeps all)")
        _check(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "in (0, 1]")
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check(self.seed is None or 0 <= self.seed < 2**63, "seed", self.seed, "in [0, 2**63)")
        _check(
            0.0 < self.repetition_penalty <= 10.0,
            "repetition_penalty",
            self.repetition_penalty,
            "in (0, 10]",
        )
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        for bias in self.logit_bias.values():
            _check_range("logit_bias", bias, -100.0, 100.0)
        _check(
            self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
            "logprobs",
            self.logprobs,
            f"in [0, {MAX_LOGPROBS}]",
        )
        _check(len(self.stop) <= 16, "stop", len(self.stop), "at most 16 strings")
        _check(all(self.stop), "stop", "an empty string", "non-empty strings")
        longest = max(map(len, self.stop), default=0)
        _check(
            longest <= MAX_STOP_LEN,
            "stop",
            f"one of {longest}",
            f"strings of at most {MAX_STOP_LEN} characters",
        )
        _check(
            len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
            "stop_token_ids",
            len(self.stop_token_ids),
            f"at most {MAX_STOP_TOKEN_IDS} ids",
        )
        _check(1 <= self.n <= 128, "n", self.n, "in [1, 128]")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def needs_history(self) -> bool:
        """Whether choosing a token looks at earlier tokens."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def takes_best(self) -> bool:
        """Whether the most likely token is taken by the logits as they are, and nothing else is asked for."""
        return (
            self.is_greedy
            and self.logprobs is None
            and not self.logit_bias
            and not self.needs_history
        )


def _check(is_valid: object, name: str, value: object, expected: str) -> None:
    if not is_valid:
        raise InvalidSamplingParams(
            f"[sampling] {name} must be {expected}, received {value}", param=name
        )


def _check_range(name: str, value: float, low: float, high: float) -> None:
    is_valid = math.isfinite(value) and low <= value <= high
    _check(is_valid, name, value, f"in [{low:g}, {high:g}]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """How long a prompt is to stay in the cache after it was computed, whatever else passes through."""

    ttl_s: float
    """Seconds, > 0. Asking again moves the end later."""
    is_pinned: bool = False
    """False: its blocks go after all others of their tenant, if running requests need the memory. True: they do not go;
    where the pins' budget has no room, as False."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReset:
    """What a reset has done."""

    num_dropped_blocks: int
    """Blocks that are free now."""
    num_detached_blocks: int
    """Blocks that running requests still hold: offered to nobody any more, and free when those end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCopy:
    """Copy the first positions of one block into another, all layers, before anything is computed.

    Copies run in plan order; a later copy may overwrite the source of an earlier one.
    """

    source: BlockId
    target: BlockId
    num_tokens: int
    """Leading positions to copy, [1, block_size]."""


class MemoryOp(NamedTuple):
    """What happens to the memory of one block, where blocks have several codecs."""

    kind: Literal["allocate", "free", "demote"]
    block_id: BlockId
    codec: str
    """Of the memory to allocate, or to demote the block to; empty for ``free``."""
    num_tokens: int = 0
    """Of ``demote``: leading positions that hold something; 0: all."""
    block_index: int = 0
    """Of ``demote``: its place in its sequence. Its first position is that times the block size, which encoders of
    int4 and int3 take into account."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities at one output position."""

    token_id: TokenId
    """The chosen token."""
    logprob: float
    """Natural log of its probability under the model's own distribution."""
    top: tuple[tuple[TokenId, float], ...] = ()
    """The most likely alternatives, most likely first; as many as were asked for."""


class MissReason(Enum):
    """Why a run of prompt tokens was not taken from the cache. The value is what clients and metrics see."""

    NEW_PROMPT = "new_prompt"
    """No earlier prompt of the namespace goes on past this position."""
    TOKENS_DIFFER = "tokens_differ"
    """The nearest earlier prompt has other tokens from here on."""
    EVICTED = "evicted"
    """Computed before, and given up for room or by a reset."""
    EXPIRED = "expired"
    """Computed before, and given up after the time for which it was to be kept."""
    NAMESPACE_DIFFERS = "namespace_differs"
    """The namespace is new, or the prompt is known under another layout of the same owner's cache."""
    MODEL_CHANGED = "model_changed"
    """The same owner's earlier prompt was computed by other weights or with another adapter."""
    BELOW_BLOCK_SIZE = "below_block_size"
    """Less than a block matches, and it could not be copied: there was no room, or the block's codec allows none."""
    VERIFICATION_FAILED = "verification_failed"
    """A block with the right identity did not hold what it should."""
    NOT_YET_COMPUTED = "not_yet_computed"
    """A request that runs now has these tokens and has not computed them yet."""
    CACHE_OFF = "cache_off"
    """The prefix cache is switched off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MissSpan:
    """Adjacent prompt positions that were not reused, for one reason."""

    start: int
    """First position."""
    end: int
    """Position after the last one."""
    reason: MissReason


@dataclass(frozen=True, slots=True, kw_only=True)
class MissReport:
    """Why the part of a prompt that could have been reused was not. The last token is always computed."""

    spans: tuple[MissSpan, ...]
    """At least one; adjacent, in order. The first begins where the reuse ended."""
    num_common_tokens: int
    """Length of the prefix that is shared with the nearest earlier prompt of the namespace, cached or not."""
    expected_token_ids: tuple[TokenId, ...] = ()
    """How that prompt went on from there, a few tokens; empty when it did not, or differs for another reason."""
    left_s_ago: float | None = None
    """Since the first block that is evicted or expired left the cache; None: there is none."""

    @property
    def main(self) -> MissSpan:
        """What cost the most tokens; the first one of equals."""
        return max(self.spans, key=lambda span: span.end - span.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens that one sequence cost."""

    num_prompt_tokens: int
    """Given by the client."""
    num_cached_tokens: int
    """Prompt tokens served from the cache at first admission; a subset of num_prompt_tokens."""
    num_computed_tokens: int
    """Token positions computed for this sequence in all, recomputation after preemption included."""
    num_output_tokens: int
    """Produced, the end-of-sequence token included."""
    num_preemptions: int = 0
    """Times the sequence lost its blocks and was recomputed."""
    num_recomputed_tokens: int = 0
    """Subset of num_computed_tokens: positions that had been computed or cached for the sequence before."""
    queue_s: float | None = field(default=None, compare=False)
    """Seconds from the scheduler taking the sequence to its first admission; None: it never started."""
    miss: MissReport | None = None
    """Why the rest of the prompt was not reused; None: all of it but the last token was, or it never started."""
    num_retained_tokens: int | None = None
    """Prompt tokens, in whole blocks, that have a TTL now; None: not asked for."""
    num_pinned_tokens: int | None = None
    """Prompt tokens, in whole blocks, that are pinned now; None: not asked for."""
    cached_by_codec: Mapping[str, int] = field(default_factory=dict)
    """num_cached_tokens by the codec that their K and V were in; empty where all blocks have the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Degeneration:
    """That an output goes round in circles, as far as its tokens show it."""

    kind: Literal["loop", "entropy"]
    """``loop``: its end repeats a run of tokens again and again. ``entropy``: it is made of very few different ones."""
    start: int
    """Index of the output token where that begins."""
    period: int | None = None
    """Tokens of the run that is repeated; None unless it is a loop."""
    entropy_bits: float | None = None
    """Entropy of the tokens from start on, as often as each occurs; None unless that is the sign."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishDetails:
    """What there is to say of the end of a sequence beyond its reason."""

    degeneration: Degeneration
    is_stopped: bool
    """Whether it was ended for that (``SamplingParams.stop_degenerate``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputChunk:
    """What one step added to one sequence of a request."""

    request_id: str
    """The client call, shared by its n sequences."""
    index: int
    """Which of the call's n sequences, [0, n)."""
    text: str = ""
    """New text; whole characters only, and never the beginning of a stop string."""
    token_ids: tuple[TokenId, ...] = ()
    """New token ids (the text of the last ones may follow in a later chunk)."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry per new token id when asked for, else empty."""
    finish_reason: FinishReason | None = None
    """Set on the last chunk of the sequence."""
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended it, if one of the request's own did."""
    finish_details: FinishDetails | None = None
    """On the last chunk of a sequence that went round in circles."""
    usage: Usage | None = None
    """Set on the last chunk of the sequence."""
