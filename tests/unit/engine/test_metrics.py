"""What the engine counts: histograms, and which moment of a request goes into which."""

from __future__ import annotations

from itertools import count

import pytest
from tests.support.engine_fakes import make_parts

from kvist.engine.core import EngineCore, RequestGroup
from kvist.engine.metrics import Histogram
from kvist.types import FinishReason, SamplingParams

MS = 1_000_000


def group(name: str, prompt: str, **params) -> RequestGroup:
    values = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 3, **params}
    return RequestGroup(
        request_id=name, prompt_token_ids=tuple(prompt.encode()), params=SamplingParams(**values)
    )


def timed_core(**changes) -> EngineCore:
    """Return a core whose clock goes on by a millisecond each time it is read."""
    ticks = count(0, MS)
    parts = make_parts(clock=lambda: next(ticks), **changes)
    parts.core._clock = lambda: next(ticks)
    return parts.core


def run(core: EngineCore, *groups: RequestGroup):
    for each in groups:
        core.add(each)
    while core.has_work:
        core.step()
    return core.stats().requests


@pytest.mark.parametrize(
    ("value", "bucket"), [(-1.0, 0), (0.0, 0), (1.0, 0), (1.5, 1), (2.0, 1), (2.5, 2)]
)
def test_bounds_belong_to_their_bucket(value, bucket):
    histogram = Histogram((1.0, 2.0))
    histogram.observe(value)
    stats = histogram.stats()
    assert stats.counts == tuple(int(index == bucket) for index in range(3))
    assert stats.total == value
    assert stats.bounds == (1.0, 2.0)


def test_a_request_is_warm_when_half_of_its_prompt_was_reused():
    core = timed_core()
    run(core, group("a", "abcdefgh"))
    run(core, group("b", "abcdxxxx"))
    stats = run(core, group("c", "abcyyyyy"))
    assert sum(stats.ttft_cold_s.counts) == 2
    assert sum(stats.ttft_warm_s.counts) == 1
    assert (stats.num_prompt_tokens, stats.num_reused_tokens) == (24, 7)
    assert stats.hit_tokens.total == 7


def test_gaps_are_between_the_tokens_of_one_sequence():
    stats = run(timed_core(), group("a", "abc", n=2, max_tokens=4))
    assert sum(stats.inter_token_s.counts) == 2 * 3
    assert sum(stats.time_per_output_token_s.counts) == 2
    mean = stats.time_per_output_token_s.total / 2
    assert mean == pytest.approx(stats.inter_token_s.total / 6)
    assert stats.num_output_tokens == 8


def test_one_token_has_no_gap():
    stats = run(timed_core(), group("a", "abc", max_tokens=1))
    assert sum(stats.inter_token_s.counts) == sum(stats.time_per_output_token_s.counts) == 0
    assert sum(stats.ttft_cold_s.counts) == 1


def test_the_queue_is_left_at_the_first_admission():
    stats = run(timed_core(max_running=1), group("a", "abc"), group("b", "xyz"))
    assert sum(stats.queue_s.counts) == 2
    # The second waited for all of the first.
    assert stats.queue_s.total > stats.ttft_cold_s.total / 2


def test_the_parts_of_a_step_are_told_apart():
    core = timed_core()
    run(core, group("a", "abc"))
    stats = core.stats()
    parts = (
        stats.requests.schedule_s,
        stats.requests.memory_s,
        stats.requests.forward_s,
        stats.requests.sample_s,
        stats.requests.apply_s,
    )
    assert [sum(part.counts) for part in parts] == [stats.num_steps] * 5
    assert stats.requests.sample_s.total == 0.0  # the fake runner measures nothing
    assert sum(part.total for part in parts) <= stats.busy_ns / 1e9


def test_an_aborted_request_that_never_started_counts_as_ended_only():
    core = timed_core()
    core.add(group("a", "abc"))
    core.abort("a")
    stats = core.stats().requests
    assert stats.finished[FinishReason.ABORT.value] == 1
    assert stats.num_prompt_tokens == 0
    assert sum(stats.queue_s.counts) == 0


def test_recomputed_tokens_are_the_request_s_own():
    parts = make_parts()
    core = parts.core
    core.add(group("a", "abcdefgh", max_tokens=6))
    core.step()
    assert parts.scheduler.preempt("a")
    parts.manager.reset()
    chunks = []
    while core.has_work:
        chunks += core.step()
    usage = chunks[-1].usage
    assert usage.num_preemptions == 1
    assert usage.num_recomputed_tokens == parts.scheduler.stats().num_recomputed_tokens == 8
    assert usage.num_computed_tokens == 8 + 5 + 8
    # Why its own blocks were gone is no miss of its prompt.
    assert [span.reason.value for span in usage.miss.spans] == ["new_prompt"]
