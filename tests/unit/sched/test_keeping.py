"""Prompts that are to stay: when they are kept, for how long, and what the request is told."""

from __future__ import annotations

import pytest
from tests.support.sched_trace import Trace

from kvist.types import Keep

PROMPT = range(1, 11)
"""Two whole blocks of four tokens, and two tokens more."""
HOUR = Keep(ttl_s=3600.0)
PINNED = Keep(ttl_s=3600.0, is_pinned=True)


def usage(trace: Trace, name: str) -> tuple[int | None, int | None]:
    found = trace.records[name].usage
    assert found is not None
    return found.num_retained_tokens, found.num_pinned_tokens


def sweep(trace: Trace) -> None:
    """Let more one-off prompts pass than the pool holds, one after another, which leaves room for what is kept."""
    for index in range(20):
        trace.add(
            f"sweep-{index}-{trace.now_ns}", range(100 + 20 * index, 112 + 20 * index), max_tokens=1
        )
        trace.drain()


def hit_len(trace: Trace) -> int:
    chain = trace.manager.new_chain(trace.records["a"].request.namespace, PROMPT)
    return trace.manager.match(chain, 8).num_hit_tokens


@pytest.mark.parametrize(
    ("keep", "told", "expected"),
    [(None, (None, None), 0), (HOUR, (8, None), 8), (PINNED, (0, 8), 8)],
)
def test_a_kept_prompt_outlives_what_passes_through(
    keep: Keep | None, told: tuple[int | None, int | None], expected: int
) -> None:
    trace = Trace(num_blocks=12, pin_fraction=0.5)
    trace.add("a", PROMPT, max_tokens=1, keep=keep)
    trace.drain()
    assert usage(trace, "a") == told
    sweep(trace)
    assert hit_len(trace) == expected


@pytest.mark.parametrize("keep", [HOUR, PINNED])
def test_it_goes_like_others_when_its_time_is_over(keep: Keep) -> None:
    trace = Trace(num_blocks=12, pin_fraction=0.5)
    trace.add("a", PROMPT, max_tokens=1, keep=keep)
    trace.drain()
    trace.now_ns = 3601 * 10**9
    sweep(trace)
    assert hit_len(trace) == 0
    assert trace.manager.num_pinned == 0


def test_a_prompt_is_kept_when_it_is_computed_and_not_when_the_answer_ends() -> None:
    trace = Trace(max_batch_tokens=6, pin_fraction=0.5)
    trace.add("a", PROMPT, max_tokens=9, ignore_eos=True, keep=PINNED)
    trace.step()
    assert trace.manager.num_pinned == 0
    trace.step()
    assert trace.manager.num_pinned == 2
    trace.drain()


def test_a_prompt_without_output_is_kept_too() -> None:
    trace = Trace(pin_fraction=0.5)
    trace.add("a", PROMPT, max_tokens=0, keep=PINNED)
    trace.drain()
    assert usage(trace, "a") == (0, 8)


def test_less_than_a_block_is_nothing_to_keep() -> None:
    trace = Trace(pin_fraction=0.5)
    trace.add("a", (1, 2, 3), max_tokens=1, keep=PINNED)
    trace.drain()
    assert usage(trace, "a") == (0, 0)


def test_a_pin_without_room_in_the_budget_becomes_a_ttl_and_says_so() -> None:
    trace = Trace(num_blocks=12, pin_fraction=0.25)
    trace.add("a", PROMPT, max_tokens=1, keep=PINNED)
    trace.add("b", range(50, 60), max_tokens=1, keep=PINNED)
    trace.drain()
    assert usage(trace, "a") == (0, 8)
    assert usage(trace, "b") == (8, 0)


def test_asking_again_replaces_the_pin_and_the_later_end_holds() -> None:
    trace = Trace(pin_fraction=0.5)
    for index, ttl_s in enumerate((10.0, 30.0, 20.0)):
        trace.add(str(index), PROMPT, max_tokens=1, keep=Keep(ttl_s=ttl_s, is_pinned=True))
        trace.drain()
        assert len(trace.manager._pins) == 1
        assert usage(trace, str(index)) == (0, 8)
    trace.now_ns = 25 * 10**9
    assert trace.manager.stats().num_pinned == 2
    trace.now_ns = 31 * 10**9
    assert trace.manager.stats().num_pinned == 0


def test_a_prompt_that_is_computed_again_after_a_preemption_is_kept_once() -> None:
    trace = Trace(pin_fraction=0.5)
    trace.add("a", PROMPT, max_tokens=4, ignore_eos=True, keep=PINNED)
    trace.step()
    trace.scheduler.preempt("a")
    trace.drain()
    assert usage(trace, "a") == (0, 8)
    assert len(trace.manager._pins) == 1


def test_requests_without_a_limit_end_although_pins_hold_what_they_may() -> None:
    trace = Trace(num_blocks=8, pin_fraction=0.5)
    trace.add("a", range(1, 17), max_tokens=0, keep=PINNED)
    trace.drain()
    assert trace.manager.num_pinned == 4
    trace.add("b", range(60, 64), ignore_eos=True)
    trace.drain()
    trace.check_answers()


# --- what counts as use


def hits(trace: Trace) -> set[int]:
    return {node.num_hits for node in trace.manager._tree.nodes()}


def test_a_call_with_several_sequences_uses_its_own_prompt_once() -> None:
    """A one-off prompt with n=4 used to look like one that others come back to, and outlived them in a sweep."""
    trace = Trace()
    for index in range(4):
        trace.add(f"a/{index}", PROMPT, max_tokens=2, ignore_eos=True, is_sibling=index > 0)
    trace.drain()
    assert hits(trace) == {0}
    assert {node.num_continuations for node in trace.manager._tree.nodes()} == {0}
    for index in range(4):
        trace.add(f"b/{index}", PROMPT, max_tokens=2, ignore_eos=True, is_sibling=index > 0)
    trace.drain()
    assert hits(trace) == {0, 1}


def test_a_request_that_resumes_does_not_count_as_use_of_its_own_blocks() -> None:
    trace = Trace()
    trace.add("a", PROMPT, max_tokens=4, ignore_eos=True)
    trace.step()
    trace.scheduler.preempt("a")
    trace.drain()
    assert hits(trace) == {0}
