"""The synchronous API: prompts in, results out."""

from __future__ import annotations

import threading

import pytest
from tests.support.engine_fakes import ByteTokenizer, answer, make_parts

import kvist
from kvist.engine.api import Engine, sampling_params
from kvist.errors import (
    EngineOverloaded,
    EngineStopped,
    InvalidSamplingParams,
    RequestError,
    UnsupportedParameter,
)
from kvist.types import FinishReason, SamplingParams

pytestmark = pytest.mark.timeout(30)

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def ids(text: str) -> list[int]:
    return list(text.encode())


def expected_text(prompt: str, params: SamplingParams = GREEDY, index: int = 0) -> str:
    return ByteTokenizer().decode(answer(ids(prompt), params, index=index))


@pytest.fixture
def engine():
    with Engine(make_parts().engine) as engine:
        yield engine


def test_is_the_public_name():
    assert kvist.Engine is Engine
    assert kvist.GenerationResult.__module__ == "kvist.engine.api"


class TestGenerate:
    def test_one_text(self, engine):
        (result,) = engine.generate("hello", GREEDY)
        assert result.text == expected_text("hello")
        assert result.token_ids == answer(ids("hello"), GREEDY)
        assert result.prompt_token_ids == tuple(ids("hello"))
        assert (result.finish_reason, result.stop_reason) == (FinishReason.LENGTH, None)
        assert (result.usage.num_output_tokens, result.logprobs) == (8, ())

    @pytest.mark.parametrize("prompt", [[104, 105], (104, 105)])
    def test_token_ids_are_one_prompt(self, engine, prompt):
        (result,) = engine.generate(prompt, GREEDY)
        assert result.text == expected_text("hi")

    def test_several_prompts_in_their_order(self, engine):
        prompts = ["a long prompt indeed", [104, 105], "b", "a long prompt indeed"]
        results = engine.generate(prompts, GREEDY)
        texts = ["a long prompt indeed", "hi", "b", "a long prompt indeed"]
        assert [result.text for result in results] == [expected_text(text) for text in texts]

    def test_more_prompts_than_the_queue_holds(self):
        with Engine(make_parts(max_queue=2, max_running=2).engine) as engine:
            prompts = [f"prompt {i}" for i in range(20)]
            results = engine.generate(prompts, GREEDY)
        assert [result.text for result in results] == [expected_text(text) for text in prompts]

    def test_queue_full_of_others_is_said(self):
        parts = make_parts(max_queue=1)
        parts.engine.start = lambda: None  # type: ignore[method-assign]  # nothing is taken from the queue
        engine = Engine(parts.engine)
        parts.engine.submit(ids("x"), GREEDY)
        with pytest.raises(EngineOverloaded):
            engine.generate("hello", GREEDY)
        engine.close()

    def test_several_choices(self, engine):
        params = SamplingParams(seed=5, n=3, max_tokens=8, ignore_eos=True)
        (result,) = engine.generate("hello", params)
        assert [choice.index for choice in result.choices] == [0, 1, 2]
        for choice in result.choices:
            assert choice.text == expected_text("hello", params, choice.index)
        assert result.text == result.choices[0].text

    def test_keywords_replace_fields(self, engine):
        (result,) = engine.generate("hello", GREEDY, max_tokens=3, logprobs=0)
        assert len(result.token_ids) == len(result.logprobs) == 3

    def test_invalid_prompt_among_others_generates_nothing_in_the_end(self, engine):
        with pytest.raises(RequestError, match="received 300"):
            engine.generate(["fine", [300]], GREEDY)
        assert engine.generate("still works", GREEDY)[0].text == expected_text("still works")

    @pytest.mark.parametrize(("prompts", "message"), [([], "empty"), (["a", 3], "mixed")])
    def test_refuses_what_is_no_prompt(self, engine, prompts, message):
        with pytest.raises(RequestError, match=message):
            engine.generate(prompts, GREEDY)

    @pytest.mark.parametrize(
        "prompts",
        [5, None, b"abc", {"a": 1}, iter(["a"]), [b"abc"]],
        ids=lambda v: type(v).__name__,
    )
    def test_refuses_values_of_other_types_by_name(self, engine, prompts):
        with pytest.raises(RequestError, match="token ids, or a sequence"):
            engine.generate(prompts, GREEDY)

    @pytest.mark.parametrize("wrong", [{"stop": 5}, {"stop_token_ids": 5}, {"n": 1.5}], ids=str)
    def test_parameters_of_the_wrong_type_harm_no_other_request(self, engine, wrong):
        with pytest.raises(InvalidSamplingParams):
            engine.generate("hello", **wrong)
        assert engine.generate("still works", GREEDY)[0].text == expected_text("still works")

    def test_empty_text_is_refused(self, engine):
        with pytest.raises(RequestError, match="at least one prompt token"):
            engine.generate("", GREEDY)


class TestStream:
    def test_a_stream_dropped_before_its_first_chunk_ends_its_request(self):
        parts = make_parts()
        parts.engine.start = lambda: None  # type: ignore[method-assign]  # so that nothing ends by itself
        engine = Engine(parts.engine)
        chunks = engine.stream("hello", GREEDY)
        cancelled = []
        chunks._stream._request_cancel = cancelled.append
        inner = chunks._stream
        del chunks
        assert cancelled == [inner]
        engine.close()

    def test_yields_as_it_goes(self, engine):
        chunks = list(engine.stream("hello", GREEDY))
        assert "".join(chunk.text for chunk in chunks) == expected_text("hello")
        assert len(chunks) == 8

    def test_checks_when_called_not_when_iterated(self, engine):
        with pytest.raises(RequestError):
            engine.stream("", GREEDY)

    def test_leaving_the_loop_ends_the_request(self):
        parts = make_parts()
        go_on = threading.Semaphore(1)
        parts.runner.before_step = lambda _: go_on.acquire(timeout=10)
        with Engine(parts.engine) as engine:
            stream = engine.stream("hello", GREEDY, max_tokens=100)
            next(stream)
            stream.close()
            parts.runner.before_step = lambda _: None
            go_on.release()
            engine.generate("other", GREEDY)
            assert engine.stats().num_aborted_requests == 1


def test_chat_uses_the_template(engine):
    result = engine.chat([{"role": "user", "content": "hi"}], GREEDY)
    assert result.text == expected_text("user: hi\nassistant: ")


def test_closed_engine_says_so():
    engine = Engine(make_parts().engine)
    engine.close()
    engine.close()
    with pytest.raises(EngineStopped):
        engine.generate("hello")


def test_describes_itself(engine):
    assert engine.model_name == engine.plan.model == "fake"
    assert engine.stats().num_steps == 0
    assert engine.encode("ab") == [97, 98]


class TestSamplingParams:
    def test_suggests_the_closest_name(self):
        with pytest.raises(UnsupportedParameter, match=r"'temprature'; did you mean 'temperature'"):
            sampling_params(temprature=0.5)

    def test_lists_the_names_when_none_is_close(self):
        with pytest.raises(UnsupportedParameter, match="known: max_tokens, temperature"):
            sampling_params(xyzzy=1)

    def test_values_are_checked(self):
        with pytest.raises(InvalidSamplingParams, match="top_p"):
            sampling_params(top_p=0)

    def test_strings_and_lists_become_tuples(self):
        params = sampling_params(stop="end", stop_token_ids=[1, 2])
        assert (params.stop, params.stop_token_ids) == (("end",), (1, 2))

    def test_keeps_what_is_not_replaced(self):
        params = sampling_params(SamplingParams(top_k=5, seed=7), seed=8)
        assert (params.top_k, params.seed) == (5, 8)
