"""Exact plans of small traces. A sequence is written (request, start, number of tokens, whether a token is chosen)."""

from __future__ import annotations

from tests.support.sched_trace import Trace

from kvist.sched.output import BlockCopy
from kvist.types import FinishReason


def plans_of(trace: Trace) -> list[tuple[tuple[str, int, int, bool], ...]]:
    return [trace.compact_plan(plan) for plan in trace.plans]


def test_computes_a_prompt_once_then_one_token_a_step() -> None:
    trace = Trace(block_size=4)
    trace.add("a", range(1, 7), max_tokens=3, ignore_eos=True)
    trace.drain()
    assert plans_of(trace) == [
        (("a", 0, 6, True),),
        (("a", 6, 1, True),),
        (("a", 7, 1, True),),
    ]
    assert [plan.step_index for plan in trace.plans] == [0, 1, 2]
    assert [len(plan.sequences[0].block_table) for plan in trace.plans] == [2, 2, 2]
    trace.check_answers()


def test_splits_a_long_prompt_and_samples_after_its_last_chunk() -> None:
    trace = Trace(block_size=4, max_batch_tokens=8)
    trace.add("a", range(1, 21), max_tokens=2, ignore_eos=True)
    trace.drain()
    assert plans_of(trace) == [
        (("a", 0, 8, False),),
        (("a", 8, 8, False),),
        (("a", 16, 4, True),),
        (("a", 20, 1, True),),
    ]
    assert [len(plan.sequences[0].block_table) for plan in trace.plans] == [2, 4, 5, 6]


def test_running_requests_go_before_a_new_prompt_which_gets_the_rest_of_the_budget() -> None:
    trace = Trace(block_size=4, max_batch_tokens=8)
    trace.add("a", range(1, 5), max_tokens=4, ignore_eos=True)
    trace.step()
    trace.add("b", range(10, 22), max_tokens=1, ignore_eos=True)
    trace.drain()
    assert plans_of(trace) == [
        (("a", 0, 4, True),),
        (("a", 4, 1, True), ("b", 0, 7, False)),
        (("a", 5, 1, True), ("b", 7, 5, True)),
        (("a", 6, 1, True),),
    ]


def test_an_old_request_that_recomputes_does_not_hold_up_the_next_token_of_others() -> None:
    trace = Trace(block_size=4, max_batch_tokens=6, prefix_cache=False)
    trace.add("old", range(1, 11), max_tokens=4, ignore_eos=True)
    trace.step()
    trace.step()
    trace.add("new", (20, 21), max_tokens=6, ignore_eos=True)
    trace.step()
    assert trace.scheduler.preempt("old")
    del trace.plans[:]
    trace.drain()
    assert plans_of(trace) == [
        (("new", 2, 1, True), ("old", 0, 5, False)),
        (("new", 3, 1, True), ("old", 5, 5, False)),
        (("new", 4, 1, True), ("old", 10, 2, True)),
        (("old", 12, 1, True), ("new", 5, 1, True)),
        (("new", 6, 1, True),),
    ]
    trace.check_answers()


def test_a_second_identical_prompt_computes_its_last_token_only() -> None:
    trace = Trace(block_size=4)
    trace.add("a", range(1, 10), max_tokens=1)
    trace.drain()
    trace.add("b", range(1, 10), max_tokens=1)
    trace.drain()
    assert plans_of(trace) == [(("a", 0, 9, True),), (("b", 8, 1, True),)]
    assert trace.plans[1].copies == ()
    assert (
        trace.plans[1].sequences[0].block_table[:2] == trace.plans[0].sequences[0].block_table[:2]
    )
    assert trace.records["b"].usage.num_cached_tokens == 8


def test_a_partially_matching_block_is_copied_before_it_is_extended() -> None:
    trace = Trace(block_size=4)
    trace.add("a", range(1, 9), max_tokens=1)
    trace.drain()
    trace.add("b", (1, 2, 3, 4, 5, 6, 30, 31), max_tokens=1)
    trace.drain()
    (_, plan) = trace.plans
    assert trace.compact_plan(plan) == (("b", 6, 2, True),)
    source = trace.plans[0].sequences[0].block_table[1]
    target = plan.sequences[0].block_table[1]
    assert plan.copies == (BlockCopy(source=source, target=target, num_tokens=2),)


