"""The step loop's body: scheduler, runner and detokenisers of one engine, driven from outside.

Responsible for turning client calls into sequences, for one plan-run-apply step at a time, for text and stop strings,
and for what happens when a step fails. Knows nothing of threads, queues of commands or event loops: whoever owns an
``EngineCore`` calls it from one thread.

Invariants:
    1. Every sequence added leaves through exactly one final chunk or one ``RequestFailure`` of its client call.
    2. Blocks are given back only through ``Scheduler.finish`` and ``Scheduler.apply``.
    3. An error while computing ends the requests of that step and no others.
    4. Memory that cannot be had makes requests wait or ends them with ``EngineOverloaded``, and nothing else.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import secrets
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Protocol

from kvist.engine.degeneration import DegenerationWatch
from kvist.engine.detokenizer import Detokenizer, StopStrings
from kvist.engine.guards import GuardStats
from kvist.engine.metrics import RequestMetrics
from kvist.errors import DeadlineExceeded, EngineError, EngineOverloaded, InvariantViolation
from kvist.sched.output import StepResult
from kvist.sched.request import Request
from kvist.types import CacheReset, FinishDetails, FinishReason, OutputChunk, RequestId, TokenId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvist.cache.manager import CacheManager
    from kvist.cache.namespaces import Namespace
    from kvist.cache.stats import CacheStats
    from kvist.cache.survey import CacheSurvey
    from kvist.engine.guards import Guards
    from kvist.engine.metrics import RequestStats
    from kvist.model.tokenizer import Tokenizer
    from kvist.sched.output import StepPlan
    from kvist.sched.scheduler import RequestUpdate, Scheduler, SchedulerStats
    from kvist.types import BlockCopy, Keep, MemoryOp, SamplingParams, Usage

logger = logging.getLogger(__name__)

MAX_FAILED_RUNS = 8
"""Steps in a row that memory runs out in, each half as long as the one before, before the requests of the last of them
are refused."""


class Runner(Protocol):
    """Computes plans; ``kvist.runner.runner.ModelRunner`` in earnest."""

    def run(self, plan: StepPlan, meanwhile: Callable[[], None] | None = None) -> StepResult:
        """Compute every sequence of the plan and sample where it says so.

        Args:
            plan: What to compute.
            meanwhile: Called once, by this thread, as soon as others compute, or before anything is. What it raises is
                raised when the step is over, if not at once. None: there is nothing to do.
        """

    def change_memory(self, ops: Sequence[MemoryOp | BlockCopy]) -> None:
        """Carry out what happens to the memory of blocks between two steps, in order; only where they have codecs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestGroup:
    """One client call: a prompt and the ``params.n`` sequences to generate from it."""

    request_id: str
    prompt_token_ids: tuple[TokenId, ...]
    """Checked to be in the vocabulary."""
    params: SamplingParams
    tenant: str = ""
    """Owner of the cache namespace."""
    priority: int = 0
    """Lower goes first, as ``--schedule`` allows."""
    deadline_s: float | None = None
    """Seconds after the engine took it, at which it ends; None: never."""
    keep: Keep | None = None
    """How long the prompt is to stay in the cache; None: as its use earns it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestFailure:
    """The end of a client call that could not be completed, all of its sequences included."""

    request_id: str
    error: EngineError


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreStats:
    """Counters of the core at one moment between two steps."""

    cache: CacheStats
    scheduler: SchedulerStats
    num_waiting: int
    """Sequences the scheduler has not started, or has preempted."""
    retry_after_s: float
    """How long the work of those takes, as fast as the last steps were; for clients that are refused."""
    num_steps: int
    busy_ns: int
    """Time spent in ``compute``."""
    num_finished: int
    """Client calls ended in any way."""
    num_aborted: int
    """Subset of num_finished."""
    num_failed: int
    """Subset of num_finished."""
    requests: RequestStats
    """Hits, latencies and the parts of a step."""
    guards: GuardStats
    """What was found wrong, and what was done about it."""


@dataclass(slots=True)
class _Sequence:
    """What the core keeps of one running sequence."""

    call: _Call
    index: int
    detokenizer: Detokenizer
    request: Request
    """The scheduler's record; only read."""
    watch: DegenerationWatch = field(default_factory=DegenerationWatch)
    first_token_ns: int = 0
    """0: it has none yet."""
    last_token_ns: int = 0


