from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
from tests.support.sched_trace import Trace, WrongContents, unshared_answer

from kvist.errors import (
    ConfigError,
    EngineOverloaded,
    InvariantViolation,
    PromptTooLong,
    RequestError,
)
from kvist.sched.output import StepResult
from kvist.sched.policy import Fcfs
from kvist.sched.request import RequestStatus
from kvist.sched.scheduler import Scheduler
from kvist.types import FinishReason, TokenId

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvist.sched.output import StepPlan

NO_EOS: frozenset[TokenId] = frozenset()


# --- what is refused


def test_refuses_an_empty_prompt() -> None:
    with pytest.raises(RequestError, match="at least one token, received none") as error:
        Trace().add("a", ())
    assert error.value.param == "prompt"


def test_refuses_an_id_in_progress_and_accepts_it_again_later() -> None:
    trace = Trace()
    trace.add("a", (1, 2), max_tokens=1)
    with pytest.raises(RequestError, match="received 'a', which is in progress"):
        trace.add("a", (1, 2), max_tokens=1)
    trace.drain()
    trace.add("a", (1, 2), max_tokens=1)
    trace.drain()
    trace.check_answers()


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "numbers"),
    [
        (16, None, "fit the context of 16 tokens, received 16 prompt tokens and room for output"),
        (17, 0, "fit the context of 16 tokens, received 17 prompt tokens and max_tokens=0, 17 in"),
        (10, 7, "fit the context of 16 tokens, received 10 prompt tokens and max_tokens=7, 17 in"),
    ],
)
def test_refuses_what_cannot_fit_the_context(
    num_prompt: int, max_tokens: int | None, numbers: str
) -> None:
    trace = Trace(max_context_len=16)
    with pytest.raises(PromptTooLong, match=numbers):
        trace.add("a", range(num_prompt), max_tokens=max_tokens)
    assert not trace.scheduler.has_work


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(15, None), (16, 0), (10, 6), (15, 1)])
def test_answers_what_just_fits_the_context(num_prompt: int, max_tokens: int | None) -> None:
    trace = Trace(max_context_len=16)
    trace.add("a", range(1, num_prompt + 1), max_tokens=max_tokens, ignore_eos=True)
    trace.drain()
    trace.check_answers()
    assert trace.records["a"].finish_reason is FinishReason.LENGTH


def test_refuses_a_footprint_larger_than_the_pool() -> None:
    trace = Trace(num_blocks=4, block_size=4)
    message = (
        r"KV memory of 4 blocks \(block_size=4\), received 10 prompt tokens and max_tokens=8, "
        "which need 5 blocks; .* --memory-gib"
    )
    with pytest.raises(PromptTooLong, match=message):
        trace.add("a", range(10), max_tokens=8)
    # The last output token is never attended to, so 17 tokens need 16 positions.
    trace.add("a", range(1, 11), max_tokens=7, ignore_eos=True)
    trace.drain()
    trace.check_answers()


def test_refuses_more_than_max_queue() -> None:
    trace = Trace(max_queue=2)
    trace.add("a", (1,), max_tokens=1)
    trace.add("b", (1,), max_tokens=1)
    with pytest.raises(EngineOverloaded, match=r"2 requests are waiting.*--max-queue") as error:
        trace.add("c", (1,), max_tokens=1)
    assert error.value.retry_after_s > 0
    trace.finish("b")
    trace.add("c", (1,), max_tokens=1)
    trace.drain()
    assert set(trace.records) == {"a", "b", "c"}


def test_refuses_to_forget_kv_while_sharing_it() -> None:
    with pytest.raises(ConfigError, match="--prefix-cache off"):
        Scheduler(
            Trace().manager,
            max_batch_tokens=8,
            max_running=8,
            max_queue=8,
            max_context_len=8,
            reserve_tokens=8,
            policy=Fcfs(),
            keep_kv=False,
        )


# --- the protocol of a step


