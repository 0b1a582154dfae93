"""What the engine measures of requests and steps.

Responsible for histograms of fixed size and for what is observed when. Integers and sums only: whoever shows them works
out shares and quantiles. Knows no exposition format. Engine thread only, snapshots aside.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvist.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvist.sched.request import Request
    from kvist.types import Degeneration

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""From a decode step of a tiny model to a long prompt on a slow machine."""
TOKENS = (0, 16, 64, 256, 1024, 4096, 16384, 65536)
"""Hit lengths: nothing, the template, a system prompt, a document."""
WARM_FRACTION = 0.5
"""A request is warm when at least so much of its prompt was reused. Chat templates begin all alike, so that hardly a
prompt reuses nothing at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramStats:
    """A histogram at one moment."""

    bounds: Sequence[float]
    """Upper bounds, inclusive, ascending."""
    counts: Sequence[int]
    """Values in each bucket, not cumulated; one more than bounds, for what is above all of them."""
    total: float
    """Sum of all values."""


class Histogram:
    """Counts values by bucket.

    Args:
        bounds: Upper bounds, ascending.
    """

    __slots__ = ("_bounds", "_counts", "_stats", "_total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0
        # Most histograms stay as they are from one step to the next.
        self._stats: HistogramStats | None = None

    def observe(self, value: float) -> None:
        """Count one value. O(log buckets)."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value
        self._stats = None

    def stats(self) -> HistogramStats:
        """Return what was counted."""
        if self._stats is None:
            self._stats = HistogramStats(
                bounds=self._bounds, counts=tuple(self._counts), total=self._total
            )
        return self._stats


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStats:
    """What was measured of sequences since the start. Durations are in seconds, on the engine's own clock."""

    num_prompt_tokens: int
    """Of the sequences that ended after they had been admitted."""
    num_reused_tokens: int
    """Subset of num_prompt_tokens: those that came out of the cache."""
    reused_by_window: Mapping[int, int]
    """Subsets of num_reused_tokens, by sliding window: those in the window of the first token computed."""
    num_output_tokens: int
    """Produced by the sequences that ended."""
    finished: Mapping[str, int]
    """Sequences that ended, by ``FinishReason``."""
    degenerate: Mapping[str, int]
    """Subset of finished: sequences whose output went round in circles, by ``Degeneration.kind``."""
    num_stopped_degenerate: int
    """Subset of degenerate: those that were ended for it."""
    hit_tokens: HistogramStats
    """Prompt tokens reused by each of those that had been admitted."""
    ttft_cold_s: HistogramStats
    """From the engine taking a request to its first token, when less than WARM_FRACTION of the prompt was reused."""
    ttft_warm_s: HistogramStats
    """The same for all others."""
    inter_token_s: HistogramStats
    """Between one token of a sequence and the next."""
    time_per_output_token_s: HistogramStats
    """Mean of the gaps of one sequence, for each with at least two tokens."""
    queue_s: HistogramStats
    """From the scheduler taking a sequence to its first admission."""
    schedule_s: HistogramStats
    """Of each step: making the plan."""
    memory_s: HistogramStats
    """Of each step: copies of blocks, and changes of their codec."""
    forward_s: HistogramStats
    """Of each step: inputs and the forward pass, logits and what is done meanwhile included."""
    sample_s: HistogramStats
    """Of each step: choosing tokens by their logits."""
    apply_s: HistogramStats
    """Of each step: publishing blocks, and the ends of sequences."""
    reused_by_codec: Mapping[str, int] = field(default_factory=dict)
    """num_reused_tokens by the codec that they were in; empty where all blocks have the same."""