@dataclass(slots=True)
class _Call:
    """What the core keeps of one client call."""

    group: RequestGroup
    added_ns: int
    first_token_ns: int | None = None
    is_aborted: bool = False
    open_ids: dict[RequestId, None] = field(default_factory=dict)  # an ordered set


class _Meanwhile:
    """What is done while a step is computed, with what it raised: that is no failure of the step."""

    __slots__ = ("_task", "error")

    def __init__(self, task: Callable[[], None]) -> None:
        self._task = task
        self.error: Exception | None = None

    def __call__(self) -> None:
        try:
            self._task()
        except Exception as error:
            self.error = error
            raise


class EngineCore:
    """Scheduler, runner and text of one engine.

    Lifecycle of a step: ``compute`` it, then ``take_outputs``. Whoever computes the next one may take them while that
    is computed, so that text and clients do not hold it up; ``step`` does one after the other.

    Threads: one owner; nothing here is locked.
    """

    def __init__(  # noqa: PLR0913  # one for each part
        self,
        *,
        namespace: Namespace,
        manager: CacheManager,
        scheduler: Scheduler,
        runner: Runner,
        tokenizer: Tokenizer,
        windows: Iterable[int] = (),
        guards: Guards | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        """Take ownership of the parts.

        Args:
            namespace: That of this model and block layout; each request adds its tenant.
            manager: The cache that ``scheduler`` works with.
            scheduler: Nothing added yet.
            runner: Computes the scheduler's plans.
            tokenizer: Only read; may be shared with other threads.
            windows: The sliding windows that the model's layers have; only counted by.
            guards: What watches over the blocks; None: nothing does, and a sequence whose numbers are not finite fails.
            clock: Monotonic nanoseconds.
        """
        self._namespace = namespace
        self._manager = manager
        self._scheduler = scheduler
        self._runner = runner
        self._tokenizer = tokenizer
        self._guards = guards
        self._clock = clock
        self._eos_token_ids = frozenset(map(TokenId, tokenizer.eos_token_ids))
        self._sequences: dict[RequestId, _Sequence] = {}
        self._calls: dict[str, _Call] = {}
        # What nobody has taken: outputs, and after those the updates that are to become some.
        self._outputs: list[OutputChunk | RequestFailure] = []
        self._updates: Sequence[RequestUpdate] = ()
        # Of the latest step, for the metrics, once it is settled: times of its begin and of the ends of plan, run and
        # apply, and the parts of run for choosing tokens and for memory.
        self._step_ns: tuple[tuple[int, int, int, int], int, int] | None = None
        self._num_steps = 0
        self._num_steps_checked = 0
        self._num_failed_runs = 0
        self._busy_ns = 0
        self._num_finished = 0
        self._num_aborted = 0
        self._num_failed = 0
        self._metrics = RequestMetrics(windows)

    @property
    def has_work(self) -> bool:
        """Whether a step would compute anything."""
        return self._scheduler.has_work

    @property
    def has_background_work(self) -> bool:
        """Whether there is something to do while nobody waits for anything."""
        return self._manager.has_due_demotions or (
            self._guards is not None and self._guards.has_work
        )

    @property
    def has_unchecked_steps(self) -> bool:
        """Whether anything ran since ``check_invariants``."""
        return self._num_steps != self._num_steps_checked

    def add(self, group: RequestGroup) -> None:
        """Queue the sequences of a client call.

        Raises:
            EngineOverloaded: The scheduler's queue is full, or there is no memory left to take the call down; nothing
                of it is queued then.
            PromptTooLong: The scheduler can never run it; nothing of the call is queued then.
        """
        call = _Call(group=group, added_ns=self._clock())
        params = group.params
        try:
            seed = params.seed if params.seed is not None else secrets.randbits(63)
            stop = StopStrings(params.stop)
            for index in range(params.n):
                request_id = RequestId(
                    group.request_id if params.n == 1 else f"{group.request_id}/{index}"
                )
                request = self._request(request_id, group, seed, index)
                self._scheduler.add(request)
                call.open_ids[request_id] = None
                detokenizer = Detokenizer(
                    self._tokenizer, stop, previous_token_id=group.prompt_token_ids[-1]
                )
                self._sequences[request_id] = _Sequence(
                    call=call, index=index, detokenizer=detokenizer, request=request
                )
        except EngineError:
            self._take_back(call)
            raise
        except MemoryError:
            self._take_back(call)
            raise EngineOverloaded(
                f"[engine] no memory is left for a request of {len(group.prompt_token_ids)} tokens; retry later",
                retry_after_s=self._scheduler.retry_after_s(),
            ) from None
        self._calls[group.request_id] = call

    def abort(self, request_id: str) -> list[OutputChunk | RequestFailure]:
        """End a client call at once and give its blocks back; no effect when it has ended already.

        Returns:
            What nobody has taken of the last step, and then the last chunks of the call.
        """
        outputs = self.take_outputs()
        call = self._calls.get(request_id)
        if call is None:
            return outputs
        call.is_aborted = True
        outputs += [
            self._final_chunk(sequence_id, FinishReason.ABORT)
            for sequence_id in list(call.open_ids)
        ]
        return outputs

    def step(self) -> list[OutputChunk | RequestFailure]:
        """Compute one step and return what it added to each sequence; errors as ``compute``."""
        self.compute()
        return self.take_outputs()

    def compute(self, meanwhile: Callable[[], None] | None = None) -> None:
        """Plan, compute and apply one step; what it adds to each sequence is for ``take_outputs``.

        Args:
            meanwhile: Called at most once: while the step is computed, or when there is nothing to compute just now. It
                may take the outputs of the step before, and nothing else of this object. None: there is nothing to do.

        Raises:
            InvariantViolation: A law of the cache or the scheduler is broken; the core must not be used any more.
            Exception: Whatever ``meanwhile`` raised; likewise.
        """
        started_ns = self._clock()
        try:
            ended = self._scheduler.take_ended()
            if ended:
                self._settle()
                self._outputs += self._end_early(ended)
            begin_ns = self._clock()
            plan = self._scheduler.plan()
            if plan is None:
                if meanwhile is not None:
                    meanwhile()
                return
            planned_ns = self._clock()
            self._num_steps += 1
            result = self._run(plan, meanwhile)
            if self._step_ns is not None:  # nobody has taken the outputs meanwhile
                self._settle()
            if not isinstance(result, StepResult):
                self._outputs += result
                return
            self._num_failed_runs = 0
            ran_ns = self._clock()
            if result.damaged or self._manager.has_distrusted:
                result = self._recovered(plan, result)
            if result.failed:
                self._outputs += self._fail_sequences(result)
            self._updates = self._scheduler.apply(plan, result)
            stamps_ns = (begin_ns, planned_ns, ran_ns, self._clock())
            self._step_ns = (stamps_ns, result.sample_ns, result.memory_ns)
            if self._guards is not None:
                self._guards.run_under_load()
        finally:
            self._busy_ns += self._clock() - started_ns

    def take_outputs(self) -> list[OutputChunk | RequestFailure]:
        """Return what was added to each sequence since the last call, in order. Ends sequences at stop strings."""
        self._settle()
        outputs, self._outputs = self._outputs, []
        return outputs

    def _settle(self) -> None:
        """Do what the latest step left for later: turn updates into outputs, and count its time."""
        updates, self._updates = self._updates, ()
        for update in updates:
            self._outputs.append(self._chunk(update))
        if self._step_ns is not None:
            self._metrics.step(*self._step_ns)
            self._step_ns = None

    def _run(
        self, plan: StepPlan, meanwhile: Callable[[], None] | None
    ) -> StepResult | list[RequestFailure]:
        """Compute a plan; return the result, or the ends of client calls when there is none."""
        task = None if meanwhile is None else _Meanwhile(meanwhile)
        try:
            return self._runner.run(plan, task)
        except Exception as error:
            if task is not None and error is task.error:
                raise
            self._settle()
            if isinstance(error, MemoryError):
                return self._retry_or_fail_step(plan, error)
            # Whatever the numeric code raises concerns the requests of this step; the others go on.
            logger.exception("[engine] step %d failed", plan.step_index)
            return self._fail_step(plan, partial(self._step_error, plan, error))

    def background_step(self) -> None:
        """Do one step's worth of what can wait; to be called while ``has_work`` is False."""
        self._num_steps += 1  # the laws are to be checked again
        if self._manager.has_due_demotions:
            try:
                self._runner.change_memory(self._manager.take_memory_ops())
            except MemoryError:
                # The arena keeps what is left, and begins with it in the next step.
                logger.warning(
                    "[engine] no memory is left to make cached blocks smaller with; it is done later"
                )
        elif self._guards is not None:
            self._guards.run_once()

    def reset_cache(
        self, tenant: str | None, prompt_token_ids: tuple[TokenId, ...] | None
    ) -> CacheReset:
        """Forget what is cached; running requests keep what they hold, and nobody else gets it. Between two steps.

        Args:
            tenant: Whose; None: everybody's.
            prompt_token_ids: Of that, only what begins with these tokens, from the block of the last of them on; at
                least one. None: all of it.

        Complexity: O(blocks forgotten).
        """
        manager = self._manager
        if prompt_token_ids is None:
            nodes = manager.nodes_of(tenant)
        else:
            try:
                chain = manager.new_chain(self._namespace_of(tenant or ""), prompt_token_ids)
                nodes = manager.nodes_after(chain)
            except MemoryError:
                raise EngineOverloaded(
                    f"[engine] no memory is left to look for a prompt of {len(prompt_token_ids)} tokens; retry later",
                    retry_after_s=self._scheduler.retry_after_s(),
                ) from None
        taken = manager.forget(nodes)
        return CacheReset(
            num_dropped_blocks=taken.num_dropped, num_detached_blocks=taken.num_detached
        )

    def check_invariants(self) -> None:
        """Check the conservation law, and that an idle engine holds no block but pinned ones.

        Raises:
            InvariantViolation: It does not hold.
        """
        self._num_steps_checked = self._num_steps
        self._manager.check_invariants()
        if not self._sequences and self._manager.num_held != self._manager.num_pinned:
            raise InvariantViolation(
                f"[engine] expected an idle engine to hold pinned blocks only ({self._manager.num_pinned}), "
                f"{self._manager.num_held} are held: "
                f"{self._manager.stats()}"
            )

    def close(self) -> None:
        """End every sequence, give back all blocks, and check that nothing is missing. Emits no chunks."""
        for request_id in list(self._sequences):
            self._scheduler.finish(request_id, FinishReason.ABORT)
        self._sequences.clear()
        self._calls.clear()
        self._updates = ()
        self.check_invariants()

    def survey(self) -> CacheSurvey:
        """Return what every block of the cache holds; as ``CacheManager.survey``."""
        return self._manager.survey()

    def census(self) -> tuple[int, int]:
        """Return how many sequences wait and how many client calls have ended: what other threads act upon."""
        return self._scheduler.num_waiting, self._num_finished

    def stats(self) -> CoreStats:
        """Return the counters."""
        return CoreStats(
            cache=self._manager.stats(),
            scheduler=self._scheduler.stats(),
            num_waiting=self._scheduler.num_waiting,
            retry_after_s=self._scheduler.retry_after_s(),
            num_steps=self._num_steps,
            busy_ns=self._busy_ns,
            num_finished=self._num_finished,
            num_aborted=self._num_aborted,
            num_failed=self._num_failed,
            requests=self._metrics.stats(),
            guards=GuardStats() if self._guards is None else self._guards.stats(),
        )

    def _take_back(self, call: _Call) -> None:
        """Forget the sequences of a call that is not taken after all."""
        for request_id in call.open_ids:
            self._scheduler.finish(request_id, FinishReason.ABORT)
            self._sequences.pop(request_id, None)

    def _request(
        self, request_id: RequestId, group: RequestGroup, seed: int, index: int
    ) -> Request:
        return Request(
            request_id=request_id,
            prompt_token_ids=group.prompt_token_ids,
            params=group.params,
            namespace=self._namespace_of(group.tenant),
            seed=sequence_seed(seed, index),
            is_sibling=index > 0,
            eos_token_ids=self._eos_token_ids,
            priority=group.priority,
            deadline_s=group.deadline_s,
            keep=group.keep,
        )

    def _namespace_of(self, tenant: str) -> Namespace:
        return dataclasses.replace(self._namespace, tenant=tenant)

    def _end_early(self, updates: tuple[RequestUpdate, ...]) -> list[OutputChunk | RequestFailure]:
        """Tell of sequences that ended outside a step: with what they have, or with an error while that is nothing."""
        outputs: list[OutputChunk | RequestFailure] = []
        for update in updates:
            sequence = self._sequences.get(update.request_id)
            if sequence is None:
                continue  # went with a sibling, just now
            call, reason = sequence.call, update.finish_reason
            assert reason is not None  # the scheduler's promise
            if reason is FinishReason.TIMEOUT and call.first_token_ns is not None:
                outputs.append(self._chunk(update))
                continue
            for sibling_id in list(call.open_ids):
                self._scheduler.finish(sibling_id, reason)  # no effect on those that have ended
                self._forget(sibling_id, reason)
            error = self._early_end_error(reason, call)
            outputs.append(RequestFailure(request_id=call.group.request_id, error=error))
        return outputs

    def _early_end_error(self, reason: FinishReason, call: _Call) -> EngineError:
        if reason is FinishReason.TIMEOUT:
            return DeadlineExceeded(
                f"[engine] the request's time of {call.group.deadline_s} s ran out before it had any output; "
                "retry later, or give it more (timeout_s)"
            )
        return EngineOverloaded(
            "[engine] no memory could be had for the request although it was accepted; retry later",
            retry_after_s=self._scheduler.retry_after_s(),
        )

    def _chunk(self, update: RequestUpdate) -> OutputChunk:
        """Return what one applied update adds to its sequence; ends the sequence at a stop string."""
        sequence = self._sequences[update.request_id]
        call = sequence.call
        if update.token_ids:
            self._note_token(sequence)
        detokenizer = sequence.detokenizer
        # The token that ended the sequence (end-of-sequence or stop token) is not part of its text.
        has_stop_token = update.finish_reason is FinishReason.STOP
        shown = update.token_ids[:-1] if has_stop_token else update.token_ids
        text = "".join(map(detokenizer.append, shown))
        if update.finish_reason is not None:
            text += detokenizer.finish()
        finish_reason = update.finish_reason
        stop_reason: str | int | None = update.stop_token_id
        if detokenizer.stop_string is not None:
            if finish_reason is None:
                self._scheduler.finish(update.request_id, FinishReason.STOP)
            finish_reason, stop_reason = FinishReason.STOP, detokenizer.stop_string
        sequence.watch.append(update.token_ids)
        is_stopped = (
            finish_reason is None
            and sequence.watch.found is not None
            and call.group.params.stop_degenerate
        )
        if is_stopped:
            self._scheduler.finish(update.request_id, FinishReason.STOP)
            text += detokenizer.finish()
            finish_reason = FinishReason.STOP
        usage = None
        if finish_reason is not None:
            self._metrics.degeneration(sequence.watch.found, is_stopped=is_stopped)
            usage = self._forget(update.request_id, finish_reason)
        return OutputChunk(
            request_id=call.group.request_id,
            index=sequence.index,
            text=text,
            token_ids=update.token_ids,
            logprobs=update.logprobs,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            finish_details=None
            if finish_reason is None
            else _finish_details(sequence, is_stopped=is_stopped),
            usage=usage,
        )

    def _note_token(self, sequence: _Sequence) -> None:
        now_ns, call = self._clock(), sequence.call
        if call.first_token_ns is None:
            call.first_token_ns = now_ns
            self._metrics.first_token(sequence.request, now_ns - call.added_ns)
        if sequence.first_token_ns:
            self._metrics.next_token(now_ns - sequence.last_token_ns)
        else:
            sequence.first_token_ns = now_ns
        sequence.last_token_ns = now_ns

    def _final_chunk(self, request_id: RequestId, reason: FinishReason) -> OutputChunk:
        """End a sequence from outside; return its last chunk, with the text held back so far."""
        sequence = self._sequences[request_id]
        update = self._scheduler.finish(request_id, reason)
        assert update is not None  # known here means not finished there
        return OutputChunk(
            request_id=sequence.call.group.request_id,
            index=sequence.index,
            text=sequence.detokenizer.finish(),
            finish_reason=reason,
            finish_details=_finish_details(sequence, is_stopped=False),
            usage=self._forget(request_id, reason),
        )

    def _retry_or_fail_step(self, plan: StepPlan, error: MemoryError) -> list[RequestFailure]:
        """Let a shorter step be planned, or after too many that failed refuse the requests of this one."""
        self._num_failed_runs += 1
        num_tokens = plan.num_batch_tokens
        logger.warning(
            "[engine] no memory to compute the %d tokens of step %d (%s)",
            num_tokens,
            plan.step_index,
            error,
        )
        if self._num_failed_runs < MAX_FAILED_RUNS:
            self._scheduler.retry_shorter(plan)
            return []
        self._num_failed_runs = 0
        retry_after_s = self._scheduler.retry_after_s()
        return self._fail_step(
            plan,
            lambda: EngineOverloaded(
                f"[engine] no memory could be had to compute {num_tokens} tokens, after {MAX_FAILED_RUNS} attempts; "
                "retry later, or lower --max-batch-tokens or --memory-gib",
                retry_after_s=retry_after_s,
            ),
        )

    def _step_error(self, plan: StepPlan, error: Exception) -> EngineError:
        failure = EngineError(
            f"[engine] step {plan.step_index} failed ({type(error).__name__}: {error}); the request was ended"
        )
        failure.__cause__ = error
        return failure

    def _fail_step(
        self, plan: StepPlan, make_error: Callable[[], EngineError]
    ) -> list[RequestFailure]:
        """End every client call with a sequence in the step; raise if the cache does not survive that."""
        outputs = []
        for sequence in plan.sequences:
            # One error each: a raised exception carries the traceback of its reader.
            outputs += self._fail(sequence.request_id, make_error())
        # Heads are published by commit alone, so neither a copy nor a position that was not computed is ever offered to
        # others.
        self._scheduler.cancel(plan)
        self._manager.check_invariants()
        return outputs

    def _recovered(self, plan: StepPlan, result: StepResult) -> StepResult:
        """Let the guards deal with numbers that are not finite, and with blocks found to be wrong in this step."""
        if self._guards is None:
            return result
        damaged = {
            sequence.request_id: self._sequences[sequence.request_id].request
            for sequence in plan.sequences
            if sequence.request_id in result.damaged and sequence.request_id in self._sequences
        }
        try:
            return self._guards.after_run(result, damaged)
        except MemoryError:
            logger.exception("[engine] no memory to look for damaged blocks; their requests end")
            return result

    def _fail_sequences(self, result: StepResult) -> list[RequestFailure]:
        """End the client calls of the sequences for which no token could be chosen."""
        return [
            failure
            for request_id, message in result.failed.items()
            for failure in self._fail(request_id, EngineError(message))
        ]

    def _fail(self, request_id: RequestId, error: EngineError) -> list[RequestFailure]:
        """End the client call of a sequence with an error; nothing when a sibling ended it just before."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return []
        call = sequence.call
        for sibling_id in list(call.open_ids):
            self._final_chunk(sibling_id, FinishReason.ERROR)
        return [RequestFailure(request_id=call.group.request_id, error=error)]

    def _forget(self, request_id: RequestId, reason: FinishReason) -> Usage:
        """Drop a sequence that ended; log it, count the call when it was the last one, and return what it cost."""
        sequence = self._sequences.pop(request_id)
        call, usage = sequence.call, sequence.request.usage()
        decode_ns = sequence.last_token_ns - sequence.first_token_ns
        self._metrics.finish(sequence.request, reason, decode_ns)
        del call.open_ids[request_id]
        now_ns = self._clock()
        first_ns = call.first_token_ns if call.first_token_ns is not None else now_ns
        # Not INFO: the front end has one line for each client call, whatever its prompts and their n.
        logger.debug(
            "[engine] %s: %s, prompt %d, cached %d, computed %d, output %d tokens, preempted %d, "
            "ttft %.3f s, %.1f output tokens/s",
            request_id,
            reason.value,
            usage.num_prompt_tokens,
            usage.num_cached_tokens,
            usage.num_computed_tokens,
            usage.num_output_tokens,
            usage.num_preemptions,
            (first_ns - call.added_ns) / 1e9,
            usage.num_output_tokens / max(1e-9, (now_ns - call.added_ns) / 1e9),
        )
        if not call.open_ids:
            del self._calls[call.group.request_id]
            self._num_finished += 1
            self._num_aborted += call.is_aborted
            self._num_failed += reason is FinishReason.ERROR
        return usage


def _finish_details(sequence: _Sequence, *, is_stopped: bool) -> FinishDetails | None:
    found = sequence.watch.found
    return None if found is None else FinishDetails(degeneration=found, is_stopped=is_stopped)


def sequence_seed(seed: int, index: int) -> int:
    """Return the seed of one of a call's sequences, in [0, 2**63).

    The first sequence takes the call's own seed, so it is the one that the same call with ``n = 1`` would give; the
    others are spread over the whole range, so that neighbouring seeds of clients do not meet.
    """
    if index == 0:
        return seed
    digest = hashlib.blake2b(
        seed.to_bytes(8, "little") + index.to_bytes(8, "little"), digest_size=8
    ).digest()
    return int.from_bytes(digest, "little") >> 1