def test_siblings_compute_the_prompt_once_and_one_token_each() -> None:
    """A call with n = 4: the prompt of 11 tokens is computed once, and each sibling computes its last token only."""
    trace = Trace(block_size=4)
    for index in range(4):
        trace.add(
            f"s{index}", range(1, 12), max_tokens=3, temperature=1.0, seed=index, ignore_eos=True
        )
    trace.drain()
    assert plans_of(trace) == [
        (("s0", 0, 11, True),),
        (("s0", 11, 1, True), ("s1", 10, 1, True), ("s2", 10, 1, True), ("s3", 10, 1, True)),
        (("s0", 12, 1, True), ("s1", 11, 1, True), ("s2", 11, 1, True), ("s3", 11, 1, True)),
        (("s1", 12, 1, True), ("s2", 12, 1, True), ("s3", 12, 1, True)),
    ]
    # Two full blocks are shared, the computed head of the third is copied while its owner goes on writing it.
    owner = trace.plans[0].sequences[0].block_table
    assert [copy.source for copy in trace.plans[1].copies] == [owner[2]] * 3
    assert [copy.num_tokens for copy in trace.plans[1].copies] == [2] * 3
    usages = [record.usage for record in trace.records.values()]
    assert [usage.num_cached_tokens for usage in usages] == [0, 10, 10, 10]
    assert [usage.num_computed_tokens for usage in usages] == [13, 3, 3, 3]
    stats = trace.scheduler.stats()
    # 11 prompt positions, one of each sibling, two of each sequence's outputs.
    assert stats.num_scheduled_tokens == 11 + 3 * 1 + 4 * 2
    assert stats.num_deferred_admissions == 3
    assert len({tuple(record.token_ids) for record in trace.records.values()}) > 1
    trace.check_answers()


def test_requests_with_one_uncached_prefix_compute_it_once() -> None:
    """Same-step sharing over a prompt of several chunks: the others wait for the blocks that they have in common."""
    trace = Trace(block_size=4, max_batch_tokens=8)
    for index in range(5):
        trace.add(f"r{index}", (*range(1, 17), 20 + index), max_tokens=1)
    trace.drain()
    assert plans_of(trace) == [
        (("r0", 0, 8, False),),
        (("r0", 8, 8, False),),
        (("r0", 16, 1, True), *((f"r{index}", 16, 1, True) for index in range(1, 5))),
    ]
    assert trace.scheduler.stats().num_scheduled_tokens == 16 + 5
    trace.check_answers()


def test_a_deferred_request_does_not_block_those_behind_it() -> None:
    trace = Trace(block_size=4, max_batch_tokens=12)
    trace.add("first", range(1, 13), max_tokens=1)
    trace.add("same", range(1, 13), max_tokens=1)
    trace.add("other", range(20, 24), max_tokens=1)
    trace.drain()
    # In the first step the budget ends with `first`; `same` waits for its blocks, which are there one step later.
    assert plans_of(trace) == [
        (("first", 0, 12, True),),
        (("same", 11, 1, True), ("other", 0, 4, True)),
    ]


def test_requests_behind_a_deferred_one_start_in_the_same_step() -> None:
    trace = Trace(block_size=4, max_batch_tokens=20)
    trace.add("first", range(1, 13), max_tokens=1)
    trace.add("same", range(1, 13), max_tokens=1)
    trace.add("other", range(20, 24), max_tokens=1)
    trace.step()
    assert plans_of(trace) == [(("first", 0, 12, True), ("other", 0, 4, True))]
    assert trace.scheduler.num_waiting == 1
    trace.drain()
    assert plans_of(trace)[1] == (("same", 11, 1, True),)


def test_a_request_that_does_not_fit_blocks_smaller_ones_behind_it() -> None:
    trace = Trace(num_blocks=8, block_size=4)
    trace.add("a", range(1, 9), max_tokens=9, ignore_eos=True)  # 16 positions: 4 blocks
    trace.add("big", range(11, 23), max_tokens=9, ignore_eos=True)  # 20 positions: 5 blocks
    trace.add("small", range(30, 33), max_tokens=2, ignore_eos=True)  # 4 positions: 1 block
    trace.drain()
    starts = {}
    for index, plan in enumerate(trace.plans):
        for sequence in plan.sequences:
            starts.setdefault(sequence.request_id, index)
    assert starts == {"a": 0, "big": 9, "small": 9}
    trace.check_answers()


def test_no_more_than_max_running_hold_blocks() -> None:
    trace = Trace(max_running=2)
    for index in range(5):
        trace.add(f"r{index}", (5 * index + 1, 5 * index + 2), max_tokens=2, ignore_eos=True)
    trace.drain()
    assert [len(plan.sequences) for plan in trace.plans] == [2, 2, 2, 2, 1, 1]


def test_max_tokens_0_computes_the_prompt_and_ends() -> None:
    trace = Trace(block_size=4, max_batch_tokens=4)
    trace.add("a", range(1, 7), max_tokens=0)
    trace.drain()
    assert plans_of(trace) == [(("a", 0, 4, False),), (("a", 4, 2, False),)]
    record = trace.records["a"]
    assert record.token_ids == []
    assert record.finish_reason is FinishReason.LENGTH
    assert record.usage.num_computed_tokens == 6
    # What it computed serves the next request.
    trace.add("b", range(1, 8), max_tokens=1)
    trace.drain()
    assert plans_of(trace)[2:] == [(("b", 6, 1, True),)]


