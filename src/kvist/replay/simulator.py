"""The real scheduler and cache manager on a virtual clock, with a cost model in place of the runner.

Responsible for time: when requests arrive, how long each step takes, and which steps need no planning. What is
computed, shared, evicted, deferred or preempted is decided by ``Scheduler`` and ``CacheManager`` themselves.

One step is planned, takes its price (``cost``), and is applied; requests that arrived meanwhile are added, and so on.
That alone would plan once for every token of the longest output. Three kinds of steps are not planned (*fast-forward*):

1.  A sequence that only decodes inside one block changes nothing that anybody can see: it allocates nothing and
    publishes no full block, and nobody shares its output. It is *asleep* (``Scheduler.sleep``), and counted in the
    price of every step and against the budget. Steps in which everybody is asleep are one jump, which ends at a step
    that matters to somebody or where a request arrives. To a sequence three steps matter: the one that starts a block,
    the one that fills a block, its last one.
2.  A sequence that is sure of its blocks, since it set ``max_tokens``, takes the block that it starts from its lease,
    which is what a plan would do first, and commits what it has written there after the step, so that others see that
    it goes on. The other steps that matter to it need no plan if everybody is asleep and a plan could start nobody:
    what was computed is committed, and the sequence ends if that was its last step.
3.  While one request prefills, nobody else is awake and nobody waits, its whole chunks are extended and committed
    one after another without planning.

What differs from planning every step: nothing in what is cached, evicted or hit, nor in any time, as long as every
running sequence gets its token in every step (``max_batch_tokens >= max_running``; otherwise all steps are planned).
Counters of the scheduler that count plans (``num_steps``, ``num_deferred_admissions``) count fewer. Whoever looks at
the tokens of a running request (``fair`` charging for output; the choice of a victim, which happens only when requests
set no ``max_tokens``) sees those of a sleeping one late, by a block at most.

Invariants:
    1. ``_num_attended`` is the sum over sleeping sequences of the positions that their next step attends to.
    2. Times are whole picoseconds, so a jump of n steps ends exactly where n steps would.
"""

from __future__ import annotations

import heapq
import math
from array import array
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, cast

from kvist.cache.namespaces import Namespace
from kvist.errors import ConfigError, EngineOverloaded, InvariantViolation, RequestError
from kvist.replay.cost import PS_PER_S, StepPrices
from kvist.replay.tokens import SimulatedRequest, own_token, prompt_of
from kvist.sched import policy
from kvist.sched.output import SampledToken, StepResult
from kvist.types import FinishReason, RequestId, SamplingParams, TokenId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kvist.cache.lease import PrefixLease
    from kvist.replay.cost import CostModel
    from kvist.replay.setting import Setting
    from kvist.replay.traces import TraceRequest
    from kvist.sched.output import StepPlan
    from kvist.sched.scheduler import RequestUpdate

