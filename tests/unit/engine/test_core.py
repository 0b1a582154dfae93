"""The step loop's body: sequences, text, stop strings, failures and the conservation law."""

from __future__ import annotations

import dataclasses
import gc
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.support.engine_fakes import EOS, ByteTokenizer, Parts, answer, make_parts

import kvist
from kvist.engine.core import RequestFailure, RequestGroup, sequence_seed
from kvist.errors import DeadlineExceeded, EngineOverloaded, InvariantViolation, PromptTooLong
from kvist.types import FinishReason, OutputChunk, SamplingParams

if TYPE_CHECKING:
    from types import FrameType

PROMPT = tuple(b"the same long prompt for all")


def group(
    name: str = "r", prompt=PROMPT, tenant: str = "", priority: int = 0, deadline_s=None, **params
) -> RequestGroup:
    return RequestGroup(
        priority=priority,
        deadline_s=deadline_s,
        request_id=name,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(**{"seed": 1, "max_tokens": 12, **params}),
        tenant=tenant,
    )


def step(parts: Parts) -> list[OutputChunk | RequestFailure]:
    outputs = parts.core.step()
    parts.manager.check_invariants()
    return outputs


def run(parts: Parts) -> dict[tuple[str, int], list[OutputChunk]]:
    """Step until idle; return the chunks of each sequence."""
    chunks: dict[tuple[str, int], list[OutputChunk]] = {}
    while parts.core.has_work:
        for output in step(parts):
            assert isinstance(output, OutputChunk), output
            chunks.setdefault((output.request_id, output.index), []).append(output)
    parts.core.check_invariants()
    return chunks


def tokens(chunks: list[OutputChunk]) -> tuple[int, ...]:
    return tuple(token_id for chunk in chunks for token_id in chunk.token_ids)


def text(chunks: list[OutputChunk]) -> str:
    return "".join(chunk.text for chunk in chunks)


def test_answer_text_reason_and_usage():
    parts, request = make_parts(), group(ignore_eos=True)
    parts.core.add(request)
    chunks = run(parts)["r", 0]
    expected = answer(PROMPT, request.params)
    assert tokens(chunks) == expected
    assert text(chunks) == ByteTokenizer().decode(expected)
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * 11
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * 11
    last = chunks[-1]
    assert last.finish_reason is FinishReason.LENGTH
    assert last.usage is not None
    assert (last.usage.num_prompt_tokens, last.usage.num_output_tokens) == (len(PROMPT), 12)


def test_second_request_reports_what_was_cached():
    parts = make_parts()
    parts.core.add(group("a"))
    run(parts)
    parts.core.add(group("b"))
    usage = run(parts)["b", 0][-1].usage
    assert usage is not None
    assert usage.num_cached_tokens == len(PROMPT) - 1


def test_tenants_share_nothing():
    parts = make_parts()
    parts.core.add(group("a", tenant="one"))
    run(parts)
    parts.core.add(group("b", tenant="two"))
    usage = run(parts)["b", 0][-1].usage
    assert usage is not None
    assert usage.num_cached_tokens == 0


def test_end_of_sequence_token_counts_but_has_no_text():
    seed = next(
        s for s in range(1000) if EOS in answer(PROMPT, SamplingParams(seed=s, max_tokens=12))[3:]
    )
    parts, request = make_parts(), group(seed=seed)
    parts.core.add(request)
    chunks = run(parts)["r", 0]
    expected = answer(PROMPT, request.params)
    assert tokens(chunks) == expected
    assert expected[-1] == EOS
    assert text(chunks) == bytes(expected[:-1]).decode()
    assert (chunks[-1].finish_reason, chunks[-1].stop_reason) == (FinishReason.STOP, None)


