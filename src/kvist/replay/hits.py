"""Hit shares alone: every prompt of a trace through the real cache, one after another.

Responsible for the one number that depends on nothing but order, memory and eviction, so that eviction policies can be
compared with each other and with the clairvoyant one. Knows no clock, no scheduler and no outputs: a request looks up,
holds, computes and publishes its prompt, and gives it back before the next one comes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvist.cache.namespaces import Namespace
from kvist.replay.tokens import prompt_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvist.cache.manager import CacheManager
    from kvist.replay.traces import TraceRequest


@dataclass(slots=True, kw_only=True)
class HitCounts:
    """What a run through the cache counted."""

    num_requests: int = 0
    """Those that fit the memory."""
    num_prompt_tokens: int = 0
    num_hit_tokens: int = 0
    """Subset of num_prompt_tokens."""
    num_refused: dict[str, int] = field(default_factory=dict)
    """Requests that did not run, by reason."""
    max_held_blocks: int = 0
    held_blocks: int = 0
    """Sum over requests of the blocks held when its prompt is computed."""


def replay_hits(
    records: Iterable[TraceRequest],
    manager: CacheManager,
    on_finished: Callable[[], None] = lambda: None,
) -> HitCounts:
    """Take the prompts of a trace through a cache, in order.

    Args:
        records: The trace.
        manager: The cache, empty; its block size that of the trace.
        on_finished: Called after every request.

    Raises:
        TraceError: Reading the trace failed.

    Mutates: The cache.
    """
    counts = HitCounts()
    namespace = Namespace(model="trace")
    for number, record in enumerate(records):
        num_tokens = record.num_input_tokens
        if num_tokens == 0 or not manager.can_ever_admit(num_tokens):
            reason = "RequestError" if num_tokens == 0 else "PromptTooLong"
            counts.num_refused[reason] = counts.num_refused.get(reason, 0) + 1
            on_finished()
            continue
        chain = manager.new_chain(namespace, prompt_of(record, number))
        # The last token is always computed, as the scheduler does it: its logits choose the next one.
        lease = manager.admit(manager.lookup(chain, num_tokens - 1), chain, num_tokens)
        assert lease is not None  # nobody else holds anything
        counts.num_requests += 1
        counts.num_prompt_tokens += num_tokens
        counts.num_hit_tokens += lease.num_computed_tokens
        manager.extend(lease, num_tokens)
        counts.held_blocks += manager.num_held
        counts.max_held_blocks = max(counts.max_held_blocks, manager.num_held)
        manager.commit(lease, chain, num_tokens)
        manager.release(lease)
        on_finished()
    return counts