def test_has_nothing_to_do_without_requests() -> None:
    trace = Trace()
    assert trace.scheduler.plan() is None
    assert not trace.scheduler.has_work
    assert trace.scheduler.stats().num_steps == 0


def test_refuses_a_second_plan_before_the_first_is_applied() -> None:
    trace = Trace()
    trace.add("a", (1, 2))
    plan = trace.scheduler.plan()
    with pytest.raises(InvariantViolation, match="step 0 must be applied"):
        trace.scheduler.plan()
    trace.scheduler.apply(plan, trace.runner.run(plan))
    with pytest.raises(InvariantViolation, match="step 0 is not in flight"):
        trace.scheduler.apply(plan, trace.runner.run(plan))
    trace.scheduler.finish("a", FinishReason.ABORT)


def test_refuses_results_of_another_step_and_missing_samples() -> None:
    trace = Trace()
    trace.add("a", (1, 2))
    plan = trace.scheduler.plan()
    result = trace.runner.run(plan)
    with pytest.raises(InvariantViolation, match="not in flight"):
        trace.scheduler.apply(plan._replace(), result)
    with pytest.raises(InvariantViolation, match="result of step 0, received that of 7"):
        trace.scheduler.apply(plan, StepResult(step_index=7, samples=result.samples))
    with pytest.raises(InvariantViolation, match=r"without samples for \['a'\]"):
        trace.scheduler.apply(plan, StepResult(step_index=0, samples={}))
    # A refused result leaves the step in flight.
    assert len(trace.scheduler.apply(plan, result)) == 1
    trace.scheduler.finish("a", FinishReason.ABORT)


def test_says_so_when_nothing_can_ever_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = Trace()
    trace.add("a", (1, 2))
    monkeypatch.setattr(trace.scheduler._waiting.queue, "peek", lambda: None)
    with pytest.raises(InvariantViolation, match=r"nothing can go on.*num_waiting=1"):
        trace.scheduler.plan()


# --- how sequences end


def first_tokens(num_tokens: int) -> tuple[int, ...]:
    """Return what the fake model says after prompt (1, 2, 3)."""
    trace = Trace()
    trace.add("a", (1, 2, 3), max_tokens=num_tokens, ignore_eos=True)
    trace.drain()
    return tuple(trace.records["a"].token_ids)


def test_ends_at_eos_unless_told_to_ignore_it() -> None:
    tokens = first_tokens(6)
    index = next(i for i in range(1, 6) if tokens[i] not in tokens[:i])
    eos = frozenset({TokenId(tokens[index])})
    trace = Trace()
    trace.add("a", (1, 2, 3), max_tokens=6, eos=eos)
    trace.add("b", (1, 2, 3), max_tokens=6, eos=eos, ignore_eos=True)
    trace.drain()
    assert tuple(trace.records["a"].token_ids) == tokens[: index + 1]
    assert trace.records["a"].finish_reason is FinishReason.STOP
    assert trace.records["a"].stop_token_id is None
    assert tuple(trace.records["b"].token_ids) == tokens
    assert trace.records["b"].finish_reason is FinishReason.LENGTH


def test_ends_at_a_stop_token_even_where_eos_is_ignored_and_names_it() -> None:
    tokens = first_tokens(6)
    index = next(i for i in range(1, 6) if tokens[i] not in tokens[:i])
    trace = Trace()
    trace.add("a", (1, 2, 3), max_tokens=6, ignore_eos=True, stop_token_ids=(tokens[index],))
    trace.drain()
    assert tuple(trace.records["a"].token_ids) == tokens[: index + 1]
    assert trace.records["a"].finish_reason is FinishReason.STOP
    assert trace.records["a"].stop_token_id == tokens[index]


def test_a_stop_token_as_the_last_allowed_one_is_a_stop() -> None:
    tokens = first_tokens(1)
    trace = Trace()
    trace.add("a", (1, 2, 3), max_tokens=1, stop_token_ids=tokens)
    trace.drain()
    assert trace.records["a"].finish_reason is FinishReason.STOP