def test_stop_token_of_the_request_is_named_and_not_shown():
    expected = answer(PROMPT, SamplingParams(seed=1, max_tokens=12, ignore_eos=True))
    parts = make_parts()
    parts.core.add(group(ignore_eos=True, stop_token_ids=(expected[5],)))
    chunks = run(parts)["r", 0]
    stop_at = expected.index(expected[5])
    assert tokens(chunks) == expected[: stop_at + 1]
    assert text(chunks) == bytes(expected[:stop_at]).decode()
    assert chunks[-1].stop_reason == expected[5]


def test_stop_string_ends_the_sequence_and_never_leaks():
    expected = bytes(answer(PROMPT, SamplingParams(seed=1, max_tokens=40, ignore_eos=True)))
    stop = expected[6:9].decode()
    cut = expected.decode().index(stop)
    parts = make_parts()
    parts.core.add(group(ignore_eos=True, max_tokens=40, stop=(stop, "never there")))
    chunks = run(parts)["r", 0]
    assert text(chunks) == expected[:cut].decode()
    assert tokens(chunks) == tuple(expected[: cut + 3])
    assert (chunks[-1].finish_reason, chunks[-1].stop_reason) == (FinishReason.STOP, stop)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.num_output_tokens == cut + 3


def test_stop_string_completed_by_the_last_allowed_token_is_a_stop():
    expected = bytes(answer(PROMPT, SamplingParams(seed=1, max_tokens=9, ignore_eos=True)))
    stop = expected[6:9].decode()
    parts = make_parts()
    parts.core.add(group(ignore_eos=True, max_tokens=9, stop=(stop,)))
    chunks = run(parts)["r", 0]
    assert (chunks[-1].finish_reason, chunks[-1].stop_reason) == (FinishReason.STOP, stop)


def test_text_held_back_for_a_stop_string_comes_with_the_last_chunk():
    expected = bytes(answer(PROMPT, SamplingParams(seed=1, max_tokens=9, ignore_eos=True))).decode()
    parts = make_parts()
    parts.core.add(group(ignore_eos=True, max_tokens=9, stop=(expected[6:] + "!",)))
    chunks = run(parts)["r", 0]
    assert text(chunks[:-1]) == expected[:6]
    assert text(chunks) == expected


def test_no_output_wanted():
    parts = make_parts()
    parts.core.add(group(max_tokens=0))
    (chunk,) = run(parts)["r", 0]
    assert (chunk.token_ids, chunk.text, chunk.finish_reason) == ((), "", FinishReason.LENGTH)


def test_logprobs_pass_through():
    parts = make_parts()
    parts.core.add(group(logprobs=0, ignore_eos=True))
    chunks = run(parts)["r", 0]
    assert [[entry.token_id for entry in chunk.logprobs] for chunk in chunks] == [
        list(chunk.token_ids) for chunk in chunks
    ]


class TestSeveralSequences:
    def test_each_has_its_own_answer_and_the_first_is_that_of_n_1(self):
        parts, request = make_parts(), group(n=3)
        parts.core.add(request)
        chunks = run(parts)
        for index in range(3):
            assert tokens(chunks["r", index]) == answer(PROMPT, request.params, index=index)
        assert len({tokens(sequence) for sequence in chunks.values()}) == 3
        parts.core.add(group("alone"))
        assert tokens(run(parts)["alone", 0]) == tokens(chunks["r", 0])

    def test_prompt_is_computed_once(self):
        parts = make_parts()
        parts.core.add(group(n=4, max_tokens=1))
        usages = [chunks[-1].usage for chunks in run(parts).values()]
        assert sum(usage.num_computed_tokens for usage in usages if usage) == len(PROMPT) + 3

    def test_without_a_seed_calls_differ(self):
        parts = make_parts()
        for name in ("a", "b"):
            parts.core.add(group(name, seed=None, ignore_eos=True))
        chunks = run(parts)
        assert tokens(chunks["a", 0]) != tokens(chunks["b", 0])

    def test_seeds_are_in_range_and_distinct(self):
        seeds = {sequence_seed(seed, index) for seed in (0, 1, 2**63 - 1) for index in range(128)}
        assert len(seeds) == 3 * 128
        assert all(0 <= seed < 2**63 for seed in seeds)

    def test_abort_ends_all_of_them_with_usage(self):
        parts = make_parts()
        parts.core.add(group(n=3))
        step(parts)
        chunks = parts.core.abort("r")
        assert [chunk.index for chunk in chunks] == [0, 1, 2]
        assert {chunk.finish_reason for chunk in chunks} == {FinishReason.ABORT}
        assert all(chunk.usage is not None for chunk in chunks)
        assert not parts.core.has_work
        parts.core.check_invariants()


