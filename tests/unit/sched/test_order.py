"""Who starts before whom under each policy, and how a step is shared out: exact plans."""

from __future__ import annotations

import random

import pytest
from tests.support.sched_trace import Trace

from kvist.errors import UnsupportedParameter
from kvist.sched import policy
from kvist.types import FinishReason

NO_EOS: frozenset[int] = frozenset()
ALL = tuple(policy.POLICIES)
AGING = tuple(name for name in ALL if name != "static")


def plans_of(trace: Trace) -> list[tuple[tuple[str, int, int, bool], ...]]:
    return [trace.compact_plan(plan) for plan in trace.plans]


def add_sizes(trace: Trace, **sizes: int) -> None:
    """Add one request a name, each with a prompt of its own and one token of output."""
    for name, size in sizes.items():
        first = 100 * (len(trace.records) + 1)
        trace.add(name, range(first, first + size), max_tokens=1)


# --- policies


def start_order(schedule: str, **options: int) -> str:
    """Run requests one at a time, with a document in the cache that `w` extends, and return who started when."""
    trace = Trace(policy=schedule, max_running=1, **options)
    trace.add("x", range(1, 13), max_tokens=1)
    trace.step()
    trace.add("l", range(100, 120), max_tokens=1)
    trace.add("s", range(200, 206), max_tokens=1)
    trace.add("w", (*range(1, 13), *range(300, 308)), max_tokens=1)
    trace.drain()
    trace.check_answers()
    return "".join(trace.started)[1:]


@pytest.mark.parametrize(
    ("schedule", "order"),
    [("fcfs", "lsw"), ("shortest", "swl"), ("prefix", "wsl"), ("fair", "lsw"), ("static", "lsw")],
)
def test_each_policy_has_its_order(schedule: str, order: str) -> None:
    assert start_order(schedule) == order


@pytest.mark.parametrize("schedule", ["shortest", "prefix"])
def test_without_overtakes_every_policy_is_first_come_first_served(schedule: str) -> None:
    assert start_order(schedule, max_overtakes=0) == "lsw"


def test_shortest_counts_what_the_cache_holds_now_and_not_what_it_held_at_arrival() -> None:
    """`warm` arrives before its prefix is computed, and `other`, shorter as it then was, waits longer."""
    trace = Trace(policy="shortest", max_running=1, block_size=4)
    trace.add("first", range(1, 17), max_tokens=3, ignore_eos=True)
    trace.step(before_run=lambda: trace.add("warm", (*range(1, 17), 50, 51), max_tokens=1))
    trace.add("other", range(60, 70), max_tokens=1)
    trace.drain()
    assert trace.started == ["first", "warm", "other"]
    assert trace.records["warm"].usage.num_cached_tokens == 16


def test_shortest_puts_a_request_back_whose_prefix_was_evicted() -> None:
    trace = Trace(policy="shortest", max_running=1, block_size=4)
    trace.add("first", range(1, 17), max_tokens=1)
    trace.drain()
    trace.add("long", (*range(1, 17), 50, 51), max_tokens=1)
    trace.add("short", range(60, 70), max_tokens=1)
    assert [row.num_prefill_tokens for row in trace.scheduler.snapshot()] == [2, 10]
    trace.manager.reset()
    trace.drain()
    assert trace.started == ["first", "short", "long"]


def test_prefix_runs_those_together_that_share() -> None:
    """Three documents in turn; one at a time, so that nothing but the order brings equal prefixes together."""
    documents = {name: [100 * i + j for j in range(12)] for i, name in enumerate("abc", start=1)}
    trace = Trace(policy="prefix", max_running=1, num_blocks=8, block_size=4)
    for index in range(3):
        for name, document in documents.items():
            trace.add(f"{name}{index}", (*document, index), max_tokens=1)
    trace.drain()
    assert trace.started == ["a0", "a1", "a2", "b0", "b1", "b2", "c0", "c1", "c2"]
    # Each document once, and the last token of each request; the pool does not hold all three.
    assert trace.scheduler.stats().num_scheduled_tokens == 3 * 12 + 9