def test_without_max_tokens_it_ends_at_the_context() -> None:
    trace = Trace(max_context_len=30, reserve_tokens=2)
    trace.add("a", (1, 2, 3), eos=NO_EOS)
    trace.drain()
    assert len(trace.records["a"].token_ids) == 27
    assert trace.records["a"].finish_reason is FinishReason.LENGTH


def test_without_max_tokens_it_ends_where_the_whole_pool_is_full() -> None:
    """A lone request that outgrew the pool would preempt itself and never be admitted again."""
    trace = Trace(num_blocks=4, block_size=4, reserve_tokens=2)
    trace.add("a", (1, 2, 3), eos=NO_EOS)
    trace.drain()
    assert len(trace.records["a"].token_ids) == 16 - 3 + 1
    assert trace.records["a"].finish_reason is FinishReason.LENGTH
    assert trace.scheduler.stats().num_preemptions == 0
    trace.check_answers()


def test_logprobs_are_passed_on_when_asked_for() -> None:
    trace = Trace()
    trace.add("a", (1, 2, 3), max_tokens=3, ignore_eos=True, logprobs=0)
    trace.add("b", (1, 2, 3), max_tokens=3, ignore_eos=True)
    trace.drain()
    assert [entry.token_id for entry in trace.records["a"].logprobs] == trace.records["a"].token_ids
    assert trace.records["b"].logprobs == []


def test_history_is_in_the_plan_only_when_the_params_need_it() -> None:
    trace = Trace()
    trace.add("a", (1, 2, 3), max_tokens=3, ignore_eos=True, presence_penalty=0.5)
    trace.add("b", (5, 6), max_tokens=3, ignore_eos=True)
    trace.drain()
    samples = [sequence.sample for sequence in trace.plans[-1].sequences]
    assert [len(sample.prompt_token_ids) for sample in samples] == [3, 0]
    assert [len(sample.output_token_ids) for sample in samples] == [2, 0]


# --- leaving early


def test_finish_of_an_unknown_or_ended_request_is_nothing() -> None:
    trace = Trace()
    trace.add("a", (1, 2), max_tokens=1)
    trace.drain()
    assert trace.scheduler.finish("a", FinishReason.ABORT) is None
    assert trace.scheduler.finish("never", FinishReason.ABORT) is None
    assert not trace.scheduler.preempt("a")


def test_preempt_of_a_waiting_request_is_nothing() -> None:
    trace = Trace()
    trace.add("a", (1, 2), max_tokens=1)
    assert not trace.scheduler.preempt("a")


def test_a_stop_string_found_by_the_engine_ends_it_with_its_reason() -> None:
    trace = Trace()
    trace.add("a", (1, 2), max_tokens=9, ignore_eos=True)
    trace.step()
    update = trace.scheduler.finish("a", FinishReason.STOP)
    assert update.finish_reason is FinishReason.STOP
    assert update.usage.num_output_tokens == 1
    assert not trace.scheduler.has_work
    assert trace.manager.num_held == 0


@pytest.mark.parametrize("moment", ["before_run", "before_apply"])
@pytest.mark.parametrize("max_batch_tokens", [3, 64])
def test_an_abort_in_flight_frees_the_blocks_at_once_and_drops_the_result(
    moment: str, max_batch_tokens: int
) -> None:
    trace = Trace(num_blocks=8, block_size=4, max_batch_tokens=max_batch_tokens)
    trace.add("a", range(1, 10), max_tokens=9, ignore_eos=True)
    trace.add("b", range(20, 24), max_tokens=9, ignore_eos=True)

    def abort() -> None:
        trace.finish("a")
        trace.manager.check_invariants()
        assert trace.records["a"].request.lease is None

    trace.step()
    trace.step(**{moment: abort})
    assert trace.scheduler.stats().num_dropped_results == 1
    # Blocks written by the dropped part of the step serve others without harm.
    for index in range(4):
        trace.add(f"c{index}", range(1, 9 + index), max_tokens=9, ignore_eos=True)
    trace.drain()
    trace.check_answers()


