"""Prompts that are to stay in the cache beyond what their use earns them.

Responsible for carrying out ``Request.keep`` once a prompt is computed, and for one pin per prefix. Knows no queue and
no budget of pins; both belong to others.

Invariant: of live pins that end with the same block there is one, so that asking again and again costs no memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvist.errors import NotCached, PinBudgetExceeded

if TYPE_CHECKING:
    from kvist.cache.block import Block
    from kvist.cache.manager import CacheManager
    from kvist.cache.pins import Pin
    from kvist.sched.request import Request


class PromptKeeper:
    """Pins and retains prompts for their requests. Owned by the scheduler."""

    def __init__(self, manager: CacheManager) -> None:
        self._manager = manager
        # By their last block, which is theirs as long as they live; at most one entry for each block of the pool.
        self._pins: dict[Block, Pin] = {}

    def keep(self, request: Request) -> None:
        """Do what a request asks of its prompt, which is computed; no effect the second time.

        A pin that the budget has no room for becomes a TTL of the same length, and the request is told by its usage.

        Complexity: O(blocks of the prompt).
        """
        keep = request.keep
        if keep is None or request.has_been_kept:
            return
        request.has_been_kept = True
        chain, num_tokens = request.chain, request.num_prompt_tokens
        # Less than a block, or the prompt's identities collided with others: there is nothing to keep.
        if num_tokens < self._manager.block_size:
            return
        try:
            if keep.is_pinned and self._pin(request, keep.ttl_s):
                return
            request.num_retained_tokens = self._manager.retain(chain, num_tokens, keep.ttl_s)
        except (NotCached, MemoryError):
            return  # its usage says that nothing was kept

    def _pin(self, request: Request, ttl_s: float) -> bool:
        try:
            pin = self._manager.pin(request.chain, request.num_prompt_tokens, ttl_s)
        except PinBudgetExceeded:
            return False
        if pin is None:
            return False
        request.num_pinned_tokens = pin.num_tokens
        last = pin.blocks[-1]
        other = self._pins.get(last)
        if other is not None and not other.is_released:
            pin, other = (other, pin) if _ends_later(other, pin) else (pin, other)
            self._manager.unpin(other)
        self._pins[last] = pin
        return True


def _ends_later(pin: Pin, other: Pin) -> bool:
    assert pin.deadline_ns is not None
    assert other.deadline_ns is not None
    return pin.deadline_ns > other.deadline_ns
