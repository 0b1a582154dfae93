"""The simulator: times and hits worked out by hand, and fast-forward against planning every step."""

from __future__ import annotations

import random

import pytest

from kvist.errors import ConfigError
from kvist.replay.cost import PS_PER_S, CostModel
from kvist.replay.setting import Setting
from kvist.replay.simulator import Load, Simulator, _steps_lasting
from kvist.replay.traces import TraceRequest

UNIT = CostModel(
    step_s=1.0, prefill_token_s=0.0, prefill_pair_s=0.0, decode_token_s=0.0, decode_attended_s=0.0
)
"""Every step takes a second."""
MIXED = CostModel(
    step_s=0.01,
    prefill_token_s=0.001,
    prefill_pair_s=1e-5,
    decode_token_s=0.002,
    decode_attended_s=1e-4,
)


def record(arrival_s, num_input, num_output, *runs, size=4, session=""):
    return TraceRequest(
        arrival_s=arrival_s,
        num_input_tokens=num_input,
        num_output_tokens=num_output,
        session=session,
        block_size=size,
        block_runs=tuple(range(start, stop) for start, stop in runs),
    )


def simulate(records, *, cost=UNIT, load=None, fast_forward=True, **numbers):
    numbers = {
        "num_blocks": 64,
        "block_size": 4,
        "max_batch_tokens": 16,
        "max_running": 8,
    } | numbers
    simulator = Simulator(
        Setting(**numbers), cost=cost, load=load or Load(), fast_forward=fast_forward
    )
    timeline = simulator.run(records)
    simulator.manager.check_invariants()
    stats = simulator.manager.stats()
    # Conservation, and nothing is held once everybody has ended.
    assert stats.num_free + stats.num_evictable == stats.num_blocks
    assert stats.num_held == stats.num_reserved == 0
    return timeline, stats


def seconds(duration_ps):
    return duration_ps / PS_PER_S


def test_one_request_takes_a_step_for_its_prompt_and_one_for_each_later_token():
    timeline, _ = simulate([record(0.0, 8, 5, (0, 2))])
    (request,) = timeline.finished
    assert seconds(request.first_token_ps) == 1
    assert seconds(request.finished_ps) == 5
    assert dict(zip(timeline.gaps_ps, timeline.gap_counts, strict=True)).keys() == {PS_PER_S}
    assert sum(timeline.gap_counts) == 4
    assert (timeline.num_prefill_tokens, timeline.num_decode_tokens) == (8, 4)


def test_a_prompt_longer_than_a_step_is_computed_in_chunks():
    timeline, _ = simulate([record(0.0, 40, 1, (0, 10))])
    assert seconds(timeline.finished[0].first_token_ps) == 3  # 16 + 16 + 8
    assert timeline.num_steps == 3


def test_prices_add_up_as_documented():
    # One prefill of 4 positions from 0: 1 + 2 + 3 + 4 pairs. Then decodes at positions 4 and 5.
    timeline, _ = simulate([record(0.0, 4, 3, (0, 1))], cost=MIXED)
    (request,) = timeline.finished
    first = 0.01 + 4 * 0.001 + 10 * 1e-5
    assert seconds(request.first_token_ps) == pytest.approx(first, rel=1e-12)
    rest = 2 * (0.01 + 0.002) + (5 + 6) * 1e-4
    assert seconds(request.finished_ps) == pytest.approx(first + rest, rel=1e-12)
    assert request.alone_ps == request.finished_ps


def test_a_later_request_hits_the_blocks_of_an_earlier_one():
    records = [record(0.0, 12, 1, (0, 3)), record(10.0, 12, 1, (0, 2), (7, 8))]
    timeline, _ = simulate(records)
    assert [r.num_cached_tokens for r in timeline.finished] == [0, 8]
    assert seconds(timeline.finished[1].first_token_ps) == 11


def test_an_identical_prompt_computes_its_last_token_only():
    records = [record(0.0, 10, 1, (0, 3)), record(5.0, 10, 1, (0, 3))]
    timeline, _ = simulate(records)
    assert [r.num_cached_tokens for r in timeline.finished] == [0, 9]


def test_tokens_behind_the_last_block_are_shared_with_nobody():
    records = [record(0.0, 7, 1, (0, 1)), record(5.0, 7, 1, (0, 1))]
    timeline, _ = simulate(records)
    assert [r.num_cached_tokens for r in timeline.finished] == [0, 4]


