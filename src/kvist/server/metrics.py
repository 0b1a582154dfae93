"""The engine's counters as Prometheus reads them.

Responsible for names, help texts and labels. Everything comes from snapshots that the engine makes anyway, so a scrape
costs the same however many blocks or requests there are. Knows nothing of how a number comes about.

Invariants:
    1. Every label has a closed set of values (reasons, states, causes, phases), whatever clients send: no request, no
       API key and no namespace is ever a label.
    2. What is not measured is not there.
"""

from __future__ import annotations

from collections import Counter
from http import HTTPStatus
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector, CollectorRegistry

import kvist
from kvist.errors import (
    DeadlineExceeded,
    EngineOverloaded,
    EngineStopped,
    PromptTooLong,
    RequestError,
)
from kvist.server.errors import HttpError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client.metrics_core import Metric

    from kvist.cache.stats import CacheStats
    from kvist.engine.guards import GuardStats
    from kvist.engine.metrics import HistogramStats, RequestStats
    from kvist.sched.report import SchedulerStats
    from kvist.server.ports import ServedEngine
    from kvist.server.rerender import Rerenders

_BY_ERROR: Mapping[type[Exception], str] = {
    # In this order: the first that fits.
    PromptTooLong: "prompt_too_long",
    RequestError: "invalid",
    EngineOverloaded: "overloaded",
    DeadlineExceeded: "deadline",
    EngineStopped: "stopping",
}
_BY_STATUS: Mapping[int, str] = {
    HTTPStatus.UNAUTHORIZED: "unauthorized",
    HTTPStatus.NOT_FOUND: "unknown_model",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "body_too_large",
}
TIER = "device"
"""Where all blocks are: in the memory that attention reads them from."""
REFUSALS = (*_BY_ERROR.values(), *_BY_STATUS.values(), "internal")
"""Why a request to generate was answered with an error."""


class Refusals:
    """Counts requests to generate that were answered with an error, by reason. One event loop."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter(dict.fromkeys(REFUSALS, 0))

    def note(self, error: Exception) -> None:
        """Count one."""
        if isinstance(error, HttpError):
            self.counts[_BY_STATUS.get(error.status, "invalid")] += 1
            return
        names = (name for kind, name in _BY_ERROR.items() if isinstance(error, kind))
        self.counts[next(names, "internal")] += 1


class EngineCollector(Collector):
    """Turns one snapshot into metrics.

    Args:
        engine: Asked for a snapshot at each scrape.
        model: The name that is served.
        refusals: The server's own counts.
        rerenders: As refusals, of answers rendered as history; None: they are not looked at.
    """

    def __init__(
        self,
        engine: ServedEngine,
        model: str,
        refusals: Refusals,
        rerenders: Rerenders | None = None,
    ) -> None:
        self._engine = engine
        self._model = model
        self._refusals = refusals
        self._rerenders = rerenders

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        stats = self._engine.stats()
        plan = self._engine.plan
        labels = {"model": self._model, "codec": plan.kv_format, "version": kvist.__version__}
        yield InfoMetricFamily("kvist", "What is served.", labels)
        yield from _reuse(stats.requests, stats.cache, plan.codec)
        yield from _blocks(stats.cache, plan.codec)
        yield _gauge("kvist_block_bytes", "Bytes of a block, all layers.", stats.memory.block_bytes)
        by_codec = GaugeMetricFamily(
            "kvist_kv_bytes", "Bytes of blocks that hold something, by codec.", labels=("codec",)
        )
        for name, num_bytes in stats.memory.bytes_by_codec.items():
            by_codec.add_metric((name,), num_bytes)
        yield by_codec
        yield _gauge(
            "kvist_kv_compression_ratio",
            "Bytes that the blocks would take in 16 bits, for each byte that they take.",
            stats.memory.compression,
        )
        yield from _work(stats.scheduler)
        yield from _guards(stats.guards, stats.requests, stats.cache)
        yield from _latencies(stats.requests)
        yield _counter("kvist_busy_seconds", "Time spent in steps.", stats.busy_s)
        yield _gauge(
            "kvist_waiting_sequences", "Sequences that wait, preempted ones too.", stats.num_queued
        )
        yield _by(
            "kvist_refused_requests",
            "Requests to generate that were answered with an error, by reason.",
            "reason",
            self._refusals.counts,
        )
        if self._rerenders is not None:
            yield from _rerendered(self._rerenders)


def exposition(collector: Collector, accept: str) -> tuple[bytes, str]:
    """Return the metrics and their content type: Prometheus' text format, or OpenMetrics for those who accept it."""
    registry = CollectorRegistry()
    registry.register(collector)
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


