"""One client call while it runs: its prompts in the engine, their output in order of arrival, and its end.

Responsible for submitting all prompts of a call or none, merging their streams, cancelling everything when the client
goes away or the server ends, and the one log line. Knows nothing of JSON.

Invariants:
    1. When ``Call.__aexit__`` returns, no prompt of the call runs in the engine and none of its tasks is left.
    2. ``abort`` cancels in the engine at once, not when the consumer next looks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvist.errors import EngineError, EngineStopped
from kvist.server.errors import ClientDisconnected
from kvist.types import FinishDetails, FinishReason, OutputChunk, TokenLogprobs, Usage

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence
    from typing import Self

    from kvist.server.body import Receive
    from kvist.server.endpoints import Job
    from kvist.server.ports import ServedEngine, ServedStream
    from kvist.types import MissSpan

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChoiceChunk:
    """New output of one choice of the response."""

    choice_index: int
    """``prompt_index * n + index of the sequence``."""
    chunk: OutputChunk
    """As the engine gave it."""


@dataclass(slots=True, kw_only=True)
class ChoiceOutput:
    """Everything that one choice has produced so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    finish_details: FinishDetails | None = None
    usage: Usage | None = None

    def add(self, chunk: OutputChunk) -> None:
        """Append a chunk of this choice."""
        self.text += chunk.text
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.finish_reason = chunk.finish_reason
        self.finish_details = chunk.finish_details
        self.usage = chunk.usage


@dataclass(frozen=True, slots=True, kw_only=True)
class CallUsage:
    """Tokens of a whole call."""

    num_prompt_tokens: int
    """Each prompt once, whatever ``n`` is."""
    num_cached_tokens: int
    """The part of num_prompt_tokens that was in the cache before the call: sequences beside the first of a prompt
    find what the first computed, which is no reuse the client should be told of."""
    num_computed_tokens: int
    """Token positions computed for all sequences."""
    num_recomputed_tokens: int
    """Subset of num_computed_tokens: those computed again after a preemption."""
    num_output_tokens: int
    """Of all sequences."""
    num_retained_tokens: int | None = None
    """The part of num_prompt_tokens that has a TTL; None: not asked for."""
    num_pinned_tokens: int | None = None
    """The part of num_prompt_tokens that is pinned; None: not asked for."""
    cached_by_codec: Mapping[str, int] = field(default_factory=dict)
    """num_cached_tokens by the codec that they were in; empty where all blocks have the same."""


def call_usage(outputs: Sequence[ChoiceOutput], n: int) -> CallUsage:
    """Return the sum over the choices of a finished call.

    Args:
        outputs: One for each choice, in order; every prompt has ``n`` of them, each finished.
        n: Sequences for each prompt.
    """
    usages = [output.usage for output in outputs if output.usage is not None]
    assert len(usages) == len(outputs)  # the engine sets it on every final chunk
    by_prompt = [usages[start : start + n] for start in range(0, len(usages), n)]
    first_of = [min(group, key=_num_cached) for group in by_prompt]
    cached_by_codec: Counter[str] = Counter()
    for usage in first_of:
        cached_by_codec.update(usage.cached_by_codec)
    return CallUsage(
        num_prompt_tokens=sum(group[0].num_prompt_tokens for group in by_prompt),
        num_cached_tokens=sum(u.num_cached_tokens for u in first_of),
        cached_by_codec=dict(cached_by_codec),
        num_computed_tokens=sum(u.num_computed_tokens for u in usages),
        num_recomputed_tokens=sum(u.num_recomputed_tokens for u in usages),
        num_output_tokens=sum(u.num_output_tokens for u in usages),
        num_retained_tokens=_sum_of_largest(
            [[u.num_retained_tokens for u in group] for group in by_prompt]
        ),
        num_pinned_tokens=_sum_of_largest(
            [[u.num_pinned_tokens for u in group] for group in by_prompt]
        ),
    )