def test_prefix_takes_the_deepest_first() -> None:
    trace = Trace(policy="prefix", max_running=1, block_size=4)
    trace.add("first", range(1, 17), max_tokens=1)
    trace.drain()
    for depth in (4, 12, 8, 16):
        trace.add(f"d{depth}", (*range(1, depth + 1), 50, 51), max_tokens=1)
    trace.drain()
    assert trace.started == ["first", "d16", "d12", "d8", "d4"]


@pytest.mark.parametrize("schedule", AGING)
def test_a_lower_priority_starts_first(schedule: str) -> None:
    trace = Trace(policy=schedule, max_running=1)
    for name, priority in (("a", 5), ("b", 0), ("c", -1), ("d", 5)):
        trace.add(name, (ord(name), 2), max_tokens=1, priority=priority)
    trace.drain()
    assert trace.started == ["c", "b", "a", "d"]


def test_under_fair_a_priority_moves_a_request_inside_its_namespace_only() -> None:
    trace = Trace(policy="fair", max_running=1, max_batch_tokens=8)
    for index in range(3):
        trace.add(f"x{index}", (index + 1, 2), max_tokens=1, tenant="x", priority=-index)
        trace.add(f"y{index}", (index + 1, 2), max_tokens=1, tenant="y")
    trace.drain()
    assert trace.started == ["x2", "y0", "x1", "y1", "x0", "y2"]


def test_static_refuses_a_priority() -> None:
    trace = Trace(policy="static")
    with pytest.raises(
        UnsupportedParameter, match=r"--schedule static .* received priority=1"
    ) as e:
        trace.add("a", (1, 2), max_tokens=1, priority=1)
    assert e.value.param == "priority"
    assert not trace.scheduler.has_work


# --- static batching


def test_static_starts_the_next_batch_when_the_last_one_has_ended_entirely() -> None:
    trace = Trace(policy="static", max_running=2)
    for index, num_output in enumerate((1, 3, 1, 1)):
        trace.add(f"r{index}", (10 * index + 1, 2), max_tokens=num_output, ignore_eos=True)
    trace.drain()
    assert plans_of(trace) == [
        (("r0", 0, 2, True), ("r1", 0, 2, True)),
        (("r1", 2, 1, True),),
        (("r1", 3, 1, True),),
        (("r2", 0, 2, True), ("r3", 0, 2, True)),
    ]


def test_a_static_batch_is_as_large_as_the_memory_whatever_a_step_holds() -> None:
    trace = Trace(policy="static", num_blocks=12, block_size=4, max_batch_tokens=8)
    add_sizes(trace, a=16, b=16, c=12, d=8)  # 4 + 4 + 3 blocks, and 2 that do not fit
    trace.step()
    assert trace.started == ["a", "b", "c"]
    trace.add("late", (1, 2), max_tokens=1)
    trace.drain()
    assert trace.started == ["a", "b", "c", "d", "late"]
    assert [plan.num_batch_tokens for plan in trace.plans] == [8, 8, 8, 8, 8, 4, 8, 2]
    trace.check_answers()


def test_a_static_batch_of_more_requests_than_a_step_holds_goes_on_oldest_first() -> None:
    trace = Trace(policy="static", max_batch_tokens=2)
    for name in "abc":
        trace.add(name, (ord(name),), max_tokens=3, ignore_eos=True)
    trace.drain()
    assert ["".join(s[0] for s in plan) for plan in plans_of(trace)] == [
        "ab",
        "ab",
        "ab",
        "c",
        "c",
        "c",
    ]
    trace.check_answers()


def test_a_static_batch_stays_open_for_those_whose_prefix_it_computes() -> None:
    trace = Trace(policy="static", max_batch_tokens=8, block_size=4)
    for index in range(3):
        trace.add(f"r{index}", (*range(1, 17), 50 + index), max_tokens=2, ignore_eos=True)
    trace.drain()
    assert trace.scheduler.stats().num_scheduled_tokens == 16 + 3 * 2
    assert trace.started == ["r0", "r1", "r2"]
    assert len(trace.plans) == 4


def test_a_preempted_member_of_a_static_batch_comes_back_before_the_next_one() -> None:
    trace = Trace(policy="static", max_running=2)
    for index in range(3):
        trace.add(f"r{index}", (10 * index + 1, 2), max_tokens=3, ignore_eos=True)
    trace.step()
    assert trace.scheduler.preempt("r1")
    trace.drain()
    assert trace.started == ["r0", "r1", "r2"]
    assert plans_of(trace)[3][0] == ("r1", 2, 1, True)
    trace.check_answers()


