"""Answers rendered as history, over HTTP: never before the answer, and what the next turn then reuses."""

from __future__ import annotations

import asyncio

import pytest
from tests.support.asgi import JSON_HEADERS, arequest, events
from tests.support.engine_fakes import ByteTokenizer, make_parts

from kvist.config import EngineConfig, ServerConfig
from kvist.engine.build import build_engine
from kvist.model.chat_template import ChatTemplate
from kvist.server import rerender as rerendering
from kvist.server.app import create_app

CHAT = {"model": "fake", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
USER = {"role": "user", "content": "How thick is the fog?"}
AGAIN = {"role": "user", "content": "And now?"}


class Dropping(ByteTokenizer):
    """The template drops the first half of old answers, as others do with thoughts."""

    def apply_chat_template(self, messages, add_generation_prompt=True, *, tools=None):
        shown = [
            {**m, "content": m["content"][len(m["content"]) // 2 :]}
            if m["role"] == "assistant"
            else m
            for m in messages
        ]
        return super().apply_chat_template(shown, add_generation_prompt, tools=tools)


@pytest.fixture
def engine():
    parts = make_parts(num_blocks=512, max_context_len=512, max_batch_tokens=16)
    parts.engine.tokenizer = Dropping()
    with parts.engine as engine:
        yield engine


async def ask(app, messages, **extra):
    body = {**CHAT, "messages": messages, **extra}
    return await arequest(app, "POST", "/v1/chat/completions", body, headers=JSON_HEADERS)


async def counted(app, name):
    """Return the value of a metric."""
    text = (await arequest(app, "GET", "/metrics")).body.decode()
    (line,) = [line for line in text.splitlines() if line.startswith(f"{name} ")]
    return float(line.split()[1])


async def told_later(app, request_id):
    """Return what is told of an answer once it has been looked at."""
    async with asyncio.timeout(20):
        while True:
            told = (await arequest(app, "GET", f"/v1/cache/explain/{request_id}")).json()
            if told["rerendered"] is not None:
                return told["rerendered"]
            await asyncio.sleep(0.01)


async def two_turns(app, until):
    """Return the answer to a second turn that comes after ``until``."""
    first = (await ask(app, [USER])).json()
    await told_later(app, first["id"])
    await until(app)
    text = first["choices"][0]["message"]["content"]
    history = [USER, {"role": "assistant", "content": text}, AGAIN]
    return (await ask(app, history, kvist_explain=True)).json()["kvist"]


async def nothing(app):
    """Return at once."""


async def something(app):
    """Return when something was computed ahead."""
    async with asyncio.timeout(20):
        while not await counted(app, "kvist_prefilled_history_tokens_total"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def test_what_is_lost_is_told_after_the_answer_or_with_it_where_that_was_asked(engine):
    app = create_app(engine, ServerConfig())

    async def scenario():
        plain = (await ask(app, [USER])).json()
        assert "kvist" not in plain
        later = await told_later(app, plain["id"])
        asked = (await ask(app, [USER], kvist_explain=True)).json()["kvist"]["rerendered"]
        pieces = events((await ask(app, [USER], kvist_explain=True, stream=True)).body)
        assert later == asked == pieces[-2]["kvist"]["rerendered"]
        text = plain["choices"][0]["message"]["content"]
        num_prompt = plain["usage"]["prompt_tokens"]
        assert not later["is_same"]
        assert later["position"] >= num_prompt
        assert later["tokens_lost"] == num_prompt + 23 - later["position"]
        start = later["position"] - num_prompt
        assert later["generated"].startswith(text[start : start + 8])
        assert await counted(app, "kvist_rerendered_lost_tokens_total") == 3 * later["tokens_lost"]

    asyncio.run(scenario())


def test_an_answer_does_not_wait_for_the_look_at_it(engine, monkeypatch):
    app = create_app(engine, ServerConfig())

    def never(*arguments):
        raise AssertionError("looked at before the answer was sent")

    async def scenario():
        for is_stream in (False, True):
            monkeypatch.setattr(rerendering.Rerenders, "start", never)
            with pytest.raises(AssertionError, match="before the answer"):
                # The answer is complete when the check begins: the failure comes after its last message.
                await ask(app, [USER], stream=is_stream)

    asyncio.run(scenario())


def test_where_asked_to_the_next_turn_is_computed_while_nothing_else_is(engine):
    without = create_app(engine, ServerConfig())
    lost = asyncio.run(two_turns(without, nothing))
    engine_2 = make_parts(num_blocks=512, max_context_len=512, max_batch_tokens=16).engine
    engine_2.tokenizer = Dropping()
    with engine_2:
        app = create_app(engine_2, ServerConfig(prefill_rendered_history="on"))
        saved = asyncio.run(two_turns(app, something))
    assert lost["miss"]["reason"] == "tokens_differ"
    assert lost["miss"]["part"] == "message 1"
    assert saved["miss"]["reason"] in ("tokens_differ", "new_prompt")
    total = saved["reused_tokens"] + saved["computed_tokens"]
    assert saved["reused_tokens"] >= total - len("And now?\nassistant: ") > lost["reused_tokens"]


@pytest.mark.model
def test_the_embedded_model_s_answers_are_the_same_and_dropped_thoughts_are_computed_ahead(
    smollm2_path,
):
    config = EngineConfig.from_options(model=str(smollm2_path), memory_gib=0.1, max_context=512)
    user = {"role": "user", "content": "What is the capital of France?"}
    body = {"model": "smol", "temperature": 0, "max_tokens": 12, "kvist_explain": True}

    async def scenario(engine):
        app = create_app(engine, ServerConfig(served_name="smol", prefill_rendered_history="on"))

        async def answer(messages):
            path = "/v1/chat/completions"
            document = {**body, "messages": messages}
            return (await arequest(app, "POST", path, document, headers=JSON_HEADERS)).json()

        async def next_turn(first):
            text = first["choices"][0]["message"]["content"]
            later = [{"role": "assistant", "content": text}, {**user, "content": "And Spain?"}]
            return (await answer([user, *later]))["kvist"]

        first = await answer([user])
        assert first["choices"][0]["finish_reason"] == "stop"
        found = first["kvist"]["rerendered"]
        assert found["is_same"]
        following = await next_turn(first)
        assert following["reused_tokens"] >= found["position"]

        # A template that treats what stands before "capital" as thoughts.
        tokenizer = engine.tokenizer
        source = tokenizer.chat_template.source
        dropping = source.replace(
            "message['content']",
            "(message['content'].split(' capital ')[-1] if message['role'] == 'assistant' else message['content'])",
        )
        assert dropping != source
        tokenizer.chat_template = ChatTemplate(dropping, {})
        first = await answer([user])
        found = first["kvist"]["rerendered"]
        assert not found["is_same"]
        assert found["generated"].startswith("The capital")
        assert found["rendered"].startswith("of France")
        await something(app)
        following = await next_turn(first)
        assert following["reused_tokens"] > found["position"] + found["tokens_lost"] - 3

    with build_engine(config) as engine:
        asyncio.run(scenario(engine))
