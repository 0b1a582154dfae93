"""Requests that wait, and what the cache holds of them.

Responsible for keeping the queue's order true to the cache, and for not looking up twice what has not changed. Knows no
step and no budget.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvist.cache.pending import pending_key
from kvist.sched.queue import ParkedGroup, WaitingQueue
from kvist.sched.request import RequestStatus

if TYPE_CHECKING:
    from kvist.cache.lease import PrefixMatch
    from kvist.cache.manager import CacheManager
    from kvist.sched.lengths import Lengths
    from kvist.sched.policy import SchedulingPolicy
    from kvist.sched.request import Request

MAX_REORDERED = 16
"""Requests whose place is worked out anew in one plan: each costs a lookup, ~0.1 ms for 4,096 tokens."""


class Waiting:
    """The waiting requests of one engine.

    Args:
        manager: Asked what it holds.
        policy: Order of admission.
        lengths: For the work that a request is expected to need.
        max_overtakes: See ``WaitingQueue``.
    """

    def __init__(
        self,
        manager: CacheManager,
        policy: SchedulingPolicy,
        lengths: Lengths,
        max_overtakes: int,
    ) -> None:
        self._manager = manager
        self._policy = policy
        self._lengths = lengths
        self.queue = WaitingQueue(policy, max_overtakes)
        """The order."""
        self.num_tokens = 0
        """Positions that all of them are expected to need."""
        self.num_lookups = 0
        """Searches of the cache so far."""

    def __len__(self) -> int:
        return len(self.queue)

    def add(self, request: Request) -> None:
        """Let a request wait: a new one, or one that was preempted."""
        if request.status is RequestStatus.PREEMPTED:
            self.queue.push_resumed(request)
        else:
            self.queue.push(request)
        # What is reserved for it, less what is cached.
        num_tokens = self._lengths.footprint(request) - request.num_expected_hit_tokens
        request.num_queued_tokens = num_tokens
        self.num_tokens += num_tokens

    def start(self, request: Request) -> None:
        """Take a request out because it starts, which overtakes those that came before it."""
        self.queue.start(request)
        self.num_tokens -= request.num_queued_tokens

    def remove(self, request: Request) -> None:
        """Take a request out because it has ended."""
        self.queue.remove(request)
        self.num_tokens -= request.num_queued_tokens

    def join_parked(self, request: Request) -> bool:
        """Park a request if it waits for a block that others are known to wait for; saves a lookup for each."""
        if self.queue.has_parked:
            for group in self.queue.groups:
                if _waits_for(request, group):
                    self.queue.park(request, group)
                    return True
        return False

    def wake_parked(self) -> None:
        """Ask for one request of each group whether its block is still being computed."""
        for group in self.queue.groups:
            first = next(self.queue.parked(group))
            match = self.look_up(first)
            next_group = group_of(first, match) if match.pending else None
            if next_group == group:
                continue
            requests = tuple(self.queue.parked(group))
            self.queue.unpark(group)
            if next_group is None:
                continue
            # The computing request goes on: whoever needs the next block too need not be looked up one by one.
            for request in requests:
                if _waits_for(request, next_group):
                    self.queue.park(request, next_group)

    def reorder_stale(self) -> None:
        """Bring some keys up to date with the blocks published since."""
        for _ in range(MAX_REORDERED):
            request = self.queue.take_stale()
            if request is None:
                return
            if self.look_up_hits(request):
                self.queue.rekey(request)

    def look_up(self, request: Request) -> PrefixMatch:
        """Return what the cache holds of a waiting request; what was found before, as long as that is current."""
        # The last token is always computed, since its logits choose the next one.
        max_hit_len = 0 if request.is_distrustful else request.num_tokens - 1
        match = request.match
        if (
            match is None
            or match.max_hit_len != max_hit_len
            or not self._manager.is_current(match, request.chain)
        ):
            match = request.match = self._manager.match(request.chain, max_hit_len)
            self._manager.note_failures(match)
            self.num_lookups += 1
        return match

    def look_up_hits(self, request: Request) -> bool:
        """Note what the cache holds of a request; return whether that is news."""
        match = self.look_up(request)
        is_news = match.num_hit_tokens != request.num_expected_hit_tokens
        request.num_expected_hit_tokens = match.num_hit_tokens
        return is_news

    def has_lost_hits(self, request: Request, match: PrefixMatch) -> bool:
        """Put a request back where it belongs if blocks it counted on were evicted; return whether that was so."""
        if not self._policy.is_cache_aware:
            return False
        has_lost = match.num_hit_tokens < request.num_expected_hit_tokens
        request.num_expected_hit_tokens = match.num_hit_tokens
        if has_lost:
            self.queue.rekey(request)
        return has_lost


def group_of(request: Request, match: PrefixMatch) -> ParkedGroup:
    """Return the block in flight that a request waits for, by a match that says it does."""
    index = len(match.block_ids)
    return ParkedGroup(index, pending_key(request.chain, index))


def _waits_for(request: Request, group: ParkedGroup) -> bool:
    """Return whether a request needs the very block that a group waits for."""
    chain, index = request.chain, group.block_index
    has_block = index < chain.num_full_blocks or (
        index == chain.num_full_blocks and bool(chain.block_tokens(index))
    )
    return has_block and pending_key(chain, index) == group.key