# --- sharing a step out


@pytest.mark.parametrize("schedule", AGING)
def test_a_short_request_waits_for_one_chunk_of_a_long_one_at_most(schedule: str) -> None:
    trace = Trace(policy=schedule, max_batch_tokens=8)
    trace.add("long", range(100, 140), max_tokens=1)
    trace.step()
    trace.add("short", (1, 2, 3), max_tokens=2, ignore_eos=True)
    trace.drain()
    assert plans_of(trace) == [
        (("long", 0, 8, False),),
        # Half is kept for those that wait, and what they leave goes back.
        (("long", 8, 5, False), ("short", 0, 3, True)),
        (("short", 3, 1, True), ("long", 13, 7, False)),
        (("long", 20, 8, False),),
        (("long", 28, 8, False),),
        (("long", 36, 4, True),),
    ]


def test_a_warm_request_is_a_short_one() -> None:
    trace = Trace(max_batch_tokens=8, block_size=4)
    trace.add("first", range(1, 21), max_tokens=1)
    trace.drain()
    trace.add("long", range(100, 140), max_tokens=1)
    trace.step()
    trace.add("warm", (*range(1, 21), 50, 51), max_tokens=1)
    trace.step()
    assert plans_of(trace)[-1] == (("long", 8, 6, False), ("warm", 20, 2, True))
    trace.drain()
    trace.check_answers()


def test_short_requests_start_beside_a_long_one_in_the_very_step_in_which_all_arrive() -> None:
    trace = Trace(max_batch_tokens=8)
    add_sizes(trace, long=40, short=3, second=2)
    trace.step()
    assert plans_of(trace) == [
        (("long", 0, 4, False), ("short", 0, 3, True), ("second", 0, 1, False))
    ]
    trace.drain()
    trace.check_answers()


def test_a_second_long_request_does_not_start_beside_the_first_and_stops_no_short_one() -> None:
    trace = Trace(max_batch_tokens=8)
    add_sizes(trace, long=24, other=20)
    trace.step()
    add_sizes(trace, short=4)
    trace.drain()
    assert plans_of(trace) == [
        (("long", 0, 8, False),),
        (("long", 8, 4, False), ("short", 0, 4, True)),
        (("long", 12, 8, False),),
        (("long", 20, 4, True), ("other", 0, 4, False)),
        (("other", 4, 8, False),),
        (("other", 12, 8, True),),
    ]
    trace.check_answers()


def test_of_prompts_begun_the_shortest_goes_first_and_the_longest_is_never_stopped() -> None:
    trace = Trace(max_batch_tokens=8)
    add_sizes(trace, long=60)
    trace.step()
    add_sizes(trace, middle=20)
    trace.drain()
    assert plans_of(trace)[1:5] == [
        (("long", 8, 4, False), ("middle", 0, 4, False)),
        (("middle", 4, 4, False), ("long", 12, 4, False)),
        (("middle", 8, 4, False), ("long", 16, 4, False)),
        (("middle", 12, 4, False), ("long", 20, 4, False)),
    ]


def test_a_long_request_overtaken_often_enough_starts_beside_the_first() -> None:
    trace = Trace(max_batch_tokens=8, max_overtakes=1)
    add_sizes(trace, long=40, other=30)
    trace.step()
    add_sizes(trace, short=4)
    trace.step()
    add_sizes(trace, late=2)
    trace.step()
    assert plans_of(trace)[1:] == [
        (("long", 8, 4, False), ("short", 0, 4, True)),
        (("long", 12, 4, False), ("other", 0, 2, False), ("late", 0, 2, True)),
    ]
    trace.drain()
    trace.check_answers()


