"""What no honest client sends: each gets the error envelope, and the server goes on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging

import pytest
from tests.support.asgi import JSON_HEADERS, exchange, request
from tests.support.fake_engine import FakeEngine

from kvist.config import ServerConfig
from kvist.errors import RequestError
from kvist.server import exchange as exchange_module
from kvist.server.app import create_app
from kvist.server.endpoints import prepare_chat, prepare_completion
from kvist.server.errors import HttpError
from kvist.server.protocol import ChatMessage, ChatRequest, CompletionRequest, TextPart

GOOD = {"model": "fake-1", "prompt": "p"}
PATH = "/v1/completions"
LIMIT_BYTES = 1024


@pytest.fixture
def app():
    return create_app(FakeEngine(), ServerConfig(max_body_mib=LIMIT_BYTES / 2**20))


def assert_goes_on(app):
    assert request(app, "POST", PATH, GOOD).status == 200


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not valid JSON"),
        (b"{", "line 1, column 2"),
        (b'{"model": "fake-1", "prompt": "p"} {}', "not valid JSON"),
        (b"null", "must be a JSON object"),
        (b"[]", "must be a JSON object"),
        (b'"text"', "must be a JSON object"),
        (b"NaN", "NaN"),
        (b'{"model": "fake-1", "prompt": "p", "temperature": NaN}', "NaN"),
        (b'{"model": "fake-1", "prompt": "p", "temperature": Infinity}', "Infinity"),
        (b'{"model": "fake-1", "prompt": "p", "temperature": -Infinity}', "-Infinity"),
        (b'{"model": "fake-1", "prompt": "p", "temperature": 1e999}', "temperature"),
        (b'{"model": "fake-1", "prompt": "p", "logit_bias": {"1": 1e999}}', "logit_bias"),
        (b'{"model": "fake-1", "prompt": "p", "seed": ' + b"9" * 5000 + b"}", "digits"),
        (b'{"model": "fake-1", "prompt": "p", "seed": ' + b"9" * 900 + b"}", "seed"),
        (b'{"model": "fake-1", "prompt": "\xff"}', "not UTF-8"),
        (b"\xff\xfe" + '{"model": "fake-1", "prompt": "p"}'.encode("utf-16-le"), "not UTF-8"),
        (b"\xef\xbb\xbf{}", "not valid JSON"),
        (b'{"model": "fake-1", "prompt": "\\ud800"}', "surrogate"),
        (b'{"model": "fake-1", "prompt": ["a", "\\udc00"]}', "surrogate"),
        (b'{"model": "fake-1", "prompt": "p", "stop": "\\ud800"}', "surrogate"),
        (b'{"model": "fake-1", "prompt": "p", "\\ud800": 1}', "surrogate"),
        (b'{"model": "\\uDFFF", "prompt": "p"}', "surrogate"),
        (b'{"model": "fake-1", "prompt": "p", "prompt": "q"}', "given twice"),
        (b'{"model": "fake-1", "prompt": "p", "x": {"a": 1, "a": 2}}', "given twice"),
        (b'{"model": "fake-1", "prompt": "a\x00b', "not valid JSON"),
    ],
)
def test_bad_json_is_refused(body, says):
    app = create_app(FakeEngine(), ServerConfig())
    answer = request(app, "POST", PATH, raw=[body])
    assert answer.status == 400
    assert says in answer.error["message"]
    assert answer.error["type"] == "invalid_request_error"
    assert_goes_on(app)


@pytest.mark.parametrize("opening", [b"[", b'{"a":', b'{"prompt":['])
def test_deep_nesting_is_refused(opening):
    app = create_app(FakeEngine(), ServerConfig())
    for depth in (500, 200_000):
        answer = request(app, "POST", PATH, raw=[opening * depth])
        assert answer.status == 400
    closing = {b"[": b"]", b'{"a":': b"1}", b'{"prompt":[': b"]}"}[opening]
    answer = request(app, "POST", PATH, raw=[opening * 400 + closing * 400])
    assert answer.status == 400
    assert_goes_on(app)


def test_long_names_are_cut_in_messages():
    app = create_app(FakeEngine(), ServerConfig())
    answer = request(app, "POST", PATH, {**GOOD, "x" * 100_000: 1})
    assert answer.status == 400
    assert len(answer.error["message"]) < 400
    assert len(answer.error["param"]) < 400
    answer = request(app, "POST", PATH, {**GOOD, "model": "x" * 100_000})
    assert answer.status == 404
    assert len(answer.body) < 600
    answer = request(app, "GET", "/" + "x" * 50_000)
    assert answer.status == 404
    assert len(answer.body) < 600


def test_whole_surrogate_pairs_are_text():
    engine = FakeEngine()
    app = create_app(engine, ServerConfig())
    answer = request(app, "POST", PATH, raw=[b'{"model": "fake-1", "prompt": "\\ud83d\\ude00"}'])
    assert answer.status == 200
    assert bytes(engine.submissions[0].prompt_token_ids[1:]).decode() == "\U0001f600"


def test_null_characters_are_text():
    app = create_app(FakeEngine(), ServerConfig())
    assert request(app, "POST", PATH, {**GOOD, "prompt": "a\0b"}).status == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "multipart/form-data; boundary=x"},
        {"content-type": "application/json; charset=latin-1"},
        {"content-type": "application/json", "content-encoding": "gzip"},
    ],
)
def test_wrong_content_type_is_refused(app, headers):
    answer = request(app, "POST", PATH, GOOD, headers=headers)
    assert answer.status == 415
    assert answer.error["code"] == "unsupported_media_type"
    assert_goes_on(app)


@pytest.mark.parametrize(
    "content_type", ["application/json; charset=utf-8", 'Application/JSON;charset="UTF-8"']
)
def test_json_with_its_charset_is_accepted(app, content_type):
    answer = request(app, "POST", PATH, GOOD, headers={"content-type": content_type})
    assert answer.status == 200


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/completions", "POST"),
        ("PUT", "/v1/chat/completions", "POST"),
        ("POST", "/v1/models", "GET"),
        ("DELETE", "/v1/models/fake-1", "GET"),
        ("POST", "/health", "GET"),
    ],
)
def test_wrong_method_is_told_the_right_one(app, method, path, allowed):
    answer = request(app, method, path)
    assert answer.status == 405
    assert allowed in answer.headers["allow"]
    assert f"use {allowed}" in answer.error["message"]
    assert answer.error["code"] == "method_not_allowed"


@pytest.mark.parametrize(
    "path",
    ["/", "/v1", "/v1/", "/v1/completions/", "/completions", "/docs", "/openapi.json", "/v1/../x"],
)
def test_unknown_path_is_not_found(app, path):
    for method in ("GET", "POST"):
        answer = request(app, method, path)
        assert answer.status == 404
        assert answer.error["code"] == "not_found"


def test_cross_origin_requests_get_no_permission(app):
    answer = request(
        app, "POST", PATH, GOOD, headers={**JSON_HEADERS, "origin": "http://evil.example"}
    )
    assert not [name for name in answer.headers if name.startswith("access-control")]
    answer = request(
        app,
        "OPTIONS",
        PATH,
        headers={"origin": "http://evil.example", "access-control-request-method": "POST"},
    )
    assert answer.status == 405


@pytest.mark.parametrize("length", [str(LIMIT_BYTES + 1), "9" * 5000])
def test_declared_oversize_is_refused_before_reading(length):
    async def run():
        engine = FakeEngine()
        app = create_app(engine, ServerConfig(max_body_mib=LIMIT_BYTES / 2**20))
        headers = {**JSON_HEADERS, "content-length": length, "expect": "100-continue"}
        async with exchange(
            app, "POST", PATH, headers=headers, body=[b"x"], is_body_complete=False
        ) as (connection, _):
            answer = await connection.answer()
            assert connection.num_body_messages_taken == 0
        assert answer.status == 413
        assert answer.error["code"] == "request_too_large"
        assert str(LIMIT_BYTES) in answer.error["message"]
        assert "--max-body-mib" in answer.error["message"]

    asyncio.run(run())


def test_undeclared_oversize_is_refused_while_it_arrives():
    async def run():
        app = create_app(FakeEngine(), ServerConfig(max_body_mib=LIMIT_BYTES / 2**20))
        headers = {**JSON_HEADERS, "transfer-encoding": "chunked"}
        pieces = [b"x" * 300] * 4
        async with exchange(
            app, "POST", PATH, headers=headers, body=pieces, is_body_complete=False
        ) as (connection, _):
            start = await connection.start()
            assert start["status"] == 413
            assert b"request_too_large" in await connection.next_body()
            # The rest is read and forgotten, so that the client gets to read the answer.
            connection.incoming.put_nowait(
                {"type": "http.request", "body": b"y" * 5000, "more_body": False}
            )
            assert await connection.next_body() == b""

    asyncio.run(run())


def test_body_of_exactly_the_limit_is_accepted(app):
    padding = LIMIT_BYTES - len(json.dumps({**GOOD, "prompt": ""}))
    body = json.dumps({**GOOD, "prompt": "x" * padding}).encode()
    assert len(body) == LIMIT_BYTES
    # Longer than the fake model's context, so it was read and understood.
    answer = request(app, "POST", PATH, raw=[body])
    assert answer.error["code"] == "context_length_exceeded"
    assert request(app, "POST", PATH, raw=[body + b" "]).status == 413


def test_discarding_a_body_that_never_ends_gives_up(monkeypatch):
    monkeypatch.setattr(exchange_module, "DISCARD_S", 0.0)

    async def run():
        app = create_app(FakeEngine(), ServerConfig(max_body_mib=LIMIT_BYTES / 2**20))
        headers = {**JSON_HEADERS, "transfer-encoding": "chunked"}
        async with exchange(
            app, "POST", PATH, headers=headers, body=[b"x" * 2000], is_body_complete=False
        ) as (connection, _):
            assert (await connection.answer()).status == 413

    asyncio.run(run())


def test_refusals_are_no_errors_in_the_log(app, caplog):
    caplog.set_level(logging.INFO)
    request(app, "POST", PATH, raw=[b"{"])
    request(app, "POST", PATH, {**GOOD, "tools": [1]})
    request(app, "GET", "/nowhere")
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def bodies_with_a_value_in_every_place(value):
    """Return both endpoints' bodies with the value in the place of each parameter and of each part of a message."""
    chat = {"model": "fake-1", "messages": [{"role": "user", "content": "c"}]}
    part = {"type": "text", "text": "t"}
    inner = [{**chat["messages"][0], name: value} for name in [*ChatMessage.model_fields, "x"]]
    inner += [
        {"role": "user", "content": [{**part, name: value}]} for name in TextPart.model_fields
    ]
    inner += [{**chat["messages"][0], name: value} for name in ChatMessage.refused]
    inner += [{"role": "user", "content": [value]}, value]
    streamed = {"stream": True, "stream_options": {"include_usage": value}}
    for prepare, body, kind in (
        (prepare_completion, GOOD, CompletionRequest),
        (prepare_chat, chat, ChatRequest),
    ):
        for name in (*kind.model_fields, *kind.refused):
            yield prepare, {**body, name: value}
            yield prepare, {**body, name: [value]}
            yield prepare, {**body, name: {"1": value}}
        yield prepare, {**body, **streamed}
    for message in inner:
        yield prepare_chat, {**chat, "messages": [message]}


@pytest.mark.parametrize(
    "value",
    [None, True, 0, -1, 1.5, 10**30, "", "text", "\0", [], [[]], [None], {}, {"a": {}}, {"": []}],
    ids=repr,
)
def test_no_type_in_any_place_is_an_unforeseen_error(value):
    """A message's role that was an array or an object was looked up in a set, which answered 500."""
    engine = FakeEngine()
    for prepare, body in bodies_with_a_value_in_every_place(value):
        with contextlib.suppress(RequestError, HttpError):
            prepare(body, engine, "fake-1")


@pytest.mark.parametrize("role", [["user"], {"a": 1}])
def test_role_of_a_wrong_type_is_named(role):
    app = create_app(FakeEngine(), ServerConfig())
    body = {"model": "fake-1", "messages": [{"role": role, "content": "c"}]}
    answer = request(app, "POST", "/v1/chat/completions", body)
    assert answer.status == 400
    assert answer.error["param"] == "messages[0].role"