def test_outputs_are_shared_with_nobody():
    records = [record(0.0, 4, 9, (0, 1)), record(20.0, 8, 1, (0, 2))]
    timeline, _ = simulate(records)
    assert [r.num_cached_tokens for r in timeline.finished] == [0, 4]


def test_queueing_behind_memory():
    # Footprints of 4 blocks in a pool of 4: strictly one after the other, 8 steps each.
    records = [record(0.0, 8, 8, (0, 2)), record(0.0, 8, 8, (2, 4))]
    timeline, stats = simulate(records, num_blocks=4)
    assert [seconds(r.started_ps) for r in timeline.finished] == [0, 8]
    assert [seconds(r.first_token_ps) for r in timeline.finished] == [1, 9]
    assert [seconds(r.finished_ps) for r in timeline.finished] == [8, 16]
    assert stats.num_evictions == 4
    assert timeline.max_held_blocks == 4


def test_idle_time_is_skipped_and_not_busy():
    timeline, _ = simulate([record(0.0, 4, 1, (0, 1)), record(1000.0, 4, 1, (5, 6))])
    assert seconds(timeline.end_ps) == 1001
    assert seconds(timeline.busy_ps) == 2


def test_speedup_divides_arrival_times():
    timeline, _ = simulate([record(0.0, 4, 1), record(100.0, 4, 1)], load=Load(speedup=10.0))
    assert [seconds(r.arrival_ps) for r in timeline.finished] == [0, 10]


def test_a_closed_loop_sends_when_somebody_has_ended():
    records = [record(9.0 * i, 4, 3, (10 * i, 10 * i + 1)) for i in range(4)]
    timeline, _ = simulate(records, load=Load(concurrency=1))
    assert [seconds(r.arrival_ps) for r in timeline.finished] == [0, 3, 6, 9]
    timeline, _ = simulate(records, load=Load(concurrency=2))
    assert [seconds(r.arrival_ps) for r in timeline.finished] == [0, 0, 3, 3]


def test_requests_that_never_fit_are_counted_and_do_not_stop_the_rest():
    records = [record(0.0, 400, 1), record(0.0, 0, 1), record(0.0, 4, 1)]
    for load in (Load(), Load(concurrency=1)):
        timeline, _ = simulate(records, load=load)
        assert timeline.num_refused == {"PromptTooLong": 1, "RequestError": 1}
        assert [r.number for r in timeline.finished] == [2]


def test_a_full_queue_refuses():
    records = [record(0.0, 4, 50) for _ in range(5)]
    timeline, _ = simulate(records, max_running=1, max_queue=2)
    assert timeline.num_refused == {"EngineOverloaded": 3}
    assert len(timeline.finished) == 2


def test_without_max_tokens_requests_are_preempted_and_still_answered():
    records = [record(0.0, 8, 24, (10 * i, 10 * i + 2)) for i in range(6)]
    load = Load(has_max_tokens=False)
    timeline, _ = simulate(records, num_blocks=12, reserve_tokens=2, load=load)
    assert timeline.num_preemptions > 0
    assert [r.num_output_tokens for r in timeline.finished] == [24] * 6


def test_no_output_wanted_ends_with_the_prompt():
    timeline, _ = simulate([record(0.0, 40, 0, (0, 10))])
    (request,) = timeline.finished
    assert (request.first_token_ps, seconds(request.finished_ps)) == (-1, 3)


def random_records(rng, *, num_requests=40):
    """Return requests that share prefixes of a few documents, with bursts and gaps."""
    now_s, records = 0.0, []
    for index in range(num_requests):
        now_s += rng.choice((0.0, 0.0, 0.5, 3.0, rng.random() * 8))
        document = rng.randrange(5) * 100
        num_shared, num_own = rng.randrange(6), rng.randrange(3)
        own = 10_000 + index * 10
        runs = [
            run
            for run in ((document, document + num_shared), (own, own + num_own))
            if run[0] < run[1]
        ]
        num_blocks = num_shared + num_own
        num_input = max(
            1,
            4 * num_blocks - rng.randrange(4)
            if rng.random() < 0.5
            else 4 * num_blocks + rng.randrange(4),
        )
        records.append(record(now_s, num_input, rng.choice((0, 1, 2, 5, 17, 40)), *runs))
    return records


