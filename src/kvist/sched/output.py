"""The boundary between the two planes: the plan of one step, and its result.

Responsible for the frozen values that the scheduler hands to the runner and gets back. The runner keeps no state per
request: everything it needs is in the plan. Knows no tensors and no policy.

Tuples with names and not frozen dataclasses: each step makes a few for each sequence, at a moment when the kernels have
left nothing of Python in the processor's caches, and a frozen dataclass then costs twice as long.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from kvist.types import BlockCopy, MemoryOp

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvist.types import BlockId, RequestId, SamplingParams, TokenId, TokenLogprobs

__all__ = [
    "BlockCopy",
    "MemoryOp",
    "SampleSpec",
    "SampledToken",
    "ScheduledSequence",
    "StepPlan",
    "StepResult",
]


class SampleSpec(NamedTuple):
    """How to choose the next token of one sequence."""

    params: SamplingParams
    seed: int
    """Seed of this sequence. A draw depends on it and on output_index alone: batching and preemption change nothing."""
    output_index: int
    """Index of the output token being chosen, from 0."""
    takes_best: bool = False
    """``params.takes_best`` if whoever made this knows it already; False says nothing."""
    prompt_token_ids: tuple[TokenId, ...] = ()
    """The prompt; only filled in when params.needs_history."""
    output_token_ids: tuple[TokenId, ...] = ()
    """Output so far; only filled in when params.needs_history."""


class ScheduledSequence(NamedTuple):
    """The part of one sequence that a step computes.

    Positions ``[start, start + len(token_ids))`` are computed; ``[0, start)`` are in the blocks already.
    """

    request_id: RequestId
    start: int
    """Position of the first token computed, >= 0."""
    token_ids: tuple[TokenId, ...]
    """Tokens at the computed positions; at least one."""
    block_table: tuple[BlockId, ...]
    """Blocks of the sequence in order; covers start + len(token_ids) positions."""
    sample: SampleSpec | None
    """Set when the last computed position is the sequence's last token, so that the next one is to be chosen."""

    @property
    def context_len(self) -> int:
        """Positions that have K and V after this step."""
        return self.start + len(self.token_ids)


class StepPlan(NamedTuple):
    """Everything one step does. The runner needs nothing else."""

    step_index: int
    copies: tuple[BlockCopy, ...]
    """Block copies to carry out first, in this order; none where ``memory_ops`` has them."""
    sequences: tuple[ScheduledSequence, ...]
    """At least one; each request at most once."""
    memory_ops: tuple[MemoryOp | BlockCopy, ...] = ()
    """Where blocks have several codecs: what happens to their memory, and the copies, to be carried out first and in
    this order. A demoted block is full, and running sequences may read it."""

    @property
    def num_batch_tokens(self) -> int:
        """Token positions computed in the step."""
        return sum(len(sequence.token_ids) for sequence in self.sequences)


class SampledToken(NamedTuple):
    """The token chosen for one sequence."""

    token_id: TokenId
    logprobs: TokenLogprobs | None = None
    """Set when the sequence's params asked for log-probabilities."""


class StepResult(NamedTuple):
    """What the runner gives back for one plan."""

    step_index: int
    samples: Mapping[RequestId, SampledToken]
    """One entry for each scheduled sequence with ``sample`` set, except those in ``failed``."""
    failed: Mapping[RequestId, str] = MappingProxyType({})
    """Sequences whose next token could not be chosen, each with the reason as an error message; the others go on.
    Their blocks may hold NaN: they must not be published."""
    damaged: frozenset[RequestId] = frozenset()
    """Those of ``failed`` whose logits, or whose K or V of this step, are no finite numbers."""
    sample_ns: int = 0
    """Time spent on choosing tokens by their logits, a part of the step's."""
    memory_ns: int = 0
    """Time spent on copies of blocks and on changes of their codec, another part of it; 0 where nobody measures it."""
