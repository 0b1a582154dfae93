"""Random traces: whatever is shared, copied, evicted, preempted or aborted, answers are those of unshared runs."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.sched_trace import VOCAB_SIZE, Trace

from kvist.types import FinishReason, RequestId, SamplingParams


@dataclass(frozen=True)
class Call:
    """One client call: n sequences of one prompt."""

    prompt: tuple[int, ...]
    params: SamplingParams
    tenant: str
    seed: int


class CallMaker:
    """Draws calls whose prompts share prefixes of every length."""

    def __init__(self, generator: random.Random, *, max_prompt_len: int, max_output: int) -> None:
        self._random = generator
        self._max_output = max_output
        self._documents = [
            [generator.randrange(VOCAB_SIZE) for _ in range(max_prompt_len * 2 // 3)]
            for _ in range(5)
        ]
        self._max_suffix = max_prompt_len // 3

    def call(self) -> Call:
        draw = self._random
        document = draw.choice(self._documents)
        prompt = document[: draw.randint(1, len(document))]
        prompt = prompt + [
            draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(0, self._max_suffix))
        ]
        max_tokens = draw.choice([0, 1, 2, None, None, draw.randint(3, self._max_output)])
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=draw.choice([0.0, 0.0, 1.0]),
            stop_token_ids=tuple(draw.sample(range(VOCAB_SIZE), draw.choice([0, 0, 1]))),
            ignore_eos=draw.random() < 0.5,
            presence_penalty=draw.choice([0.0, 0.0, 0.5]),
            logprobs=draw.choice([None, 2]),
            n=draw.choice([1, 1, 1, 2, 4]),
        )
        return Call(tuple(prompt), params, draw.choice(["", "", "other"]), draw.randrange(1000))


def add_call(trace: Trace, name: str, call: Call) -> list[str]:
    names = [f"{name}.{index}" for index in range(call.params.n)]
    for index, sequence_name in enumerate(names):
        trace.add(
            sequence_name,
            call.prompt,
            params=call.params,
            tenant=call.tenant,
            seed=call.seed + index,
        )
    return names


def live(trace: Trace) -> list[RequestId]:
    return [name for name, record in trace.records.items() if record.finish_reason is None]


def check_books(trace: Trace) -> None:
    """The counters agree with the plans and with each other."""
    stats = trace.scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_finished == len(trace.records)
    assert stats.num_steps == len(trace.plans)
    assert stats.num_scheduled_tokens == sum(plan.num_batch_tokens for plan in trace.plans)
    usages = [record.usage for record in trace.records.values()]
    assert stats.num_preemptions == sum(usage.num_preemptions for usage in usages)
    for record in trace.records.values():
        usage = record.usage
        is_whole = usage.num_preemptions == 0 and record.finish_reason is not FinishReason.ABORT
        assert usage.num_prompt_tokens == record.request.num_prompt_tokens
        assert usage.num_cached_tokens < usage.num_prompt_tokens
        if is_whole and trace.keep_kv:
            num_positions = usage.num_prompt_tokens + max(usage.num_output_tokens - 1, 0)
            assert usage.num_computed_tokens == num_positions - usage.num_cached_tokens
        if record.request.params.logprobs is not None:
            assert [entry.token_id for entry in record.logprobs] == record.token_ids
    assert trace.manager.num_held == 0
    assert trace.manager.num_reserved == 0


def run_random_trace(
    *, num_requests: int, block_size: int, seed: int, max_context_len: int, max_running: int
) -> tuple[Trace, int]:
    """Feed random calls through a pool of 64 blocks, with aborts and preemptions at every moment of a step.

    Returns the trace and how many of its preemptions were forced.
    """
    generator = random.Random(seed)
    trace = Trace(
        num_blocks=64,
        block_size=block_size,
        max_batch_tokens=generator.choice([48, 96]),
        max_running=max_running,
        max_context_len=max_context_len,
        reserve_tokens=4,
    )
    maker = CallMaker(
        generator, max_prompt_len=max_context_len * 2 // 5, max_output=max_context_len // 2
    )
    num_calls = 0
    num_forced = 0

    def disturb() -> None:
        nonlocal num_forced
        if generator.random() < 0.02 and (names := live(trace)):
            trace.finish(generator.choice(names))
        if generator.random() < 0.02 and (running := trace.scheduler._running.requests):
            assert trace.scheduler.preempt(generator.choice(running).request_id)
            num_forced += 1
        if generator.random() < 0.002:
            trace.manager.reset()

    while len(trace.records) < num_requests or trace.scheduler.has_work:
        if len(trace.records) < num_requests and trace.scheduler.num_waiting < 20:
            add_call(trace, str(num_calls), maker.call())
            num_calls += 1
        disturb()
        if trace.scheduler.has_work:
            trace.step(before_run=disturb, before_apply=disturb)
    return trace, num_forced


@pytest.mark.parametrize(
    ("block_size", "max_context_len", "max_running"), [(4, 90, 24), (16, 260, 32)]
)
def test_a_thousand_random_requests_through_64_blocks(
    block_size: int, max_context_len: int, max_running: int
) -> None:
    trace, num_forced = run_random_trace(
        num_requests=1000,
        block_size=block_size,
        seed=block_size,
        max_context_len=max_context_len,
        max_running=max_running,
    )
    assert len(trace.records) >= 1000
    trace.check_answers()
    check_books(trace)
    stats, cache = trace.scheduler.stats(), trace.manager.stats()
    # Everything that the trace is there for did happen.
    assert num_forced > 50
    assert stats.num_preemptions - num_forced > 100
    assert stats.num_recomputed_tokens > 1000
    assert stats.num_deferred_admissions > 100
    assert stats.num_dropped_results > 20
    assert cache.num_evictions > 1000
    assert cache.num_partial_copies > 200
    assert cache.num_hit_tokens > 5000
    assert cache.num_verification_failures == 0


def test_the_same_trace_gives_the_same_plans() -> None:
    traces = [
        run_random_trace(num_requests=60, block_size=4, seed=1, max_context_len=90, max_running=12)[
            0
        ]
        for _ in range(2)
    ]
    assert traces[0].plans == traces[1].plans
    assert traces[0].scheduler.stats() == traces[1].scheduler.stats()


def answers(trace: Trace, calls: list[Call]) -> dict[str, tuple[tuple[int, ...], FinishReason]]:
    for index, call in enumerate(calls):
        add_call(trace, str(index), call)
    trace.drain()
    trace.check_answers()
    check = {n: (tuple(r.token_ids), r.finish_reason) for n, r in trace.records.items()}
    assert all(reason is not None for _, reason in check.values())
    return check


@pytest.mark.parametrize("seed", range(3))
def test_answers_do_not_depend_on_any_option(seed: int) -> None:
    """Metamorphic: cache, chunk size, block size, batch size, KV cache and one-at-a-time give the same tokens."""
    maker = CallMaker(random.Random(seed), max_prompt_len=30, max_output=20)
    calls = [maker.call() for _ in range(15)]
    options = [
        {"block_size": 4},
        {"block_size": 4, "prefix_cache": False},
        {"block_size": 1, "num_blocks": 61},
        {"block_size": 7, "num_blocks": 9},
        {"block_size": 4, "max_batch_tokens": 1},
        {"block_size": 4, "max_batch_tokens": 5},
        {"block_size": 4, "max_running": 1},
        {"block_size": 64, "num_blocks": 6},
        {"block_size": 16, "keep_kv": False},
    ]
    first, *others = (answers(Trace(max_context_len=60, **option), calls) for option in options)
    for other in others:
        assert other == first


SMALL_CALLS = st.builds(
    Call,
    prompt=st.lists(st.integers(1, 2), min_size=1, max_size=12).map(tuple),
    params=st.builds(
        SamplingParams,
        max_tokens=st.sampled_from([None, None, 0, 1, 2, 5, 9]),
        temperature=st.sampled_from([0.0, 1.0]),
        ignore_eos=st.booleans(),
        presence_penalty=st.sampled_from([0.0, 0.5]),
        n=st.integers(1, 3),
    ),
    tenant=st.sampled_from(["", "x"]),
    seed=st.integers(0, 3),
)
MOMENTS = st.sampled_from(["between", "before_run", "before_apply"])
EVENTS = st.one_of(
    SMALL_CALLS,
    st.tuples(st.just("step"), st.integers(1, 4)),
    st.tuples(st.just("abort"), st.integers(0, 30), MOMENTS),
    st.tuples(st.just("preempt"), st.integers(0, 30), MOMENTS),
    st.tuples(st.just("reset")),
)


def act(trace: Trace, event: tuple[object, ...]) -> None:
    names = live(trace)
    if event[0] == "abort" and names:
        trace.finish(names[event[1] % len(names)])
    if event[0] == "preempt" and names:
        trace.scheduler.preempt(names[event[1] % len(names)])


@settings(max_examples=150, deadline=None)
@given(
    events=st.lists(EVENTS, max_size=25),
    block_size=st.sampled_from([1, 2, 3, 4]),
    num_blocks=st.integers(0, 6),
    max_batch_tokens=st.sampled_from([1, 3, 8, 40]),
    max_running=st.sampled_from([1, 2, 6]),
    reserve_tokens=st.integers(1, 4),
    mode=st.sampled_from(["prefix cache", "prefix cache", "no prefix cache", "no KV cache"]),
)
def test_small_traces_answer_like_unshared_runs(
    events: list[Call | tuple[object, ...]],
    block_size: int,
    num_blocks: int,
    max_batch_tokens: int,
    max_running: int,
    reserve_tokens: int,
    mode: str,
) -> None:
    # Just enough blocks for the largest request, and a few more: 12 prompt tokens and 8 of 9 outputs.
    trace = Trace(
        num_blocks=-(-20 // block_size) + num_blocks,
        block_size=block_size,
        max_batch_tokens=max_batch_tokens,
        max_running=max_running,
        reserve_tokens=reserve_tokens,
        max_context_len=26,
        prefix_cache=mode == "prefix cache",
        keep_kv=mode != "no KV cache",
    )
    for index, event in enumerate(events):
        if isinstance(event, Call):
            add_call(trace, str(index), event)
        elif event[0] == "step":
            for _ in range(event[1]):
                trace.step()
        elif event[0] == "reset":
            trace.manager.reset()
        elif event[2] == "between":
            act(trace, event)
        else:
            trace.step(**{event[2]: lambda event=event: act(trace, event)})
        trace.check()
    trace.drain()
    trace.check_answers()
    check_books(trace)
