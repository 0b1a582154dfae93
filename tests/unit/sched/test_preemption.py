"""Who gives way, that it costs the least, and that everybody still ends."""

from __future__ import annotations

import itertools

import pytest
from tests.support.sched_trace import Trace

from kvist.sched.preemption import choose_victim
from kvist.sched.request import RequestStatus

NO_EOS: frozenset[int] = frozenset()


def victim(trace: Trace, requester: str) -> str | None:
    requests = trace.scheduler._running.requests
    chosen = choose_victim(trace.records[requester].request, requests, trace.manager.block_size)
    return None if chosen is None else chosen.request_id


def leave_all(trace: Trace) -> None:
    for name in trace.records:
        trace.finish(name)


def test_the_victim_recomputes_least_for_each_block_it_frees() -> None:
    trace = Trace(block_size=4)
    trace.add("old", (1, 2), eos=NO_EOS)
    trace.add("full", range(10, 26), max_tokens=1 + 4, ignore_eos=True)  # 16 tokens lost, 5 blocks
    trace.add("begun", range(30, 34), max_tokens=1 + 12, ignore_eos=True)  # 4 tokens lost, 4 blocks
    trace.add("asks", range(40, 48), eos=NO_EOS)  # 8 tokens lost, 4 blocks
    trace.step()
    assert victim(trace, "asks") == "begun"
    leave_all(trace)


def test_shared_blocks_cost_nothing_and_free_nothing() -> None:
    trace = Trace(block_size=4)
    trace.add("old", (1, 2), eos=NO_EOS)
    trace.add("first", range(10, 22), max_tokens=5, ignore_eos=True)
    trace.step()
    # `first` has but its last block to itself: one token for one block. Of `second` it is 4 for 2, of `alone` 16 for 5.
    trace.add("second", (*range(10, 22), 50, 51, 52, 53), max_tokens=5, ignore_eos=True)
    trace.add("alone", range(60, 76), max_tokens=5, ignore_eos=True)
    trace.step()
    assert victim(trace, "alone") == "first"
    trace.finish("second")
    # Now it has all four to itself, with 13 tokens.
    assert victim(trace, "alone") == "alone"
    leave_all(trace)


def test_one_that_frees_nothing_comes_last_and_is_still_a_choice() -> None:
    trace = Trace(block_size=4)
    trace.add("old", range(1, 10), max_tokens=0)
    trace.step()
    trace.add("old", range(1, 9), max_tokens=1)
    trace.add("same", range(1, 9), max_tokens=1)
    trace.scheduler.plan()
    (old, same) = trace.scheduler._running.requests
    same.lease.num_reserved_units, kept = 0, same.lease.num_reserved_units
    blocks, same.lease.blocks = same.lease.blocks, []
    assert choose_victim(same, [old, same], 4) is same
    same.lease.num_reserved_units, same.lease.blocks = kept, blocks
    leave_all(trace)


def test_of_equals_the_youngest_gives_way_and_never_the_oldest() -> None:
    trace = Trace(block_size=4)
    for name in "abc":
        trace.add(name, (ord(name), 2), eos=NO_EOS)
    trace.step()
    assert [victim(trace, name) for name in "abc"] == ["c", "c", "c"]
    trace.finish("c")
    trace.finish("b")
    assert victim(trace, "a") is None
    leave_all(trace)


def test_a_more_important_request_is_not_preempted_for_a_less_important_one() -> None:
    trace = Trace(block_size=4)
    for name, priority in (("a", 0), ("b", 1), ("c", -1)):
        trace.add(name, (ord(name), 2), eos=NO_EOS, priority=priority)
    trace.step()
    assert [victim(trace, name) for name in "abc"] == ["b", "b", "c"]
    trace.finish("b")
    assert victim(trace, "a") is None
    leave_all(trace)


def test_nobody_is_preempted_twice_without_a_token_in_between() -> None:
    trace = Trace(block_size=4, max_batch_tokens=8, prefix_cache=False)
    trace.add("a", (1, 2), eos=NO_EOS)
    trace.add("b", range(10, 30), eos=NO_EOS)
    for _ in range(4):
        trace.step()
    assert victim(trace, "a") == "b"
    assert trace.scheduler.preempt("b")
    trace.step()
    b = trace.records["b"].request
    assert b.status is RequestStatus.RUNNING
    assert victim(trace, "a") is None
    while not b.has_progressed:
        trace.step()
    assert victim(trace, "a") == "b"
    leave_all(trace)


def test_a_request_pauses_while_nobody_can_give_way() -> None:
    """`old` needs a block while `young`, preempted just before, computes its prompt again and has no token out yet."""
    trace = Trace(
        num_blocks=20, block_size=1, reserve_tokens=1, max_batch_tokens=3, prefix_cache=False
    )
    trace.add("old", (1,), eos=NO_EOS)
    trace.add("young", range(10, 20), eos=NO_EOS)
    young = trace.records["young"].request
    while not young.num_output_tokens:
        trace.step()
    assert trace.scheduler.preempt("young")
    while not young.has_progressed:
        trace.step()
    num_pauses = trace.scheduler.stats().num_pauses
    assert num_pauses > 0
    assert [s.request_id for s in trace.plans[-1].sequences] == ["young"]
    trace.step()
    assert young.status is RequestStatus.PREEMPTED
    trace.drain()
    assert trace.scheduler.stats().num_pauses == num_pauses
    assert trace.records["old"].usage.num_preemptions == 0
    trace.check_answers()


def test_nobody_is_admitted_while_a_running_request_pauses() -> None:
    trace = Trace(num_blocks=6, block_size=1, reserve_tokens=1, max_context_len=7)
    trace.add("old", (1,), eos=NO_EOS, priority=1)
    trace.add("vip", (2, 3), max_tokens=4, ignore_eos=True)  # 5 of 6 positions: `old` cannot grow
    trace.step()
    trace.finish("vip")
    trace.add("vip", (2, 3), max_tokens=4, ignore_eos=True)
    trace.step()
    trace.add("tiny", (4,), max_tokens=1)
    paused = []
    while trace.records["old"].finish_reason is None:
        pauses = trace.scheduler.stats().num_pauses
        trace.step()
        if trace.scheduler.stats().num_pauses > pauses:
            paused.append(trace.records["tiny"].request.status)
    assert set(paused) <= {RequestStatus.WAITING}
    trace.drain()
    trace.check_answers()


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize(
    ("num_blocks", "block_size"), list(itertools.product([9, 13, 20], [1, 2, 4]))
)
def test_growing_requests_all_end_with_less_recomputation_than_outputs_allow(
    num_blocks: int, block_size: int, prefix_cache: bool
) -> None:
    trace = Trace(
        num_blocks=num_blocks,
        block_size=block_size,
        reserve_tokens=1,
        max_batch_tokens=4,
        prefix_cache=prefix_cache,
        max_context_len=30,
    )
    for index in range(8):
        trace.add(f"r{index}", (index, 1, 2), eos=NO_EOS, priority=index % 2)
    trace.drain()
    trace.check_answers()
    for record in trace.records.values():
        assert record.usage.num_preemptions <= record.usage.num_output_tokens
    assert trace.records["r0"].usage.num_preemptions == 0
    stats = trace.scheduler.stats()
    recomputed = sum(
        r.usage.num_computed_tokens - (r.request.num_tokens - 1 - r.usage.num_cached_tokens)
        for r in trace.records.values()
    )
    assert stats.num_recomputed_tokens >= recomputed