class TestAbort:
    def test_gives_blocks_back_at_once_and_leaves_others_alone(self):
        parts, other = make_parts(), group("b", prompt=b"something else")
        parts.core.add(group("a"))
        parts.core.add(other)
        first = step(parts)
        held = parts.manager.num_held
        parts.core.abort("a")
        assert parts.manager.num_held < held
        rest = run(parts)["b", 0]
        begun = tuple(t for chunk in first if chunk.request_id == "b" for t in chunk.token_ids)
        assert begun + tokens(rest) == answer(b"something else", other.params)

    def test_before_the_first_step(self):
        parts = make_parts()
        parts.core.add(group())
        (chunk,) = parts.core.abort("r")
        assert chunk.usage is not None
        assert (chunk.finish_reason, chunk.usage.num_output_tokens) == (FinishReason.ABORT, 0)

    def test_of_an_unknown_or_finished_request_does_nothing(self):
        parts = make_parts()
        parts.core.add(group())
        run(parts)
        assert parts.core.abort("r") == []
        assert parts.core.abort("other") == []
        assert parts.core.stats().num_aborted == 0

    def test_shows_text_held_back(self):
        expected = bytes(
            answer(PROMPT, SamplingParams(seed=1, max_tokens=9, ignore_eos=True))
        ).decode()
        parts = make_parts()
        parts.core.add(group(ignore_eos=True, stop=(expected[0] + "\0",)))
        (chunk,) = step(parts)
        assert isinstance(chunk, OutputChunk)
        assert chunk.text == ""
        assert [last.text for last in parts.core.abort("r")] == [expected[0]]


class TestRefusal:
    def test_group_that_does_not_fit_the_queue_leaves_nothing_behind(self):
        parts = make_parts(max_queue=3)
        with pytest.raises(EngineOverloaded):
            parts.core.add(group(n=4))
        assert not parts.core.has_work
        parts.core.add(group(n=3))
        assert len(run(parts)) == 3

    def test_prompt_that_never_fits(self):
        parts = make_parts(max_context_len=16)
        with pytest.raises(PromptTooLong, match="16"):
            parts.core.add(group())
        assert not parts.core.has_work


