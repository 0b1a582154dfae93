"""Which token positions are computed in the next step, and what becomes of the results.

Responsible for the step budget, preemption, deadlines and the end of each sequence. Knows no tensors and no text; which
block holds what is the cache manager's affair, who stands before whom that of ``policy`` and ``queue``, who may start
that of ``admission``.

There are no phases: every running request has ``num_computed_tokens`` that catches up with ``num_tokens``. A long
prompt, a chunk of it, the next token, a prompt found in the cache and a preempted sequence are the same arithmetic.

Invariants:
    1. One step at a time: ``plan`` -> run -> ``apply``, by one thread. Blocks are allocated by ``plan`` alone, and
       ``plan`` refuses to run while a step is in flight.
    2. Of a running request, blocks cover at most ``footprint`` positions, all reserved at admission, unless it set no
       ``max_tokens``; only such a request can find the pool empty while it grows.
    3. The running request that arrived first is never preempted for memory.
    4. Copies once planned stay in the plan, whatever becomes of their request. When the step fails, those that running
       requests still wait for are in the next plan; until that has run, nobody writes to a block.

Why everybody ends. A running request needs no new block for the next token after its admission (inv. 2; without
``max_tokens`` at least one output is reserved). When it needs one later and there is none, somebody is preempted or it
pauses, and then somebody else goes on (``preemption.choose_victim``). Nobody is preempted twice without a token in
between, and outputs are bounded, so preemptions are. The oldest is never a victim and fits alone, since a request may
not grow past the pool (``lengths``). While somebody pauses nobody is admitted; preempted requests resume before
new ones, oldest first; and among new ones the queue bounds how often one is overtaken. So the oldest of all ends, and
then the next.

How a step's positions are shared out, so that a long prompt holds up nobody for more than a step:

    1. next tokens      every running request that lacks one position only
    2. prompts begun    shortest rest first; each but the longest may take half of what is left. While requests wait,
                        this is half of the step only
    3. prompts to begin in the queue's order. One that fits into what is left is computed whole. A longer one is begun
                        when no other is under way or all of those are at least twice as long; while more requests wait
                        it gets half of what is left. Others are looked past, which the bound on overtakes counts
    4. what is left     to prompts begun, oldest first

So a step is as full as without sharing, and of the requests that lack at most a quarter of what the next tokens leave,
the first starts in the next step that has a place and the memory for it, whatever long prompts run or stand before it.

Why ``finish`` and ``preempt`` are safe between ``plan`` and ``apply``: they release the blocks at once, although the
step in flight still writes the positions planned for the request.

      block table of a released request, P = 4      [ full ][ full ][ open:  a b . . ]
      computed, maybe published from now on          ------------------------|
      written by the step in flight                                          |--- ...>

A release publishes committed positions only, and the step writes only behind them, so what the cache offers stays as
it was. The blocks that become free are written once more, by a step whose result is dropped, and nobody can own them
before the next ``plan`` (inv. 1). A copy into a released block is carried out as planned (inv. 4), so even a copied
head that was published by the release holds what it should before anybody reads it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvist.errors import (
    ConfigError,
    EngineOverloaded,
    InvariantViolation,
    RequestError,
)
from kvist.sched.admission import Admission, extend
from kvist.sched.deadlines import Deadlines
from kvist.sched.keeping import PromptKeeper
from kvist.sched.lengths import Lengths
from kvist.sched.output import SampleSpec, ScheduledSequence, StepPlan
from kvist.sched.policy import check_priority
from kvist.sched.preemption import choose_victim
from kvist.sched.report import RequestRow, RequestUpdate, SchedulerStats, distrust
from kvist.sched.request import Request, RequestStatus
from kvist.sched.running import Running, lease_of
from kvist.sched.step import InFlight, Step
from kvist.sched.throughput import Throughput
from kvist.sched.waiting import Waiting
from kvist.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from kvist.cache.lease import PrefixLease
    from kvist.cache.manager import CacheManager
    from kvist.sched.output import SampledToken, StepResult
    from kvist.sched.policy import SchedulingPolicy
    from kvist.types import BlockCopy, RequestId, TokenId

__all__ = ["DEFAULT_MAX_OVERTAKES", "RequestRow", "RequestUpdate", "Scheduler", "SchedulerStats"]

DEFAULT_MAX_OVERTAKES = 64
"""Chosen by simulation: 200 requests of Azure's 2023 lengths, 32 clients at a time, memory for 8, ``shortest``. Time to
the first token of the shorter half at the 95th percentile, and the longest of all; under ``fcfs`` 7.9 s and 10.8 s:

    max_overtakes     8      16      32      64     128
    short, p95     10.9     9.6     2.5     1.6     1.0 s
    longest        12.1    15.3    19.9    28.8    40.4 s

