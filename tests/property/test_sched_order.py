"""Whatever the order of starting: equal answers, bounded overtakes, and no request lost when memory fails."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.property.test_sched_traces import Call, CallMaker, add_call, answers, check_books
from tests.support.allocations import CONTROL_PLANE, SLABS, Failures, Site
from tests.support.sched_trace import VOCAB_SIZE, FakeRunner, Trace

from kvist.errors import EngineOverloaded
from kvist.kernels import native
from kvist.sched import policy
from kvist.types import FinishReason, Keep

ALL = tuple(policy.POLICIES)
SECOND = 10**9


@pytest.mark.parametrize("seed", range(2))
def test_answers_do_not_depend_on_the_order(seed: int) -> None:
    maker = CallMaker(random.Random(seed), max_prompt_len=30, max_output=20)
    calls = [maker.call() for _ in range(15)]
    options: list[dict[str, Any]] = [
        {"block_size": 4, "num_blocks": 30, "max_batch_tokens": 7},
        {"block_size": 4, "max_running": 2, "max_overtakes": 2},
        {"block_size": 7, "num_blocks": 9},
    ]
    first, *others = (
        answers(Trace(max_context_len=60, policy=name, **option), calls)
        for option in options
        for name in ALL
    )
    for other in others:
        assert other == first


ARRIVALS = st.lists(
    st.tuples(
        st.lists(st.integers(1, 2), min_size=1, max_size=14),
        st.integers(1, 6),
        st.integers(-1, 1),
        st.sampled_from("xyz"),
        st.integers(0, 2),
    ),
    max_size=25,
)


@settings(max_examples=200, deadline=None)
@given(
    arrivals=ARRIVALS,
    schedule=st.sampled_from(ALL),
    max_overtakes=st.integers(0, 4),
    num_blocks=st.integers(0, 6),
    max_batch_tokens=st.sampled_from([1, 2, 5, 16]),
    max_running=st.integers(1, 4),
)
def test_nobody_is_overtaken_more_often_than_stated(
    arrivals: list[tuple[list[int], int, int, str, int]],
    schedule: str,
    max_overtakes: int,
    num_blocks: int,
    max_batch_tokens: int,
    max_running: int,
) -> None:
    """The bound is checked by the trace after each plan, by going through everybody who waits."""
    trace = Trace(
        num_blocks=10 + num_blocks,
        block_size=2,
        max_batch_tokens=max_batch_tokens,
        max_running=max_running,
        max_overtakes=max_overtakes,
        policy=schedule,
    )
    for index, (prompt, num_output, priority, tenant, num_steps) in enumerate(arrivals):
        trace.add(
            str(index),
            prompt,
            max_tokens=num_output,
            tenant=tenant,
            priority=0 if schedule == "static" else priority,
        )
        for _ in range(num_steps):
            trace.step()
    trace.drain()
    trace.check_answers()
    check_books(trace)


MIXED = "sink=raw16,recent:6=raw16,rest=int8"
"""Two codecs: blocks are allocated, demoted and copied by the arena."""
PRECISIONS = [
    None,
    pytest.param(
        MIXED,
        marks=pytest.mark.skipif(
            not native.available(), reason="the native kernels were not built"
        ),
    ),
]
RUNNER = (Site(FakeRunner, "_write"), Site(FakeRunner, "_sample"))
COPIES = (Site(FakeRunner, "run"),)
"""The step fails before the copies of its plan are carried out."""


def add_one(trace: Trace, name: str, call: Call, generator: random.Random) -> None:
    trace.add(
        name,
        call.prompt,
        params=call.params,
        tenant=call.tenant,
        seed=call.seed,
        priority=0 if trace.policy.is_batched else generator.choice([0, 0, 0, -1, 3]),
        deadline_s=generator.choice([None, None, None, 0.05, 1.0]),
        keep=generator.choice([None, None, Keep(ttl_s=1.0)]),
    )


def run_against_failures(
    num_requests: int,
    schedule: str,
    precision: str | None,
    *,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every request is answered, or ends with a reason, whichever allocations fail, and nothing is left behind."""
    generator = random.Random(seed)
    trace = Trace(
        num_blocks=16,
        block_size=4,
        max_batch_tokens=24,
        max_running=8,
        max_queue=24,
        max_context_len=48,
        reserve_tokens=2,
        policy=schedule,
        max_overtakes=20,
        precision=precision,
    )
    sites = (*CONTROL_PLANE, *RUNNER, *(COPIES if precision is None else SLABS))
    failures = Failures(sites, generator, monkeypatch)
    maker = CallMaker(generator, max_prompt_len=24, max_output=16)
    retry_after_s: list[float] = []
    num_added = 0
    waited: dict[str, int] = {}

    def disturb() -> None:
        if generator.random() < 0.02 and (names := list(trace.scheduler._requests)):
            trace.finish(generator.choice(names))
        if generator.random() < 0.02 and (running := trace.scheduler._running.requests):
            trace.scheduler.preempt(generator.choice(running).request_id)

    while num_added < num_requests or trace.scheduler.has_work:
        trace.now_ns += SECOND // 100
        for _ in range(generator.choice([0, 0, 1, 2]) * (num_added < num_requests)):
            num_added += 1
            try:
                with failures.storm(0.03):
                    add_one(trace, str(num_added), maker.call(), generator)
            except EngineOverloaded as error:
                retry_after_s.append(error.retry_after_s)
        disturb()
        # Mostly a failure now and then, sometimes nothing goes at all for a while.
        rate = 1.0 if trace.now_ns // (SECOND // 10) % 15 == 7 else 0.03
        with failures.storm(rate):
            if trace.scheduler.has_work:
                trace.step(before_run=disturb, before_apply=disturb)
        if num_added % 50 == 0:
            trace.scheduler.snapshot()
            trace.check_arena()
        for name in trace.scheduler._requests:
            waited[name] = waited.get(name, 0) + 1
    trace.step()
    trace.check_answers()
    stats = trace.scheduler.stats()
    assert stats.num_finished == len(trace.records)
    assert all(record.finish_reason is not None for record in trace.records.values())
    assert trace.manager.num_held == trace.manager.num_reserved == stats.num_waiting_tokens == 0
    trace.check_arena()
    # Nobody starves: of 24 that may wait, each gets its turn.
    assert max(waited.values()) < 1500
    # Everything that the run is there for did happen.
    assert all(failures.num_failures.values()), failures.num_failures
    reasons = {record.finish_reason for record in trace.records.values()}
    assert reasons == set(FinishReason)
    assert len(retry_after_s) > 5
    assert 1 <= min(retry_after_s) <= max(retry_after_s) <= 60
    assert stats.num_preemptions > 5


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("schedule", ALL)
def test_requests_survive_allocations_that_fail(
    schedule: str, precision: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_against_failures(200, schedule, precision, seed=9, monkeypatch=monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("schedule", ALL)
def test_ten_thousand_requests_survive_allocations_that_fail(
    schedule: str, precision: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_against_failures(10_000, schedule, precision, seed=6, monkeypatch=monkeypatch)


def test_the_same_arrivals_start_in_the_same_order() -> None:
    for schedule in ALL:
        orders = []
        for _ in range(2):
            generator = random.Random(3)
            trace = Trace(policy=schedule, num_blocks=32, block_size=4, max_batch_tokens=16)
            maker = CallMaker(generator, max_prompt_len=VOCAB_SIZE, max_output=8)
            for index in range(40):
                add_call(trace, str(index), maker.call())
                trace.step()
            trace.drain()
            orders.append((trace.started, trace.plans))
        assert orders[0] == orders[1]
