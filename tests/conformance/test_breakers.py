"""``/v1/cache/breakers``: what keeps changing in a client's prompts, as the server sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.support.asgi import JSON_HEADERS, request
from tests.support.engine_fakes import make_parts

from kvist.config import ServerConfig
from kvist.server.app import create_app

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvist.engine.async_engine import AsyncEngine

CHAT = {"model": "fake", "max_tokens": 1, "temperature": 0, "ignore_eos": True}
RULES = ". Be brief and polite, and never leave the lamp alone at night."
QUESTION = {"role": "user", "content": "How thick is the fog?"}


def tool(name):
    return {"type": "function", "function": {"name": name}}


@pytest.fixture
def engine() -> Iterator[AsyncEngine]:
    parts = make_parts(num_blocks=2048, block_size=8, max_context_len=1024, max_batch_tokens=1024)
    with parts.engine as engine:
        yield engine


@pytest.fixture
def app(engine):
    return create_app(engine, ServerConfig(api_key=("key-1", "key-2")))


def ask(app, messages, key="key-1", **extra):
    headers = {**JSON_HEADERS, "authorization": f"Bearer {key}"}
    body = {**CHAT, "messages": messages, **extra}
    answer = request(app, "POST", "/v1/chat/completions", body, headers=headers)
    assert answer.status == 200
    return answer.json()


def told(app, key="key-1"):
    headers = {"authorization": f"Bearer {key}"}
    answer = request(app, "GET", "/v1/cache/breakers", headers=headers).json()
    assert (answer["object"], answer["window_s"]) == ("list", 3600)
    return answer["data"]


def system(text):
    return [{"role": "system", "content": text}, QUESTION]


def test_a_date_in_the_system_prompt_is_named_with_what_it_costs(app):
    lost = []
    for day in range(14, 18):
        answer = ask(app, system(f"Today is 2026-11-{day}{RULES}"), kvist_explain=True)
        lost.append(answer["kvist"]["miss"]["tokens_lost"])
    (row,) = told(app)
    assert (row["part"], row["kind"], row["count"]) == ("system", "timestamp", 3)
    assert row["tokens_per_hour"] == sum(lost[1:])
    assert "2026-11-16 -> 2026-11-17" in row["example"]
    assert "move the date" in row["hint"]


def test_it_needs_no_explanation_to_be_asked_for(app):
    for number in ("482910375", "917264038"):
        ask(app, system(f"Request {number}{RULES}"))
    assert [(row["part"], row["kind"]) for row in told(app)] == [("system", "id")]


def test_reordered_tools_and_an_edited_message_are_parts_of_their_own(app):
    first, second = [tool("fog"), tool("bell"), tool("tide")], [tool("bell"), tool("fog")]
    ask(app, system(f"Keep the lamp{RULES}"), tools=first)
    ask(app, system(f"Keep the lamp{RULES}"), tools=[*second, first[2]])
    history = [QUESTION, {"role": "assistant", "content": f"Thick{RULES}"}, QUESTION]
    ask(app, history)
    history[1] = {"role": "assistant", "content": f"Thin{RULES}"}
    ask(app, history)
    rows = {(row["part"], row["kind"]) for row in told(app)}
    assert rows == {("tools", "reordered_json"), ("message 1", "other")}


def test_conversations_that_have_nothing_in_common_are_no_breakers(app):
    for text in ("How thick is the fog?", "What rings at night?", "Tell me of the harbour."):
        ask(app, [{"role": "user", "content": text}])
    assert told(app) == []


def test_other_keys_see_nothing_of_it(app):
    for day in (14, 15):
        ask(app, system(f"Today is 2026-11-{day}{RULES}"))
    assert told(app, "key-2") == []
    assert len(told(app)) == 1
    assert request(app, "GET", "/v1/cache/breakers").status == 401


def test_every_prompt_of_a_completion_is_looked_at(app):
    headers = {**JSON_HEADERS, "authorization": "Bearer key-1"}
    for number in (7, 8):
        prompts = [f"{start} {number}{RULES}" for start in ("Page", "Line")]
        body = {**CHAT, "prompt": prompts}
        assert request(app, "POST", "/v1/completions", body, headers=headers).status == 200
    rows = told(app)
    assert [(row["part"], row["kind"], row["count"]) for row in rows] == [(None, "counter", 1)] * 2
