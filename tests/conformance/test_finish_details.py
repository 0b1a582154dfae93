"""Outputs that go round in circles, as clients see them."""

from __future__ import annotations

import json

import pytest
from tests.support.asgi import events, request
from tests.support.engine_fakes import make_parts

from kvist.config import ServerConfig
from kvist.engine.degeneration import MIN_LOOP_TOKENS
from kvist.server.app import create_app

COMPLETION = {"model": "fake", "prompt": "once", "max_tokens": 300, "temperature": 0}
CHAT = {
    "model": "fake",
    "messages": [{"role": "user", "content": "hm"}],
    "max_tokens": 300,
    "temperature": 0,
}
PATHS = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}
ENDPOINT = pytest.mark.parametrize("path", PATHS)


@pytest.fixture
def parts():
    made = make_parts(max_context_len=400, num_blocks=200)
    run = made.runner.run

    def looping(plan, meanwhile):
        result = run(plan, meanwhile)
        samples = {
            name: type(sample)(token_id=97 + spec.output_index % 2)
            for sequence in plan.sequences
            if (spec := sequence.sample) is not None
            and (name := sequence.request_id) in result.samples
            and (sample := result.samples[name])
        }
        return type(result)(step_index=result.step_index, samples=samples)

    made.runner.run = looping
    made.engine.start()
    yield made
    made.engine.close()


def ask(parts, path, config=None, **extra):
    app = create_app(parts.engine, config or ServerConfig())
    return request(app, "POST", path, {**PATHS[path], **extra})


@ENDPOINT
def test_a_loop_is_told_of(parts, path):
    (choice,) = ask(parts, path).json()["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["finish_details"] == {
        "type": "loop", "start": 0, "period": 2, "entropy_bits": None, "stopped": False
    }  # fmt: skip


@ENDPOINT
def test_and_in_the_last_piece_of_a_stream(parts, path):
    *pieces, end = events(ask(parts, path, stream=True).body)
    assert end == "[DONE]"
    told = [p["choices"][0].get("finish_details") for p in pieces]
    assert told[:-1] == [None] * (len(pieces) - 1)
    assert told[-1]["period"] == 2


@ENDPOINT
def test_it_is_ended_when_the_request_says_so(parts, path):
    answer = ask(parts, path, stop_degenerate=True).json()
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["finish_details"]["stopped"] is True
    assert answer["usage"]["completion_tokens"] == MIN_LOOP_TOKENS


@ENDPOINT
def test_the_server_may_end_it_and_a_request_may_not_want_that(parts, path):
    config = ServerConfig(stop_degenerate=True)
    assert ask(parts, path, config).json()["choices"][0]["finish_reason"] == "stop"
    answer = ask(parts, path, config, stop_degenerate=False).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert (
        ask(parts, path, config, stop_degenerate=None).json()["choices"][0]["finish_reason"]
        == "stop"
    )


@ENDPOINT
def test_ordinary_answers_have_none(parts, path):
    answer = ask(parts, path, max_tokens=50)
    assert b"finish_details" not in answer.body
    assert json.loads(answer.body)["choices"][0]["finish_reason"] == "length"
