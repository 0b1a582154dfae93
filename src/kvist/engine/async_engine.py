"""The engine as a service inside the process: one thread owns it, everybody else sends messages.

Responsible for the owner thread, the queue of commands into it, checks of a request before it is queued, back-pressure
and an orderly end. Knows nothing of HTTP, of how a step is computed, or of blocks.

Invariants:
    1. Only the owner thread touches ``EngineCore`` (and with it cache and scheduler) while it runs.
    2. Every stream ever returned by ``submit`` ends: with final chunks, or with an error.
    3. An idle engine sleeps; nothing polls.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import math
import operator
import threading
import time
import uuid
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvist.config import MAX_TTL_S
from kvist.engine.core import EngineCore, RequestFailure, RequestGroup
from kvist.engine.memory_stats import MemoryStats, memory_stats
from kvist.engine.stream import RequestStream
from kvist.errors import (
    EngineError,
    EngineOverloaded,
    EngineStopped,
    InvalidSamplingParams,
    PinBudgetExceeded,
    PromptTooLong,
    RequestError,
    UnsupportedParameter,
)
from kvist.sched import policy
from kvist.sched.policy import check_priority
from kvist.types import Keep

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Self

    from kvist.cache.stats import CacheStats
    from kvist.cache.survey import CacheSurvey
    from kvist.engine.guards import GuardStats
    from kvist.engine.metrics import RequestStats
    from kvist.model.tokenizer import Tokenizer
    from kvist.plan import EnginePlan
    from kvist.sched.scheduler import SchedulerStats
    from kvist.types import CacheReset, OutputChunk, SamplingParams, TokenId

__all__ = ["AsyncEngine", "EngineStats", "RequestStream"]

logger = logging.getLogger(__name__)

IDLE_CHECK_S = 1.0
"""Quiet time after work before the conservation law is checked: never between two requests in quick succession."""
JOIN_S = 2.0
"""How long ``close`` waits for the step in progress to end: a server has 5 s in all to go after SIGTERM, and spends
up to two before."""
STATS_AGE_S = 0.1
"""How old the published counters may become while requests only go on. Taking all of them down costs a tenth of a
millisecond, and a step of a small model a few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters of a running engine at one moment between two steps."""

    cache: CacheStats
    scheduler: SchedulerStats
    uptime_s: float
    """Since ``start``; 0 before."""
    busy_s: float
    """Time spent in steps, a part of uptime_s."""
    num_steps: int
    """Steps computed, failed ones included."""
    num_queued: int
    """Sequences submitted and not yet running."""
    num_finished_requests: int
    """Client calls that ended in any way; aborted and failed ones are a subset."""
    num_aborted_requests: int
    num_failed_requests: int
    requests: RequestStats
    """Hits, latencies and the parts of a step, by sequence."""
    memory: MemoryStats
    """The pool in bytes, by state and by layer."""
    guards: GuardStats
    """What was found wrong with blocks and outputs, and what was done about it."""


@dataclass(frozen=True, slots=True)
class _Add:
    group: RequestGroup


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class _Reset:
    tenant: str | None
    prompt_token_ids: tuple[TokenId, ...] | None
    done: Future[CacheReset]


_Command = _Add | _Abort | _Reset


class AsyncEngine:
    """A running engine that any thread or event loop may submit requests to.

    Lifecycle: made by ``build.build_engine``, ``start`` once, ``close`` or ``await stop()`` once. After that ``submit``
    raises ``EngineStopped``. Requests may be submitted before ``start``; they wait.
    """

    def __init__(
        self,
        core: EngineCore,
        tokenizer: Tokenizer,
        plan: EnginePlan,
        *,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.tokenizer = tokenizer
        self.plan = plan
        self._policy = policy.get(plan.schedule)
        self._core = core
        self._clock = clock
        self._wakeup = threading.Condition()
        self._surveys: list[Future[CacheSurvey]] = []
        self._commands: deque[_Command] = deque()
        self._streams: dict[str, RequestStream] = {}
        self._resets: set[Future[CacheReset]] = set()
        self._num_untaken = 0  # sequences in _commands; those taken are the scheduler's to count
        self._thread: threading.Thread | None = None
        self._started_ns: int | None = None
        self._stop_at_ns: int | None = None  # set once: when draining ends
        self._stop_error: EngineStopped | None = None  # set once: why no request is taken any more
        self._core_stats = core.stats()
        self._census = core.census()
        self._published_ns = clock()

    @property
    def model_name(self) -> str:
        """The model as the user named it."""
        return self.plan.model

    @property
    def is_running(self) -> bool:
        """Whether requests are taken and worked on."""
        return self._started_ns is not None and self._stop_error is None

    @property
    def has_stopped(self) -> bool:
        """Whether requests will never be taken again: it was closed, or has failed."""
        return self._stop_error is not None

    def start(self) -> None:
        """Start the owner thread; no effect when it runs already.

        Raises:
            EngineStopped: The engine was closed before.
        """
        with self._wakeup:
            if self._stop_error is not None:
                raise self._stop_error
            if self._thread is not None:
                return
            self._started_ns = self._clock()
            self._thread = threading.Thread(target=self._run, name="kvist-engine", daemon=True)
        # A daemon thread inside native code at interpreter exit can crash it, so end it in time.
        atexit.register(self.close)
        self._thread.start()

    def submit(  # noqa: PLR0913  # one for each thing that a client may say of a request
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        tenant: str = "",
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        keep: Keep | None = None,
    ) -> RequestStream:
        """Check a request, queue it, and return the stream of its output.

        Args:
            prompt_token_ids: At least one, each in [0, plan.vocab_size).
            params: How to choose output tokens; ``params.n`` sequences are generated.
            tenant: Cached prefixes are shared inside one tenant only.
            request_id: Name of the request in logs and chunks; must not be in use. None makes one.
            priority: Lower goes first, in [-2**31, 2**31).
            deadline_s: Seconds, > 0, after which the request ends: with FinishReason.TIMEOUT when it has output, else
                the stream raises DeadlineExceeded. Counted from when the engine takes the request, a step after this at
                the latest. None: no limit.
            keep: How long the prompt is to stay in the cache; None: ``plan.cache_ttl_s``.

        Raises:
            PromptTooLong: Prompt plus requested output exceeds ``plan.max_context_len``.
            RequestError: The prompt is empty, a token id is outside the vocabulary, the id is in use, or priority,
                deadline_s or the time to keep it is out of range.
            UnsupportedParameter: A priority was given, and ``plan.schedule`` knows none; or the prompt is to be kept,
                and there is no prefix cache, or no budget for pins.
            PinBudgetExceeded: The prompt is to be pinned, and has more blocks than pins may hold in all.
            EngineOverloaded: The queue is full.
            EngineStopped: The engine was closed or has failed.
        """
        token_ids = self._checked_prompt(prompt_token_ids, params)
        self._check_order(priority, deadline_s)
        if keep is not None:
            self._check_keep(keep, len(token_ids))
        elif self.plan.cache_ttl_s:
            keep = Keep(ttl_s=self.plan.cache_ttl_s)
        name = request_id if request_id is not None else f"req-{uuid.uuid4().hex}"
        stream = RequestStream(name, params.n, self._request_cancel)
        group = RequestGroup(
            request_id=name,
            prompt_token_ids=token_ids,
            params=params,
            tenant=tenant,
            priority=priority,
            deadline_s=deadline_s,
            keep=keep,
        )
        with self._wakeup:
            if self._stop_error is not None:
                raise EngineStopped(str(self._stop_error))
            if name in self._streams:
                raise RequestError(
                    f"[engine] request id {name!r} is in use; wait for it to end or choose another",
                    param="request_id",
                )
            self._check_queue(params.n)
            self._streams[name] = stream
            self._num_untaken += params.n
            self._commands.append(_Add(group))
            self._wakeup.notify_all()
        return stream

    def reset_cache(
        self, tenant: str | None, prompt_token_ids: Sequence[int] | None = None
    ) -> Future[CacheReset]:
        """Forget what is cached, between two steps. Running requests keep what they hold and are not disturbed.

        Args:
            tenant: Whose; None: everybody's.
            prompt_token_ids: Only what begins with these tokens, from the block of the last of them on; needs a tenant.
                Earlier blocks stay, since other prompts share them: give fewer tokens to go further back. None: all.

        Returns:
            Done when the cache is; what has been forgotten.

        Raises:
            RequestError: The prompt is empty, or a token id is outside the vocabulary.
            EngineOverloaded: There is no memory to look for the prompt; raised by the result.
            EngineStopped: The engine was closed or has failed; raised by the result when that happens meanwhile.
        """
        token_ids: tuple[TokenId, ...] | None = None
        if prompt_token_ids is not None:
            token_ids = self._checked_ids(prompt_token_ids)
        done: Future[CacheReset] = Future()
        with self._wakeup:
            if self._stop_error is not None:
                raise EngineStopped(str(self._stop_error))
            self._resets.add(done)
            self._commands.append(_Reset(tenant, token_ids, done))
            self._wakeup.notify_all()
        return done

    def stats(self) -> EngineStats:
        """Return the counters as they were after a step; from any thread, without waiting for one.

        After the latest that started or ended a request, or a later one; while steps go on, at most STATS_AGE_S old.
        """
        with self._wakeup:
            core, num_untaken = self._core_stats, self._num_untaken
        uptime_ns = 0 if self._started_ns is None else self._clock() - self._started_ns
        return EngineStats(
            cache=core.cache,
            scheduler=core.scheduler,
            uptime_s=uptime_ns / 1e9,
            busy_s=core.busy_ns / 1e9,
            num_steps=core.num_steps,
            num_queued=core.num_waiting + num_untaken,
            num_finished_requests=core.num_finished,
            num_aborted_requests=core.num_aborted,
            num_failed_requests=core.num_failed,
            requests=core.requests,
            memory=memory_stats(self.plan, core.cache, core.requests),
            guards=core.guards,
        )

    def survey(self) -> Future[CacheSurvey]:
        """Ask for what every block of the cache holds, as it is after the step in progress; from any thread.

        Holds the engine thread for some milliseconds with 50,000 blocks, so ask about once a second at most. While the
        engine has not started, the answer waits for that; it may be cancelled.

        Raises:
            EngineStopped: The engine was closed or has failed; the future raises it when that comes first.
        """
        reply: Future[CacheSurvey] = Future()
        with self._wakeup:
            if self._stop_error is not None:
                raise EngineStopped(str(self._stop_error))
            self._surveys.append(reply)
            self._wakeup.notify_all()
        return reply

    def close(self, drain_s: float = 0.0) -> None:
        """Stop taking requests, let running ones go on for a while, abort the rest, and end the thread. Idempotent.

        Blocks for at most ``drain_s`` plus the step in progress, and ``JOIN_S`` for that; a longer step ends by itself.

        Args:
            drain_s: Seconds that requests already submitted may go on; 0 aborts at once. A later call can shorten
                the time an earlier one gave, not lengthen it.
        """
        stop_at_ns = self._clock() + int(drain_s * 1e9)
        with self._wakeup:
            if self._stop_at_ns is None or stop_at_ns < self._stop_at_ns:
                self._stop_at_ns = stop_at_ns
            if self._stop_error is None:
                self._stop_error = EngineStopped("[engine] the engine has been shut down")
            self._wakeup.notify_all()
            thread = self._thread
        if thread is None:
            self._end()
            return
        atexit.unregister(self.close)
        thread.join(timeout=drain_s + JOIN_S)
        if thread.is_alive():
            logger.error(
                "[engine] the step in progress did not end within %.1f s; leaving it", JOIN_S
            )

    async def stop(self, drain_s: float = 0.0) -> None:
        """Do what ``close`` does without blocking the event loop."""
        await asyncio.to_thread(self.close, drain_s)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- checks, in the caller's thread ---

    def _checked_prompt(
        self, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> tuple[TokenId, ...]:
        self._check_length(len(prompt_token_ids), params.max_tokens)
        token_ids = self._checked_ids(prompt_token_ids)
        vocab_size = self.plan.vocab_size
        _check_vocabulary(params.logit_bias, vocab_size, "logit_bias", InvalidSamplingParams)
        _check_vocabulary(
            params.stop_token_ids, vocab_size, "stop_token_ids", InvalidSamplingParams
        )
        return token_ids

    def _checked_ids(self, prompt_token_ids: Sequence[int]) -> tuple[TokenId, ...]:
        """Return a prompt as token ids of the model's vocabulary; raise RequestError when it is none."""
        if not len(prompt_token_ids):
            raise RequestError(
                "[engine] expected at least one prompt token, received none; send a prompt that is not empty",
                param="prompt",
                code="invalid_value",
            )
        try:
            token_ids = tuple(map(operator.index, prompt_token_ids))
        except TypeError as error:
            raise RequestError(
                f"[engine] prompt token ids must be integers ({error})", param="prompt"
            ) from None
        vocab_size = self.plan.vocab_size
        _check_vocabulary((min(token_ids), max(token_ids)), vocab_size, "prompt", RequestError)
        return token_ids  # type: ignore[return-value]  # checked to be token ids just now

    def _check_length(self, num_tokens: int, max_tokens: int | None) -> None:
        limit = self.plan.max_context_len
        # Without max_tokens there must be room for one token of output, or there is nothing to ask for.
        if num_tokens + (1 if max_tokens is None else max_tokens) <= limit:
            return
        output = "at least 1 token of output" if max_tokens is None else f"max_tokens={max_tokens}"
        raise PromptTooLong(
            f"[engine] the prompt has {num_tokens} tokens, with {output} more than the {limit} tokens a request "
            f"may have; shorten the prompt, lower max_tokens, or raise --max-context or --memory-gib",
            param="prompt" if max_tokens is None or num_tokens >= limit else "max_tokens",
        )

    def _check_order(self, priority: int, deadline_s: float | None) -> None:
        if not -(2**31) <= priority < 2**31:
            raise RequestError(
                f"[engine] priority must be in [-2**31, 2**31), received {priority}",
                param="priority",
                code="invalid_value",
            )
        check_priority(self._policy, priority)
        if deadline_s is not None and not 0.0 < deadline_s < math.inf:
            raise RequestError(
                f"[engine] timeout_s (deadline_s) must be a positive number of seconds, received {deadline_s}",
                param="timeout_s",
                code="invalid_value",
            )

    def _check_keep(self, keep: Keep, num_prompt_tokens: int) -> None:
        plan = self.plan
        if not plan.prefix_cache:
            raise UnsupportedParameter(
                "[engine] cache_control needs the prefix cache, which is off; leave it out, or start the engine with "
                "--prefix-cache on",
                param="cache_control",
            )
        if not 0.0 < keep.ttl_s <= MAX_TTL_S:
            raise RequestError(
                f"[engine] cache_control.ttl must be in (0, {MAX_TTL_S:.0f}] seconds, received {keep.ttl_s}",
                param="cache_control",
                code="invalid_value",
            )
        if not keep.is_pinned:
            return
        if not plan.pin_fraction:
            raise UnsupportedParameter(
                "[engine] cache_control.type 'pinned' needs memory that may be pinned; use 'ephemeral', or start the "
                "engine with --pin-fraction above 0",
                param="cache_control",
            )
        num_blocks = num_prompt_tokens // plan.block_size
        if num_blocks > plan.max_pinned_blocks:
            raise PinBudgetExceeded(
                f"[engine] the prompt fills {num_blocks} blocks and pins may hold {plan.max_pinned_blocks}; pin less, "
                "or raise --pin-fraction or --memory-gib",
                param="cache_control",
            )

    def _check_queue(self, num_sequences: int) -> None:
        """Raise when ``num_sequences`` more would not fit the queue; called with the lock held."""
        limit = self.plan.max_queue
        if num_sequences > limit:
            raise InvalidSamplingParams(
                f"[engine] n must be at most {limit}, the length of the queue, received {num_sequences}; "
                f"lower n or raise --max-queue",
                param="n",
            )
        core = self._core_stats
        num_queued = core.num_waiting + self._num_untaken
        if num_queued + num_sequences > limit:
            raise EngineOverloaded(
                f"[engine] {num_queued} sequences are waiting and the queue holds {limit}; "
                f"retry later or raise --max-queue",
                retry_after_s=core.retry_after_s,
            )

    def _request_cancel(self, stream: RequestStream) -> None:
        with self._wakeup:
            # Not by id alone: it may have been given to a later request since this one ended.
            if self._streams.get(stream.request_id) is stream:
                self._commands.append(_Abort(stream.request_id))
                self._wakeup.notify_all()

    # --- the owner thread ---

    def _run(self) -> None:
        try:
            while self._advance():
                pass
        except Exception as error:
            # The thread is a process boundary: whatever went wrong, every waiting client must hear of it.
            logger.exception("[engine] stopped by an internal error")
            stopped = EngineStopped(
                f"[engine] stopped by an internal error ({type(error).__name__}: {error}); restart it"
            )
            stopped.__cause__ = error
            with self._wakeup:
                self._stop_error = stopped
        self._end()

    def _advance(self) -> bool:
        """Handle what was sent, compute one step, hand out its chunks; return False when it is time to end."""
        commands = self._wait()
        if commands or self._surveys:
            outputs = self._core.take_outputs()
            for command in commands:
                outputs += self._handle(command)
            self._publish(sum(c.group.params.n for c in commands if isinstance(c, _Add)))
            self._deliver(outputs)
            self._answer_surveys()
        if self._is_time_to_stop():
            return False
        if self._core.has_work:
            # While the kernels of a step run, the outputs of the one before are on their way.
            self._core.compute(self._hand_out)
            if not self._core.has_work:
                self._hand_out()
        elif self._core.has_background_work:
            self._core.background_step()
            self._publish(0)
        return True

    def _wait(self) -> list[_Command]:
        """Return the commands sent since the last call; sleep while there is nothing to do at all."""
        if not self._core.has_work and not self._core.has_background_work:
            with self._wakeup:
                has_news = self._wakeup.wait_for(
                    self._has_news, IDLE_CHECK_S if self._core.has_unchecked_steps else None
                )
            if not has_news:
                self._core.check_invariants()
        # Looked at without the lock: what is sent a moment later waits for a step.
        if not self._commands:
            return []
        with self._wakeup:
            commands = list(self._commands)
            self._commands.clear()
        return commands

    def _has_news(self) -> bool:
        return bool(self._commands or self._surveys) or self._stop_at_ns is not None

    def _handle(self, command: _Command) -> Sequence[OutputChunk | RequestFailure]:
        match command:
            case _Add(group):
                try:
                    self._core.add(group)
                except EngineError as error:
                    return [RequestFailure(request_id=group.request_id, error=error)]
            case _Abort(request_id):
                return self._core.abort(request_id)
            case _Reset():
                self._reset(command)
        return []

    def _reset(self, command: _Reset) -> None:
        with self._wakeup:
            self._resets.discard(command.done)
        taken: CacheReset | EngineOverloaded
        try:
            taken = self._core.reset_cache(command.tenant, command.prompt_token_ids)
        except EngineOverloaded as error:
            taken = error
        if not command.done.set_running_or_notify_cancel():
            return
        if isinstance(taken, EngineOverloaded):
            command.done.set_exception(taken)
        else:
            command.done.set_result(taken)

    def _answer_surveys(self) -> None:
        """Give everybody who has asked for one the same survey."""
        with self._wakeup:
            surveys, self._surveys = self._surveys, []
        surveys = [reply for reply in surveys if reply.set_running_or_notify_cancel()]
        if not surveys:
            return
        try:
            survey = self._core.survey()
        except Exception as error:
            # Whoever only looks must not end the engine.
            logger.exception("[engine] a survey of the cache failed")
            for reply in surveys:
                reply.set_exception(error)
        else:
            for reply in surveys:
                reply.set_result(survey)

    def _hand_out(self) -> None:
        outputs = self._core.take_outputs()
        self._publish_if_due()
        self._deliver(outputs)

    def _deliver(self, outputs: Iterable[OutputChunk | RequestFailure]) -> None:
        """Hand outputs to their streams; after the counters, so that whoever has seen its end finds it counted."""
        for output in outputs:
            stream = self._streams[output.request_id]
            if isinstance(output, RequestFailure):
                stream.fail(output.error)
            else:
                stream.put(output)
                if output.finish_reason is None:
                    continue
            if stream.is_finished:
                with self._wakeup:
                    del self._streams[output.request_id]

    def _publish_if_due(self) -> None:
        """Publish what a step changed: at once when a request started or ended in it, else every STATS_AGE_S."""
        is_old = self._clock() - self._published_ns >= STATS_AGE_S * 1e9
        if is_old or self._core.census() != self._census:
            self._publish(0)

    def _publish(self, num_taken: int) -> None:
        stats = self._core.stats()
        self._census = self._core.census()
        self._published_ns = self._clock()
        with self._wakeup:
            self._core_stats = stats
            self._num_untaken -= num_taken

    def _is_time_to_stop(self) -> bool:
        # Without the lock: it is read once, and only ever gets earlier.
        stop_at_ns = self._stop_at_ns
        if stop_at_ns is None:
            return False
        return not self._core.has_work or self._clock() >= stop_at_ns

    def _end(self) -> None:
        """Fail every stream still open and give back all blocks; nothing runs afterwards."""
        with self._wakeup:
            streams, error = list(self._streams.values()), self._stop_error
            surveys, self._surveys = self._surveys, []
            resets = list(self._resets)
            self._streams.clear()
            self._commands.clear()
            self._resets.clear()
            self._num_untaken = 0
        assert error is not None  # set by close() or by the failure that led here
        for stream in streams:
            # One object each: a raised exception carries the traceback of its reader.
            failure = EngineStopped(str(error))
            failure.__cause__ = error.__cause__
            stream.fail(failure)
        for reply in surveys:
            if reply.set_running_or_notify_cancel():
                reply.set_exception(EngineStopped(str(error)))
        for done in resets:
            if done.set_running_or_notify_cancel():
                done.set_exception(EngineStopped(str(error)))
        try:
            self._core.close()
        except Exception:
            # The last act of the thread: nobody is left to tell but the log.
            logger.exception("[engine] the cache was left inconsistent")
        self._publish(0)


def _check_vocabulary(
    token_ids: Iterable[int], vocab_size: int, name: str, kind: type[RequestError]
) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise kind(
                f"[engine] {name}: token ids must be in [0, {vocab_size}), received {token_id}; "
                f"use ids of this model's tokeniser",
                param=name,
            )