def test_the_id_of_an_aborted_request_may_be_used_again_while_its_last_step_is_in_flight() -> None:
    trace = Trace()
    trace.add("a", (1, 2, 3), max_tokens=4, ignore_eos=True)

    def replace() -> None:
        trace.finish("a")
        trace.add("a", (7, 8), max_tokens=2, ignore_eos=True)

    trace.step(before_apply=replace)
    assert trace.records["a"].token_ids == []
    trace.drain()
    trace.check_answers()


@pytest.mark.parametrize("moment", ["before_run", "before_apply"])
def test_a_preemption_in_flight_drops_the_token_and_chooses_it_again(moment: str) -> None:
    trace = Trace(block_size=4)
    trace.add("a", range(1, 10), max_tokens=6, ignore_eos=True, temperature=1.0, seed=5)
    trace.step()
    trace.step(**{moment: lambda: trace.scheduler.preempt("a")})
    assert len(trace.records["a"].token_ids) == 1
    assert trace.records["a"].request.status is RequestStatus.PREEMPTED
    trace.drain()
    trace.check_answers()
    usage = trace.records["a"].usage
    assert usage.num_preemptions == 1
    # Position 9 was computed in the dropped step, and again afterwards; the blocks before it were still cached.
    assert usage.num_computed_tokens == (9 + 6 - 1) + 1
    assert usage.num_cached_tokens == 0


def test_a_preempted_request_keeps_its_output_and_recomputes_what_is_not_cached() -> None:
    trace = Trace(block_size=4, prefix_cache=False)
    trace.add("a", range(1, 6), max_tokens=5, ignore_eos=True)
    trace.step()
    trace.step()
    assert trace.scheduler.preempt("a")
    trace.drain()
    trace.check_answers()
    assert trace.compact_plan(trace.plans[2]) == (("a", 0, 7, True),)
    assert trace.scheduler.stats().num_recomputed_tokens == 6
    assert trace.records["a"].usage.num_computed_tokens == 5 + 1 + 7 + 1 + 1


def test_a_preempted_request_can_be_aborted() -> None:
    trace = Trace()
    trace.add("a", range(1, 6), max_tokens=5, ignore_eos=True)
    trace.step()
    assert trace.scheduler.preempt("a")
    trace.finish("a")
    assert not trace.scheduler.has_work


def test_preempted_requests_resume_in_order_of_arrival_before_new_ones() -> None:
    trace = Trace(max_running=2)
    for name, prompt in (("a", (1, 2)), ("b", (3, 4)), ("c", (5, 6))):
        trace.add(name, prompt, max_tokens=4, ignore_eos=True)
    trace.step()
    assert trace.scheduler.preempt("b")
    assert trace.scheduler.preempt("a")
    plan = trace.step()
    assert [sequence.request_id for sequence in plan.sequences] == ["a", "b"]
    trace.drain()
    trace.check_answers()


# --- nobody waits for ever for a block


def add_pair(trace: Trace) -> None:
    """Add two requests with one prompt; the second is deferred in the step that ends the first one's prefill."""
    trace.add("first", range(1, 22), max_tokens=4, ignore_eos=True)
    trace.add("second", range(1, 22), max_tokens=4, ignore_eos=True)


def starts_of(trace: Trace, request_id: str) -> list[int]:
    return [
        sequence.start
        for plan in trace.plans
        for sequence in plan.sequences
        if sequence.request_id == request_id
    ]


