"""The whole way with the real engine and the embedded model: what only they can show."""

from __future__ import annotations

import asyncio
import json

import pytest
from tests.support.asgi import JSON_HEADERS, arequest, events, exchange

from kvist.config import EngineConfig, ServerConfig
from kvist.engine.build import build_engine
from kvist.server.app import create_app

pytestmark = pytest.mark.model

CHAT = {
    "model": "smol",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 12,
}


@pytest.fixture(scope="module")
def engine(smollm2_path):
    config = EngineConfig.from_options(model=str(smollm2_path), memory_gib=0.1, max_context=512)
    with build_engine(config) as engine:
        yield engine


@pytest.fixture
def app(engine):
    return create_app(engine, ServerConfig(served_name="smol", api_key=("key-1", "key-2")))


def with_key(key):
    return {**JSON_HEADERS, "authorization": f"Bearer {key}"}


async def until(engine, condition):
    """Wait until the cache's counters, published after each step, fulfil a condition."""
    async with asyncio.timeout(30):
        while not condition(engine.stats().cache):  # noqa: ASYNC110  # the engine tells nobody
            await asyncio.sleep(0.01)


def test_second_request_is_served_from_the_cache_of_its_own_key_only(app):
    async def run():
        answers = [
            (
                await arequest(app, "POST", "/v1/chat/completions", CHAT, headers=with_key(key))
            ).json()
            for key in ("key-1", "key-1", "key-2")
        ]
        texts = [answer["choices"][0]["message"]["content"] for answer in answers]
        assert texts == ["The capital of France is Paris."] * 3
        assert [answer["choices"][0]["finish_reason"] for answer in answers] == ["stop"] * 3
        usages = [answer["usage"] for answer in answers]
        cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
        assert cached == [0, usages[0]["prompt_tokens"] - 1, 0]

    asyncio.run(run())


def test_stream_has_the_text_of_the_whole_answer(app):
    async def run():
        whole = await arequest(app, "POST", "/v1/chat/completions", CHAT, headers=with_key("key-1"))
        stream = await arequest(
            app,
            "POST",
            "/v1/chat/completions",
            {**CHAT, "stream": True},
            headers=with_key("key-1"),
        )
        pieces = [event["choices"][0]["delta"] for event in events(stream.body)[:-1]]
        text = "".join(piece.get("content", "") for piece in pieces)
        assert text == whole.json()["choices"][0]["message"]["content"]

    asyncio.run(run())


def test_offsets_point_at_the_tokens_in_the_text(app):
    document = {
        "model": "smol",
        "prompt": "Smörgås means",
        "temperature": 0,
        "max_tokens": 8,
        "logprobs": 1,
    }

    async def run():
        answer = await arequest(app, "POST", "/v1/completions", document, headers=with_key("key-1"))
        choice = answer.json()["choices"][0]
        logprobs = choice["logprobs"]
        assert len(logprobs["tokens"]) == 8
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            assert token.startswith("bytes:") or choice["text"][offset:].startswith(token)

    asyncio.run(run())


@pytest.mark.parametrize("is_stream", [True, False])
def test_disconnect_gives_every_block_back(engine, app, is_stream):
    document = {
        "model": "smol",
        "prompt": ["Once upon a time", "In the beginning"],
        "max_tokens": 400,
        "ignore_eos": True,
        "stream": is_stream,
    }

    async def run():
        num_aborted = engine.stats().num_aborted_requests
        body = [json.dumps(document).encode()]
        async with exchange(
            app, "POST", "/v1/completions", headers=with_key("key-1"), body=body
        ) as (connection, _):
            await until(engine, lambda cache: cache.num_held > 0)
            connection.disconnect()
        await until(engine, lambda cache: cache.num_held == 0)
        assert engine.stats().num_aborted_requests == num_aborted + 2

    asyncio.run(run())


def test_statistics_are_json(app):
    async def run():
        answer = await arequest(app, "GET", "/v1/cache/stats", headers=with_key("key-1"))
        document = answer.json()
        cache = document["cache"]
        assert cache["num_free"] + cache["num_evictable"] + cache["num_held"] == cache["num_blocks"]
        assert document["num_finished_requests"] >= 0

    asyncio.run(run())
