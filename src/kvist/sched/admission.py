"""Which waiting requests start in a step.

Responsible for starting requests in the queue's order as far as memory and the step's positions go, and for looking
past those that do not fit. Who stands before whom is the affair of ``policy`` and ``queue``, preemption that of
``scheduler``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvist.sched.request import RequestStatus
from kvist.sched.waiting import MAX_REORDERED, group_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvist.cache.lease import PrefixLease, PrefixMatch
    from kvist.cache.manager import CacheManager
    from kvist.sched.lengths import Lengths
    from kvist.sched.policy import SchedulingPolicy
    from kvist.sched.request import Request
    from kvist.sched.running import Running
    from kvist.sched.step import Step
    from kvist.sched.waiting import Waiting

MAX_SKIPPED = 8
"""Requests looked past in one plan because they do not fit: each costs a lookup, ~0.1 ms for 4,096 tokens."""


class Admission:
    """Takes requests from those that wait to those that run.

    Args:
        manager: The blocks.
        policy: Whether requests may pass one that does not fit, and whether they come in batches.
        lengths: What a request reserves.
        waiting: Requests are taken from there.
        running: And added there.
        max_running: Requests holding blocks at once at most, >= 1.
        clock: Monotonic nanoseconds.
    """

    def __init__(  # noqa: PLR0913  # each a part of the scheduler, and no two of them belong together
        self,
        manager: CacheManager,
        *,
        policy: SchedulingPolicy,
        lengths: Lengths,
        waiting: Waiting,
        running: Running,
        max_running: int,
        clock: Callable[[], int],
    ) -> None:
        self._manager = manager
        self._policy = policy
        self._lengths = lengths
        self._waiting = waiting
        self._running = running
        self._max_running = max_running
        self._clock = clock
        self._is_batch_open = False
        self.num_deferred = 0
        """How often a request was parked in a plan."""

    def can_admit(self, step: Step) -> bool:
        """Return whether a waiting request could start in this step as far as anything but its own size goes."""
        return bool(
            len(self._waiting.queue) > self._waiting.queue.num_parked
            and len(self._running) < self._max_running
            and not step.paused
            and (not self._policy.is_batched or not self._running or self._is_batch_open)
        )

    def plan(self, step: Step) -> None:
        """Start waiting requests in the queue's order, as far as memory and the step's positions go.

        One whose next block is being computed by a running request is parked instead, since it needs no room yet.
        Parked requests are asked anew in each plan, one for each such block, instead of waiting for a signal from the
        computing request: no way of losing that one (abort, preemption, eviction of its blocks) can leave anybody
        waiting for ever.
        """
        if not self._running.requests:
            self._is_batch_open = True
        if not len(self._waiting):
            return
        if self.can_admit(step):
            self._is_batch_open = self._admit_in_order(step)
        self._waiting.queue.restore()
        self.num_deferred += self._waiting.queue.num_parked

    def _admit_in_order(self, step: Step) -> bool:
        """Start requests until one stops those behind it; return whether the batch may go on growing."""
        num_skipped = num_reordered = 0
        queue, running = self._waiting.queue, self._running.requests
        while num_skipped < MAX_SKIPPED and len(running) < self._max_running:
            candidate = None if self._is_used_up(step) else queue.peek()
            if candidate is None:
                return queue.has_parked
            request, is_urgent = candidate
            if self._waiting.join_parked(request):
                continue
            match = self._look_up(request, step)
            if match is None:
                return False
            self._manager.touch(match)
            if match.pending:
                self._waiting.queue.park(request, group_of(request, match))
                continue
            if (
                not is_urgent
                and num_reordered < MAX_REORDERED
                and self._waiting.has_lost_hits(request, match)
            ):
                num_reordered += 1
                continue
            num_tokens = self._first_chunk(request, match, step, is_urgent=is_urgent)
            if num_tokens is None:
                self._waiting.queue.set_aside(request)
                num_skipped += 1
            elif not self._admit(request, match, num_tokens, step):
                if is_urgent or not self._policy.can_pass:
                    return False
                self._waiting.queue.set_aside(request)
                num_skipped += 1
        return False

    def _look_up(self, request: Request, step: Step) -> PrefixMatch | None:
        """Return what the cache holds of a waiting request; None: there is no memory to look."""
        try:
            return self._waiting.look_up(request)
        except MemoryError:
            step.has_failed_allocation = True
            return None

    def _is_used_up(self, step: Step) -> bool:
        # A batch takes what the memory holds, whenever the prompts are computed.
        return step.budget == 0 and not self._policy.is_batched

    def _first_chunk(
        self, request: Request, match: PrefixMatch, step: Step, *, is_urgent: bool
    ) -> int | None:
        """Return the positions to compute of a request that starts now; None: it should not start now."""
        num_tokens = request.num_tokens - match.num_hit_tokens
        if num_tokens <= step.budget or self._policy.is_batched:
            return min(num_tokens, step.budget)
        num_left = step.least_left(self._running.awake)
        if not is_urgent and num_left is not None and 2 * num_tokens > num_left:
            return None
        has_others = len(self._waiting.queue) - self._waiting.queue.num_parked > 1
        return (step.budget + 1) // 2 if has_others else step.budget

    def _admit(self, request: Request, match: PrefixMatch, num_tokens: int, step: Step) -> bool:
        """Start a request if its whole footprint fits; False means not now."""
        lease = self._allocate(request, match, step)
        if lease is None:
            return False
        num_tokens = min(request.num_tokens - lease.num_computed_tokens, num_tokens)
        if not extend(self._manager, lease, lease.num_computed_tokens + num_tokens):
            step.has_failed_allocation = True
            self._manager.release(lease)
            return False
        self._waiting.start(request)
        request.move_to(RequestStatus.RUNNING)
        request.match = None
        request.lease = lease
        request.num_computed_tokens = lease.num_computed_tokens
        if request.num_cached_tokens is None:
            request.num_cached_tokens = lease.num_computed_tokens
            request.cached_by_codec = lease.reused_tokens
            request.miss = lease.miss
            request.admitted_ns = self._clock()
            self._policy.charge(request, request.num_uncomputed_tokens)
        request.num_computed_before = max(request.num_computed_before, lease.num_computed_tokens)
        self._running.add(request)
        if lease.pending_copy is not None:
            step.copies.append(lease.pending_copy)
        if num_tokens:
            step.schedule(request, num_tokens)
        step.has_partial |= num_tokens < request.num_uncomputed_tokens
        return True

    def _allocate(self, request: Request, match: PrefixMatch, step: Step) -> PrefixLease | None:
        try:
            lease = self._manager.admit(
                match, request.chain, self._lengths.footprint(request), is_reuse=request.is_reuse
            )
        except MemoryError:
            lease = None
            step.has_failed_allocation = True
        if lease is None and not self._running:
            step.has_failed_allocation = True  # alone it fits, or it would not have been accepted
        return lease


def extend(manager: CacheManager, lease: PrefixLease, num_positions: int) -> bool:
    """Cover so many positions by blocks; False: there are none now, or no memory to note them in."""
    try:
        return manager.extend(lease, num_positions)
    except MemoryError:
        return False