LOSSES: dict[str, Callable[[Trace], object]] = {
    "aborted": lambda trace: trace.finish("first"),
    "finished": lambda trace: trace.finish("first", FinishReason.STOP),
    "preempted": lambda trace: trace.scheduler.preempt("first"),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("moment", ["before_run", "before_apply"])
def test_a_deferred_request_goes_on_when_the_computing_one_is_lost(loss: str, moment: str) -> None:
    trace = Trace(block_size=4, max_batch_tokens=12)
    add_pair(trace)
    trace.step()  # 12 of the first prompt's 21 tokens
    trace.step(**{moment: lambda: LOSSES[loss](trace)})  # the other 9, which are dropped
    assert trace.scheduler.stats().num_deferred_admissions == 2
    trace.drain()
    # Three blocks had been published in the first step, and the rest is computed anew, by whoever goes first.
    assert starts_of(trace, "second")[0] == (20 if loss == "preempted" else 12)
    assert trace.scheduler.stats().num_deferred_admissions == (3 if loss == "preempted" else 2)
    assert trace.records["second"].finish_reason is FinishReason.LENGTH
    expected = unshared_answer(trace.records["second"].request, max_tokens_in_all=100)
    assert tuple(trace.records["second"].token_ids) == expected.token_ids


def test_a_deferred_request_goes_on_when_the_computed_blocks_are_evicted() -> None:
    trace = Trace(block_size=4)
    trace.add("first", range(1, 22), max_tokens=1)
    trace.add("second", range(1, 22), max_tokens=1)
    trace.step()
    assert trace.scheduler.stats().num_deferred_admissions == 1
    assert trace.manager.reset() == 6
    trace.drain()
    assert starts_of(trace, "second") == [0]
    trace.check_answers()


def test_a_deferred_request_can_be_aborted() -> None:
    trace = Trace(block_size=4)
    add_pair(trace)
    trace.step()
    trace.finish("second")
    trace.drain()
    trace.check_answers()
    assert starts_of(trace, "second") == []


def test_a_chain_of_deferrals_ends_when_every_computing_request_is_lost_in_turn() -> None:
    trace = Trace(block_size=4)
    for index in range(10):
        trace.add(f"r{index}", range(1, 22), max_tokens=2, ignore_eos=True)
    for index in range(9):
        trace.step(before_apply=lambda name=f"r{index}": trace.finish(name))
    trace.drain()
    assert trace.scheduler.stats().num_deferred_admissions == sum(range(10))
    assert trace.records["r9"].finish_reason is FinishReason.LENGTH
    trace.check_answers()


# --- fairness


def test_requests_of_one_length_finish_in_order_of_arrival() -> None:
    trace = Trace(num_blocks=8, block_size=4, max_running=3, max_batch_tokens=7)
    for index in range(20):
        prompt = (index % 5 + 1, index + 1, 3, 4, 5)
        trace.add(f"r{index:02}", prompt, max_tokens=3, ignore_eos=True)
    order = []
    while (plan := trace.step()) is not None:
        order += [
            sequence.request_id
            for sequence in plan.sequences
            if trace.records[sequence.request_id].finish_reason is not None
        ]
    assert order == sorted(order)
    assert len(order) == 20


def test_a_stream_of_small_requests_does_not_starve_a_big_one() -> None:
    trace = Trace(num_blocks=8, block_size=4, max_batch_tokens=8)
    for index in range(3):
        trace.add(f"before{index}", (index + 1, 2), max_tokens=6, ignore_eos=True)
    trace.add("big", range(1, 25), max_tokens=8, ignore_eos=True)  # 31 positions: the whole pool
    for index in range(40):
        trace.add(f"after{index}", (index + 1, 3), max_tokens=6, ignore_eos=True)
        trace.step()
    assert trace.records["big"].finish_reason is FinishReason.LENGTH
    trace.drain()
    order = [sequence.request_id for plan in trace.plans for sequence in plan.sequences]
    assert order.index("big") < min(order.index(f"after{index}") for index in range(40))
    trace.check_answers()


def test_a_growing_old_request_is_never_preempted_for_younger_ones() -> None:
    trace = Trace(num_blocks=12, block_size=4, reserve_tokens=1)
    trace.add("old", (1, 2), eos=NO_EOS)
    for index in range(6):
        trace.add(f"young{index}", (index + 1, 7), eos=NO_EOS)
    trace.drain()
    assert trace.records["old"].usage.num_preemptions == 0
    assert trace.scheduler.stats().num_preemptions >= 6
    trace.check_answers()


def test_every_running_request_gets_a_position_in_every_step_but_for_recomputation() -> None:
    """Admission needs budget left over, so there are never more next tokens to compute than budget."""
    trace = Trace(max_batch_tokens=3, max_running=10)
    for index in range(8):
        trace.add(f"r{index}", (index + 1,), max_tokens=5, ignore_eos=True)
    trace.drain()
    assert [len(plan.sequences) for plan in trace.plans[:5]] == [3] * 5
    assert max(len(plan.sequences) for plan in trace.plans) == 3
    trace.check_answers()


# --- the scaffold itself: a runner that misses mistakes proves nothing


def without_copies(plan: StepPlan) -> StepPlan:
    return plan._replace(copies=())


def with_the_first_blocks_swapped(plan: StepPlan) -> StepPlan:
    first, *others = plan.sequences
    a, b, *rest = first.block_table
    return plan._replace(sequences=(first._replace(block_table=(b, a, *rest)), *others))


@pytest.mark.parametrize("spoil", [without_copies, with_the_first_blocks_swapped])
def test_the_fake_runner_notices_a_wrong_plan(spoil: Callable[[StepPlan], StepPlan]) -> None:
    trace = Trace(block_size=4)
    trace.add("a", range(1, 9), max_tokens=1)
    trace.drain()
    trace.add("b", (1, 2, 3, 4, 5, 6, 30, 31), max_tokens=1)
    plan = trace.scheduler.plan()
    with pytest.raises(WrongContents, match="b: block"):
        trace.runner.run(spoil(plan))
    trace.finish("b")


def test_the_fake_runner_notices_blocks_of_another_tenant() -> None:
    trace = Trace(block_size=4)
    trace.add("a", range(1, 9), max_tokens=1, tenant="x")
    trace.drain()
    request = trace.add("b", range(1, 9), max_tokens=1, tenant="x")
    request.namespace = dataclasses.replace(request.namespace, tenant="y")
    trace.runner.expect(request)
    plan = trace.scheduler.plan()
    with pytest.raises(WrongContents, match="b: block"):
        trace.runner.run(plan)
    trace.finish("b")


def test_a_sleeping_request_is_planned_by_nobody_and_keeps_its_place_in_the_budget():
    trace = Trace(max_batch_tokens=8, max_running=4)
    sleeper = trace.add("a", range(1, 5), max_tokens=20, ignore_eos=True)
    trace.step()
    woken = []
    trace.scheduler.sleep(sleeper, lambda: woken.append(sleeper.num_tokens))
    assert trace.scheduler.plan() is None
    trace.add("b", range(10, 26), max_tokens=1)
    plan = trace.step()
    assert [(s.request_id, len(s.token_ids)) for s in plan.sequences] == [("b", 7)]
    trace.scheduler.wake(sleeper)
    trace.scheduler.wake(sleeper)
    assert woken == [5]
    assert {s.request_id for s in trace.step().sequences} == {"a", "b"}
    trace.drain()


def test_a_sleeping_request_is_woken_before_its_blocks_are_released():
    trace = Trace()
    sleeper = trace.add("a", range(1, 5), max_tokens=20, ignore_eos=True)
    trace.step()
    for end in (lambda: trace.scheduler.preempt("a"), lambda: trace.finish("a")):
        held = []
        trace.scheduler.sleep(
            sleeper, lambda held=held: held.append(len(sleeper.lease.block_table))
        )
        end()
        assert len(held) == 1
        assert held[0] >= 1
        if trace.scheduler.has_work:
            trace.step()
    assert trace.manager.num_held == 0