@pytest.mark.parametrize("max_batch_tokens", [1, 2, 3])
def test_tiny_steps_starve_neither_long_nor_short_requests(max_batch_tokens: int) -> None:
    trace = Trace(max_batch_tokens=max_batch_tokens, policy="shortest", max_overtakes=5)
    trace.add("long", range(100, 140), max_tokens=2, ignore_eos=True)
    for index in range(60):
        trace.add(f"s{index}", (index, index + 1), max_tokens=1)
        trace.step()
    trace.drain()
    trace.check_answers()
    finished = {s.request_id for plan in trace.plans[:90] for s in plan.sequences if s.sample}
    assert max_batch_tokens == 1 or "long" in finished


# --- memory


def starts_under_pressure(schedule: str, max_overtakes: int) -> list[str]:
    """A request that needs the whole pool waits behind one that runs, while small ones keep coming."""
    trace = Trace(policy=schedule, num_blocks=8, block_size=4, max_overtakes=max_overtakes)
    trace.add("a", (1, 2), max_tokens=6, ignore_eos=True)
    trace.step()
    trace.add("big", range(100, 124), max_tokens=8, ignore_eos=True)
    for index in range(30):
        trace.add(f"s{index}", (200 + index, 3), max_tokens=6, ignore_eos=True)
        trace.step()
    trace.drain()
    trace.check_answers()
    return trace.started


@pytest.mark.parametrize("schedule", ["shortest", "prefix", "fair"])
@pytest.mark.parametrize("max_overtakes", [0, 1, 7])
def test_what_fits_passes_what_does_not_as_often_as_the_bound_allows(
    schedule: str, max_overtakes: int
) -> None:
    started = starts_under_pressure(schedule, max_overtakes)
    assert started.index("big") == 1 + max_overtakes


@pytest.mark.parametrize("schedule", ["fcfs", "static"])
def test_under_fcfs_and_static_nothing_passes_what_does_not_fit(schedule: str) -> None:
    assert starts_under_pressure(schedule, 7)[:2] == ["a", "big"]


def test_what_was_found_before_is_not_looked_up_again() -> None:
    trace = Trace(policy="shortest", num_blocks=8, block_size=4)
    trace.add("runs", range(1, 9), max_tokens=17, ignore_eos=True)
    trace.step()
    for index in range(40):
        trace.add(f"big{index}", (100 + index, 2), max_tokens=20)
    before = trace.scheduler.stats().num_lookups
    trace.step()
    # What was found when they arrived is still true.
    assert trace.scheduler.stats().num_lookups == before
    trace.drain()
    trace.check_answers()


# --- deferral


def test_many_requests_that_wait_for_one_block_cost_one_lookup_a_plan() -> None:
    trace = Trace(max_batch_tokens=8, block_size=4, num_blocks=400, max_running=150)
    for index in range(100):
        trace.add(f"r{index}", (*range(1, 41), 50 + index), max_tokens=1)
    for _ in range(4):
        trace.step()
    stats = trace.scheduler.stats()
    # The first one, the second one, and one a plan for all that wait.
    assert stats.num_lookups == 2 + 3
    assert stats.num_deferred_admissions == 4 * 99
    trace.drain()
    assert trace.scheduler.stats().num_scheduled_tokens == 40 + 100
    trace.check_answers()


def test_requests_that_part_ways_are_woken_when_their_own_blocks_are_there() -> None:
    trace = Trace(max_batch_tokens=8, block_size=4)
    trace.add("first", range(1, 25), max_tokens=1)
    trace.add("same", range(1, 25), max_tokens=1)
    trace.add("parts", (*range(1, 9), 50, 51), max_tokens=1)
    trace.add("tail", (*range(1, 9), 11), max_tokens=1)
    trace.drain()
    starts = dict.fromkeys(trace.records)
    for index, plan in enumerate(plans_of(trace)):
        for name, start, _, _ in plan:
            if starts[name] is None:
                starts[name] = (index, start)
    assert starts == {"first": (0, 0), "parts": (1, 8), "tail": (1, 8), "same": (4, 23)}
    trace.check_answers()