class TestEarlyEnd:
    def setup_method(self) -> None:
        self.now_ns = 0
        self.parts = make_parts(clock=lambda: self.now_ns)

    def pass_time(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)

    def test_time_that_runs_out_while_waiting_is_an_error_for_all_sequences(self):
        self.parts.core.add(group(n=3, deadline_s=2.0))
        self.pass_time(2.0)
        (failure,) = step(self.parts)
        assert isinstance(failure, RequestFailure)
        assert isinstance(failure.error, DeadlineExceeded)
        assert "2.0 s ran out before it had any output" in str(failure.error)
        assert not self.parts.core.has_work
        stats = self.parts.core.stats()
        assert (stats.num_finished, stats.num_failed, stats.num_aborted) == (1, 0, 0)
        self.parts.core.check_invariants()

    def test_siblings_that_have_time_left_go_with_the_one_that_has_not(self):
        self.parts.core.add(group(n=2, deadline_s=2.0))
        request = self.parts.scheduler._requests["r/1"]
        self.parts.scheduler._deadlines.discard(request)
        self.pass_time(2.0)
        (failure,) = step(self.parts)
        assert isinstance(failure.error, DeadlineExceeded)
        assert not self.parts.core.has_work

    def test_time_that_runs_out_later_ends_the_output_where_it_is(self):
        self.parts.core.add(group(ignore_eos=True, deadline_s=2.0))
        self.parts.core.add(group("other", prompt=b"else"))
        chunks = step(self.parts) + step(self.parts)
        self.pass_time(2.0)
        outputs = step(self.parts)
        last = outputs[0]
        assert last.finish_reason is FinishReason.TIMEOUT
        assert last.usage.num_output_tokens == 2
        mine = [chunk for chunk in [*chunks, last] if chunk.request_id == "r"]
        assert tokens(mine) == answer(PROMPT, group(ignore_eos=True).params)[:2]
        # The step went on with the others.
        assert [chunk.request_id for chunk in outputs[1:]] == ["other"]
        self.parts.core.close()

    def test_memory_that_cannot_be_had_ends_as_overload(self, monkeypatch):
        self.parts.core.add(group())
        monkeypatch.setattr(self.parts.manager, "admit", lambda *_, **__: None)
        outputs = []
        while self.parts.core.has_work:
            outputs += step(self.parts)
        (failure,) = outputs + step(self.parts)
        assert isinstance(failure.error, EngineOverloaded)
        assert failure.error.retry_after_s == 1.0
        assert self.parts.core.stats().num_failed == 1

    def test_a_lower_priority_starts_first(self):
        parts = make_parts(max_running=1)
        parts.core.add(group("a", priority=1))
        parts.core.add(group("b"))
        assert [chunk.request_id for chunk in step(parts)] == ["b"]
        parts.core.close()


class TestFailedStep:
    def fail_once(self, parts: Parts) -> None:
        def raise_once(_):
            parts.runner.before_step = lambda _: None
            raise RuntimeError("numeric trouble")

        parts.runner.before_step = raise_once

    def test_ends_the_requests_of_that_step_only(self, caplog):
        parts = make_parts(max_running=2)
        waiting = group("c", prompt=b"patient")
        for request in (group("a", n=1), group("b", prompt=b"another"), waiting):
            parts.core.add(request)
        self.fail_once(parts)
        failures = step(parts)
        assert [failure.request_id for failure in failures] == ["a", "b"]
        for failure in failures:
            assert isinstance(failure, RequestFailure)
            assert "numeric trouble" in str(failure.error)
            assert isinstance(failure.error.__cause__, RuntimeError)
        assert parts.manager.num_held == 0
        assert tokens(run(parts)["c", 0]) == answer(b"patient", waiting.params)
        assert parts.core.stats().num_failed == 2
        assert "step 0 failed" in caplog.text

    def test_ends_siblings_that_were_not_in_the_step(self):
        parts = make_parts()
        parts.core.add(group(n=3))
        self.fail_once(parts)
        assert [failure.request_id for failure in step(parts)] == ["r"]
        assert not parts.core.has_work
        parts.core.check_invariants()

    def test_copy_that_was_not_carried_out_is_never_served(self):
        parts = make_parts()
        parts.core.add(group("a"))
        run(parts)
        parts.core.add(group("b"))
        self.fail_once(parts)
        step(parts)
        assert parts.runner.plans[-1].copies
        request = group("c")
        parts.core.add(request)
        assert tokens(run(parts)["c", 0]) == answer(PROMPT, request.params)

    def test_everything_works_afterwards(self):
        parts, request = make_parts(), group("b")
        parts.core.add(group("a"))
        self.fail_once(parts)
        step(parts)
        parts.core.add(request)
        assert tokens(run(parts)["b", 0]) == answer(PROMPT, request.params)