def _sum_of_largest(by_prompt: Sequence[Sequence[int | None]]) -> int | None:
    """Return the sum over prompts; all sequences of one did it to the same blocks. None: nobody was asked."""
    given = [[count for count in counts if count is not None] for counts in by_prompt]
    return sum(map(max, given)) if all(given) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """What became of a call. Times are the monotonic clock's, in nanoseconds."""

    request_id: str
    received_ns: int
    submitted_ns: int
    queue_s: float | None
    """From then to the first admission of any of its sequences; None: not known, or never."""
    first_token_ns: int | None
    last_token_ns: int | None
    ended_ns: int
    usage: CallUsage | None
    """None: it did not finish."""
    finish_reasons: tuple[str, ...]
    """Of its choices; empty when it did not finish."""
    miss: MissSpan | None
    """The costliest miss of its first prompt that had one."""
    error: Exception | None
    """What ended it, if it did not finish."""


class Gate:
    """Whether calls may enter, and which ones are inside.

    Lifecycle: open; ``close`` refuses new calls; ``abort`` also ends those inside. Owned by one event loop.
    """

    def __init__(self) -> None:
        self.is_open = True
        self._is_aborted = False
        self._abort_waiters: set[asyncio.Future[None]] = set()
        self._calls: set[Call] = set()
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def check_open(self) -> None:
        """Raise EngineStopped when no call may enter."""
        if not self.is_open:
            raise EngineStopped("[server] the server is shutting down; retry elsewhere or later")

    def close(self) -> None:
        """Let no further call in."""
        self.is_open = False

    def abort(self) -> None:
        """End every call inside with EngineStopped, and let no further one in."""
        self.close()
        self._is_aborted = True
        for waiter in self._abort_waiters:
            if not waiter.done():
                waiter.set_result(None)
        for call in list(self._calls):
            call.abort(
                EngineStopped("[server] the server shut down before the request was finished")
            )

    def until_aborted(self) -> asyncio.Future[None]:
        """Return a future that is done once nothing may go on any more; cancel it when it is no longer needed."""
        waiter = asyncio.get_running_loop().create_future()
        if self._is_aborted:
            waiter.set_result(None)
        else:
            self._abort_waiters.add(waiter)
            waiter.add_done_callback(self._abort_waiters.discard)
        return waiter

    def enter(self, call: Call) -> None:
        """Remember a running call."""
        self._calls.add(call)
        self._is_empty.clear()

    def leave(self, call: Call) -> None:
        """Forget a call; no effect when it is not inside."""
        self._calls.discard(call)
        if not self._calls:
            self._is_empty.set()

    async def drained(self) -> None:
        """Return when no call is inside."""
        await self._is_empty.wait()