def _reuse(requests: RequestStats, cache: CacheStats, codec: str) -> Iterator[Metric]:
    num_computed = requests.num_prompt_tokens - requests.num_reused_tokens
    yield _by(
        "kvist_prompt_tokens",
        "Prompt tokens of the sequences that ended, by where their K and V came from. "
        "The share of source=cache is the token-weighted hit share.",
        "source",
        {"cache": requests.num_reused_tokens, "computed": num_computed},
    )
    yield _by(
        "kvist_reused_tokens",
        "Prompt tokens of the sequences that ended whose K and V came from the cache, by the codec they were in.",
        "codec",
        requests.reused_by_codec
        or ({} if cache.blocks_by_codec else {codec: requests.num_reused_tokens}),
    )
    yield _by(
        "kvist_missed_tokens",
        "Tokens that could have been hits at an admission and were not, by reason.",
        "reason",
        cache.missed_tokens,
    )
    yield _histogram(
        "kvist_hit_length_tokens", "Prompt tokens reused by a sequence.", requests.hit_tokens
    )
    yield _counter(
        "kvist_output_tokens", "Tokens of the sequences that ended.", requests.num_output_tokens
    )
    yield _by(
        "kvist_sequences", "Sequences that ended, by how.", "finish_reason", requests.finished
    )


def _rerendered(rerenders: Rerenders) -> Iterator[Metric]:
    yield _by(
        "kvist_rerendered_answers",
        "Chat answers that were rendered as history, by whether that gave the tokens that were generated.",
        "result",
        rerenders.counts,
    )
    yield _counter(
        "kvist_rerendered_lost_tokens",
        "Computed tokens that a next turn cannot reuse because its history is rendered differently.",
        rerenders.num_lost_tokens,
    )
    yield _counter(
        "kvist_prefilled_history_tokens",
        "Tokens computed ahead, for the next turn of a conversation.",
        rerenders.num_ahead_tokens,
    )


def _blocks(cache: CacheStats, codec: str) -> Iterator[Metric]:
    blocks = GaugeMetricFamily(
        "kvist_blocks",
        "Blocks by state and codec. free: new ones that free memory has room for, in the codec they are written in.",
        labels=("state", "codec", "tier"),
    )
    in_use = cache.blocks_by_codec or {codec: cache.num_evictable + cache.num_held}
    evictable = cache.evictable_by_codec or {codec: cache.num_evictable}
    blocks.add_metric(("free", codec, TIER), cache.num_free)
    for name, count in in_use.items():
        blocks.add_metric(("evictable", name, TIER), evictable[name])
        blocks.add_metric(("held", name, TIER), count - evictable[name])
    yield blocks
    yield _by(
        "kvist_demoted_blocks",
        "Times a block was encoded in a smaller codec, by cause.",
        "cause",
        {"age": cache.num_demotions_by_age, "room": cache.num_demotions_for_room},
    )
    yield _gauge(
        "kvist_due_demotions",
        "Blocks that are to be encoded in a smaller codec when a step has a turn for them.",
        cache.num_due_demotions,
    )
    yield _counter(
        "kvist_urgent_demotions",
        "Those beyond what a step may encode, because memory of the step could not be had otherwise.",
        cache.num_urgent_demotions,
    )
    yield _gauge("kvist_block_size_tokens", "Tokens in a block.", cache.block_size)
    yield _gauge("kvist_pinned_blocks", "Held blocks that pins hold.", cache.num_pinned)
    yield _gauge("kvist_reserved_blocks", "Blocks promised to sequences.", cache.num_reserved)
    yield _gauge(
        "kvist_remembered_blocks", "Blocks that left and are remembered.", cache.num_ghosts
    )
    yield _by(
        "kvist_evicted_blocks",
        "Cached blocks that were dropped, by cause.",
        "cause",
        {
            "room": cache.num_evictions - cache.num_expired_blocks,
            "expired": cache.num_expired_blocks,
            "superseded": cache.num_superseded_blocks,
            "reset": cache.num_reset_blocks,
        },
    )
    yield _counter(
        "kvist_published_blocks", "Full blocks that entered the cache.", cache.num_published_blocks
    )
    yield _counter(
        "kvist_identity_collisions",
        "Identities that matched while the tokens did not; never used.",
        cache.num_verification_failures,
    )