class RequestMetrics:
    """Counts what ``RequestStats`` tells.

    Args:
        windows: The sliding windows that the model's layers have, each once.
    """

    def __init__(self, windows: Iterable[int] = ()) -> None:
        self._reused_by_window = dict.fromkeys(windows, 0)
        self._num_prompt_tokens = 0
        self._num_reused_tokens = 0
        self._reused_by_codec: Counter[str] = Counter()
        self._num_output_tokens = 0
        self._finished: Counter[str] = Counter({reason.value: 0 for reason in FinishReason})
        self._degenerate: Counter[str] = Counter(loop=0, entropy=0)
        self._num_stopped_degenerate = 0
        self._hit_tokens = Histogram(TOKENS)
        self._ttft = {is_warm: Histogram(SECONDS) for is_warm in (False, True)}
        self._inter_token = Histogram(SECONDS)
        self._per_output_token = Histogram(SECONDS)
        self._queue = Histogram(SECONDS)
        self._phases = [Histogram(SECONDS) for _ in range(5)]

    def step(self, stamps_ns: Sequence[int], sample_ns: int, memory_ns: int = 0) -> None:
        """Note one step.

        Args:
            stamps_ns: Times of its begin, and of the ends of plan, run and apply.
            sample_ns: The part of run that was spent on choosing tokens.
            memory_ns: The part of run that was spent on copies and changes of blocks.
        """
        begin, planned, ran, applied = stamps_ns
        forward = ran - planned - sample_ns - memory_ns
        durations = (planned - begin, memory_ns, forward, sample_ns, applied - ran)
        for phase, duration_ns in zip(self._phases, durations, strict=True):
            phase.observe(duration_ns / 1e9)

    def first_token(self, request: Request, ttft_ns: int) -> None:
        """Note the first token of a client call, by the sequence that produced it."""
        num_reused = request.num_cached_tokens or 0
        is_warm = num_reused >= WARM_FRACTION * request.num_prompt_tokens
        self._ttft[is_warm].observe(ttft_ns / 1e9)

    def next_token(self, gap_ns: int) -> None:
        """Note the time between two tokens of a sequence."""
        self._inter_token.observe(gap_ns / 1e9)

    def finish(self, request: Request, reason: FinishReason, decode_ns: int) -> None:
        """Note the end of a sequence.

        Args:
            request: What the scheduler has of it.
            reason: As the client is told.
            decode_ns: From its first token to its last.
        """
        self._finished[reason.value] += 1
        self._num_output_tokens += request.num_output_tokens
        if request.num_output_tokens > 1:
            self._per_output_token.observe(decode_ns / 1e9 / (request.num_output_tokens - 1))
        if request.num_cached_tokens is None or request.admitted_ns is None:
            return  # never started
        self._num_prompt_tokens += request.num_prompt_tokens
        self._num_reused_tokens += request.num_cached_tokens
        self._reused_by_codec.update(request.cached_by_codec)
        for window in self._reused_by_window:
            self._reused_by_window[window] += min(request.num_cached_tokens, window - 1)
        self._hit_tokens.observe(request.num_cached_tokens)
        self._queue.observe((request.admitted_ns - request.arrival_ns) / 1e9)

    def degeneration(self, found: Degeneration | None, *, is_stopped: bool) -> None:
        """Note what was seen of an output by its end."""
        if found is not None:
            self._degenerate[found.kind] += 1
            self._num_stopped_degenerate += is_stopped

    def stats(self) -> RequestStats:
        """Return what was counted."""
        schedule, memory, forward, sample, apply = [phase.stats() for phase in self._phases]
        return RequestStats(
            num_prompt_tokens=self._num_prompt_tokens,
            num_reused_tokens=self._num_reused_tokens,
            reused_by_window=self._reused_by_window.copy(),
            reused_by_codec=dict(self._reused_by_codec),
            num_output_tokens=self._num_output_tokens,
            finished=dict(self._finished),
            degenerate=dict(self._degenerate),
            num_stopped_degenerate=self._num_stopped_degenerate,
            hit_tokens=self._hit_tokens.stats(),
            ttft_cold_s=self._ttft[False].stats(),
            ttft_warm_s=self._ttft[True].stats(),
            inter_token_s=self._inter_token.stats(),
            time_per_output_token_s=self._per_output_token.stats(),
            queue_s=self._queue.stats(),
            schedule_s=schedule,
            memory_s=memory,
            forward_s=forward,
            sample_s=sample,
            apply_s=apply,
        )
