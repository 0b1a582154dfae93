"""Which token positions are computed in the next step, and what becomes of the results.

Responsible for admission, the step budget, preemption and the end of each sequence. Knows no tensors, no text and no
clock; which block holds what is the cache manager's affair.

There are no phases: every running request has ``num_computed_tokens`` that catches up with ``num_tokens``. A long
prompt, a chunk of it, the next token, a prompt found in the cache and a preempted sequence are the same arithmetic.

Invariants:
    1. One step at a time: ``plan`` -> run -> ``apply``, by one thread. Blocks are allocated by ``plan`` alone, and
       ``plan`` refuses to run while a step is in flight.
    2. Of a running request, blocks cover at most ``footprint`` positions, all reserved at admission, unless it set no
       ``max_tokens``; only such a request can find the pool empty while it grows.
    3. The running request that arrived first always goes on: everybody else is preempted before it is, and alone it
       fits, since a request may not grow past the pool (``_max_tokens_of``).
    4. Copies once planned stay in the plan, whatever becomes of their request.

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

import bisect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvist.errors import (
    ConfigError,
    EngineOverloaded,
    InvariantViolation,
    PromptTooLong,
    RequestError,
)
from kvist.sched.output import SampleSpec, ScheduledSequence, StepPlan
from kvist.sched.queue import WaitingQueue
from kvist.sched.request import Request, RequestStatus
from kvist.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvist.cache.lease import PrefixLease, PrefixMatch
    from kvist.cache.manager import CacheManager
    from kvist.sched.output import SampledToken, StepResult
    from kvist.sched.policy import SchedulingPolicy
    from kvist.types import BlockCopy, RequestId, TokenId, TokenLogprobs, Usage

RETRY_AFTER_S = 1.0
"""What a refused client is told to wait: long enough not to hammer, short against any queue that is full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestUpdate:
    """What one step, or a call to ``finish``, changed for one request."""

    request_id: RequestId
    token_ids: tuple[TokenId, ...]
    """New output tokens, the one that ended the sequence included."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One per new token when asked for, else empty."""
    finish_reason: FinishReason | None = None
    """Set on the last update of the request."""
    stop_token_id: int | None = None
    """The one of ``params.stop_token_ids`` that ended it, if one did."""
    usage: Usage
    """Up to and including this update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """Counters since the scheduler was made, and two gauges. The same trace gives the same numbers."""

    num_steps: int
    """Plans made."""
    num_scheduled_tokens: int
    """Token positions in those plans."""
    num_recomputed_tokens: int
    """Of num_scheduled_tokens: those that had been computed, or found in the cache, for the same request before."""
    num_finished: int
    """Requests that ended, for whatever reason."""
    num_preemptions: int
    """Times a running request lost its blocks."""
    num_deferred_admissions: int
    """Times an admission was put off because another request was computing the very block."""
    num_dropped_results: int
    """Planned sequences whose request was finished or preempted while the step was in flight."""
    num_running: int
    """Now."""
    num_waiting: int
    """Now; deferred and preempted requests included."""


@dataclass(slots=True)
class _Step:
    """A plan in the making."""

    budget: int
    """Token positions left."""
    copies: list[BlockCopy] = field(default_factory=list)
    num_scheduled: dict[Request, int] = field(default_factory=dict)

    def schedule(self, request: Request, num_tokens: int) -> None:
        self.num_scheduled[request] = num_tokens
        self.budget -= num_tokens

    def drop(self, request: Request) -> None:
        self.budget += self.num_scheduled.pop(request, 0)


@dataclass(frozen=True, slots=True)
class _InFlight:
    """The plan that was handed out, with the requests its sequences belong to."""

    plan: StepPlan
    requests: tuple[Request, ...]


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
    ) -> None:
        if not keep_kv and manager.prefix_cache:
            raise ConfigError(
                "[scheduler] --kv-cache off keeps no blocks to share, received --prefix-cache on; "
                "set --prefix-cache off"
            )
        self._manager = manager
        self._max_batch_tokens = max_batch_tokens
        self._max_running = max_running
        self._max_queue = max_queue
        self._max_context_len = max_context_len
        self._reserve_tokens = reserve_tokens
        self._policy = policy
        self._keep_kv = keep_kv

        self._requests: dict[RequestId, Request] = {}
        self._queue = WaitingQueue()
        # By arrival, oldest first; at most max_running, so insertion into a list is cheap.
        self._running: list[Request] = []
        self._in_flight: _InFlight | None = None
        self._num_asleep = 0
        self._num_arrived = 0
        self._num_steps = 0
        self._num_scheduled_tokens = 0
        self._num_recomputed_tokens = 0
        self._num_finished = 0
        self._num_preemptions = 0
        self._num_deferred_admissions = 0
        self._num_dropped_results = 0

    # ---- requests in and out -------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._requests)

    @property
    def num_waiting(self) -> int:
        """Requests without blocks: new, deferred and preempted ones."""
        return len(self._queue)

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self._running)

    def add(self, request: Request) -> None:
        """Accept a new request; it waits until a plan admits it. O(prompt).

        Raises:
            RequestError: The prompt is empty, or the id is that of a request in progress.
            PromptTooLong: The sequence cannot fit the context or the whole pool.
            EngineOverloaded: The queue is full.
        """
        self._check_fits(request)
        if request.request_id in self._requests:
            raise RequestError(
                f"[scheduler] request ids must be unique, received {request.request_id!r}, which is in progress",
                param="request_id",
            )
        if len(self._queue) >= self._max_queue:
            raise EngineOverloaded(
                f"[scheduler] {len(self._queue)} requests are waiting, max_queue={self._max_queue}; "
                "retry later or raise --max-queue",
                retry_after_s=RETRY_AFTER_S,
            )
        request.arrival_index = self._num_arrived
        request.chain = self._manager.new_chain(request.namespace, request.prompt_token_ids)
        self._num_arrived += 1
        self._requests[request.request_id] = request
        self._enqueue(request)

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

    def sleep(self, request: Request, on_wake: Callable[[], None]) -> None:
        """Leave a running request out of plans until ``wake``.

        It keeps its blocks, its place among the running and one position of each step's budget, as if it went on
        decoding. A simulation puts a request to sleep for the steps in which it would only decode inside one block, and brings
        it up to date in ``on_wake``, which is called before a plan schedules the request or its blocks are released.
        """
        if request.status is RequestStatus.RUNNING and request.on_wake is None:
            request.on_wake = on_wake
            self._num_asleep += 1

    def wake(self, request: Request) -> None:
        """Let plans schedule a sleeping request again; no effect on any other."""
        if request.on_wake is not None:
            on_wake, request.on_wake = request.on_wake, None
            self._num_asleep -= 1
            on_wake()

    def stats(self) -> SchedulerStats:
        """Return the counters."""
        return SchedulerStats(
            num_steps=self._num_steps,
            num_scheduled_tokens=self._num_scheduled_tokens,
            num_recomputed_tokens=self._num_recomputed_tokens,
            num_finished=self._num_finished,
            num_preemptions=self._num_preemptions,
            num_deferred_admissions=self._num_deferred_admissions,
            num_dropped_results=self._num_dropped_results,
            num_running=len(self._running),
            num_waiting=len(self._queue),
        )

    # ---- plan ----------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """Return what to compute next; None when there is nothing to do, or only sleeping requests could go on.

        Mutates:
            Admits waiting requests, allocates blocks (evicting cached ones), preempts when the pool is exhausted.

        Raises:
            InvariantViolation: The last plan was not applied, or requests wait and none can ever go on.

        Complexity:
            O(running log running + scheduled blocks), and one prefix lookup for each request admitted or deferred.
        """
        if self._in_flight is not None:
            raise InvariantViolation(
                f"[scheduler] step {self._in_flight.plan.step_index} must be applied before the next is planned"
            )
        step = _Step(budget=max(0, self._max_batch_tokens - self._num_asleep))
        self._plan_running(step)
        self._plan_admissions(step)
        if not step.num_scheduled:
            if self._requests and not self._num_asleep:
                raise InvariantViolation(
                    f"[scheduler] nothing can go on: {self.stats()}, {self._manager.stats()}"
                )
            return None
        return self._hand_out(step)

    def _plan_running(self, step: _Step) -> None:
        # One-token work first: an old request that recomputes a long sequence must not hold up everybody's next token.
        # The sort is stable, so within both halves the oldest goes first.
        awake = [request for request in self._running if request.on_wake is None]
        for request in sorted(awake, key=lambda r: r.num_uncomputed_tokens > 1):
            if step.budget == 0:
                break
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted a moment ago, to make room for an older one
            num_tokens = min(request.num_uncomputed_tokens, step.budget)
            if self._make_room(request, request.num_computed_tokens + num_tokens, step):
                step.schedule(request, num_tokens)

    def _make_room(self, request: Request, num_positions: int, step: _Step) -> bool:
        """Cover ``num_positions`` by blocks, at the cost of younger requests; False when it had to give way itself."""
        while not self._manager.extend(_lease_of(request), num_positions):
            victim = self._running[-1]
            # The victim may be in this plan already; its copies stay there (inv. 4), its positions do not.
            step.drop(victim)
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _plan_admissions(self, step: _Step) -> None:
        """Start waiting requests in order until one does not fit.

        One that does not fit blocks all behind it: letting smaller ones pass would starve it. One whose next block is
        being computed by a running request is set aside instead, since it needs no room yet.
        """
        deferred = []
        while step.budget > 0 and len(self._running) < self._max_running:
            request = self._queue.peek()
            if request is None:
                break
            # The last token is always computed, since its logits choose the next one.
            match = self._manager.lookup(request.chain, request.num_tokens - 1)
            if match.pending:
                self._queue.remove(request)
                deferred.append(request)
            elif not self._admit(request, match, step):
                break
        # Back at once and asked anew in the next plan, instead of waiting for a signal from the computing request: no
        # way of losing that one (abort, preemption, eviction of its blocks) can leave anybody waiting for ever. Budget
        # was left over when they were set aside, so this very step computes what they wait for.
        for request in deferred:
            self._enqueue(request)
        self._num_deferred_admissions += len(deferred)

    def _admit(self, request: Request, match: PrefixMatch, step: _Step) -> bool:
        """Start a request if its whole footprint fits; False means not now."""
        lease = self._manager.admit(match, request.chain, self._footprint(request))
        if lease is None:
            return False
        self._queue.remove(request)
        request.move_to(RequestStatus.RUNNING)
        request.lease = lease
        request.num_computed_tokens = lease.num_computed_tokens
        if request.num_cached_tokens is None:
            request.num_cached_tokens = lease.num_computed_tokens
        request.num_computed_before = max(request.num_computed_before, lease.num_computed_tokens)
        bisect.insort(self._running, request, key=_by_arrival)
        if lease.pending_copy is not None:
            step.copies.append(lease.pending_copy)
        num_tokens = min(request.num_uncomputed_tokens, step.budget)
        if not self._manager.extend(lease, request.num_computed_tokens + num_tokens):
            raise InvariantViolation(
                f"[scheduler] {request.request_id} was admitted with {self._footprint(request)} positions reserved, "
                f"and {request.num_computed_tokens + num_tokens} were refused: {self._manager.stats()}"
            )
        step.schedule(request, num_tokens)
        return True

    def _hand_out(self, step: _Step) -> StepPlan:
        requests = tuple(step.num_scheduled)
        plan = StepPlan(
            step_index=self._num_steps,
            copies=tuple(step.copies),
            sequences=tuple(self._sequence(r, n) for r, n in step.num_scheduled.items()),
        )
        for request, sequence in zip(requests, plan.sequences, strict=True):
            repeated = min(sequence.context_len, request.num_computed_before) - sequence.start
            self._num_recomputed_tokens += max(0, repeated)
            self._num_scheduled_tokens += len(sequence.token_ids)
        self._num_steps += 1
        self._in_flight = _InFlight(plan, requests)
        return plan

    def _sequence(self, request: Request, num_tokens: int) -> ScheduledSequence:
        start = request.num_computed_tokens
        end = start + num_tokens
        is_complete = end == request.num_tokens
        return ScheduledSequence(
            request_id=request.request_id,
            start=start,
            token_ids=tuple(request.token_ids[start:end]),
            block_table=tuple(_lease_of(request).block_table),
            sample=_sample_spec(request)
            if is_complete and request.params.max_tokens != 0
            else None,
        )

    # ---- apply ---------------------------------------------------------------------------------------------------

    def apply(self, plan: StepPlan, result: StepResult) -> tuple[RequestUpdate, ...]:
        """Take the result of the step in flight: publish what was computed, append tokens, end what is complete.

        Returns:
            One update for each request that got a token or ended, in plan order.

        Raises:
            InvariantViolation: ``plan`` is not the step in flight, or ``result`` belongs to another step or lacks a
                sample.

        Mutates:
            Commits blocks; releases those of finished requests.
        """
        if self._in_flight is None or self._in_flight.plan is not plan:
            raise InvariantViolation(f"[scheduler] step {plan.step_index} is not in flight")
        missing = [
            sequence.request_id
            for sequence in plan.sequences
            if sequence.sample is not None and sequence.request_id not in result.samples
        ]
        if result.step_index != plan.step_index or missing:
            raise InvariantViolation(
                f"[scheduler] expected the result of step {plan.step_index}, received that of {result.step_index} "
                f"without samples for {missing}"
            )
        requests = self._in_flight.requests
        self._in_flight = None
        updates = (
            self._apply_sequence(request, sequence, result)
            for request, sequence in zip(requests, plan.sequences, strict=True)
        )
        return tuple(update for update in updates if update is not None)

    def _apply_sequence(
        self, request: Request, sequence: ScheduledSequence, result: StepResult
    ) -> RequestUpdate | None:
        request.num_positions_computed += len(sequence.token_ids)
        request.num_computed_before = max(request.num_computed_before, sequence.context_len)
        if request.status is not RequestStatus.RUNNING:
            self._num_dropped_results += 1
            return None
        request.num_computed_tokens = sequence.context_len
        if self._keep_kv:
            self._manager.commit(_lease_of(request), request.chain, request.num_computed_tokens)
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
        if not self._keep_kv:
            request.num_computed_tokens = 0
        finish_reason = self._finish_reason(request, token_id)
        if finish_reason is not None:
            self._leave(request)
        return RequestUpdate(
            request_id=request.request_id,
            token_ids=(token_id,),
            logprobs=() if sampled.logprobs is None else (sampled.logprobs,),
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
        if request.num_tokens >= self._max_tokens_of(request):
            return FinishReason.LENGTH
        return None

    # ---- lengths -------------------------------------------------------------------------------------------------

    def _max_tokens_of(self, request: Request) -> int:
        """Return how long the sequence may get, prompt and output.

        Without ``max_tokens`` that is the context or, if smaller, what the whole pool can hold. The last token needs
        no K and V: nothing comes after it.
        """
        if request.params.max_tokens is not None:
            return request.num_prompt_tokens + request.params.max_tokens
        pool_len = self._manager.num_blocks * self._manager.block_size + 1
        return min(self._max_context_len, pool_len)

    def _footprint(self, request: Request) -> int:
        """Return the positions to reserve at admission: all that will ever be written, or so many more outputs."""
        max_tokens = self._max_tokens_of(request)
        if request.params.max_tokens is None:
            max_tokens = min(max_tokens, request.num_tokens + self._reserve_tokens)
        return max(max_tokens - 1, request.num_prompt_tokens)

    def _check_fits(self, request: Request) -> None:
        num_prompt, max_output = request.num_prompt_tokens, request.params.max_tokens
        if num_prompt == 0:
            raise RequestError(
                "[scheduler] the prompt must have at least one token, received none", param="prompt"
            )
        # Without max_tokens there must be room for one output token at least.
        wanted = num_prompt + (1 if max_output is None else max_output)
        output = "room for output" if max_output is None else f"max_tokens={max_output}"
        if wanted > self._max_context_len:
            raise PromptTooLong(
                f"[scheduler] prompt and output must fit the context of {self._max_context_len} tokens, received "
                f"{num_prompt} prompt tokens and {output}, {wanted} in all; shorten the prompt, lower max_tokens "
                "or raise --max-context",
                param="prompt",
            )
        footprint = self._footprint(request)
        if not self._manager.can_ever_admit(footprint):
            raise PromptTooLong(
                f"[scheduler] prompt and output must fit the KV memory of {self._manager.num_blocks} blocks "
                f"(block_size={self._manager.block_size}), received {num_prompt} prompt tokens and {output}, "
                f"which need {self._manager.num_blocks_for(footprint)} blocks; shorten the prompt, lower max_tokens "
                "or raise --memory-gib",
                param="prompt",
            )

    # ---- moves ---------------------------------------------------------------------------------------------------

    def _enqueue(self, request: Request) -> None:
        if request.status is RequestStatus.PREEMPTED:
            self._queue.push(request, (0, request.arrival_index))
        else:
            self._queue.push(request, (1, *self._policy.key(request)))

    def _preempt(self, request: Request) -> None:
        self._release(request)
        request.move_to(RequestStatus.PREEMPTED)
        request.num_preemptions += 1
        self._num_preemptions += 1
        self._enqueue(request)

    def _leave(self, request: Request) -> None:
        if request.status is RequestStatus.RUNNING:
            self._release(request)
        else:
            self._queue.remove(request)
        request.move_to(RequestStatus.FINISHED)
        del self._requests[request.request_id]
        self._num_finished += 1

    def _release(self, request: Request) -> None:
        """Give the blocks of a running request back; the only place where the scheduler does."""
        self.wake(request)
        self._manager.release(_lease_of(request))
        request.lease = None
        request.num_computed_tokens = 0
        del self._running[bisect.bisect_left(self._running, request.arrival_index, key=_by_arrival)]


def _by_arrival(request: Request) -> int:
    return request.arrival_index


def _lease_of(request: Request) -> PrefixLease:
    assert request.lease is not None, "every running request holds a lease"
    return request.lease


def _sample_spec(request: Request) -> SampleSpec:
    has_history = request.params.needs_history
    return SampleSpec(
        params=request.params,
        seed=request.seed,
        output_index=request.num_output_tokens,
        prompt_token_ids=request.prompt_token_ids if has_history else (),
        output_token_ids=request.output_token_ids if has_history else (),
    )