Below the number of clients every request comes to be overtaken often enough at once, and the order is that of arrival.
"""

MAX_FAILED_PLANS = 8
"""Plans in a row in which blocks that must be there could not be had, and nothing else was possible, before the request
that stands first is refused."""


class Scheduler:
    """Turns requests into plans and results into updates.

    Lifecycle of a step: ``plan`` hands out what to compute, the runner computes it, ``apply`` takes the result.
    Owned by the engine's thread.

    Args:
        manager: The blocks; the scheduler is its only user while it lives.
        max_batch_tokens: Token positions in one step at most, >= 1.
        max_running: Requests holding blocks at once at most, >= 1.
        max_queue: Requests waiting at most, >= 1; more are refused.
        max_context_len: Tokens of one sequence at most, prompt and output.
        reserve_tokens: Output tokens reserved ahead for a request that sets no ``max_tokens``, >= 1.
        policy: Order of admission.
        keep_kv: False forgets K and V after each token and recomputes the whole sequence for the next, to show what a
            KV cache is worth. Needs a manager without prefix cache.
        max_overtakes: Later requests that may start before one that waits, >= 0 (``queue``, inv. 1 and 2).
        clock: Monotonic nanoseconds; for deadlines and throughput, and without influence on what is planned otherwise.

    Raises:
        ConfigError: ``keep_kv`` is False and the manager shares prefixes.
    """

    def __init__(  # noqa: PLR0913  # one per option of --help; each is required but the last
        self,
        manager: CacheManager,
        *,
        max_batch_tokens: int,
        max_running: int,
        max_queue: int,
        max_context_len: int,
        reserve_tokens: int,
        policy: SchedulingPolicy,
        keep_kv: bool = True,
        max_overtakes: int = DEFAULT_MAX_OVERTAKES,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        if not keep_kv and manager.prefix_cache:
            raise ConfigError(
                "[scheduler] --kv-cache off keeps no blocks to share, received --prefix-cache on; "
                "set --prefix-cache off"
            )
        self._manager = manager
        self._is_mixed = manager.is_mixed
        self._max_batch_tokens = max_batch_tokens
        # Positions in the next step at most: fewer after steps that memory ran out in.
        self._step_limit = max_batch_tokens
        self._max_queue = max_queue
        self._policy = policy
        self._keep_kv = keep_kv
        self._clock = clock

        self._requests: dict[RequestId, Request] = {}
        self._lengths = Lengths(manager, max_context_len, reserve_tokens)
        self._waiting = Waiting(manager, policy, self._lengths, max_overtakes)
        self._running = Running()
        self._admission = Admission(
            manager,
            policy=policy,
            lengths=self._lengths,
            waiting=self._waiting,
            running=self._running,
            max_running=max_running,
            clock=clock,
        )
        self._in_flight: InFlight | None = None
        # Copies planned for running requests in a step that failed (inv. 4).
        self._undone_copies: tuple[BlockCopy, ...] = ()
        self._deadlines = Deadlines()
        self._throughput = Throughput()
        self._keeper = PromptKeeper(manager)
        # Last updates of requests that ended outside a step, until somebody takes them.
        self._ended: list[RequestUpdate] = []
        self._num_failed_plans = 0
        self._num_arrived = 0
        self._num_steps = 0
        self._num_scheduled_tokens = 0
        self._num_recomputed_tokens = 0
        self._num_finished = 0
        self._num_timeouts = 0
        self._num_refused = 0
        self._num_preemptions = 0
        self._num_pauses = 0
        self._num_failed_allocations = 0
        self._num_dropped_results = 0

    # ---- requests in and out -------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._requests)

    @property
    def num_waiting(self) -> int:
        """Requests without blocks: new, deferred and preempted ones."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    @property
    def num_awake(self) -> int:
        """Of num_running: those that plans may schedule; all of them, but in a simulation (``sleep``)."""
        return len(self._running.awake)

    def add(self, request: Request) -> None:
        """Accept a new request; it waits until a plan admits it. O(prompt).

        Raises:
            RequestError: The prompt is empty, or the id is that of a request in progress.
            UnsupportedParameter: It has a priority, and the policy knows none.
            PromptTooLong: The sequence cannot fit the context or the whole pool.
            EngineOverloaded: The queue is full, or there is no memory left to take the request down.
        """
        self._lengths.check_fits(request)
        check_priority(self._policy, request.priority)
        if request.request_id in self._requests:
            raise RequestError(
                f"[scheduler] request ids must be unique, received {request.request_id!r}, which is in progress",
                param="request_id",
            )
        if len(self._waiting) >= self._max_queue:
            raise EngineOverloaded(
                f"[scheduler] {len(self._waiting)} requests are waiting, max_queue={self._max_queue}; "
                "retry later or raise --max-queue",
                retry_after_s=self.retry_after_s(),
            )
        try:
            request.chain = self._manager.new_chain(request.namespace, request.prompt_token_ids)
            if self._policy.is_cache_aware:
                self._waiting.look_up_hits(request)
        except MemoryError:
            raise EngineOverloaded(
                f"[scheduler] no memory is left for the tokens of the prompt ({request.num_prompt_tokens}); "
                "retry later",
                retry_after_s=self.retry_after_s(),
            ) from None
        request.arrival_index = self._num_arrived
        request.arrival_ns = self._clock()
        self._num_arrived += 1
        self._requests[request.request_id] = request
        if request.deadline_s is not None:
            self._deadlines.add(request, request.arrival_ns + int(request.deadline_s * 1e9))
        self._policy.arrive(request)
        self._waiting.add(request)

    def finish(self, request_id: RequestId, reason: FinishReason) -> RequestUpdate | None:
        """End a request from outside (client gone, stop string found); its blocks are released at once.

        Safe between ``plan`` and ``apply``; what the step in flight computes for the request is dropped.

        Returns:
            Its last update; None when there is no such request in progress.
        """
        request = self._requests.get(request_id)
        if request is None:
            return None
        self._leave(request)
        return RequestUpdate(
            request_id=request_id, token_ids=(), finish_reason=reason, usage=request.usage()
        )

    def take_ended(self) -> tuple[RequestUpdate, ...]:
        """End requests whose deadline has passed; return the last updates of those that ended outside a step.

        To be called between steps. An update of this kind has no tokens; its ``finish_reason`` is TIMEOUT, or ERROR
        when memory for the request could not be allocated (``MAX_FAILED_PLANS``).

        Mutates:
            Releases their blocks.

        Complexity: O(log requests) for each that has ended, else O(1).
        """
        for request in self._deadlines.take_expired(self._clock()):
            self._num_timeouts += 1
            self._end(request, FinishReason.TIMEOUT)
        if not self._ended:
            return ()
        ended, self._ended = tuple(self._ended), []
        return ended

    def retry_after_s(self) -> float:
        """Return in how many seconds the waiting requests will have been computed, as fast as the last steps were.

        Within [1, 60]; 1 before the first step.
        """
        return self._throughput.retry_after_s(self._waiting.num_tokens)

    def snapshot(self) -> tuple[RequestRow, ...]:
        """Return where each request stands, in order of arrival. O(requests log requests)."""
        now_ns = self._clock()
        overtakes = self._waiting.queue.overtakes()
        requests = sorted(self._requests.values(), key=lambda r: r.arrival_index)
        return tuple(self._row(request, now_ns, overtakes.get(request, 0)) for request in requests)

    def preempt(self, request_id: RequestId) -> bool:
        """Take a running request's blocks away; it resumes before any new one, and recomputes what is not cached.

        Output so far stays. Safe between ``plan`` and ``apply``: a token chosen meanwhile is dropped and, since the
        draw depends on seed and index alone, chosen again.

        Returns:
            Whether the request was running.
        """
        request = self._requests.get(request_id)
        if request is None or request.status is not RequestStatus.RUNNING:
            return False
        self._preempt(request)
        return True

    def recompute(self, request_id: RequestId) -> bool:
        """Preempt a running request whose K and V are not to be trusted; it resumes from its tokens, reusing nothing.

        Safe between ``plan`` and ``apply``, like ``preempt``. Whatever it has published has to be invalidated by the
        caller before. Its usage says that nothing was reused, and why.

        Returns:
            Whether the request was running.
        """
        request = self._requests.get(request_id)
        if request is None or not self.preempt(request_id):
            return False
        request.is_distrustful = True
        request.num_cached_tokens = 0
        request.cached_by_codec = {}
        request.miss = distrust(request.num_prompt_tokens)
        self._manager.note_missed(request.num_tokens - 1)
        return True

    def holders(self, leases: Collection[PrefixLease]) -> tuple[Request, ...]:
        """Return the running requests that hold some leases; only to be read. O(running)."""
        return tuple(request for request in self._running.requests if request.lease in leases)

    @property
    def num_arrived(self) -> int:
        """Requests accepted so far."""
        return self._num_arrived

    @property
    def oldest_arrival(self) -> int | None:
        """``arrival_index`` of the request in progress that arrived first; None: there is none."""
        oldest = next(iter(self._requests.values()), None)
        return None if oldest is None else oldest.arrival_index

    def sleep(self, request: Request, on_wake: Callable[[], None]) -> None:
        """Leave a running request out of plans until ``wake``.

        It keeps its blocks, its place among the running and one position of each step's budget, as if it went on
        decoding. A simulation puts a request to sleep for the steps in which it would only decode inside one block, and
        brings it up to date in ``on_wake``, which is called before a plan schedules it or its blocks are released.
        """
        if request.status is RequestStatus.RUNNING and request.on_wake is None:
            self._running.sleep(request, on_wake)

    def wake(self, request: Request) -> None:
        """Let plans schedule a sleeping request again; no effect on any other."""
        if request.on_wake is not None:
            num_tokens = request.num_tokens
            self._running.wake(request)
            self._policy.charge(request, request.num_tokens - num_tokens)

    def stats(self) -> SchedulerStats:
        """Return the counters."""
        return SchedulerStats(
            num_steps=self._num_steps,
            num_scheduled_tokens=self._num_scheduled_tokens,
            num_recomputed_tokens=self._num_recomputed_tokens,
            num_finished=self._num_finished,
            num_timeouts=self._num_timeouts,
            num_refused=self._num_refused,
            num_preemptions=self._num_preemptions,
            num_pauses=self._num_pauses,
            num_failed_allocations=self._num_failed_allocations,
            num_deferred_admissions=self._admission.num_deferred,
            num_lookups=self._waiting.num_lookups,
            num_dropped_results=self._num_dropped_results,
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_waiting_tokens=self._waiting.num_tokens,
        )

    # ---- plan ----------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """Return what to compute next; None when there is nothing to do, or nothing possible just now.

        The latter happens while only sleeping requests could go on, or when blocks that must be there could not be had;
        after MAX_FAILED_PLANS such plans in a row the request that stands first is refused (``take_ended``).

        Mutates:
            Admits waiting requests, allocates blocks (evicting cached ones), preempts when the pool is exhausted.

        Raises:
            InvariantViolation: The last plan was not applied, or requests wait and none can ever go on.

        Complexity:
            O(running log running + scheduled blocks), and prefix lookups: one for each request admitted, two for each
            block in flight that others wait for, at most MAX_SKIPPED for requests that do not fit, and under a policy
            that looks at the cache at most 2 * MAX_REORDERED more. None of it grows with the length of the queue. A
            request that is parked costs one comparison of hashes when the block it waits for changes.
        """
        if self._in_flight is not None:
            raise InvariantViolation(
                f"[scheduler] step {self._in_flight.plan.step_index} must be applied before the next is planned"
            )
        started_ns = self._clock()
        step = Step(max(0, self._step_limit - self._running.num_asleep))
        has_waiting = bool(self._waiting)
        if has_waiting:
            self._look_at_cache(step)
        has_prompts = self._plan_next_tokens(step)
        if has_prompts:
            self._plan_prompts_begun(step)
        if step.has_preempted:
            self._retry_paused(step)
        if has_waiting or step.has_preempted:
            self._admission.plan(step)
        # Whoever was given nothing so far found the step full, or pauses.
        if step.has_partial or step.has_preempted:
            self._plan_rest(step)
        self._num_pauses += len(step.paused)
        plan = self._hand_out(step, started_ns) if step.num_scheduled else None
        self._num_failed_allocations += step.has_failed_allocation
        if plan is not None:
            self._num_failed_plans = 0
        elif self._requests and not self._running.num_asleep:
            self._give_up_or_retry(step)
        return plan

    def _look_at_cache(self, step: Step) -> None:
        """Bring what is known of waiting requests up to date; what there is no memory for is left to later plans."""
        try:
            if self._waiting.queue.has_parked:
                self._waiting.wake_parked()
            if self._policy.is_cache_aware:
                self._waiting.reorder_stale()
        except MemoryError:
            step.has_failed_allocation = True

    def _plan_next_tokens(self, step: Step) -> bool:
        """Give a position to those that lack one; return whether any request lacks more."""
        lacking = []
        has_prompts = False
        for request in self._running.awake:
            # ``num_uncomputed_tokens`` of one that is awake.
            if request.num_tokens - request.num_computed_tokens == 1:
                lacking.append(request)
            else:
                has_prompts = True
        for request in lacking:
            if step.budget == 0:
                break
            self._compute(request, 1, step)
        return has_prompts

    def _plan_prompts_begun(self, step: Step) -> None:
        begun = sorted(
            [r for r in self._running.awake if r.num_uncomputed_tokens > 1],
            key=lambda r: r.num_uncomputed_tokens,
        )
        if not begun:
            return
        budget = step.budget - (step.budget // 2 if self._admission.can_admit(step) else 0)
        for index, request in enumerate(begun):
            # The longest gets what the shorter ones leave, which is half at least: it is never stopped by them.
            share = budget if index == len(begun) - 1 else budget // 2
            num_tokens = min(request.num_uncomputed_tokens, share)
            step.has_partial |= num_tokens < request.num_uncomputed_tokens
            if num_tokens and self._compute(request, num_tokens, step):
                budget -= num_tokens

    def _retry_paused(self, step: Step) -> None:
        # Others have given way since: alone at last, the oldest must not pause in an empty plan.
        for request in sorted(step.paused, key=lambda r: r.arrival_index):
            if step.budget == 0:
                return
            step.paused.discard(request)
            self._compute(request, min(request.num_uncomputed_tokens, step.budget), step)

    def _plan_rest(self, step: Step) -> None:
        for request in list(self._running.awake) if step.budget else ():
            if step.budget == 0:
                return
            num_left = step.num_left(request)
            if num_left and request not in step.paused:
                self._compute(request, min(num_left, step.budget), step)

    def _compute(self, request: Request, num_tokens: int, step: Step) -> bool:
        """Schedule so many positions more of a running request; False when it gets no block for them in this step."""
        lease = request.lease
        if lease is None:
            return False  # preempted a moment ago
        position = request.num_computed_tokens + step.num_scheduled.get(request, 0) + num_tokens
        num_covered = len(lease.block_table) * self._manager.block_size
        if position > num_covered and not self._make_room(request, position, step):
            return False
        step.schedule(request, num_tokens)
        return True

    def _make_room(self, request: Request, num_positions: int, step: Step) -> bool:
        """Cover positions by blocks, at the cost of others; False when the request pauses or gave way itself."""
        lease = lease_of(request)
        while not extend(self._manager, lease, num_positions):
            victim = None
            if self._manager.can_extend(lease, num_positions):
                step.has_failed_allocation = True
            else:
                victim = choose_victim(request, self._running.requests, self._manager.block_size)
            if victim is None:
                step.paused.add(request)
                return False
            # The victim may be in this plan already; its copies stay there (inv. 4), its positions do not.
            step.drop(victim)
            step.paused.discard(victim)
            step.has_preempted = True
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _give_up_or_retry(self, step: Step) -> None:
        """Refuse the request that stands first after too many plans in which blocks could not be had."""
        if not step.has_failed_allocation:
            raise InvariantViolation(
                f"[scheduler] nothing can go on: {self.stats()}, {self._manager.stats()}"
            )
        self._num_failed_plans += 1
        if self._num_failed_plans < MAX_FAILED_PLANS:
            return
        self._num_failed_plans = 0
        candidate = None if self._running else self._waiting.queue.peek()
        request = self._running.requests[0] if candidate is None else candidate.request
        self._num_refused += 1
        self._end(request, FinishReason.ERROR)

    def _hand_out(self, step: Step, started_ns: int) -> StepPlan | None:
        """Return the plan, which is in flight then; None: there is no memory to write it down."""
        sequences: list[ScheduledSequence] = []
        parts: list[tuple[Request, ScheduledSequence]] = []
        try:
            for request, num_tokens in step.num_scheduled.items():
                sequence = self._sequence(request, num_tokens)
                sequences.append(sequence)
                parts.append((request, sequence))
        except MemoryError:
            step.has_failed_allocation = True
            self._keep_copies()
            return None
        num_batch_tokens = 0
        for request, num_tokens in step.num_scheduled.items():
            num_batch_tokens += num_tokens
            start = request.num_computed_tokens
            if start < request.num_computed_before:
                num_repeated = min(num_tokens, request.num_computed_before - start)
                request.num_recomputed_tokens += num_repeated
                self._num_recomputed_tokens += num_repeated
        self._num_scheduled_tokens += num_batch_tokens
        copies = () if self._is_mixed else (*self._undone_copies, *step.copies)
        memory_ops = self._manager.take_memory_ops() if self._is_mixed else ()
        plan = StepPlan(self._num_steps, copies, tuple(sequences), memory_ops)
        self._undone_copies = ()
        self._num_steps += 1
        self._in_flight = InFlight(plan, parts, num_batch_tokens, started_ns)
        return plan

    def _sequence(self, request: Request, num_tokens: int) -> ScheduledSequence:
        start = request.num_computed_tokens
        end = start + num_tokens
        is_complete = end == request.num_tokens
        sample = _sample_spec(request) if is_complete and request.params.max_tokens != 0 else None
        return ScheduledSequence(
            request.request_id,
            start,
            tuple(request.token_ids[start:end]),
            tuple(lease_of(request).block_table),
            sample,
        )

    # ---- apply ---------------------------------------------------------------------------------------------------

    def apply(self, plan: StepPlan, result: StepResult) -> tuple[RequestUpdate, ...]:
        """Take the result of the step in flight: publish what was computed, append tokens, end what is complete.

        Requests that have been finished or preempted since need no sample; what was computed for them is dropped.

        Returns:
            One update for each request that got a token or ended, in plan order.

        Raises:
            InvariantViolation: ``plan`` is not the step in flight, or ``result`` belongs to another step or lacks a
                sample.

        Mutates:
            Commits blocks; releases those of finished requests.
        """
        in_flight = self._require_in_flight(plan)
        self._check_result(in_flight, result)
        self._in_flight = None
        duration_s = (self._clock() - in_flight.started_ns) / 1e9
        self._throughput.record(in_flight.num_batch_tokens, duration_s)
        if self._step_limit < self._max_batch_tokens:
            longer = self._step_limit + max(1, self._step_limit // 8)
            self._step_limit = min(longer, self._max_batch_tokens)
        updates = []
        for request, sequence in in_flight.parts:
            update = self._apply_sequence(request, sequence, result)
            if update is not None:
                updates.append(update)
        return tuple(updates)

    def cancel(self, plan: StepPlan) -> None:
        """Close the step in flight, of which nothing is known to be computed. Its running requests are planned anew.

        Raises:
            InvariantViolation: ``plan`` is not the step in flight.
        """
        self._require_in_flight(plan)
        self._in_flight = None
        self._keep_copies()

    def retry_shorter(self, plan: StepPlan) -> None:
        """Do as ``cancel`` because memory ran out: the next step has half as many positions at most.

        The limit grows by an eighth with each step that succeeds, up to what it was.
        """
        self.cancel(plan)
        self._num_failed_allocations += 1
        self._step_limit = max(1, plan.num_batch_tokens // 2)

    def _require_in_flight(self, plan: StepPlan) -> InFlight:
        if self._in_flight is None or self._in_flight.plan is not plan:
            raise InvariantViolation(f"[scheduler] step {plan.step_index} is not in flight")
        return self._in_flight

    def _check_result(self, in_flight: InFlight, result: StepResult) -> None:
        samples, missing = result.samples, None
        for request, sequence in in_flight.parts:
            if request.request_id in samples or sequence.sample is None or request.lease is None:
                continue  # of one that runs no more nothing is needed
            missing = [*(missing or ()), request.request_id]
        step_index = in_flight.plan.step_index
        if result.step_index != step_index or missing:
            raise InvariantViolation(
                f"[scheduler] expected the result of step {step_index}, received that of {result.step_index} "
                f"without samples for {missing or []}"
            )

    def _keep_copies(self) -> None:
        """Note the copies that running requests wait for, whose step has failed or was not handed out (inv. 4)."""
        leases = map(lease_of, self._running.requests)
        self._undone_copies = tuple([copy for lease in leases if (copy := lease.pending_copy)])

    def _apply_sequence(
        self, request: Request, sequence: ScheduledSequence, result: StepResult
    ) -> RequestUpdate | None:
        start, num_tokens = sequence.start, len(sequence.token_ids)
        end = start + num_tokens
        request.num_positions_computed += num_tokens
        request.num_computed_before = max(request.num_computed_before, end)
        lease = request.lease
        if lease is None:  # it runs no more
            self._num_dropped_results += 1
            return None
        request.num_computed_tokens = end
        if self._keep_kv:
            self._manager.commit(lease, request.chain, end)
            if request.keep is not None and end >= request.num_prompt_tokens:
                self._keeper.keep(request)
            size = self._manager.block_size
            if self._policy.is_cache_aware and end // size > start // size:
                self._waiting.queue.mark_stale(request.chain.block_hash(0))
        if sequence.sample is not None:
            return self._append(request, result.samples[request.request_id])
        if request.num_uncomputed_tokens > 0:
            return None
        # The whole prompt, of a request that wants no output.
        self._leave(request)
        return RequestUpdate(
            request_id=request.request_id,
            token_ids=(),
            finish_reason=FinishReason.LENGTH,
            usage=request.usage(),
        )

    def _append(self, request: Request, sampled: SampledToken) -> RequestUpdate:
        token_id = sampled.token_id
        request.append(token_id)
        self._policy.charge(request, 1)
        if not self._keep_kv:
            request.num_computed_tokens = 0
        finish_reason = self._finish_reason(request, token_id)
        if finish_reason is not None:
            self._leave(request)
        logprobs = () if sampled.logprobs is None else (sampled.logprobs,)
        if finish_reason is None:
            return RequestUpdate(request.request_id, (token_id,), logprobs)
        return RequestUpdate(
            request_id=request.request_id,
            token_ids=(token_id,),
            logprobs=logprobs,
            finish_reason=finish_reason,
            stop_token_id=token_id if token_id in request.params.stop_token_ids else None,
            usage=request.usage(),
        )

    def _finish_reason(self, request: Request, token_id: TokenId) -> FinishReason | None:
        params = request.params
        if token_id in params.stop_token_ids:
            return FinishReason.STOP
        if token_id in request.eos_token_ids and not params.ignore_eos:
            return FinishReason.STOP
        if request.num_tokens >= self._lengths.max_tokens_of(request):
            return FinishReason.LENGTH
        return None

    # ---- moves ---------------------------------------------------------------------------------------------------

    def _preempt(self, request: Request) -> None:
        self._release(request)
        request.move_to(RequestStatus.PREEMPTED)
        request.num_preemptions += 1
        request.num_tokens_at_preemption = request.num_tokens
        request.num_expected_hit_tokens = 0
        self._num_preemptions += 1
        self._waiting.add(request)

    def _end(self, request: Request, reason: FinishReason) -> None:
        """End a request outside a step, to be told by ``take_ended``."""
        self._leave(request)
        self._ended.append(
            RequestUpdate(
                request_id=request.request_id,
                token_ids=(),
                finish_reason=reason,
                usage=request.usage(),
            )
        )

    def _leave(self, request: Request) -> None:
        if request.status is RequestStatus.RUNNING:
            self._release(request)
        else:
            self._waiting.remove(request)
        request.move_to(RequestStatus.FINISHED)
        self._deadlines.discard(request)
        self._policy.leave(request)
        del self._requests[request.request_id]
        self._num_finished += 1

    def _release(self, request: Request) -> None:
        """Give the blocks of a running request back; the only place where the scheduler does."""
        self.wake(request)
        self._manager.release(lease_of(request))
        request.lease = None
        request.num_computed_tokens = 0
        self._running.remove(request)

    def _row(self, request: Request, now_ns: int, num_overtakes: int) -> RequestRow:
        is_running = request.status is RequestStatus.RUNNING
        age_s = (now_ns - request.arrival_ns) / 1e9
        return RequestRow(
            request_id=request.request_id,
            tenant=request.namespace.tenant,
            status=request.status,
            priority=request.priority,
            arrival_index=request.arrival_index,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=request.num_output_tokens,
            num_prefill_tokens=request.num_uncomputed_tokens
            if is_running
            else request.num_expected_prefill_tokens,
            num_held_blocks=len(lease_of(request).block_table) if is_running else 0,
            num_footprint_blocks=self._manager.num_blocks_for(self._lengths.footprint(request)),
            num_overtakes=num_overtakes,
            num_preemptions=request.num_preemptions,
            age_s=age_s,
            deadline_in_s=None if request.deadline_s is None else request.deadline_s - age_s,
        )


def _sample_spec(request: Request) -> SampleSpec:
    params, output_index = request.params, request.num_tokens - request.num_prompt_tokens
    if not request.needs_history:
        return SampleSpec(params, request.seed, output_index, request.takes_best)
    return SampleSpec(
        params,
        request.seed,
        output_index,
        prompt_token_ids=request.prompt_token_ids,
        output_token_ids=request.output_token_ids,
    )
