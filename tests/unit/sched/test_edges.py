"""Deadlines, status, the time to retry after, and allocations that fail."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.support.sched_trace import Trace

from kvist.errors import EngineOverloaded
from kvist.sched.request import RequestStatus
from kvist.types import FinishReason

if TYPE_CHECKING:
    from collections.abc import Callable

SECOND = 10**9
NO_EOS: frozenset[int] = frozenset()


def out_of_memory(*_: object, **__: object) -> None:
    raise MemoryError


# --- deadlines


def test_a_waiting_request_ends_at_its_deadline() -> None:
    trace = Trace(max_running=1)
    trace.add("a", (1, 2), max_tokens=9, ignore_eos=True)
    trace.now_ns = 5 * SECOND
    trace.add("b", (3, 4), max_tokens=9, deadline_s=2.0)
    trace.step()
    trace.now_ns = 7 * SECOND - 1
    trace.step()
    assert trace.records["b"].finish_reason is None
    trace.now_ns = 7 * SECOND
    (update,) = trace.scheduler.take_ended()
    trace.take(update)
    assert update.finish_reason is FinishReason.TIMEOUT
    assert update.token_ids == ()
    assert update.usage.num_output_tokens == 0
    assert trace.scheduler.take_ended() == ()
    assert trace.scheduler.stats().num_timeouts == 1
    trace.drain()
    trace.check_answers()


def test_a_running_request_ends_at_its_deadline_and_keeps_its_output() -> None:
    trace = Trace(block_size=4)
    trace.add("a", (1, 2), max_tokens=9, ignore_eos=True, deadline_s=1.0)
    trace.step()
    trace.step()
    trace.now_ns = SECOND
    assert trace.step() is None
    record = trace.records["a"]
    assert record.finish_reason is FinishReason.TIMEOUT
    assert len(record.token_ids) == 2
    assert trace.manager.num_held == 0
    trace.check_answers()


def test_a_preempted_and_a_parked_request_end_at_their_deadlines() -> None:
    trace = Trace(block_size=4, max_batch_tokens=8)
    trace.add("a", range(1, 20), max_tokens=9, ignore_eos=True, deadline_s=1.0)
    trace.add("b", range(1, 20), max_tokens=9, ignore_eos=True, deadline_s=1.0)
    trace.step(before_apply=lambda: trace.scheduler.preempt("a"))
    trace.now_ns = SECOND
    assert trace.step() is None
    assert not trace.scheduler.has_work
    assert trace.scheduler.stats().num_timeouts == 2


def test_a_request_that_ended_in_time_has_no_deadline_any_more() -> None:
    trace = Trace()
    trace.add("a", (1, 2), max_tokens=1, deadline_s=1.0)
    trace.drain()
    trace.now_ns = 2 * SECOND
    assert trace.scheduler.take_ended() == ()
    assert trace.records["a"].finish_reason is FinishReason.LENGTH


# --- status


def test_a_snapshot_shows_where_each_request_stands() -> None:
    trace = Trace(block_size=4, max_running=2, max_batch_tokens=8, policy="shortest")
    trace.add("cached", range(1, 9), max_tokens=1)
    trace.drain()
    trace.add("running", (1, 2, 3, 4, 50, 51), max_tokens=7, ignore_eos=True)
    trace.add("preempted", (60, 61), max_tokens=5, ignore_eos=True, tenant="x")
    trace.step()
    assert trace.scheduler.preempt("preempted")
    trace.now_ns = 3 * SECOND
    trace.add("waiting", (*range(1, 9), 70), max_tokens=5, priority=2, deadline_s=4.0)
    trace.now_ns = 4 * SECOND
    running, preempted, waiting = trace.scheduler.snapshot()
    assert running.request_id == "running"
    assert running.status is RequestStatus.RUNNING
    assert (running.num_prompt_tokens, running.num_output_tokens) == (6, 1)
    assert (running.num_prefill_tokens, running.num_held_blocks) == (1, 2)
    assert running.num_footprint_blocks == 3
    assert (running.age_s, running.deadline_in_s, running.arrival_index) == (4.0, None, 1)
    assert preempted.status is RequestStatus.PREEMPTED
    assert (preempted.num_prefill_tokens, preempted.num_held_blocks) == (3, 0)
    assert (preempted.num_preemptions, preempted.tenant) == (1, "x")
    assert waiting.status is RequestStatus.WAITING
    assert (waiting.num_prefill_tokens, waiting.num_footprint_blocks) == (1, 4)
    assert (waiting.priority, waiting.num_overtakes, waiting.deadline_in_s) == (2, 0, 3.0)
    trace.drain()
    assert trace.scheduler.snapshot() == ()


# --- a full queue


def test_a_refused_client_is_told_how_long_the_queue_takes() -> None:
    trace = Trace(max_queue=2, max_running=1, max_batch_tokens=100)
    trace.add("runs", range(100), max_tokens=9, ignore_eos=True)

    def pass_time() -> None:
        trace.now_ns += 10 * SECOND

    trace.step(before_apply=pass_time)  # 100 positions in 10 s
    trace.add("a", range(100, 140), max_tokens=1)
    trace.add("b", range(200, 250), max_tokens=11)
    assert trace.scheduler.stats().num_waiting_tokens == 40 + 60
    with pytest.raises(EngineOverloaded) as error:
        trace.add("c", (1,), max_tokens=1)
    assert error.value.retry_after_s == pytest.approx(10.0)
    trace.finish("b")
    assert trace.scheduler.retry_after_s() == pytest.approx(4.0)
    trace.finish("a")
    assert trace.scheduler.retry_after_s() == 1.0
    trace.drain()
    assert trace.scheduler.stats().num_waiting_tokens == 0


# --- allocations that fail


@pytest.mark.parametrize("schedule", ["fcfs", "shortest"])
def test_no_memory_for_a_prompt_is_overload(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = Trace(policy=schedule)
    monkeypatch.setattr(trace.manager, "new_chain", out_of_memory)
    with pytest.raises(EngineOverloaded, match=r"no memory is left .* \(2\); retry later"):
        trace.add("a", (1, 2), max_tokens=1)
    assert not trace.scheduler.has_work


def refuse(*_: object, **__: object) -> None:
    return None


FAILURES: dict[str, Callable[..., object]] = {"refuses": refuse, "raises": out_of_memory}


@pytest.mark.parametrize("how", FAILURES)
@pytest.mark.parametrize("site", ["admit", "extend", "allocate"])
def test_an_allocation_that_fails_for_a_while_delays_and_harms_nobody(
    site: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (site, how) == ("allocate", "refuses"):
        pytest.skip("the pool has no way of refusing but to raise")
    trace = Trace(block_size=4)
    trace.add("before", range(1, 9), max_tokens=1)
    trace.drain()
    trace.add("a", (*range(1, 7), 50), max_tokens=6, ignore_eos=True)  # begins with a copy
    trace.add("b", range(20, 30), max_tokens=3, ignore_eos=True)
    owner = trace.manager._pool if site == "allocate" else trace.manager
    kind = type(owner)
    with monkeypatch.context() as patch:
        patch.setattr(kind, site, FAILURES[how])
        for _ in range(3):
            assert trace.step() is None
    assert trace.scheduler.stats().num_failed_allocations == 3
    assert trace.manager.num_held == 0
    trace.step()
    with monkeypatch.context() as patch:
        patch.setattr(kind, site, FAILURES[how])
        for _ in range(3):
            trace.step()
    trace.drain()
    trace.check_answers()
    assert trace.scheduler.stats().num_refused == 0


def test_running_requests_are_not_preempted_for_an_allocation_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trace = Trace(block_size=1, max_batch_tokens=2)
    trace.add("a", (1, 2, 3), max_tokens=3, ignore_eos=True)
    trace.add("b", (4, 5, 6), max_tokens=3, ignore_eos=True)
    trace.step()
    with monkeypatch.context() as patch:
        patch.setattr(trace.manager, "extend", out_of_memory)
        assert trace.step() is None
    trace.drain()
    assert trace.scheduler.stats().num_preemptions == 0
    assert trace.scheduler.stats().num_pauses > 0
    trace.check_answers()


def test_after_many_plans_without_memory_the_first_request_is_refused_and_the_next_has_its_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trace = Trace(block_size=4)
    trace.add("a", (1, 2), max_tokens=2, ignore_eos=True)
    trace.add("b", (3, 4), max_tokens=2, ignore_eos=True)
    with monkeypatch.context() as patch:
        patch.setattr(trace.manager, "admit", refuse)
        for _ in range(8):
            assert trace.step() is None
    trace.drain()
    assert trace.records["a"].finish_reason is FinishReason.ERROR
    assert trace.records["b"].finish_reason is FinishReason.LENGTH
    assert trace.scheduler.stats().num_refused == 1


def test_after_many_steps_without_memory_a_running_request_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trace = Trace(block_size=1, max_batch_tokens=2)
    trace.add("a", (1, 2, 3), max_tokens=3, ignore_eos=True)
    trace.step()
    with monkeypatch.context() as patch:
        patch.setattr(trace.manager, "extend", refuse)
        for _ in range(8):
            assert trace.step() is None
    trace.drain()
    assert trace.records["a"].finish_reason is FinishReason.ERROR
    assert trace.manager.num_held == 0