class Call:
    """The prompts of one client call, running.

    Use it as an async context manager; leaving it cancels whatever has not finished. One consumer, one event loop.
    """

    def __init__(  # noqa: PLR0913  # made by ``submit``
        self,
        request_id: str,
        streams: Sequence[ServedStream],
        n: int,
        gate: Gate,
        *,
        received_ns: int,
        on_end: Callable[[CallRecord], None] | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.request_id = request_id
        self.n = n
        self.outputs = [ChoiceOutput() for _ in range(len(streams) * n)]
        """What each choice has produced so far."""
        self._streams = streams
        self._gate = gate
        self._clock = clock
        self._received_ns = received_ns
        self._submitted_ns = clock()
        self._on_end = on_end
        self._first_token_ns: int | None = None
        self._last_token_ns: int | None = None
        self._arrived: asyncio.Queue[ChoiceChunk | Exception] = asyncio.Queue()
        self._error: Exception | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    def submit(
        cls,
        engine: ServedEngine,
        job: Job,
        *,
        tenant: str,
        gate: Gate,
        received_ns: int,
        on_end: Callable[[CallRecord], None] | None = None,
    ) -> Self:
        """Submit every prompt of a job, or none of them.

        Args:
            engine: Where to.
            job: What to ask of it.
            tenant: The namespace of its cached prefixes.
            gate: Told of the call while it runs.
            received_ns: When the request arrived, on the monotonic clock.
            on_end: Told once what became of it.

        Raises:
            RequestError, EngineOverloaded, EngineStopped: As the engine refused one; those before it are cancelled.
        """
        gate.check_open()
        streams: list[ServedStream] = []
        try:
            for index, prompt in enumerate(job.prompts):
                name = job.request_id if len(job.prompts) == 1 else f"{job.request_id}-{index}"
                streams.append(
                    engine.submit(
                        prompt.token_ids,
                        job.params,
                        tenant=tenant,
                        request_id=name,
                        priority=job.priority,
                        deadline_s=job.timeout_s,
                        keep=job.keep,
                    )
                )
        except BaseException:
            for stream in streams:
                stream.cancel()
            raise
        return cls(
            job.request_id,
            streams,
            job.params.n,
            gate,
            received_ns=received_ns,
            on_end=on_end,
        )

    @property
    def is_finished(self) -> bool:
        """Whether every choice has ended."""
        return all(output.finish_reason is not None for output in self.outputs)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the request arrived."""
        return (self._clock() - self._received_ns) / 1e9

    @property
    def ttft_s(self) -> float | None:
        """Seconds from there to its first token; None: it has none yet."""
        if self._first_token_ns is None:
            return None
        return (self._first_token_ns - self._received_ns) / 1e9

    def abort(self, error: Exception) -> None:
        """Cancel every prompt at once; the consumer gets ``error``. The first reason given stays. Idempotent."""
        if self._error is None:
            self._error = error
            self._cancel_streams()
            self._arrived.put_nowait(error)

    async def abort_on_disconnect(self, receive: Receive) -> None:
        """Abort as soon as the client goes away. Runs until then, beside the consumer."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.abort(ClientDisconnected())

    async def batches(self) -> AsyncIterator[list[ChoiceChunk]]:
        """Yield what has arrived since the last time, never an empty list; end when every choice has finished.

        Raises:
            ClientDisconnected, EngineStopped: The call was aborted.
            EngineError: The engine could not go on.

        Mutates: ``outputs``.
        """
        num_open = len(self.outputs)
        while num_open:
            arrived = [await self._arrived.get()]
            while not (isinstance(arrived[-1], Exception) or self._arrived.empty()):
                arrived.append(self._arrived.get_nowait())
            if self._error is not None:
                raise self._error
            batch = [item for item in arrived if isinstance(item, ChoiceChunk)]
            for item in batch:
                self.outputs[item.choice_index].add(item.chunk)
                num_open -= item.chunk.finish_reason is not None
            if batch:
                yield batch
            # What was computed before the failure is the client's; then the failure.
            if isinstance(arrived[-1], Exception):
                self.abort(arrived[-1])
                raise arrived[-1]

    async def run(self) -> None:
        """Wait until every choice has finished; errors as ``batches``."""
        async for _ in self.batches():
            pass

    async def __aenter__(self) -> Self:
        self._gate.enter(self)
        self._tasks = [
            asyncio.create_task(self._pump(index, stream))
            for index, stream in enumerate(self._streams)
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._gate.leave(self)
        self._cancel_streams()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._log()
        if self._on_end is not None:
            self._on_end(self._record())

    def _record(self) -> CallRecord:
        usages = [output.usage for output in self.outputs if output.usage is not None]
        waits = [usage.queue_s for usage in usages if usage.queue_s is not None]
        misses = [usage.miss.main for usage in usages if usage.miss is not None]
        is_finished = self.is_finished
        return CallRecord(
            request_id=self.request_id,
            received_ns=self._received_ns,
            submitted_ns=self._submitted_ns,
            queue_s=min(waits, default=None),
            first_token_ns=self._first_token_ns,
            last_token_ns=self._last_token_ns,
            ended_ns=self._clock(),
            usage=call_usage(self.outputs, self.n) if is_finished else None,
            finish_reasons=tuple(
                output.finish_reason.value for output in self.outputs if output.finish_reason
            )
            if is_finished
            else (),
            miss=misses[0] if misses else None,
            error=None if is_finished else self._error or ClientDisconnected(),
        )

    def _cancel_streams(self) -> None:
        for stream in self._streams:
            stream.cancel()

    async def _pump(self, prompt_index: int, stream: ServedStream) -> None:
        num_open = self.n
        try:
            async for chunk in stream:
                if chunk.token_ids:
                    self._last_token_ns = self._clock()
                    self._first_token_ns = self._first_token_ns or self._last_token_ns
                if chunk.finish_reason is FinishReason.ERROR:
                    continue  # the stream raises the cause next
                _check_not_aborted(chunk)
                num_open -= chunk.finish_reason is not None
                self._arrived.put_nowait(ChoiceChunk(prompt_index * self.n + chunk.index, chunk))
            _check_ended(num_open)
        except Exception as error:  # noqa: BLE001  # whatever it is, the consumer must hear of it
            self._arrived.put_nowait(error)

    def _log(self) -> None:
        num_finished = sum(output.finish_reason is not None for output in self.outputs)
        if num_finished < len(self.outputs):
            logger.info(
                "[server] %s: %s after %.3f s",
                self.request_id,
                type(self._error).__name__ if self._error is not None else "cancelled",
                (self._clock() - self._received_ns) / 1e9,
            )
            return
        usage = call_usage(self.outputs, self.n)
        first_ns, last_ns = self._first_token_ns, self._last_token_ns
        # Over the gaps between tokens: the wait for the first one is the TTFT's to tell.
        num_gaps = usage.num_output_tokens - len(self.outputs)
        duration_ns = 0 if first_ns is None or last_ns is None else last_ns - first_ns
        logger.info(
            "[server] %s: prompt %d, hit %d, computed %d, recomputed %d, output %d tokens; miss: %s; "
            "ttft %s s, %s tokens/s",
            self.request_id,
            usage.num_prompt_tokens,
            usage.num_cached_tokens,
            usage.num_computed_tokens,
            usage.num_recomputed_tokens,
            usage.num_output_tokens,
            _miss_line(self.outputs, self.n),
            "-" if first_ns is None else f"{(first_ns - self._received_ns) / 1e9:.3f}",
            f"{num_gaps / (duration_ns / 1e9):.1f}" if num_gaps > 0 and duration_ns > 0 else "-",
        )


def _miss_line(outputs: Sequence[ChoiceOutput], n: int) -> str:
    """Return why each prompt's reuse ended, where, and what that cost; without a word of the prompt."""
    firsts = [
        min((o.usage for o in outputs[start : start + n] if o.usage), key=_num_cached)
        for start in range(0, len(outputs), n)
    ]
    misses = [usage.miss.main for usage in firsts if usage.miss is not None]
    lines = [f"{span.reason.value} at {span.start} ({span.end - span.start})" for span in misses]
    more = f" and {len(lines) - 1} more" if len(lines) > 1 else ""
    return lines[0] + more if lines else "none"


def _num_cached(usage: Usage) -> int:
    return usage.num_cached_tokens


def _check_not_aborted(chunk: OutputChunk) -> None:
    if chunk.finish_reason is FinishReason.ABORT:
        # Nobody here asked for it (the consumer would have ended first), so the engine is ending.
        raise EngineStopped("[engine] the engine ended the request before it was finished")


def _check_ended(num_open: int) -> None:
    if num_open:
        raise EngineError(
            f"[engine] the stream ended with {num_open} sequences unfinished and no reason given"
        )


@contextlib.asynccontextmanager
async def watched(call: Call, receive: Receive) -> AsyncIterator[Call]:
    """Run ``call`` inside the block and abort it when the client goes away meanwhile."""
    async with call:
        watcher = asyncio.create_task(call.abort_on_disconnect(receive))
        try:
            yield call
        finally:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