class TestFailedSequence:
    def test_ends_its_request_and_no_other(self):
        parts, good = make_parts(), group("good", prompt=b"another")
        parts.core.add(group("bad", n=2))
        parts.core.add(good)
        parts.runner.broken["bad/1"] = "no finite logits"
        chunks: list[OutputChunk] = []
        failures: list[RequestFailure] = []
        while parts.core.has_work:
            for output in step(parts):
                (failures if isinstance(output, RequestFailure) else chunks).append(output)
        assert [(failure.request_id, str(failure.error)) for failure in failures] == [
            ("bad", "no finite logits")
        ]
        assert tokens([c for c in chunks if c.request_id == "good"]) == answer(
            b"another", good.params
        )
        assert parts.core.stats().num_failed == 1

    def test_what_it_computed_is_not_served(self):
        parts = make_parts()
        parts.core.add(group("bad"))
        parts.runner.broken["bad"] = "no finite logits"
        step(parts)
        assert parts.manager.num_evictable == 0

    def test_runner_that_forgets_a_sample_is_a_bug(self):
        parts = make_parts()
        parts.core.add(group())
        run_plan = parts.runner.run
        parts.runner.run = lambda plan, _: run_plan(plan)._replace(samples={})
        with pytest.raises(InvariantViolation, match="without samples"):
            parts.core.step()
        parts.core.close()


class TestOutputsWhileTheNextStepRuns:
    """Text and ends of a step, taken while the next one is computed, are what they would be between the two."""

    STOP = bytes(answer(PROMPT, SamplingParams(seed=1, max_tokens=9, ignore_eos=True)))[
        6:9
    ].decode()
    GROUPS = (
        group("stopped", ignore_eos=True, max_tokens=40, stop=(STOP,)),
        group("siblings", n=3, max_tokens=7, seed=5),
        group("long", prompt=b"x" * 50, max_tokens=30, seed=2),
        group("ended", seed=3, max_tokens=60),
    )

    def test_every_sequence_gets_the_same_chunks(self):
        expected = make_parts()
        for each in self.GROUPS:
            expected.core.add(each)
        chunks = run(expected)
        parts = make_parts()
        for each in self.GROUPS:
            parts.core.add(each)
        taken: list[OutputChunk | RequestFailure] = []
        while parts.core.has_work:
            parts.core.compute(lambda: taken.extend(parts.core.take_outputs()))
            parts.manager.check_invariants()
        taken += parts.core.take_outputs()
        parts.core.check_invariants()
        for (name, index), mine in chunks.items():
            assert mine == [c for c in taken if (c.request_id, c.index) == (name, index)]
        assert len(taken) == sum(map(len, chunks.values()))

    def test_what_is_computed_after_a_stop_string_is_dropped(self):
        parts = make_parts()
        parts.core.add(self.GROUPS[0])
        while parts.core.has_work:
            parts.core.compute(parts.core.take_outputs)
        assert parts.core.stats().scheduler.num_dropped_results == 1
        parts.core.check_invariants()

    def test_they_can_be_taken_where_there_is_nothing_to_compute_just_now(self, monkeypatch):
        parts = make_parts()
        parts.core.add(group(ignore_eos=True))
        parts.core.compute()
        monkeypatch.setattr(parts.scheduler, "plan", lambda: None)
        taken: list[OutputChunk | RequestFailure] = []
        parts.core.compute(lambda: taken.extend(parts.core.take_outputs()))
        assert len(tokens(taken)) == 1
        parts.core.close()

    @pytest.mark.parametrize("error", [RuntimeError("a bug"), MemoryError("none left")])
    def test_a_failure_of_what_is_done_meanwhile_is_none_of_the_step(self, error):
        def fail() -> None:
            raise error

        parts = make_parts()
        parts.core.add(group())
        with pytest.raises(type(error)):
            parts.core.compute(fail)
        assert parts.core.stats().num_failed == 0
        assert not parts.core.take_outputs()
        parts.core.close()

    @pytest.mark.parametrize("error", [RuntimeError("numeric trouble"), MemoryError("none left")])
    def test_a_step_that_fails_before_they_were_taken_loses_none(self, error, monkeypatch):
        parts = make_parts()
        parts.core.add(group(max_tokens=9, ignore_eos=True))
        parts.core.compute()

        def fail(*_: object) -> None:
            raise error

        monkeypatch.setattr(parts.runner, "run", fail)
        parts.core.compute(lambda: None)
        monkeypatch.undo()
        outputs = parts.core.take_outputs()
        while parts.core.has_work:
            outputs += parts.core.step()
        expected = answer(PROMPT, SamplingParams(seed=1, max_tokens=9, ignore_eos=True))
        if isinstance(error, RuntimeError):
            assert tokens(outputs[:1]) == expected[:1]
            assert isinstance(outputs[1], RequestFailure)
        else:
            assert tokens(outputs) == expected

    def test_an_abort_returns_them_before_the_last_chunk(self):
        parts = make_parts()
        parts.core.add(group(ignore_eos=True))
        parts.core.compute()
        first, last = parts.core.abort("r")
        assert (len(first.token_ids), first.finish_reason) == (1, None)
        assert (last.token_ids, last.finish_reason) == ((), FinishReason.ABORT)

    def test_a_deadline_comes_after_them(self):
        now_ns = 0
        parts = make_parts(clock=lambda: now_ns)
        parts.core.add(group(deadline_s=1.0, ignore_eos=True))
        parts.core.compute()
        now_ns = 2 * 10**9
        parts.core.compute()
        first, last = parts.core.take_outputs()
        assert len(first.token_ids) == 1
        assert (last.token_ids, last.finish_reason) == ((), FinishReason.TIMEOUT)


