"""The exact bytes of streams, and their ends: completed, abandoned by the client, failed, or shut down."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from pathlib import Path

import pytest
from tests.support.asgi import JSON_HEADERS, arequest, events, exchange, request
from tests.support.fake_engine import FakeEngine, FakePlan, FakeStream, Reply

from kvist.config import ServerConfig
from kvist.errors import EngineError, EngineOverloaded
from kvist.server.app import create_app
from kvist.types import FinishReason

GOLDEN = Path(__file__).parent / "golden"

COMPLETION = {"model": "fake-1", "prompt": "secret prompt"}
CHAT = {"model": "fake-1", "messages": [{"role": "user", "content": "secret prompt"}]}
PATHS = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}

TRANSCRIPTS = {
    "completion": ("/v1/completions", {**COMPLETION, "stream": True}),
    "completion_full": (
        "/v1/completions",
        {
            **COMPLETION,
            "stream": True,
            "echo": False,
            "logprobs": 1,
            "n": 2,
            "max_tokens": 2,
            "stream_options": {"include_usage": True},
        },
    ),
    "completion_echo": ("/v1/completions", {**COMPLETION, "stream": True, "echo": True}),
    "chat": ("/v1/chat/completions", {**CHAT, "stream": True}),
    "chat_full": (
        "/v1/chat/completions",
        {
            **CHAT,
            "stream": True,
            "logprobs": True,
            "top_logprobs": 1,
            "n": 2,
            "max_completion_tokens": 2,
            "stream_options": {"include_usage": True},
        },
    ),
}


def normalised(body: bytes) -> str:
    text = re.sub(r'"id":"(cmpl|chatcmpl)-[0-9a-f]{32}"', r'"id":"\1-ID"', body.decode())
    return re.sub(r'"created":\d+', '"created":0', text)


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_transcript_is_as_recorded(name):
    path, document = TRANSCRIPTS[name]
    engine = FakeEngine(reply=Reply(text="på", num_cached_tokens=4))
    answer = request(create_app(engine, ServerConfig()), "POST", path, document)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-cache"
    assert normalised(answer.body) == (GOLDEN / f"{name}.sse").read_text(encoding="utf-8")


def test_request_id_is_the_id_of_the_answer():
    for path, document in PATHS.items():
        app = create_app(FakeEngine(), ServerConfig())
        whole = request(app, "POST", path, document)
        assert whole.headers["x-request-id"] == whole.json()["id"]
        stream = request(app, "POST", path, {**document, "stream": True})
        assert {e["id"] for e in events(stream.body)[:-1]} == {stream.headers["x-request-id"]}


def test_pieces_arrive_while_the_engine_works():
    engine = FakeEngine(reply=Reply(text="abc", hold_after=2))

    async def run():
        app = create_app(engine, ServerConfig())
        body = [json.dumps({**COMPLETION, "stream": True}).encode()]
        async with exchange(app, "POST", "/v1/completions", headers=JSON_HEADERS, body=body) as (
            connection,
            _,
        ):
            assert (await connection.start())["status"] == 200
            text = ""
            while text != "ab":
                text += "".join(
                    e["choices"][0]["text"] for e in events(await connection.next_body())
                )
            await engine.held.wait()
            engine.release()
            rest = (await connection.next_body()) + (await connection.next_body())
            assert b'"text":"c"' in rest

    asyncio.run(run())


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("path", PATHS)
def test_disconnect_cancels_every_prompt_at_once(path, is_stream):
    engine = FakeEngine(reply=Reply(hold_after=1))

    async def run():
        app = create_app(engine, ServerConfig())
        document = {**PATHS[path], "stream": is_stream, "n": 2}
        if path == "/v1/completions":
            document["prompt"] = ["one", "two", "three"]
        body = [json.dumps(document).encode()]
        async with exchange(app, "POST", path, headers=JSON_HEADERS, body=body) as (connection, _):
            await engine.held.wait()
            assert not any(s.stream.is_cancelled for s in engine.submissions)
            connection.disconnect()
        assert all(s.stream.is_cancelled for s in engine.submissions)
        # And the server goes on.
        engine.reply = Reply()
        assert (await arequest(app, "POST", path, PATHS[path])).status == 200

    asyncio.run(run())


def test_disconnect_while_a_write_is_stuck_cancels_at_once():
    """A client that stops reading and then goes away must not keep its blocks until the write ends."""
    engine = FakeEngine(reply=Reply(hold_after=1))

    async def run():
        app = create_app(engine, ServerConfig())
        body = [json.dumps({**COMPLETION, "stream": True}).encode()]
        async with exchange(
            app, "POST", "/v1/completions", headers=JSON_HEADERS, body=body, is_reading=False
        ) as (connection, _):
            await connection.stuck.wait()
            connection.disconnect()
            await asyncio.wait_for(engine.submissions[0].stream.cancelled.wait(), 5)
            connection.unblocked.set()

    asyncio.run(run())


def test_disconnect_before_the_body_is_complete_submits_nothing():
    engine = FakeEngine()

    async def run():
        app = create_app(engine, ServerConfig())
        async with exchange(
            app,
            "POST",
            "/v1/completions",
            headers={**JSON_HEADERS, "content-length": "100"},
            body=[b'{"model":'],
            is_body_complete=False,
        ) as (connection, _):
            connection.disconnect()
        assert engine.submissions == []

    asyncio.run(run())


@pytest.mark.parametrize("path", PATHS)
def test_engine_error_in_mid_stream_is_an_event_and_ends_the_stream(path, caplog):
    engine = FakeEngine(reply=Reply(error=EngineError("[engine] step 7 failed")))
    app = create_app(engine, ServerConfig())
    answer = request(app, "POST", path, {**PATHS[path], "stream": True})
    documents = events(answer.body)
    assert "[DONE]" not in documents
    assert documents[-1]["error"]["type"] == "server_error"
    assert documents[-1]["error"]["code"] == "internal_error"
    assert all("choices" in document for document in documents[:-1])
    assert "step 7 failed" in caplog.text
    assert "step 7" not in answer.body.decode()
    engine.reply = Reply()
    assert request(app, "POST", path, PATHS[path]).status == 200


@pytest.mark.parametrize("path", PATHS)
def test_engine_error_without_stream_is_a_500(path, caplog):
    app = create_app(FakeEngine(reply=Reply(error=EngineError("[engine] step 7"))), ServerConfig())
    answer = request(app, "POST", path, PATHS[path])
    assert answer.status == 500
    assert answer.error["code"] == "internal_error"
    assert "step 7" in caplog.text


def test_unforeseen_error_is_a_500_and_logged(caplog):
    engine = FakeEngine()
    engine.refusals.append(ZeroDivisionError("odd"))
    app = create_app(engine, ServerConfig())
    answer = request(app, "POST", "/v1/completions", COMPLETION)
    assert answer.status == 500
    assert answer.error["type"] == "server_error"
    assert "ZeroDivisionError" in caplog.text
    assert request(app, "POST", "/v1/completions", COMPLETION).status == 200


def test_failure_of_one_prompt_cancels_the_others():
    engine = FakeEngine(reply=Reply(error=EngineError("[engine] broken"), hold_after=2))

    async def run():
        app = create_app(engine, ServerConfig())
        body = [json.dumps({**COMPLETION, "prompt": ["a", "b"]}).encode()]
        async with exchange(app, "POST", "/v1/completions", headers=JSON_HEADERS, body=body) as (
            connection,
            _,
        ):
            await engine.held.wait()
            engine.release()
            assert (await connection.answer()).status == 500
        first, second = (submission.stream for submission in engine.submissions)
        assert first.is_finished
        assert second.is_finished or second.is_cancelled

    asyncio.run(run())


def test_overload_at_a_later_prompt_cancels_the_earlier_ones():
    engine = FakeEngine()
    engine.refusals.extend([None, None, EngineOverloaded("[engine] full", retry_after_s=1.0)])
    app = create_app(engine, ServerConfig())
    answer = request(app, "POST", "/v1/completions", {**COMPLETION, "prompt": ["a", "b", "c"]})
    assert answer.status == 429
    assert [s.stream.is_cancelled for s in engine.submissions] == [True, True]


def test_batch_with_one_prompt_too_long_runs_nothing():
    engine = FakeEngine(plan=FakePlan(max_context_len=30))
    app = create_app(engine, ServerConfig())
    document = {**COMPLETION, "prompt": ["a", "b" * 20, "c"]}
    answer = request(app, "POST", "/v1/completions", document)
    assert answer.status == 400
    assert answer.error["code"] == "context_length_exceeded"
    assert answer.error["param"] == "prompt"
    assert "30 tokens at most" in answer.error["message"]
    assert "prompt[1] has 21 tokens and 16 of output" in answer.error["message"]
    assert engine.submissions == []


@pytest.mark.parametrize(
    ("max_tokens", "num_prompt_bytes", "is_accepted"),
    [(10, 19, True), (11, 19, False), (None, 28, True), (None, 29, False), (0, 29, True)],
)
def test_context_holds_prompt_and_output_exactly(max_tokens, num_prompt_bytes, is_accepted):
    engine = FakeEngine(plan=FakePlan(max_context_len=30 + len("<user>\n<assistant>")))
    app = create_app(engine, ServerConfig())
    document = {
        "model": "fake-1",
        "messages": [{"role": "user", "content": "x" * (num_prompt_bytes + 1)}],
        "max_tokens": max_tokens,
    }
    answer = request(app, "POST", "/v1/chat/completions", document)
    assert answer.status == (200 if is_accepted else 400)


def test_batch_larger_than_the_queue_is_refused_for_good():
    engine = FakeEngine(plan=FakePlan(max_queue=5))
    app = create_app(engine, ServerConfig())
    answer = request(app, "POST", "/v1/completions", {**COMPLETION, "prompt": ["a"] * 3, "n": 2})
    assert answer.status == 400
    assert "6 sequences, the queue holds 5" in answer.error["message"]
    assert engine.submissions == []


def test_closed_gate_refuses_and_aborted_gate_ends_what_runs():
    engine = FakeEngine(reply=Reply(hold_after=1))

    async def run():
        app = create_app(engine, ServerConfig())
        body = [json.dumps({**COMPLETION, "stream": True}).encode()]
        async with exchange(app, "POST", "/v1/completions", headers=JSON_HEADERS, body=body) as (
            connection,
            _,
        ):
            await engine.held.wait()
            app.state.gate.close()
            refused = await arequest(app, "POST", "/v1/completions", COMPLETION)
            assert refused.status == 503
            assert refused.error["code"] == "engine_stopped"
            health = await arequest(app, "GET", "/health")
            assert (health.status, health.json()) == (503, {"status": "draining"})
            assert (await arequest(app, "GET", "/health/live")).status == 200
            assert not engine.submissions[0].stream.is_cancelled
            app.state.gate.abort()
            answer = await connection.answer()
        last = events(answer.body)[-1]
        assert last["error"]["code"] == "engine_stopped"
        assert "shut down" in last["error"]["message"]
        assert engine.submissions[0].stream.is_cancelled

    asyncio.run(run())


def test_aborted_gate_does_not_wait_for_a_slow_body():
    async def run():
        app = create_app(FakeEngine(), ServerConfig())
        async with exchange(
            app,
            "POST",
            "/v1/completions",
            headers=JSON_HEADERS,
            body=[b"{"],
            is_body_complete=False,
        ) as (connection, _):
            await connection.has_taken_body.wait()
            app.state.gate.abort()
            assert (await connection.answer()).status == 503

    asyncio.run(run())


@pytest.mark.parametrize("is_stream", [True, False])
def test_abort_by_the_engine_is_never_a_finish_reason(is_stream):
    engine = FakeEngine(reply=Reply(finish_reason=FinishReason.ABORT))
    app = create_app(engine, ServerConfig())
    answer = request(app, "POST", "/v1/completions", {**COMPLETION, "stream": is_stream})
    assert b"abort" not in answer.body
    if is_stream:
        assert events(answer.body)[-1]["error"]["code"] == "engine_stopped"
    else:
        assert answer.status == 503


def test_stream_of_the_engine_that_ends_too_early_is_an_error(monkeypatch, caplog):
    monkeypatch.setattr(FakeStream, "_chunks", lambda self: [])
    answer = request(
        create_app(FakeEngine(), ServerConfig()), "POST", "/v1/completions", COMPLETION
    )
    assert answer.status == 500
    assert "1 sequences unfinished" in caplog.text


def test_finished_request_is_one_log_line_without_its_text(caplog):
    caplog.set_level(logging.DEBUG)
    engine = FakeEngine(reply=Reply(text="secret answer", num_cached_tokens=3))
    app = create_app(engine, ServerConfig())
    for path, document in PATHS.items():
        for is_stream in (True, False):
            caplog.clear()
            request(app, "POST", path, {**document, "stream": is_stream})
            lines = [
                record
                for record in caplog.records
                if record.name.startswith("kvist") and record.levelno == logging.INFO
            ]
            assert len(lines) == 1
            assert re.search(
                r"prompt \d+, hit 3, computed \d+, recomputed 0, output 13 tokens; miss: none; "
                r"ttft \d+\.\d+ s, [\d.]+ tokens/s",
                lines[0].getMessage(),
            )
            assert "secret" not in caplog.text


def test_abandoned_request_is_one_log_line(caplog):
    caplog.set_level(logging.INFO)
    test_disconnect_cancels_every_prompt_at_once("/v1/chat/completions", is_stream=True)
    assert sum("ClientDisconnected after" in record.getMessage() for record in caplog.records) == 1