_NAMESPACE = Namespace(model="trace")
"""Of all requests."""
_EOS = TokenId(2**32 - 1)
"""Ends a sequence that set no ``max_tokens``. Its K and V are never computed, so it is never compared with anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How requests come in."""

    speedup: float = 1.0
    """Open loop: arrival times are divided by it."""
    concurrency: int | None = None
    """Closed loop: so many clients, each of which sends the next request of the trace when its last one has ended; the
    trace's times are not used. None: open loop."""
    has_max_tokens: bool = True
    """Whether a request says how much output it wants. False: it reserves as ``reserve_tokens`` says, grows, and may be
    preempted."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.speedup) and self.speedup > 0):
            raise ConfigError(f"[replay] --speedup must be > 0, received {self.speedup}")
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"[replay] --concurrency must be >= 1, received {self.concurrency}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRequest:
    """What became of one request. Times in picoseconds of the virtual clock."""

    number: int
    """Its place in the trace, from 0."""
    session: str
    num_prompt_tokens: int
    num_cached_tokens: int
    """Hit at first admission."""
    num_output_tokens: int
    num_computed_tokens: int
    """Positions computed, repeated ones included."""
    num_preemptions: int
    arrival_ps: int
    started_ps: int
    """Beginning of the first step that computed something of it."""
    first_token_ps: int
    """-1: it wanted no output."""
    finished_ps: int
    alone_ps: int
    """Time that it would have taken on an idle engine with the same hit."""


@dataclass(slots=True, kw_only=True)
class Timeline:
    """Everything that a simulation observed."""

    finished: list[FinishedRequest] = field(default_factory=list)
    """In the order of finishing."""
    num_refused: dict[str, int] = field(default_factory=dict)
    """Requests that were not accepted, by the name of the error."""
    gaps_ps: array[int] = field(default_factory=lambda: array("q"))
    """Times between two output tokens of a sequence."""
    gap_counts: array[int] = field(default_factory=lambda: array("q"))
    """How often each of ``gaps_ps`` occurred."""
    num_steps: int = 0
    """Steps that took time."""
    num_planned_steps: int = 0
    """Subset of num_steps: those not fast-forwarded."""
    num_prefill_tokens: int = 0
    """Positions computed in sequences that computed more than one."""
    num_decode_tokens: int = 0
    """Positions computed in sequences that computed one."""
    num_recomputed_tokens: int = 0
    """Subset of both: computed or found before, for the same request."""
    num_preemptions: int = 0
    busy_ps: int = 0
    """Time in steps."""
    end_ps: int = 0
    """When the last step ended."""
    held_block_ps: int = 0
    """Sum over steps of held blocks times duration."""
    max_held_blocks: int = 0


class Simulator:
    """Runs one trace through one scheduler, once.

    Args:
        setting: The engine's numbers.
        cost: Prices.
        load: How requests come in.
        fast_forward: False plans every step; same results, slower by the length of the outputs.
    """

    def __init__(
        self, setting: Setting, *, cost: CostModel, load: Load, fast_forward: bool = True
    ) -> None:
        self.manager = setting.make_manager()
        self._now_ps = 0
        self._scheduler = setting.make_scheduler(self.manager, lambda: self._now_ps // 1000)
        self._prices = StepPrices(cost)
        self._load = load
        self._max_batch_tokens = setting.max_batch_tokens
        self._can_skip = fast_forward and setting.max_batch_tokens >= setting.max_running
        # The scheduler lets no sequence grow past this.
        self._max_len = min(setting.max_context_len, setting.num_blocks * setting.block_size + 1)
        self.timeline = Timeline()

        self._source: Iterator[tuple[int, TraceRequest]] = iter(())
        self._next: tuple[int, TraceRequest] | None = None
        # When it arrives; a closed loop's requests come when a client is idle, whatever the time.
        self._next_ps = 0
        self._is_cache_aware = policy.get(setting.schedule).is_cache_aware
        self._is_closed_loop = load.concurrency is not None
        self._num_idle_clients = load.concurrency or 0
        self._live: dict[RequestId, SimulatedRequest] = {}
        self._step = 0
        # Sleeping sequences: (next step that matters, number, first step slept through, sequence); entries may be out
        # of date.
        self._alarms: list[tuple[int, int, int, SimulatedRequest]] = []
        # Sleeping sequences of which others are to see in the coming step that they go on: they start a block, or have
        # just got their first token. And those to which it matters otherwise, although it needs no plan; by number.
        self._going_on: list[SimulatedRequest] = []
        self._due: list[SimulatedRequest] = []
        self._num_asleep = 0
        self._num_attended = 0
        # Whether the last plan scheduled nothing and nothing has happened since that could change that.
        self._is_settled = False
        # The only sequence of the last plan, when it was a chunk of a longer prompt.
        self._prefilling: SimulatedRequest | None = None

    def run(
        self, records: Iterable[TraceRequest], on_finished: Callable[[], None] = lambda: None
    ) -> Timeline:
        """Simulate until every request has ended.

        Args:
            records: The trace, in order of arrival.
            on_finished: Called when a request has ended or was refused.

        Raises:
            TraceError: Reading the trace failed.
            InvariantViolation: A law of the scheduler or the cache does not hold.
        """
        self._source = enumerate(records)
        self._on_finished = on_finished
        self._read_next()
        while True:
            self._add_arrivals()
            if not self._scheduler.has_work:
                if self._next is None:
                    break
                self._now_ps = max(self._now_ps, self._next_ps)
                continue
            self._wake()
            if self._skip_chunks():
                continue
            plan = None if self._is_settled else self._plan()
            if plan is None:
                # Such a policy looks at some of the queue in each plan, so a plan may find what the one before did not.
                self._is_settled = not (self._is_cache_aware and self._scheduler.num_waiting)
                self._skip_decoding()
            else:
                self._do(plan)
        stats = self._scheduler.stats()
        self.timeline.num_recomputed_tokens += stats.num_recomputed_tokens
        self.timeline.num_preemptions = stats.num_preemptions
        self.timeline.num_steps = self._step
        self.timeline.end_ps = self._now_ps
        return self.timeline

    # ---- arrivals ------------------------------------------------------------------------------------------------

    def _read_next(self) -> None:
        self._next = next(self._source, None)
        if self._next is not None and not self._is_closed_loop:
            self._next_ps = round(self._next[1].arrival_s / self._load.speedup * PS_PER_S)

    def _add_arrivals(self) -> None:
        while self._next is not None and self._is_due():
            number, record = self._next
            arrival_ps = self._now_ps if self._is_closed_loop else self._next_ps
            self._read_next()
            self._add(number, record, arrival_ps)

    def _is_due(self) -> bool:
        """Whether the next request, if there is one, has arrived."""
        if self._is_closed_loop:
            return self._num_idle_clients > 0
        return self._next_ps <= self._now_ps

    def _add(self, number: int, record: TraceRequest, arrival_ps: int) -> None:
        has_limit = self._load.has_max_tokens or record.num_output_tokens == 0
        request = SimulatedRequest(
            request_id=RequestId(str(number)),
            prompt_token_ids=cast("tuple[TokenId, ...]", prompt_of(record, number)),
            params=_params(record.num_output_tokens if has_limit else None),
            namespace=_NAMESPACE,
            seed=0,
            eos_token_ids=frozenset() if has_limit else frozenset({_EOS}),
            number=number,
            session=record.session,
            num_output_wanted=record.num_output_tokens,
            arrival_ps=arrival_ps,
        )
        try:
            self._scheduler.add(request)
        except (RequestError, EngineOverloaded) as error:
            refused = self.timeline.num_refused
            refused[type(error).__name__] = refused.get(type(error).__name__, 0) + 1
            self._on_finished()
            return
        self._live[request.request_id] = request
        self._num_idle_clients -= 1
        self._is_settled = False

    def _plan(self) -> StepPlan | None:
        """Return the next plan; without asking, when all who could be in it are asleep."""
        scheduler = self._scheduler
        if not scheduler.num_awake and not scheduler.num_waiting:
            return None
        return scheduler.plan()

    # ---- planned steps -------------------------------------------------------------------------------------------

    def _do(self, plan: StepPlan) -> None:
        """Let a planned step take its time, and apply it."""
        prices, timeline, live = self._prices, self.timeline, self._live
        duration = 0
        num_decoding, num_attended = self._num_asleep, self._num_attended
        samples: dict[RequestId, SampledToken] = {}
        for sequence in plan.sequences:
            num_tokens = len(sequence.token_ids)
            request = live[sequence.request_id]
            if num_tokens == 1:
                num_decoding += 1
                num_attended += sequence.start + 1
                timeline.num_decode_tokens += 1
            else:
                duration += prices.prefill(sequence.start, num_tokens)
                timeline.num_prefill_tokens += num_tokens
            if request.started_ps < 0:
                request.started_ps = self._now_ps
            if sequence.sample is not None:
                is_last = request.num_output_left == 1 and request.params.max_tokens is None
                token_id = _EOS if is_last else own_token(request.number)
                samples[sequence.request_id] = SampledToken(token_id=token_id)
        duration += prices.step + prices.decode(num_decoding, num_attended)
        timeline.num_planned_steps += 1
        self._pass(duration)
        updates = self._scheduler.apply(
            plan, StepResult(step_index=plan.step_index, samples=samples)
        )
        for update in updates:
            self._take(live[update.request_id], update)
        is_chunk = len(plan.sequences) == 1 and not samples
        self._prefilling = live.get(plan.sequences[0].request_id) if is_chunk else None

    def _pass(self, duration: int) -> None:
        """Let one step of that duration go by, for the sleeping sequences too."""
        timeline = self.timeline
        num_held = self.manager.num_held
        timeline.held_block_ps += num_held * duration
        timeline.max_held_blocks = max(timeline.max_held_blocks, num_held)
        timeline.busy_ps += duration
        timeline.num_decode_tokens += self._num_asleep
        if self._num_asleep:
            timeline.gaps_ps.append(duration)
            timeline.gap_counts.append(self._num_asleep)
        self._now_ps += duration
        self._step += 1
        self._num_attended += self._num_asleep
        self._is_settled = False
        if self._going_on:
            self._commit_first()

    def _take(self, request: SimulatedRequest, update: RequestUpdate) -> None:
        if update.token_ids:
            if request.first_token_ps < 0:
                request.first_token_ps = self._now_ps
            else:
                self.timeline.gaps_ps.append(self._now_ps - request.last_token_ps)
                self.timeline.gap_counts.append(1)
            request.last_token_ps = self._now_ps
        if update.finish_reason is not None:
            self._end(request, update)
        elif self._can_skip:
            self._put_to_sleep(request)

    def _end(self, request: SimulatedRequest, update: RequestUpdate) -> None:
        usage = update.usage
        assert usage is not None  # it is the last update
        self.timeline.finished.append(
            FinishedRequest(
                number=request.number,
                session=request.session,
                num_prompt_tokens=usage.num_prompt_tokens,
                num_cached_tokens=usage.num_cached_tokens,
                num_output_tokens=usage.num_output_tokens,
                num_computed_tokens=usage.num_computed_tokens,
                num_preemptions=usage.num_preemptions,
                arrival_ps=request.arrival_ps,
                started_ps=request.started_ps,
                first_token_ps=request.first_token_ps,
                finished_ps=self._now_ps,
                alone_ps=self._prices.alone(
                    usage.num_cached_tokens,
                    usage.num_prompt_tokens,
                    usage.num_output_tokens,
                    self._max_batch_tokens,
                ),
            )
        )
        del self._live[request.request_id]
        self._num_idle_clients += 1
        self._on_finished()

    # ---- steps without a plan ------------------------------------------------------------------------------------

    def _put_to_sleep(self, request: SimulatedRequest) -> None:
        """Leave a decoding sequence out of plans until the next step that matters (module docstring)."""
        if request.num_uncomputed_tokens != 1 or request.num_output_tokens < 1:
            return
        num_skipped = self._steps_to_matter(request)
        if num_skipped < 1 and request.params.max_tokens is None:
            return
        request.asleep_since = self._step
        self._num_asleep += 1
        self._num_attended += request.num_tokens
        self._set_alarm(request, num_skipped)
        if request.num_output_tokens == 1 and num_skipped:
            self._going_on.append(request)
        self._scheduler.sleep(request, partial(self._catch_up, request))

    def _steps_to_matter(self, request: SimulatedRequest) -> int:
        """Return the steps before the next one that matters to a sequence."""
        size = self.manager.block_size
        # Of the position that the next step computes.
        offset = (request.num_tokens - 1) % size
        return 0 if offset == 0 else min(size - 1 - offset, self._steps_to_end(request) - 1)

    def _steps_to_end(self, request: SimulatedRequest) -> int:
        """Return the steps that a sequence had to go when it fell asleep, the last one included."""
        return min(request.num_output_left, self._max_len - request.num_tokens)

    def _set_alarm(self, request: SimulatedRequest, num_steps: int) -> None:
        entry = (self._step + num_steps, request.number, request.asleep_since, request)
        heapq.heappush(self._alarms, entry)

    def _catch_up(self, request: SimulatedRequest) -> None:
        """Do at once what a sleeping sequence did in the steps since; all of it inside a block that it has."""
        num_steps = self._step - request.asleep_since
        request.asleep_since = -1
        if num_steps:
            request.append_many(num_steps)
            num_computed = request.num_computed_tokens + num_steps
            self.manager.commit(_lease_of(request), request.chain, num_computed)
            _note_computed(request, num_computed)
            request.last_token_ps = self._now_ps
        self._num_asleep -= 1
        self._num_attended -= request.num_tokens

    def _wake(self) -> None:
        """Do what the coming step needs for sleeping sequences, or let the scheduler plan for them."""
        alarms, scheduler = self._alarms, self._scheduler
        if not alarms or alarms[0][0] > self._step:
            return
        due: list[SimulatedRequest] = []
        can_do = True
        while alarms and alarms[0][0] <= self._step:
            _, _, asleep_since, request = heapq.heappop(alarms)
            # A preempted sequence was woken before, and maybe put to sleep again later.
            if request.asleep_since != asleep_since:
                continue
            if not self._start_block(request):
                due.append(request)
                can_do &= request.params.max_tokens is not None
        if can_do and not scheduler.num_awake and (self._is_settled or not scheduler.num_waiting):
            self._due = due
            return
        for request in due:
            scheduler.wake(request)
            self._is_settled = False

    def _start_block(self, request: SimulatedRequest) -> bool:
        """Take the block that a sleeping sequence starts in the coming step; False when the step matters otherwise."""
        num_slept = self._step - request.asleep_since
        num_positions = request.num_tokens + num_slept
        size = self.manager.block_size
        if (num_positions - 1) % size or request.params.max_tokens is None:
            return False
        # A plan of such a policy looks at the cache first.
        if self._is_cache_aware and self._scheduler.num_waiting:
            return False
        if not self.manager.extend(_lease_of(request), num_positions):
            raise InvariantViolation(f"[replay] an output outgrew its reservation: {request!r}")
        if size == 1 or self._steps_to_end(request) - num_slept == 1:
            return False
        self._going_on.append(request)
        return True

    def _commit_first(self) -> None:
        """Commit the first positions after a prompt or of a block, computed in the step that has passed."""
        going_on, self._going_on = self._going_on, []
        for request in going_on:
            # Not when it was preempted meanwhile, or woken for another reason.
            if request.asleep_since >= 0:
                self._scheduler.wake(request)
                self._put_to_sleep(request)
                # Without max_tokens, the step that fills a block has to be planned.
                self._is_settled &= request.asleep_since >= 0

    def _finish_due(self) -> None:
        """Commit what the step that has passed computed for sequences that it mattered to, and end some of them."""
        for request in self._due:
            self._scheduler.wake(request)
            if request.num_output_left and request.num_tokens < self._max_len:
                self._put_to_sleep(request)
                continue
            update = self._scheduler.finish(request.request_id, FinishReason.LENGTH)
            assert update is not None
            self._end(request, update)
            self._is_settled = False
        self._due.clear()

    def _steps_to_wake(self) -> int:
        """Return the steps before somebody has to be awake; out-of-date alarms only make it shorter."""
        return self._alarms[0][0] - self._step if self._alarms else 2**62

    def _skip_decoding(self) -> None:
        """Let time pass while everybody is asleep: until somebody wakes, or the end of the step somebody arrives in."""
        num_asleep = self._num_asleep
        if num_asleep == 0 or not (self._alarms or self._due or self._going_on):
            raise InvariantViolation(
                f"[replay] nothing can go on at step {self._step}: {self._scheduler.stats()}"
            )
        first = self._prices.step + self._prices.decode(num_asleep, self._num_attended)
        growth = self._prices.decode(0, num_asleep)
        is_jump = self._is_settled and not self._due and not self._going_on
        num_steps = self._steps_to_wake() if is_jump else 1
        if self._next is not None and not self._is_closed_loop:
            left = self._next_ps - self._now_ps
            num_steps = min(num_steps, _steps_lasting(left, first, growth))
        timeline = self.timeline
        duration = num_steps * first + growth * (num_steps * (num_steps - 1) // 2)
        if growth:
            timeline.gaps_ps.extend(range(first, first + growth * num_steps, growth))
            timeline.gap_counts.extend([num_asleep] * num_steps)
        else:
            timeline.gaps_ps.append(first)
            timeline.gap_counts.append(num_asleep * num_steps)
        num_held = self.manager.num_held
        timeline.held_block_ps += num_held * duration
        timeline.max_held_blocks = max(timeline.max_held_blocks, num_held)
        timeline.busy_ps += duration
        timeline.num_decode_tokens += num_asleep * num_steps
        self._now_ps += duration
        self._step += num_steps
        self._num_attended += num_asleep * num_steps
        if self._going_on:
            self._commit_first()
        if self._due:
            self._finish_due()

    def _skip_chunks(self) -> bool:
        """Compute whole chunks of the one prompt in progress, while they take the whole budget and nobody waits."""
        request = self._prefilling
        scheduler = self._scheduler
        if request is None or not self._can_skip or self._going_on:
            return False
        self._prefilling = None
        if scheduler.num_waiting or scheduler.num_running - self._num_asleep != 1:
            return False
        chunk = self._max_batch_tokens - self._num_asleep
        if chunk < 2 or request.lease is None:
            return False
        # One token at least is left for a planned step, which chooses the first output token.
        num_chunks = min((request.num_uncomputed_tokens - 1) // chunk, self._steps_to_wake())
        num_done = 0
        while num_done < num_chunks and (self._next is None or not self._is_due()):
            start = request.num_computed_tokens
            if not self.manager.extend(request.lease, start + chunk):
                raise InvariantViolation(f"[replay] a prompt outgrew its reservation: {request!r}")
            duration = self._prices.step + self._prices.prefill(start, chunk)
            self._pass(duration + self._prices.decode(self._num_asleep, self._num_attended))
            self.manager.commit(request.lease, request.chain, start + chunk)
            num_repeated = min(start + chunk, request.num_computed_before) - start
            self.timeline.num_recomputed_tokens += max(0, num_repeated)
            self.timeline.num_prefill_tokens += chunk
            _note_computed(request, start + chunk)
            num_done += 1
        return num_done > 0


def _params(max_tokens: int | None) -> SamplingParams:
    params = _PARAMS.get(max_tokens)
    if params is None:
        params = _PARAMS[max_tokens] = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return params


_PARAMS: dict[int | None, SamplingParams] = {}


def _lease_of(request: SimulatedRequest) -> PrefixLease:
    assert request.lease is not None  # sleeping and prefilling requests run
    return request.lease


def _note_computed(request: SimulatedRequest, num_computed_tokens: int) -> None:
    """Do to a request what ``Scheduler.apply`` does when positions up to there were computed."""
    request.num_positions_computed += num_computed_tokens - request.num_computed_tokens
    request.num_computed_tokens = num_computed_tokens
    request.num_computed_before = max(request.num_computed_before, num_computed_tokens)


def _steps_lasting(duration: int, first: int, growth: int) -> int:
    """Return how many steps, the first of ``first`` and each ``growth`` longer, last ``duration`` at least; >= 1."""
    if growth == 0:
        return max(1, -(-duration // first))
    # n first + growth n (n - 1) / 2 >= duration, solved for n; the root may be off by one either way.
    twice = 2 * first - growth
    num_steps = max(1, (math.isqrt(twice * twice + 8 * growth * duration) - twice) // (2 * growth))
    while num_steps * first + growth * (num_steps * (num_steps - 1) // 2) < duration:
        num_steps += 1
    return num_steps