def test_a_deferred_request_starts_first_when_its_turn_has_come_whoever_passed_meanwhile() -> None:
    """Deferral with aging: what starts while it waits for its own blocks is beyond the bound, and nothing later is."""
    trace = Trace(
        policy="shortest", max_overtakes=2, max_batch_tokens=8, block_size=4, num_blocks=100
    )
    trace.add("first", range(1, 41), max_tokens=1)
    trace.add("same", (*range(1, 41), 50, 51, 52), max_tokens=1)
    trace.step()
    for index in range(4):
        trace.add(f"s{index}", (200 + index, 3), max_tokens=1)
        trace.step()
    assert "s3" in trace.started
    assert "same" not in trace.started
    rows = {row.request_id: row for row in trace.scheduler.snapshot()}
    assert rows["same"].num_overtakes == 4
    trace.finish("first")
    # Nothing computes its blocks any more; it needs more of a step than `s4`, and does not wait any longer.
    trace.add("s4", (300, 3), max_tokens=1)
    trace.step()
    assert trace.started[-2:] == ["same", "s4"]
    trace.drain()
    trace.check_answers()


# --- everybody, under load


@pytest.mark.parametrize("schedule", ALL)
def test_nobody_starves_under_a_stream_of_favoured_requests(schedule: str) -> None:
    trace = Trace(
        policy=schedule, num_blocks=24, block_size=4, max_batch_tokens=16, max_overtakes=10
    )
    trace.add("first", range(1, 13), max_tokens=2)
    trace.drain()
    trace.add("victim", range(100, 150), max_tokens=8, ignore_eos=True, tenant="poor")
    steps = 0
    while trace.records["victim"].finish_reason is None:
        # Warm, short, and more than can be served.
        for index in range(3):
            trace.add(
                f"s{steps}.{index}", (*range(1, 13), steps % 30), max_tokens=4, ignore_eos=True
            )
        trace.step()
        steps += 1
        assert steps < 100
    assert trace.records["victim"].finish_reason is FinishReason.LENGTH
    trace.drain()
    trace.check_answers()


def jain(values: list[int]) -> float:
    """Return Jain's index: 1 for equal shares, 1/n when one has everything."""
    return sum(values) ** 2 / (len(values) * sum(value**2 for value in values))


def shares(schedule: str) -> list[int]:
    """One tenant floods the queue, another sends as much as is served; return what each got while both had work."""
    generator = random.Random(0)
    trace = Trace(policy=schedule, num_blocks=64, block_size=4, max_batch_tokens=16, max_running=4)

    def add(name: str, tenant: str) -> None:
        prompt = [generator.randrange(1000) for _ in range(generator.randint(4, 20))]
        num_output = generator.randint(1, 8)
        trace.add(name, prompt, tenant=tenant, max_tokens=num_output, ignore_eos=True)

    for index in range(200):
        add(f"flood{index}", "flood")
    computed = {"flood": 0, "calm": 0}
    num_calm = 0
    for _ in range(120):
        waiting = [r.tenant for r in trace.scheduler.snapshot() if r.num_held_blocks == 0]
        for _ in range(2 - waiting.count("calm")):
            add(f"calm{num_calm}", "calm")
            num_calm += 1
        plan = trace.step()
        for sequence in plan.sequences:
            tenant = "flood" if sequence.request_id.startswith("flood") else "calm"
            computed[tenant] += len(sequence.token_ids)
    trace.drain()
    trace.check_answers()
    return list(computed.values())


def test_fair_gives_two_tenants_equal_shares_whatever_they_send() -> None:
    assert jain(shares("fair")) > 0.99
    assert jain(shares("fcfs")) < 0.6


def test_what_an_engine_of_a_thousand_waiting_requests_looks_up_in_a_plan_is_bounded() -> None:
    for schedule in ALL:
        trace = Trace(policy=schedule, num_blocks=64, block_size=4, max_batch_tokens=16)
        generator = random.Random(1)
        documents = [[generator.randrange(1000) for _ in range(20)] for _ in range(20)]
        for index in range(1000):
            prompt = (*generator.choice(documents)[: generator.randint(4, 20)], index)
            trace.add(f"r{index}", prompt, max_tokens=4, ignore_eos=True)
        for _ in range(30):
            stats = trace.scheduler.stats()
            trace.step()
            now = trace.scheduler.stats()
            num_started = len(trace.started)
            groups = len(trace.scheduler._waiting.queue.groups)
            assert now.num_lookups - stats.num_lookups <= 8 + 2 * 16 + 2 * groups + 16, schedule
        assert num_started > 20
        for name in list(trace.records):
            trace.finish(name)
