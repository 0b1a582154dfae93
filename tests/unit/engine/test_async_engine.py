"""The engine's thread: submission, streams, cancellation, back-pressure and the end."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from tests.support.engine_fakes import VOCAB_SIZE, Parts, answer, make_parts

from kvist.errors import (
    DeadlineExceeded,
    EngineError,
    EngineOverloaded,
    EngineStopped,
    InvalidSamplingParams,
    PromptTooLong,
    RequestError,
    UnsupportedParameter,
)
from kvist.types import FinishReason, Keep, OutputChunk, SamplingParams

pytestmark = pytest.mark.timeout(30)

PROMPT = list(b"once upon a time")
GREEDY = SamplingParams(temperature=0.0, max_tokens=10)
WAIT_S = 10.0


def tokens(chunks: list[OutputChunk]) -> tuple[int, ...]:
    return tuple(token_id for chunk in chunks for token_id in chunk.token_ids)


class Gate:
    """Holds the engine thread at the beginning of each step until the test lets it through."""

    def __init__(self, parts: Parts) -> None:
        self.entered = threading.Semaphore(0)
        self._may_pass = threading.Semaphore(0)
        parts.runner.before_step = self._pass
        self._parts = parts

    def _pass(self, _plan: object) -> None:
        self.entered.release()
        assert self._may_pass.acquire(timeout=WAIT_S)

    def allow_step(self) -> None:
        self._may_pass.release()

    def open(self) -> None:
        self._parts.runner.before_step = lambda _: None
        self._may_pass.release()

    def wait_for_step(self) -> None:
        assert self.entered.acquire(timeout=WAIT_S)


@pytest.fixture
def parts():
    parts = make_parts()
    yield parts
    parts.runner.before_step = lambda _: None
    parts.engine.close()


class TestGeneration:
    def test_sync_and_async_readers_get_the_same_answer(self, parts):
        with parts.engine as engine:

            async def read() -> list[OutputChunk]:
                return [chunk async for chunk in engine.submit(PROMPT, GREEDY)]

            assert tokens(list(engine.submit(PROMPT, GREEDY))) == answer(PROMPT, GREEDY)
            assert tokens(asyncio.run(read())) == answer(PROMPT, GREEDY)

    def test_many_threads_at_once(self, parts):
        results: dict[int, tuple[int, ...]] = {}
        params = [SamplingParams(seed=i, max_tokens=5 + i % 7) for i in range(24)]

        def ask(index: int) -> None:
            results[index] = tokens(list(parts.engine.submit(PROMPT, params[index])))

        parts.engine.start()
        threads = [threading.Thread(target=ask, args=(i,)) for i in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert results == {i: answer(PROMPT, params[i]) for i in range(24)}
        assert parts.runner.thread_ids.isdisjoint({threading.get_ident()})
        assert len(parts.runner.thread_ids) == 1

    def test_requests_submitted_before_the_start_wait(self, parts):
        stream = parts.engine.submit(PROMPT, GREEDY)
        assert parts.engine.stats().num_queued == 1
        parts.engine.start()
        parts.engine.start()
        assert tokens(list(stream)) == answer(PROMPT, GREEDY)

    def test_sequences_of_one_call_share_a_stream(self, parts):
        params = SamplingParams(seed=3, max_tokens=6, n=3)
        with parts.engine as engine:
            chunks = list(engine.submit(PROMPT, params, request_id="mine"))
        assert {chunk.request_id for chunk in chunks} == {"mine"}
        for index in range(3):
            mine = [chunk for chunk in chunks if chunk.index == index]
            assert tokens(mine) == answer(PROMPT, params, index=index)

    def test_names_the_model_and_its_plan(self, parts):
        assert (parts.engine.model_name, parts.engine.plan.vocab_size) == ("fake", VOCAB_SIZE)


class TestValidation:
    @pytest.mark.parametrize(
        ("prompt", "params", "error", "message"),
        [
            ([], {}, RequestError, "at least one prompt token"),
            ([1, VOCAB_SIZE], {}, RequestError, r"\[0, 257\), received 257"),
            ([-1], {}, RequestError, "received -1"),
            ([1, "a"], {}, RequestError, "must be integers"),
            ([1.5], {}, RequestError, "must be integers"),
            ([1] * 128, {}, PromptTooLong, "128 tokens, with at least 1 token .* 128 tokens"),
            ([1] * 100, {"max_tokens": 29}, PromptTooLong, "100 tokens, with max_tokens=29 .* 128"),
            ([1], {"logit_bias": {257: 1.0}}, InvalidSamplingParams, "logit_bias: .*257"),
            ([1], {"stop_token_ids": (3, 999)}, InvalidSamplingParams, "stop_token_ids: .*999"),
            ([1], {"n": 65}, InvalidSamplingParams, "n must be at most 64"),
        ],
    )
    def test_refuses_at_once(self, parts, prompt, params, error, message):
        with pytest.raises(error, match=message):
            parts.engine.submit(prompt, SamplingParams(**params))
        assert parts.engine.stats().num_queued == 0

    @pytest.mark.parametrize(("length", "max_tokens"), [(127, None), (100, 28), (128, 0)])
    def test_a_prompt_that_just_fits_is_answered(self, parts, length, max_tokens):
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        with parts.engine as engine:
            chunks = list(engine.submit([5] * length, params))
        assert len(tokens(chunks)) == 128 - length
        assert chunks[-1].finish_reason is FinishReason.LENGTH

    def test_refuses_an_id_in_use_but_not_one_that_was(self, parts):
        first = parts.engine.submit(PROMPT, GREEDY, request_id="x")
        with pytest.raises(RequestError, match="'x' is in use"):
            parts.engine.submit(PROMPT, GREEDY, request_id="x")
        parts.engine.start()
        list(first)
        assert tokens(list(parts.engine.submit(PROMPT, GREEDY, request_id="x")))

    def test_engine_thread_refusals_reach_the_stream(self, parts):
        """The scheduler has the last word; a refusal of its own must not kill the thread."""
        parts.scheduler._lengths._max_context_len = 4
        with parts.engine as engine:
            with pytest.raises(PromptTooLong):
                list(engine.submit(PROMPT, GREEDY))
            assert tokens(list(engine.submit([1], SamplingParams(max_tokens=2, ignore_eos=True))))


class TestOrder:
    @pytest.mark.parametrize(
        ("options", "param"),
        [
            ({"priority": 2**31}, "priority"),
            ({"deadline_s": 0.0}, "timeout_s"),
            ({"deadline_s": float("inf")}, "timeout_s"),
            ({"deadline_s": float("nan")}, "timeout_s"),
        ],
    )
    def test_what_is_out_of_range_is_named(self, parts, options, param):
        with pytest.raises(RequestError) as info:
            parts.engine.submit(PROMPT, GREEDY, **options)
        assert info.value.param == param

    @pytest.mark.parametrize(
        ("changes", "keep", "message"),
        [
            ({"prefix_cache": False}, Keep(ttl_s=1.0), "--prefix-cache on"),
            ({}, Keep(ttl_s=0.0), r"ttl must be in \(0, 2592000\] seconds, received 0"),
            ({}, Keep(ttl_s=float("nan")), "ttl must be in"),
            ({}, Keep(ttl_s=1.0, is_pinned=True), "--pin-fraction above 0"),
            (
                {"pin_fraction": 0.02},
                Keep(ttl_s=1.0, is_pinned=True),
                "fills 2 blocks and pins may hold 1",
            ),
        ],
    )
    def test_what_cannot_be_kept_is_refused(self, changes, keep, message):
        parts = make_parts(**changes)
        with pytest.raises(RequestError, match=message) as info:
            parts.engine.submit([1] * 8, GREEDY, keep=keep)
        assert info.value.param == "cache_control"
        parts.engine.close()

    def test_a_prompt_is_kept_as_the_request_says_or_else_as_the_plan_does(self):
        parts = make_parts(cache_ttl_s=60.0, pin_fraction=0.5)
        pinned = parts.engine.submit([1] * 8, GREEDY, keep=Keep(ttl_s=9.0, is_pinned=True))
        plain = parts.engine.submit([2] * 8, GREEDY)
        with parts.engine:
            ends = [list(stream)[-1].usage for stream in (pinned, plain)]
        told = [(usage.num_retained_tokens, usage.num_pinned_tokens) for usage in ends]
        assert told == [(0, 8), (8, None)]
        parts.core.check_invariants()  # an idle engine with a pin is in order

    def test_a_priority_that_would_be_ignored_is_refused(self):
        parts = make_parts(schedule="static")
        with pytest.raises(UnsupportedParameter, match="--schedule static"):
            parts.engine.submit(PROMPT, GREEDY, priority=1)
        parts.engine.close()

    def test_priority_and_deadline_reach_the_scheduler(self):
        now_ns = 0
        parts = make_parts(clock=lambda: now_ns, max_running=1)
        first = parts.engine.submit(PROMPT, GREEDY, priority=5)
        second = parts.engine.submit(PROMPT, GREEDY, priority=-1)
        late = parts.engine.submit(PROMPT, GREEDY, priority=9, deadline_s=3.0)
        gate = Gate(parts)
        with parts.engine:
            gate.wait_for_step()
            row = parts.scheduler.snapshot()[1]
            assert (row.priority, row.num_held_blocks > 0) == (-1, True)
            now_ns = 3 * 10**9
            gate.open()
            with pytest.raises(DeadlineExceeded):
                list(late)
            assert tokens(list(first)) == tokens(list(second)) == answer(PROMPT, GREEDY)

    def test_only_the_end_of_the_engine_is_final(self, parts):
        assert not parts.engine.has_stopped
        parts.engine.close()
        assert parts.engine.has_stopped


class TestBackPressure:
    def test_full_queue_is_refused_with_a_time_to_wait(self):
        parts = make_parts(max_queue=3)
        for _ in range(3):
            parts.engine.submit(PROMPT, GREEDY)
        with pytest.raises(
            EngineOverloaded, match=r"3 sequences .* holds 3; .*--max-queue"
        ) as info:
            parts.engine.submit(PROMPT, GREEDY)
        assert 1.0 <= info.value.retry_after_s <= 60.0
        parts.engine.close()

    def test_sequences_count_not_calls(self):
        parts = make_parts(max_queue=3)
        parts.engine.submit(PROMPT, SamplingParams(n=2))
        with pytest.raises(EngineOverloaded):
            parts.engine.submit(PROMPT, SamplingParams(n=2))
        parts.engine.submit(PROMPT, GREEDY)
        parts.engine.close()

    def test_waiting_sequences_of_the_scheduler_count(self):
        parts = make_parts(max_queue=2, max_running=1)
        gate = Gate(parts)
        with parts.engine as engine:
            streams = [engine.submit(PROMPT, GREEDY)]
            gate.wait_for_step()
            gate.allow_step()
            gate.wait_for_step()  # its first step is over, so it runs and the queue is empty again
            streams += [engine.submit(PROMPT, GREEDY) for _ in range(2)]
            with pytest.raises(EngineOverloaded):
                engine.submit(PROMPT, GREEDY)
            assert engine.stats().num_queued == 2
            gate.open()
            for stream in streams:
                assert tokens(list(stream)) == answer(PROMPT, GREEDY)
            engine.submit(PROMPT, GREEDY)


class TestCancellation:
    def test_frees_blocks_at_the_next_step_boundary(self, parts):
        gate = Gate(parts)
        parts.engine.start()
        stream = parts.engine.submit(PROMPT, SamplingParams(max_tokens=100, ignore_eos=True))
        gate.wait_for_step()
        stream.cancel()
        stream.cancel()
        gate.open()
        chunks = list(stream)
        assert len(tokens(chunks)) <= 1
        assert chunks[-1].finish_reason is FinishReason.ABORT
        assert chunks[-1].usage is not None
        assert parts.engine.stats().num_aborted_requests == 1
        parts.engine.close()
        assert parts.manager.num_held == 0

    def test_of_a_request_that_was_never_taken(self, parts):
        stream = parts.engine.submit(PROMPT, GREEDY)
        stream.cancel()
        parts.engine.start()
        (chunk,) = list(stream)
        assert chunk.finish_reason is FinishReason.ABORT
        assert not parts.runner.plans

    def test_after_the_end_does_nothing(self, parts):
        with parts.engine as engine:
            stream = engine.submit(PROMPT, GREEDY)
            list(stream)
            stream.cancel()
            assert tokens(list(engine.submit(PROMPT, GREEDY))) == answer(PROMPT, GREEDY)
            assert engine.stats().num_aborted_requests == 0

    def test_old_stream_cannot_cancel_a_later_request_of_the_same_name(self, parts):
        with parts.engine as engine:
            old = engine.submit(PROMPT, GREEDY, request_id="x")
            list(old)
            new = engine.submit(PROMPT, GREEDY, request_id="x")
            engine._request_cancel(old)
            assert tokens(list(new)) == answer(PROMPT, GREEDY)

    def test_cancelled_task_that_leaves_the_block_ends_the_request(self, parts):
        async def scenario() -> None:
            async def read() -> None:
                params = SamplingParams(max_tokens=100, ignore_eos=True)
                async with parts.engine.submit(PROMPT, params) as stream:
                    async for _ in stream:
                        await asyncio.sleep(0)

            task = asyncio.create_task(read())
            await asyncio.to_thread(gate.wait_for_step)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            gate.open()
            await parts.engine.stop()

        gate = Gate(parts)
        parts.engine.start()
        asyncio.run(scenario())
        assert parts.engine.stats().num_aborted_requests == 1
        assert parts.manager.num_held == 0


class TestFailure:
    def test_failed_step_ends_its_request_and_the_engine_goes_on(self, parts):
        def fail(_plan: object) -> None:
            parts.runner.before_step = lambda _: None
            raise RuntimeError("numeric trouble")

        parts.runner.before_step = fail
        with parts.engine as engine:
            with pytest.raises(EngineError, match="numeric trouble"):
                list(engine.submit(PROMPT, GREEDY))
            assert tokens(list(engine.submit(PROMPT, GREEDY))) == answer(PROMPT, GREEDY)
            assert engine.stats().num_failed_requests == 1
            assert engine.is_running

    def test_broken_law_stops_the_engine_for_everyone(self, parts):
        gate = Gate(parts)
        parts.engine.start()
        first = parts.engine.submit(PROMPT, GREEDY)
        gate.wait_for_step()
        second = parts.engine.submit(PROMPT, GREEDY)

        def broken(*_: object) -> None:
            raise KeyError("a bug")

        parts.scheduler.apply = broken  # type: ignore[method-assign]
        gate.open()
        for stream in (first, second):
            with pytest.raises(EngineStopped, match="KeyError"):
                list(stream)
        parts.engine._thread.join(WAIT_S)
        assert not parts.engine.is_running
        with pytest.raises(EngineStopped, match="internal error"):
            parts.engine.submit(PROMPT, GREEDY)
        with pytest.raises(EngineStopped):
            parts.engine.start()


class TestIdle:
    def test_conservation_is_checked_once_after_work_and_nothing_polls(self, parts, monkeypatch):
        monkeypatch.setattr("kvist.engine.async_engine.IDLE_CHECK_S", 0.02)
        checked = threading.Semaphore(0)
        check = parts.core.check_invariants

        def counting_check() -> None:
            check()
            checked.release()

        parts.core.check_invariants = counting_check  # type: ignore[method-assign]
        parts.engine.start()
        list(parts.engine.submit(PROMPT, GREEDY))
        assert checked.acquire(timeout=WAIT_S)
        assert not checked.acquire(timeout=0.2)

    def test_broken_law_found_when_idle_stops_the_engine(self, parts, monkeypatch):
        monkeypatch.setattr("kvist.engine.async_engine.IDLE_CHECK_S", 0.02)

        def broken() -> None:
            parts.core._num_steps_checked = parts.core._num_steps
            raise EngineError("lost a block")

        parts.core.check_invariants = broken  # type: ignore[method-assign]
        parts.engine.start()
        list(parts.engine.submit(PROMPT, GREEDY))
        parts.engine._thread.join(WAIT_S)
        with pytest.raises(EngineStopped, match="lost a block"):
            parts.engine.submit(PROMPT, GREEDY)


class TestEnd:
    def test_close_aborts_what_runs_and_frees_everything(self, parts):
        gate = Gate(parts)
        parts.engine.start()
        streams = [
            parts.engine.submit(PROMPT, SamplingParams(max_tokens=100, ignore_eos=True))
            for _ in range(3)
        ]
        gate.wait_for_step()
        gate.open()
        parts.engine.close()
        for stream in streams:
            with pytest.raises(EngineStopped, match="shut down"):
                list(stream)
        assert parts.manager.num_held == 0
        assert not parts.engine._thread.is_alive()

    def test_close_with_time_to_drain_lets_requests_end(self, parts):
        gate = Gate(parts)
        parts.engine.start()
        stream = parts.engine.submit(PROMPT, GREEDY)
        gate.wait_for_step()
        threading.Timer(0.05, gate.open).start()
        parts.engine.close(drain_s=WAIT_S)
        assert tokens(list(stream)) == answer(PROMPT, GREEDY)

    def test_draining_is_bounded(self, parts):
        parts.runner.before_step = lambda _: time.sleep(0.02)
        parts.engine.start()
        stream = parts.engine.submit([5], SamplingParams(max_tokens=100, ignore_eos=True))
        next(stream)
        parts.engine.close(drain_s=0.1)
        with pytest.raises(EngineStopped):
            list(stream)

    def test_refuses_while_draining_and_afterwards(self, parts):
        parts.engine.start()
        parts.engine.close()
        parts.engine.close()
        with pytest.raises(EngineStopped, match="shut down"):
            parts.engine.submit(PROMPT, GREEDY)
        with pytest.raises(EngineStopped):
            parts.engine.start()
        assert not parts.engine.is_running

    def test_close_of_an_engine_that_never_ran(self, parts):
        stream = parts.engine.submit(PROMPT, GREEDY)
        parts.engine.close()
        with pytest.raises(EngineStopped):
            list(stream)

    def test_stop_does_not_block_the_event_loop(self, parts):
        gate = Gate(parts)
        parts.engine.start()
        parts.engine.submit(PROMPT, GREEDY)
        gate.wait_for_step()

        async def scenario() -> bool:
            stopping = asyncio.create_task(parts.engine.stop())
            await asyncio.sleep(0)
            was_done = stopping.done()
            gate.open()
            await stopping
            return was_done

        assert asyncio.run(scenario()) is False

    def test_step_that_does_not_end_is_left_behind(self, parts, monkeypatch, caplog):
        monkeypatch.setattr("kvist.engine.async_engine.JOIN_S", 0.05)
        gate = Gate(parts)
        parts.engine.start()
        parts.engine.submit(PROMPT, GREEDY)
        gate.wait_for_step()
        parts.engine.close()
        assert "did not end within" in caplog.text
        gate.open()
        parts.engine._thread.join(WAIT_S)


class TestStats:
    def test_whoever_has_seen_its_end_finds_it_counted(self, parts):
        with parts.engine as engine:
            for count in range(1, 20):
                list(engine.submit(PROMPT, SamplingParams(max_tokens=2, ignore_eos=True)))
                assert engine.stats().num_finished_requests == count

    def test_while_requests_only_go_on_they_are_taken_down_now_and_then(self, monkeypatch):
        now_ns = 0
        parts = make_parts()
        parts.engine._clock = lambda: now_ns
        parts.engine._published_ns = 0
        taken: list[int] = []
        stats = parts.core.stats
        monkeypatch.setattr(parts.core, "stats", lambda: taken.append(now_ns) or stats())
        gate = Gate(parts)
        parts.engine.submit([5], SamplingParams(max_tokens=100, ignore_eos=True))
        with parts.engine:
            for _ in range(20):
                gate.wait_for_step()
                gate.allow_step()
            gate.wait_for_step()
            num_before = len(taken)
            now_ns = 10**9
            gate.allow_step()
            gate.wait_for_step()
            gate.allow_step()
            gate.wait_for_step()
            assert num_before <= 4
            assert taken[num_before:] == [10**9]
            gate.open()


def test_stats_count_calls_and_time(parts):
    assert parts.engine.stats().uptime_s == 0.0
    with parts.engine as engine:
        for _ in range(2):
            list(engine.submit(PROMPT, GREEDY))
        engine.close()
        stats = engine.stats()
    assert stats.num_finished_requests == 2
    assert stats.num_steps == len(parts.runner.plans)
    assert 0 < stats.busy_s < stats.uptime_s
    assert stats.cache.num_hit_tokens == len(PROMPT) - 1
    assert stats.scheduler.num_finished == 2
    assert stats.num_queued == 0


class TestSurvey:
    def test_tells_what_the_cache_holds_after_the_step_in_progress(self):
        with make_parts().engine as engine:
            list(engine.submit(list(b"abcdefgh"), SamplingParams(max_tokens=1, temperature=0)))
            survey = engine.survey().result(10)
        assert sum(map(bool, survey.numbers)) == 2

    def test_everybody_who_waits_gets_the_same_one(self):
        parts = make_parts()
        first, second = parts.engine.survey(), parts.engine.survey()
        with parts.engine:
            assert first.result(10) is second.result(10)

    def test_one_that_was_cancelled_is_not_answered_and_harms_nobody(self):
        parts = make_parts()
        first, second = parts.engine.survey(), parts.engine.survey()
        first.cancel()
        with parts.engine:
            assert second.result(10)

    def test_fails_when_the_engine_ends_before(self):
        parts = make_parts()
        waiting = parts.engine.survey()
        parts.engine.close()
        with pytest.raises(EngineStopped):
            waiting.result(10)
        with pytest.raises(EngineStopped):
            parts.engine.survey()

    def test_fails_when_the_engine_has_failed(self, monkeypatch):
        parts = make_parts()
        monkeypatch.setattr(parts.core, "add", lambda group: 1 / 0)
        parts.engine.submit([1], SamplingParams())
        waiting = parts.engine.survey()
        parts.engine.start()
        with pytest.raises(EngineStopped):
            waiting.result(10)
        parts.engine.close()

    def test_a_failing_one_does_not_end_the_engine(self, monkeypatch):
        parts = make_parts()
        monkeypatch.setattr(parts.core, "survey", lambda: 1 / 0)
        with parts.engine as engine:
            with pytest.raises(ZeroDivisionError):
                engine.survey().result(10)
            list(engine.submit([1], SamplingParams(max_tokens=1)))
            assert engine.is_running