def test_without_a_kv_cache_every_token_recomputes_everything() -> None:
    trace = Trace(block_size=4, keep_kv=False, max_batch_tokens=5)
    trace.add("a", range(1, 7), max_tokens=3, ignore_eos=True)
    trace.drain()
    assert plans_of(trace) == [
        (("a", 0, 5, False),),
        (("a", 5, 1, True),),
        (("a", 0, 5, False),),
        (("a", 5, 2, True),),
        (("a", 0, 5, False),),
        (("a", 5, 3, True),),
    ]
    assert trace.records["a"].usage.num_computed_tokens == 6 + 7 + 8
    assert trace.scheduler.stats().num_recomputed_tokens == 6 + 7
    assert trace.manager.num_free == trace.num_blocks
    trace.check_answers()


def test_growth_without_max_tokens_preempts_the_youngest_which_resumes_before_new_ones() -> None:
    # 4 blocks of 2. Reserved at admission: 2 prompt tokens and 2 outputs, 3 positions, 2 blocks each.
    trace = Trace(
        num_blocks=4, block_size=2, reserve_tokens=2, prefix_cache=False, max_context_len=7
    )
    trace.add("old", (1, 2), eos=frozenset())
    trace.add("young", (11, 12), eos=frozenset())
    trace.add("new", (21, 22), eos=frozenset())
    trace.drain()
    assert plans_of(trace)[:5] == [
        (("old", 0, 2, True), ("young", 0, 2, True)),
        (("old", 2, 1, True), ("young", 2, 1, True)),
        (("old", 3, 1, True), ("young", 3, 1, True)),
        # Position 4 needs a third block: `young` gives way, and `new` does not pass it.
        (("old", 4, 1, True),),
        (("old", 5, 1, True),),
    ]
    assert plans_of(trace)[5][0] == ("young", 0, 5, True)
    assert trace.records["young"].usage.num_preemptions == 1
    assert trace.records["old"].usage.num_preemptions == 0
    stats = trace.scheduler.stats()
    assert stats.num_preemptions == 1
    # 2 prompt tokens and 2 outputs had been computed; the third output had only been chosen.
    assert stats.num_recomputed_tokens == 4
    trace.check_answers()


def test_the_youngest_gives_way_itself_and_goes_on_later() -> None:
    # `first` has its whole footprint reserved: 6 positions, 3 of 5 blocks. `second` gets 2 and then wants a third.
    trace = Trace(num_blocks=5, block_size=2, reserve_tokens=2, max_context_len=7)
    trace.add("first", (1, 2), max_tokens=5, ignore_eos=True)
    trace.add("second", (11, 12), eos=frozenset())
    trace.drain()
    assert trace.records["first"].usage.num_preemptions == 0
    assert trace.records["second"].usage.num_preemptions == 1
    assert [len(plan.sequences) for plan in trace.plans][:5] == [2, 2, 2, 1, 1]
    trace.check_answers()


def test_a_victim_that_is_in_the_plan_already_leaves_it() -> None:
    """`mid` has just begun what it reserved, so it is the cheapest to recompute when `young` needs a block."""
    trace = Trace(num_blocks=17, block_size=1, reserve_tokens=1, max_context_len=17)
    trace.add("old", (1,), max_tokens=9, ignore_eos=True)
    trace.add("mid", (2,), max_tokens=5, ignore_eos=True)
    trace.add("young", (3, 4, 5), eos=frozenset())
    trace.step()
    trace.step()
    assert plans_of(trace) == [
        (("old", 0, 1, True), ("mid", 0, 1, True), ("young", 0, 3, True)),
        (("old", 1, 1, True), ("young", 3, 1, True)),
    ]
    trace.drain()
    trace.check_answers()


def test_a_preempted_request_resumes_before_an_older_one_that_never_ran() -> None:
    trace = Trace(block_size=4, max_running=2)
    trace.add("first", range(1, 10), max_tokens=4, ignore_eos=True)
    trace.add("deferred", range(1, 10), max_tokens=4, ignore_eos=True)
    trace.add("third", (20, 21), max_tokens=4, ignore_eos=True)
    trace.step(before_apply=lambda: trace.scheduler.preempt("third"))
    trace.step()
    assert plans_of(trace) == [
        (("first", 0, 9, True), ("third", 0, 2, True)),
        (("first", 9, 1, True), ("third", 0, 2, True)),
    ]
    trace.drain()
    trace.check_answers()