def _work(scheduler: SchedulerStats) -> Iterator[Metric]:
    yield _counter("kvist_steps", "Steps planned.", scheduler.num_steps)
    yield _counter(
        "kvist_computed_tokens", "Token positions computed.", scheduler.num_scheduled_tokens
    )
    yield _counter(
        "kvist_recomputed_tokens",
        "Those of kvist_computed_tokens_total that the same sequence had before it was preempted.",
        scheduler.num_recomputed_tokens,
    )
    yield _counter(
        "kvist_preemptions", "Times a sequence lost its blocks.", scheduler.num_preemptions
    )
    yield _counter(
        "kvist_deferred_admissions",
        "Times an admission waited for a block that another sequence was computing.",
        scheduler.num_deferred_admissions,
    )
    yield _gauge("kvist_running_sequences", "Sequences that hold blocks.", scheduler.num_running)


def _guards(guards: GuardStats, requests: RequestStats, cache: CacheStats) -> Iterator[Metric]:
    family = CounterMetricFamily(
        "kvist_audited_blocks",
        "Reused blocks that were checked, by how and with what result.",
        labels=("method", "result"),
    )
    for method, num_checked, num_failed in (
        ("checksum", guards.num_checksums, guards.num_checksum_failures),
        ("recompute", guards.num_recomputed_blocks, guards.num_recompute_failures),
    ):
        family.add_metric((method, "ok"), num_checked - num_failed)
        family.add_metric((method, "failed"), num_failed)
    yield family
    yield _gauge(
        "kvist_pending_audits", "Blocks that wait to be computed again.", guards.num_pending_blocks
    )
    yield _counter(
        "kvist_skipped_audits",
        "Audits given up because too many waited.",
        guards.num_skipped_blocks,
    )
    yield _counter(
        "kvist_invalidated_blocks",
        "Cached blocks taken out because they, or a block before them, were wrong.",
        cache.num_invalidated_blocks,
    )
    yield _counter(
        "kvist_damaged_sequences",
        "Times that a sequence's logits, K or V were no finite numbers.",
        guards.num_damaged_sequences,
    )
    yield _counter(
        "kvist_distrusted_sequences",
        "Sequences computed again from their tokens because of damage.",
        guards.num_recomputed_sequences,
    )
    yield _counter(
        "kvist_refreshed_blocks", "Lossy blocks that were renewed.", guards.num_refreshed_blocks
    )
    yield _counter(
        "kvist_background_chunks",
        "Steps computed for audits and refreshes.",
        guards.num_background_chunks,
    )
    yield _by(
        "kvist_degenerate_sequences",
        "Sequences whose output went round in circles, by the sign.",
        "kind",
        requests.degenerate,
    )
    yield _counter(
        "kvist_stopped_degenerate_sequences",
        "Those of kvist_degenerate_sequences_total that were ended for it.",
        requests.num_stopped_degenerate,
    )


def _latencies(requests: RequestStats) -> Iterator[Metric]:
    yield _histograms(
        "kvist_time_to_first_token_seconds",
        "From the engine taking a request to its first token; warm: half of the prompt was reused, or more.",
        "cache",
        {"cold": requests.ttft_cold_s, "warm": requests.ttft_warm_s},
    )
    yield _histogram(
        "kvist_inter_token_seconds",
        "Between one token of a sequence and the next.",
        requests.inter_token_s,
    )
    yield _histogram(
        "kvist_time_per_output_token_seconds",
        "Mean time between the tokens of a sequence.",
        requests.time_per_output_token_s,
    )
    yield _histogram(
        "kvist_queue_seconds", "From arrival to first admission of a sequence.", requests.queue_s
    )
    yield _histograms(
        "kvist_step_seconds",
        "Parts of a step.",
        "phase",
        {
            "schedule": requests.schedule_s,
            "memory": requests.memory_s,
            "forward": requests.forward_s,
            "sample": requests.sample_s,
            "apply": requests.apply_s,
        },
    )


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value)


def _by(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(name, text, labels=(label,))
    for key, value in values.items():
        family.add_metric((key,), value)
    return family


def _histogram(name: str, text: str, stats: HistogramStats) -> Metric:
    return HistogramMetricFamily(name, text, buckets=_buckets(stats), sum_value=stats.total)


def _histograms(name: str, text: str, label: str, each: Mapping[str, HistogramStats]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=(label,))
    for key, stats in each.items():
        family.add_metric((key,), _buckets(stats), stats.total)
    return family


def _buckets(stats: HistogramStats) -> list[tuple[str, float]]:
    """Return the cumulated counts by upper bound."""
    bounds = [*(str(float(bound)) for bound in stats.bounds), "+Inf"]
    return list(zip(bounds, accumulate(stats.counts), strict=True))