def outcome(timeline, stats):
    return {
        "finished": timeline.finished,
        "refused": timeline.num_refused,
        "steps": timeline.num_steps,
        "end": timeline.end_ps,
        "busy": timeline.busy_ps,
        "held": (timeline.held_block_ps, timeline.max_held_blocks),
        "tokens": (timeline.num_prefill_tokens, timeline.num_decode_tokens),
        "recomputed": (timeline.num_recomputed_tokens, timeline.num_preemptions),
        "gaps": sorted(
            gap
            for gap, count in zip(timeline.gaps_ps, timeline.gap_counts, strict=True)
            for _ in range(count)
        ),
        "cache": stats,
    }


@pytest.mark.parametrize("schedule", ["fcfs", "shortest", "prefix", "fair", "static"])
@pytest.mark.parametrize("concurrency", [None, 5])
def test_fast_forward_changes_nothing(schedule, concurrency):
    num_planned = num_steps = 0
    for seed in range(6):
        rng = random.Random(f"{seed} {schedule} {concurrency}")
        records = random_records(rng)
        numbers = {
            "schedule": schedule,
            "num_blocks": rng.choice((18, 30, 80)),
            "max_batch_tokens": rng.choice((8, 16, 48)),
            "max_running": rng.choice((3, 8)),
        }
        load = Load(concurrency=concurrency)
        skipped, stats = simulate(records, cost=MIXED, load=load, **numbers)
        planned, planned_stats = simulate(
            records, cost=MIXED, load=load, fast_forward=False, **numbers
        )
        assert planned.num_planned_steps == planned.num_steps
        assert outcome(skipped, stats) == outcome(planned, planned_stats), seed
        num_planned += skipped.num_planned_steps
        num_steps += skipped.num_steps
    assert num_planned < num_steps


def test_fast_forward_plans_no_step_of_a_long_output_but_its_first():
    timeline, _ = simulate(
        [record(0.0, 64, 640, (0, 1), size=64)], block_size=64, max_batch_tokens=64
    )
    assert timeline.num_steps == 640
    assert timeline.num_planned_steps == 1


def test_fast_forward_plans_the_steps_that_matter_when_somebody_waits_or_grows():
    """Without ``max_tokens`` a block may be missing when it is to start, so a plan has to ask for it."""
    timeline, _ = simulate(
        [record(0.0, 64, 640, (0, 1), size=64)],
        block_size=64,
        max_batch_tokens=64,
        load=Load(has_max_tokens=False),
    )
    # Of each block the step that starts and the one that fills it; beside them the first, and the last.
    assert 20 <= timeline.num_planned_steps <= 2 * 10 + 3


@pytest.mark.parametrize("num_prompt", range(5, 9))
@pytest.mark.parametrize("num_output", range(2, 9))
def test_fast_forward_changes_nothing_for_one_that_grows_alone(num_prompt, num_output):
    load = Load(has_max_tokens=False)
    records = [record(0.0, num_prompt, num_output)]
    outcomes = [
        outcome(*simulate(records, cost=MIXED, load=load, fast_forward=fast_forward))
        for fast_forward in (True, False)
    ]
    assert outcomes[0] == outcomes[1]


def test_the_same_trace_gives_the_same_result():
    records = random_records(random.Random(7))
    assert outcome(*simulate(records, cost=MIXED)) == outcome(*simulate(records, cost=MIXED))


def test_too_small_steps_are_all_planned():
    timeline, _ = simulate([record(0.0, 8, 9)], max_batch_tokens=4, max_running=8)
    assert timeline.num_planned_steps == timeline.num_steps


@pytest.mark.parametrize("growth", [0, 1, 3, 7])
def test_steps_lasting_is_the_least_number(growth):
    for first in (10, 11, 37):
        for duration in range(1, 900, 7):
            n = _steps_lasting(duration, first, growth)
            assert n * first + growth * (n * (n - 1) // 2) >= duration
            if n > 1:
                assert (n - 1) * first + growth * ((n - 1) * (n - 2) // 2) < duration


@pytest.mark.parametrize(
    "numbers", [{"speedup": 0.0}, {"speedup": float("nan")}, {"concurrency": 0}]
)
def test_impossible_loads_are_refused(numbers):
    with pytest.raises(ConfigError, match=r"--speedup|--concurrency"):
        Load(**numbers)
