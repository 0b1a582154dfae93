"""From what a replay observed to the numbers that people compare.

Responsible for their definitions; STYLE's glossary has the terms. Knows neither scheduler nor cache nor formats.

    hit_share      prompt tokens found in the cache at first admission, per prompt token of the requests that ran
    evicted_blocks, evicted_tokens   cached blocks dropped for their memory; the positions of those blocks
    ttft_s, e2e_s  from arrival to the first output token, and to the end
    queue_s        from arrival to the beginning of the first step that computed something
    itl_s          one sample for each gap between two output tokens of a sequence
    tpot_s         one sample for each request with two output tokens or more: mean gap
    goodput_rps    requests per second of the run whose ttft_s and tpot_s are within the SLO; a refused request is not
    jain_fairness  Jain's index over sessions (over requests, when the trace names no sessions) of the speed they got:
                   time their requests would have taken alone, with the same hits, per time they took. 1: all alike
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass
from itertools import accumulate, repeat
from typing import TYPE_CHECKING, Any

from kvist.errors import ConfigError
from kvist.replay.cost import PS_PER_S

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvist.cache.stats import CacheStats
    from kvist.replay.hits import HitCounts
    from kvist.replay.setting import Setting
    from kvist.replay.simulator import FinishedRequest, Timeline

PERCENTILES = (50, 90, 95, 99)
"""Which ones are reported of every distribution."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """What a request has to keep to count as served well."""

    ttft_s: float = 2.0
    """Time to the first token at most."""
    itl_s: float = 0.2
    """Mean gap between its output tokens (its TPOT) at most."""

    def __post_init__(self) -> None:
        if not (self.ttft_s > 0 and self.itl_s > 0):
            raise ConfigError(
                f"[replay] --slo-ttft-s and --slo-itl-s must be > 0, received {self.ttft_s}, {self.itl_s}"
            )


Document = dict[str, Any]  # Any: JSON values


def percentiles(values: Sequence[float], counts: Sequence[int] | None = None) -> Document | None:
    """Return the percentiles and the mean of samples; None of none.

    A percentile is the smallest sample with at least that share of all samples at or below it.

    Args:
        values: The samples.
        counts: How often each occurred; None: once.
    """
    weighted = sorted(zip(values, repeat(1) if counts is None else counts, strict=False))
    if not weighted:
        return None
    cumulative = list(accumulate([count for _, count in weighted]))
    num_samples = cumulative[-1]
    document: Document = {
        f"p{p}": float(weighted[bisect_left(cumulative, -(-p * num_samples // 100))][0])
        for p in PERCENTILES
    }
    document["mean"] = sum([value * count for value, count in weighted]) / num_samples
    return document


def jain_index(values: Sequence[float]) -> float | None:
    """Return (sum x)^2 / (n sum x^2), in [1 / n, 1]; None of nothing or of zeros only.

    Source: Jain, Chiu, Hawe, A quantitative measure of fairness, 1984.
    """
    squares = sum([value * value for value in values])
    return sum(values) ** 2 / (len(values) * squares) if squares else None


def describe_hits(setting: Setting, counts: HitCounts, stats: CacheStats) -> Document:
    """Return the document of a run without a clock."""
    return {
        **_head(setting, "hits"),
        "requests": counts.num_requests + sum(counts.num_refused.values()),
        "refused": counts.num_refused,
        "hit_share": _share(counts.num_hit_tokens, counts.num_prompt_tokens),
        "hit_tokens": counts.num_hit_tokens,
        "prompt_tokens": counts.num_prompt_tokens,
        **_evictions(setting, stats),
        "kv_held_blocks": {
            "mean": counts.held_blocks / max(1, counts.num_requests),
            "peak": counts.max_held_blocks,
        },
    }


def describe_timeline(
    setting: Setting, timeline: Timeline, stats: CacheStats, slo: Slo
) -> Document:
    """Return the document of a simulation."""
    finished = timeline.finished
    num_prompt_tokens = sum([request.num_prompt_tokens for request in finished])
    num_hit_tokens = sum([request.num_cached_tokens for request in finished])
    num_output_tokens = sum([request.num_output_tokens for request in finished])
    first_ps = min([request.arrival_ps for request in finished], default=0)
    duration_s = (timeline.end_ps - first_ps) / PS_PER_S
    answered = [request for request in finished if request.first_token_ps >= 0]
    num_good = sum([_is_good(request, slo) for request in answered])
    groups = _speeds(finished)
    return {
        **_head(setting, "timed"),
        "requests": len(finished) + sum(timeline.num_refused.values()),
        "refused": timeline.num_refused,
        "hit_share": _share(num_hit_tokens, num_prompt_tokens),
        "hit_tokens": num_hit_tokens,
        "prompt_tokens": num_prompt_tokens,
        "output_tokens": num_output_tokens,
        **_evictions(setting, stats),
        "computed_tokens": timeline.num_prefill_tokens + timeline.num_decode_tokens,
        "recomputed_tokens": timeline.num_recomputed_tokens,
        "preemptions": timeline.num_preemptions,
        "steps": timeline.num_steps,
        "planned_steps": timeline.num_planned_steps,
        "makespan_s": duration_s,
        "busy_fraction": _share(timeline.busy_ps / PS_PER_S, duration_s),
        "ttft_s": percentiles(_seconds([r.first_token_ps - r.arrival_ps for r in answered])),
        "itl_s": percentiles(_seconds(timeline.gaps_ps), timeline.gap_counts),
        "tpot_s": percentiles([_tpot_s(r) for r in answered if r.num_output_tokens > 1]),
        "e2e_s": percentiles(_seconds([r.finished_ps - r.arrival_ps for r in finished])),
        "queue_s": percentiles(_seconds([r.started_ps - r.arrival_ps for r in finished])),
        "requests_per_s": _share(len(finished), duration_s),
        "output_tokens_per_s": _share(num_output_tokens, duration_s),
        "prompt_tokens_per_s": _share(num_prompt_tokens, duration_s),
        "slo": {"ttft_s": slo.ttft_s, "itl_s": slo.itl_s},
        "slo_share": _share(num_good, len(finished) + sum(timeline.num_refused.values())),
        "goodput_rps": _share(num_good, duration_s),
        "jain_fairness": jain_index(list(groups.values())),
        "jain_over": "sessions" if any(r.session for r in finished) else "requests",
        "kv_held_blocks": {
            "mean": timeline.held_block_ps / timeline.busy_ps if timeline.busy_ps else 0.0,
            "peak": timeline.max_held_blocks,
        },
    }


def _head(setting: Setting, mode: str) -> Document:
    return {
        "mode": mode,
        "eviction": setting.eviction,
        "schedule": setting.schedule if mode == "timed" else None,
        "num_blocks": setting.num_blocks,
        "block_size": setting.block_size,
    }


def _evictions(setting: Setting, stats: CacheStats) -> Document:
    return {
        "evicted_blocks": stats.num_evictions,
        "evicted_tokens": stats.num_evictions * setting.block_size,
    }


def _seconds(durations_ps: Sequence[int]) -> Sequence[float]:
    return [duration / PS_PER_S for duration in durations_ps]


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _tpot_s(request: FinishedRequest) -> float:
    gaps_ps = request.finished_ps - request.first_token_ps
    return gaps_ps / (request.num_output_tokens - 1) / PS_PER_S


def _is_good(request: FinishedRequest, slo: Slo) -> bool:
    if (request.first_token_ps - request.arrival_ps) / PS_PER_S > slo.ttft_s:
        return False
    return request.num_output_tokens < 2 or _tpot_s(request) <= slo.itl_s


def _speeds(finished: Sequence[FinishedRequest]) -> Mapping[str, float]:
    """Return the time alone per time taken, of each session or, where there are none, of each request."""
    alone: defaultdict[str, int] = defaultdict(int)
    taken: defaultdict[str, int] = defaultdict(int)
    for request in finished:
        name = request.session or f"request {request.number}"
        alone[name] += request.alone_ps
        taken[name] += request.finished_ps - request.arrival_ps
    return {name: alone[name] / taken[name] for name in alone if taken[name]}
