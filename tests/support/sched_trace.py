"""Drive a scheduler without a model: a runner that checks every block it would read, and an oracle of the answers.

The next token is a function of the whole prefix, the seed and the index. K and V of a position are represented by the
hash of the prefix that ends there, so wrong sharing, a stale block or a missing copy shows up as a wrong hash in a
block table, and the runner raises ``WrongContents`` naming it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvist.cache.hash import BlockHasher
from kvist.cache.manager import CacheManager
from kvist.cache.namespaces import Namespace
from kvist.engine.core import MAX_FAILED_RUNS
from kvist.kernels import native
from kvist.precision import KVBudget, KVPrecision
from kvist.sched.output import SampledToken, StepResult
from kvist.sched.policy import Fcfs
from kvist.sched.policy import get as policy_named
from kvist.sched.request import Request, RequestStatus
from kvist.sched.scheduler import DEFAULT_MAX_OVERTAKES, RequestUpdate, Scheduler
from kvist.spec import KVSpec
from kvist.types import (
    BlockCopy,
    FinishReason,
    Keep,
    MemoryOp,
    RequestId,
    SamplingParams,
    TokenId,
    TokenLogprobs,
    Usage,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvist.sched.output import SampleSpec, ScheduledSequence, StepPlan
    from kvist.sched.policy import SchedulingPolicy

if native.available():
    from kvist.storage.slabs import SlabArena

    class _ToldArena(SlabArena):
        """Says what it has carried out."""

        on_done: Callable[[MemoryOp | BlockCopy], None] = staticmethod(lambda op: None)

        def _carry_out(self, op: MemoryOp | BlockCopy) -> None:
            super()._carry_out(op)
            self.on_done(op)


VOCAB_SIZE = 37
"""Small, so that prompts overlap and stop tokens are met."""
EOS = frozenset({TokenId(0)})
CUT_SHORT = (FinishReason.ABORT, FinishReason.TIMEOUT, FinishReason.ERROR)
"""Ends from outside: the answer is the beginning of the whole one."""


class WrongContents(AssertionError):
    """A sequence would have read K and V that are not those of its prefix."""


def prefix_hashes(tenant: str, token_ids: Iterable[int]) -> list[int]:
    """Return one value per position that stands for K and V there: it depends on tenant and prefix."""
    value = int.from_bytes(tenant.encode(), "little")
    hashes = []
    for token_id in token_ids:
        value = hash((value, token_id))
        hashes.append(value)
    return hashes


def next_token(prefix_hash: int, params: SamplingParams, seed: int, output_index: int) -> TokenId:
    """Return the model's and sampler's answer; greedy ignores the seed."""
    draw = 0 if params.is_greedy else hash((seed, output_index))
    return TokenId(hash((prefix_hash, draw)) % VOCAB_SIZE)


@dataclass(frozen=True)
class Answer:
    token_ids: tuple[TokenId, ...]
    finish_reason: FinishReason


def unshared_answer(request: Request, *, max_tokens_in_all: int) -> Answer:
    """Compute what a request must answer, with no cache, no batch and no scheduler."""
    params = request.params
    output: list[TokenId] = []
    limit = max_tokens_in_all - request.num_prompt_tokens
    if params.max_tokens is not None:
        limit = params.max_tokens
    last = prefix_hashes(request.namespace.tenant, request.prompt_token_ids)[-1]
    while len(output) < limit:
        token_id = next_token(last, params, request.seed, len(output))
        last = hash((last, token_id))
        output.append(token_id)
        is_eos = token_id in request.eos_token_ids and not params.ignore_eos
        if is_eos or token_id in params.stop_token_ids:
            return Answer(tuple(output), FinishReason.STOP)
    return Answer(tuple(output), FinishReason.LENGTH)


@dataclass
class _Known:
    """What the runner knows by itself of a sequence, to hold the plan against."""

    request: Request
    token_ids: list[TokenId]
    hashes: list[int]


class FakeRunner:
    """Runs plans on integers. Keeps block contents, and a copy of each sequence to check the plan with.

    With an arena, blocks have several codecs, and contents come, go and are copied as the arena carries it out.
    """

    def __init__(self, num_blocks: int, block_size: int, arena: SlabArena | None = None) -> None:
        self.block_size = block_size
        self.arena = arena
        self.contents: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.known: dict[RequestId, _Known] = {}
        self.num_positions_read = 0

    def expect(self, request: Request) -> None:
        tokens = list(request.prompt_token_ids)
        self.known[request.request_id] = _Known(
            request, tokens, prefix_hashes(request.namespace.tenant, tokens)
        )

    def run(self, plan: StepPlan) -> StepResult:
        assert plan.sequences, "an empty plan"
        if self.arena is None:
            assert not plan.memory_ops
        else:
            assert not plan.copies
            self.arena.apply(plan.memory_ops)
        for copy in plan.copies:
            self.copy(copy)
        # A model writes K and V of all sequences in a layer before any of them attends.
        written: set[tuple[int, int]] = set()
        for sequence in plan.sequences:
            self._write(sequence, written)
        samples = {}
        for sequence in plan.sequences:
            self._check_reads(sequence)
            if sequence.sample is not None:
                samples[sequence.request_id] = self._sample(sequence, sequence.sample)
        assert len({s.request_id for s in plan.sequences}) == len(plan.sequences)
        return StepResult(step_index=plan.step_index, samples=samples)

    def copy(self, copy: BlockCopy) -> None:
        assert 1 <= copy.num_tokens <= self.block_size
        source = self.contents[copy.source][: copy.num_tokens]
        self.contents[copy.target][: copy.num_tokens] = source

    def follow(self, op: MemoryOp | BlockCopy) -> None:
        """Do to contents what the arena has done to memory."""
        if not isinstance(op, MemoryOp):
            self.copy(op)
        elif op.kind in {"allocate", "free"}:
            self.contents[op.block_id] = [None] * self.block_size

    def _write(self, sequence: ScheduledSequence, written: set[tuple[int, int]]) -> None:
        known = self.known[sequence.request_id]
        start, end = sequence.start, sequence.context_len
        assert sequence.token_ids, "a sequence without tokens"
        assert list(sequence.token_ids) == known.token_ids[start:end], "not the request's tokens"
        assert len(sequence.block_table) * self.block_size >= end, "block table too short"
        assert len(set(sequence.block_table)) == len(sequence.block_table), "block twice in a table"
        for position in range(start, end):
            slot = sequence.block_table[position // self.block_size], position % self.block_size
            assert slot not in written, f"slot {slot} written twice in one step"
            written.add(slot)
            self.contents[slot[0]][slot[1]] = known.hashes[position]

    def _check_reads(self, sequence: ScheduledSequence) -> None:
        known, size = self.known[sequence.request_id], self.block_size
        for index, block_id in enumerate(sequence.block_table):
            expected = known.hashes[: sequence.context_len][index * size : (index + 1) * size]
            actual = self.contents[block_id][: len(expected)]
            self.num_positions_read += len(expected)
            if actual != expected:
                raise WrongContents(
                    f"{sequence.request_id}: block {block_id} (index {index}) does not hold its prefix"
                )

    def _sample(self, sequence: ScheduledSequence, spec: SampleSpec) -> SampledToken:
        known = self.known[sequence.request_id]
        request = known.request
        num_prompt = request.num_prompt_tokens
        assert sequence.context_len == num_prompt + spec.output_index, "sampled in the middle"
        assert (spec.params, spec.seed) == (request.params, request.seed)
        output = tuple(known.token_ids[num_prompt : num_prompt + spec.output_index])
        has_history = spec.params.needs_history
        assert spec.prompt_token_ids == (request.prompt_token_ids if has_history else ())
        assert spec.output_token_ids == (output if has_history else ())
        last = known.hashes[sequence.context_len - 1]
        token_id = next_token(last, spec.params, spec.seed, spec.output_index)
        # After a dropped result the same token is chosen again, and known already.
        if len(known.token_ids) == sequence.context_len:
            known.token_ids.append(token_id)
            known.hashes.append(hash((last, token_id)))
        logprobs = None
        if spec.params.logprobs is not None:
            logprobs = TokenLogprobs(token_id=token_id, logprob=-1.0)
        return SampledToken(token_id=token_id, logprobs=logprobs)


@dataclass
class Record:
    """What came out of one request."""

    request: Request
    token_ids: list[TokenId] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    usage: Usage | None = None


def _arena_for(precision: str, num_blocks: int, block_size: int) -> SlabArena:
    spec = KVSpec(num_layers=1, num_kv_heads=1, head_dim=8, block_size=block_size)
    codecs = KVPrecision.parse(precision).codecs
    pool = native.extension().Pool(1)
    return _ToldArena(spec, codecs, num_blocks * spec.block_bytes, pool)


def _budget_for(precision: str, arena: SlabArena, max_chunk: int) -> KVBudget:
    rule = KVPrecision.parse(precision)
    return KVBudget(
        num_bytes=arena.budget_bytes,
        block_bytes={codec: arena.cell_bytes(codec) for codec in rule.codecs},
        precision=rule,
        max_chunk=max_chunk,
    )


class Trace:
    """A scheduler on a real cache manager with the checking runner; every law is checked after every step."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        prefix_cache: bool = True,
        max_batch_tokens: int = 64,
        max_running: int = 16,
        max_queue: int = 10_000,
        max_context_len: int = 10_000,
        reserve_tokens: int = 8,
        policy: SchedulingPolicy | str | None = None,
        keep_kv: bool = True,
        max_overtakes: int = DEFAULT_MAX_OVERTAKES,
        pin_fraction: float = 0.0,
        precision: str | None = None,
    ) -> None:
        """``precision``: a rule for blocks of several codecs, in the memory of ``num_blocks`` of the largest."""
        self.now_ns = 0
        self.policy = policy_named(policy) if isinstance(policy, str) else policy or Fcfs()
        arena = None if precision is None else _arena_for(precision, num_blocks, block_size)
        self.manager = CacheManager(
            num_blocks=num_blocks,
            budget=None
            if arena is None or precision is None
            else _budget_for(precision, arena, max_batch_tokens),
            block_size=block_size,
            hasher=BlockHasher(bytes(32)),
            prefix_cache=prefix_cache and keep_kv,
            max_ghosts=64,  # every law is checked after every step, those of the ghosts too
            pin_fraction=pin_fraction,
            clock_ns=lambda: self.now_ns,
        )
        self.scheduler = Scheduler(
            self.manager,
            max_batch_tokens=max_batch_tokens,
            max_running=max_running,
            max_queue=max_queue,
            max_context_len=max_context_len,
            reserve_tokens=reserve_tokens,
            policy=self.policy,
            keep_kv=keep_kv,
            max_overtakes=max_overtakes,
            clock=lambda: self.now_ns,
        )
        self.runner = FakeRunner(len(self.manager._pool.blocks), block_size, arena)
        if arena is not None:
            arena.on_done = self.runner.follow
        self.num_failed_runs = 0
        """Steps that memory ran out in, in a row."""
        self.num_blocks = num_blocks
        self.keep_kv = keep_kv
        self.max_batch_tokens = max_batch_tokens
        self.max_running = max_running
        num_usable = self.manager.max_blocks_alone
        self.max_tokens_in_all = min(max_context_len, num_usable * block_size + 1)
        self.records: dict[RequestId, Record] = {}
        self.plans: list[StepPlan] = []
        self.max_overtakes = max_overtakes
        self.started: list[RequestId] = []
        """Requests in the order in which they got blocks first."""
        self.num_overtakes: dict[Request, int] = {}
        """Of each that waits for the first time, counted by going through all of them after each plan."""

    def add(
        self,
        request_id: str,
        prompt: Iterable[int],
        *,
        tenant: str = "",
        seed: int = 0,
        eos: frozenset[TokenId] = EOS,
        params: SamplingParams | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        keep: Keep | None = None,
        is_sibling: bool = False,
        **sampling: object,
    ) -> Request:
        sampling.setdefault("temperature", 0.0)
        request = Request(
            request_id=RequestId(request_id),
            prompt_token_ids=tuple(TokenId(t) for t in prompt),
            params=params or SamplingParams(**sampling),
            namespace=Namespace(model="fake", tenant=tenant),
            seed=seed,
            eos_token_ids=eos,
            priority=priority,
            deadline_s=deadline_s,
            keep=keep,
            is_sibling=is_sibling,
        )
        self.scheduler.add(request)
        self.num_overtakes[request] = 0
        self.runner.expect(request)
        self.records[request.request_id] = Record(request)
        return request

    def step(
        self,
        *,
        before_run: Callable[[], None] = lambda: None,
        before_apply: Callable[[], None] = lambda: None,
    ) -> StepPlan | None:
        """Do one step; the callables act while it is in flight. None: there was nothing to do, or nothing possible."""
        for update in self.scheduler.take_ended():
            self.take(update)
        num_failed = self.scheduler.stats().num_failed_allocations
        plan = self.scheduler.plan()
        self.count_overtakes()
        if plan is None:
            has_failed = self.scheduler.stats().num_failed_allocations > num_failed
            assert has_failed or not self.scheduler.has_work
            self.check()
            return None
        assert 1 <= plan.num_batch_tokens <= self.max_batch_tokens
        assert self.scheduler.num_running <= self.max_running
        self.plans.append(plan)
        before_run()
        try:
            result = self.runner.run(plan)
        except MemoryError:
            self._retry_or_fail(plan)
            self.check()
            return plan
        self.num_failed_runs = 0
        before_apply()
        for update in self.scheduler.apply(plan, result):
            self.take(update)
        self.check()
        return plan

    def _retry_or_fail(self, plan: StepPlan) -> None:
        """Do as the engine does when memory runs out in a step."""
        self.num_failed_runs += 1
        if self.num_failed_runs < MAX_FAILED_RUNS:
            self.scheduler.retry_shorter(plan)
            return
        self.num_failed_runs = 0
        for sequence in plan.sequences:
            self.finish(sequence.request_id, FinishReason.ERROR)
        self.scheduler.cancel(plan)

    def count_overtakes(self) -> None:
        """Count who started before whom in the last plan, as the queue promises to bound it, and check the bound."""
        queue, lane = self.scheduler._waiting.queue, self.policy.lane
        is_waiting = {r: r.status is RequestStatus.WAITING for r in self.num_overtakes}
        starts = [
            r for r in self.num_overtakes if not is_waiting[r] and (r.num_cached_tokens is not None)
        ]
        oldest: dict[object, Request] = {}
        for request in self.num_overtakes:
            oldest.setdefault(lane(request), request)
        self.started += [r.request_id for r in starts]
        for request, waits in is_waiting.items():
            if not waits:
                del self.num_overtakes[request]
                continue
            place = queue._places[request]
            later = [r for r in starts if r.arrival_index > request.arrival_index]
            counted = [
                r for r in later if lane(r) == lane(request) or oldest[lane(request)] is request
            ]
            if place.group is None:
                self.num_overtakes[request] += len(counted)
            assert self.num_overtakes[request] <= self.max_overtakes, request.request_id

    def take(self, update: RequestUpdate | None) -> None:
        if update is None:
            return
        record = self.records[update.request_id]
        assert record.finish_reason is None, "an update after the last one"
        record.token_ids += update.token_ids
        record.logprobs += update.logprobs
        record.finish_reason = update.finish_reason
        record.stop_token_id = update.stop_token_id
        record.usage = update.usage
        assert (update.usage is None) == (update.finish_reason is None)
        if update.usage is not None:
            assert record.request.status is RequestStatus.FINISHED
            assert record.request.lease is None
            assert update.usage.num_output_tokens == len(record.token_ids)

    def finish(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        self.take(self.scheduler.finish(RequestId(request_id), reason))

    def drain(self, max_steps: int = 10_000) -> None:
        """Step until everything is answered."""
        for _ in range(max_steps):
            if self.step() is None and not self.scheduler.has_work:
                for update in self.scheduler.take_ended():
                    self.take(update)
                return
        raise AssertionError(f"not done after {max_steps} steps: {self.scheduler.stats()}")

    def check(self) -> None:
        manager, scheduler = self.manager, self.scheduler
        manager.check_invariants()
        if not manager.is_mixed:
            num_blocks = manager.num_free + manager.num_evictable + manager.num_held
            assert num_blocks == self.num_blocks
        running = [r for r in scheduler._requests.values() if r.status is RequestStatus.RUNNING]
        assert sorted(running, key=lambda r: r.arrival_index) == scheduler._running.requests
        assert len(scheduler._requests) == len(running) + scheduler.num_waiting
        for request in scheduler._requests.values():
            assert (request.lease is not None) == (request.status is RequestStatus.RUNNING)
            assert request.num_computed_tokens == 0 or request.lease is not None
            assert request.num_computed_tokens <= request.num_tokens
        if not running:
            assert manager.num_held == manager.num_pinned
            assert manager.num_reserved == 0

    def check_arena(self) -> None:
        """With several codecs: the arena has the blocks that the cache counts, once it has caught up."""
        arena = self.runner.arena
        if arena is None:
            return
        arena.apply(self.manager.take_memory_ops())
        stats = self.manager.stats()
        assert dict(arena.stats().num_blocks) == dict(stats.blocks_by_codec)
        assert dict(arena.stats().cell_bytes) == dict(stats.bytes_by_codec)

    def check_answers(self) -> None:
        """Every request ended; its answer is that of an unshared run, or the beginning of it when it was aborted."""
        for request_id, record in self.records.items():
            expected = unshared_answer(record.request, max_tokens_in_all=self.max_tokens_in_all)
            answer = tuple(record.token_ids)
            if record.finish_reason in CUT_SHORT:
                assert answer == expected.token_ids[: len(answer)], request_id
            else:
                assert answer == expected.token_ids, request_id
                assert record.finish_reason is expected.finish_reason, request_id

    def compact_plan(self, plan: StepPlan) -> tuple[tuple[str, int, int, bool], ...]:
        """Return (request, start, number of tokens, is sampled) of each sequence."""
        return tuple(
            (s.request_id, s.start, len(s.token_ids), s.sample is not None) for s in plan.sequences
        )