def test_idle_engine_that_holds_blocks_is_a_bug():
    parts = make_parts()
    parts.core.add(group())
    step(parts)
    parts.core._sequences.clear()
    with pytest.raises(InvariantViolation, match="idle engine"):
        parts.core.check_invariants()
    parts.scheduler.finish("r", FinishReason.ABORT)


def test_close_gives_everything_back():
    parts = make_parts()
    parts.core.add(group(n=2))
    step(parts)
    parts.core.close()
    assert not parts.core.has_work
    assert parts.manager.num_held == 0


def test_one_debug_line_per_finished_sequence_without_its_content(caplog):
    """At INFO it stood beside the server's line for the same call."""
    parts = make_parts()
    parts.core.add(group(ignore_eos=True))
    with caplog.at_level(logging.DEBUG, logger="kvist.engine.core"):
        chunks = run(parts)["r", 0]
    ((_, level, line),) = caplog.record_tuples
    assert level == logging.DEBUG
    assert "prompt 28, cached 0, computed 39, output 12 tokens" in line
    assert text(chunks) not in line


def test_stats_are_a_frozen_snapshot():
    parts = make_parts()
    before = parts.core.stats()
    parts.core.add(group())
    run(parts)
    after = parts.core.stats()
    assert (before.num_steps, before.num_finished) == (0, 0)
    assert (after.num_finished, after.num_waiting) == (1, 0)
    assert after.num_steps == len(parts.runner.plans)
    with pytest.raises(dataclasses.FrozenInstanceError):
        after.num_steps = 3  # type: ignore[misc]


def test_a_decode_step_takes_few_calls_of_python():
    """What stands between two steps' kernels is paid for by every token; what is done meanwhile is not counted."""
    parts = make_parts(num_blocks=64)
    parts.core.add(group(ignore_eos=True, max_tokens=40))
    for _ in range(5):
        parts.core.compute(parts.core.take_outputs)
    package = str(Path(kvist.__file__).parent)
    calls: list[str] = []

    def count(frame: FrameType, event: str, _: object) -> None:
        # The generated constructors of dataclasses are in no file.
        if event == "call" and frame.f_code.co_filename.startswith((package, "<string>")):
            calls.append(frame.f_code.co_qualname)

    def meanwhile() -> None:
        sys.setprofile(None)
        parts.core.take_outputs()
        sys.setprofile(count)

    gc.disable()  # what other tests left behind may have finalisers
    sys.setprofile(count)
    try:
        parts.core.compute(meanwhile)
    finally:
        sys.setprofile(None)
        gc.enable()
    # 58 when this was written.
    assert len(calls) <= 60, calls
    parts.core.close()
