"""What the last quarter of an hour was like, kept so that a dashboard opened now can show it.

Responsible for sums over all finished calls in short spans of time, and for the last calls of each API key. Bounded,
and O(spans of misses) for each call, whether or not anybody looks. Knows no engine and no HTTP. One event loop.

Invariant: sums are over all keys, as in ``/metrics``; a single call is shown to its own key only.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvist.engine.metrics import WARM_FRACTION

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    Json = dict[str, Any]  # Any: a JSON document

SPAN_S = 5
"""Length of one span."""
MAX_SPANS = 180
"""A quarter of an hour."""
MAX_CALLS = 120
"""Calls kept of each key; keys are as many as the configuration has."""
MAX_SAMPLES = 256
"""Times to first token kept of one span, for each of cold and warm: 50 requests a second are all counted."""

_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedCall:
    """One client call that was answered to its end."""

    request_id: str
    """The id of its answer."""
    tenant: str
    """Whose it was."""
    finished_ns: int
    """On the monotonic clock."""
    elapsed_s: float
    """From receiving it to its end."""
    ttft_s: float | None
    """From receiving it to its first token; None: it had none."""
    num_output_tokens: int
    """Of all its sequences."""
    explanation: Json
    """What ``explanation.explain_call`` says."""


@dataclass(slots=True)
class _Span:
    """Sums over the calls that finished in one span."""

    num_calls: int = 0
    num_reused_tokens: int = 0
    num_computed_tokens: int = 0
    num_output_tokens: int = 0
    missed_tokens: Counter[str] = field(default_factory=Counter)
    cold: list[float] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)
    num_cold: int = 0
    num_warm: int = 0

    def note_ttft(self, ttft_s: float, reused_fraction: float) -> None:
        """Count a time to first token among the cold or the warm ones."""
        if reused_fraction >= WARM_FRACTION:
            _sample(self.warm, self.num_warm, ttft_s)
            self.num_warm += 1
        else:
            _sample(self.cold, self.num_cold, ttft_s)
            self.num_cold += 1

    def row(self) -> Json:
        """Return what is shown of it."""
        return {
            "calls": self.num_calls,
            "reused": self.num_reused_tokens,
            "computed": self.num_computed_tokens,
            "output": self.num_output_tokens,
            "missed": dict(self.missed_tokens),
            "cold": _spread(self.cold, self.num_cold),
            "warm": _spread(self.warm, self.num_warm),
        }


class Activity:
    """Calls that finished, summed up and one by one."""

    def __init__(self) -> None:
        self._spans: dict[int, _Span] = {}
        self._rows: dict[int, Json] = {}
        self._calls: dict[str, deque[tuple[str, Json]]] = {}

    def note(self, call: FinishedCall) -> None:
        """Count a finished call."""
        index = call.finished_ns // (SPAN_S * _NS_PER_S)
        if index not in self._spans:
            self._spans[index] = _Span()
            self._drop_before(index - MAX_SPANS)
        self._rows.pop(index, None)
        span, told = self._spans[index], call.explanation
        num_reused, num_computed = told["reused_tokens"], told["computed_tokens"]
        span.num_calls += 1
        span.num_reused_tokens += num_reused
        span.num_computed_tokens += num_computed
        span.num_output_tokens += call.num_output_tokens
        for miss in _misses(told):
            span.missed_tokens[miss["reason"]] += miss["tokens_lost"]
        if call.ttft_s is not None:
            span.note_ttft(call.ttft_s, num_reused / max(1, num_reused + num_computed))
        calls = self._calls.setdefault(call.tenant, deque(maxlen=MAX_CALLS))
        calls.append((call.request_id, _call_row(call)))

    def spans(self, now_ns: int) -> Mapping[str, Json]:
        """Return the spans that are not too old, by the second at which they begin."""
        self._drop_before(now_ns // (SPAN_S * _NS_PER_S) - MAX_SPANS)
        for index, span in self._spans.items():
            if index not in self._rows:
                self._rows[index] = span.row()
        return {str(index * SPAN_S): self._rows[index] for index in self._spans}

    def calls(self, tenant: str) -> Mapping[str, Json]:
        """Return the last calls of a tenant by their ids, oldest first."""
        return dict(self._calls.get(tenant, ()))

    def _drop_before(self, index: int) -> None:
        # Oldest first: time goes one way.
        while self._spans and next(iter(self._spans)) <= index:
            oldest = next(iter(self._spans))
            del self._spans[oldest]
            self._rows.pop(oldest, None)


def _misses(explanation: Json) -> Iterator[Json]:
    for prompt in explanation.get("prompts", [explanation]):
        yield from prompt["spans"]


def _call_row(call: FinishedCall) -> Json:
    told, miss = call.explanation, call.explanation["miss"]
    # No text: who wants to see that asks for the explanation of the one call.
    fields = ("reason", "part", "position", "tokens_lost")
    return {
        "at_s": round(call.finished_ns / _NS_PER_S, 2),
        "elapsed_s": round(call.elapsed_s, 4),
        "ttft_s": None if call.ttft_s is None else round(call.ttft_s, 4),
        "reused": told["reused_tokens"],
        "computed": told["computed_tokens"],
        "recomputed": told["recomputed_tokens"],
        "output": call.num_output_tokens,
        "miss": None if miss is None else {name: miss[name] for name in fields},
    }


def _sample(samples: list[float], count: int, value: float) -> None:
    if count < MAX_SAMPLES:
        samples.append(value)
    else:
        samples[count % MAX_SAMPLES] = value


def _spread(samples: Sequence[float], count: int) -> Json | None:
    """Return the number of values with their median and 9th decile in seconds; None: there are none."""
    if not samples:
        return None
    high = statistics.quantiles(samples, n=10, method="inclusive")[-1] if count > 1 else samples[0]
    return {"n": count, "p50": round(statistics.median(samples), 4), "p90": round(high, 4)}
