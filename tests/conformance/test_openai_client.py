"""The official client, unchanged, against the application in this process."""

from __future__ import annotations

import asyncio
import importlib

import openai
import pytest
from tests.support.asgi import request
from tests.support.fake_engine import BOS, FakeEngine, Reply

from kvist.config import ServerConfig
from kvist.errors import EngineOverloaded, EngineStopped
from kvist.server.app import create_app
from kvist.types import FinishReason

# The client's HTTP library has changed its name between versions; the transport must be from the same one.
_http = importlib.import_module(
    openai.DefaultAsyncHttpxClient.__mro__[1].__module__.partition(".")[0]
)


def with_client(engine, scenario, *, config=None, api_key="any"):
    """Run ``await scenario(client)`` and return its result."""

    async def run():
        app = create_app(engine, config or ServerConfig())
        http_client = openai.DefaultAsyncHttpxClient(transport=_http.ASGITransport(app=app))
        async with openai.AsyncOpenAI(
            base_url="http://test/v1", api_key=api_key, http_client=http_client, max_retries=0
        ) as client:
            return await scenario(client)

    return asyncio.run(run())


MESSAGES = [{"role": "user", "content": "hej"}]
TOOLS = [{"type": "function", "function": {"name": "fog", "parameters": {"type": "object"}}}]


def test_tools_are_shown_to_the_model_and_what_it_writes_is_content():
    engine = FakeEngine(reply=Reply(text='{"name": "fog"}'))
    answer = with_client(
        engine,
        lambda client: client.chat.completions.create(
            model="fake-1", messages=MESSAGES, tools=TOOLS, tool_choice="auto"
        ),
    )
    (choice,) = answer.choices
    assert choice.message.content == '{"name": "fog"}'
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"
    assert b'"name": "fog"' in bytes(engine.submissions[0].prompt_token_ids)


@pytest.mark.parametrize("is_stream", [False, True])
def test_usage_of_a_chat_says_what_was_cached_and_diagnostics_are_an_attribute(is_stream):
    engine = FakeEngine(reply=Reply(text="Hej!", num_cached_tokens=3))

    async def scenario(client):
        arguments = {
            "model": "fake-1",
            "messages": MESSAGES,
            "extra_body": {"kvist_explain": True},
        }
        if not is_stream:
            return await client.chat.completions.create(**arguments)
        stream = await client.chat.completions.create(
            **arguments, stream=True, stream_options={"include_usage": True}
        )
        return [piece async for piece in stream][-1]

    answer = with_client(engine, scenario)
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert answer.prompt_cache_diagnostics == {"type": "cache_hit"}
    assert answer.diagnostics is None
    assert answer.kvist["reused_tokens"] == 3


def test_completion_has_text_reason_and_usage():
    engine = FakeEngine(reply=Reply(text="Hej!", num_cached_tokens=3))
    answer = with_client(
        engine, lambda client: client.completions.create(model="fake-1", prompt="hello")
    )
    assert answer.object == "text_completion"
    assert answer.model == "fake-1"
    assert [choice.text for choice in answer.choices] == ["Hej!"]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens == 6
    assert answer.usage.completion_tokens == 4
    assert answer.usage.total_tokens == 10
    assert answer.usage.prompt_tokens_details.cached_tokens == 3
    assert engine.submissions[0].prompt_token_ids == (BOS, *b"hello")
    assert engine.submissions[0].params.max_tokens == 16


def test_finish_reason_is_length_when_max_tokens_ends_it():
    engine = FakeEngine(reply=Reply(text="long answer"))
    answer = with_client(
        engine,
        lambda client: client.completions.create(model="fake-1", prompt="a", max_tokens=4),
    )
    assert answer.choices[0].text == "long"
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [(BOS, 97, 98)]),
        (["a", "b"], [(BOS, 97), (BOS, 98)]),
        ([97, 98], [(97, 98)]),
        ([[97], [98, 99]], [(97,), (98, 99)]),
    ],
)
def test_every_form_of_prompt_reaches_the_engine(prompt, expected):
    engine = FakeEngine()
    answer = with_client(
        engine, lambda client: client.completions.create(model="fake-1", prompt=prompt)
    )
    assert [submission.prompt_token_ids for submission in engine.submissions] == expected
    assert [choice.index for choice in answer.choices] == list(range(len(expected)))
    assert len({submission.request_id for submission in engine.submissions}) == len(expected)


def test_usage_counts_each_prompt_once_and_only_reuse_from_before_the_call():
    engine = FakeEngine(reply=Reply(text="xy", num_cached_tokens=1))
    answer = with_client(
        engine, lambda client: client.completions.create(model="fake-1", prompt=["ab", "cde"], n=3)
    )
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert answer.usage.prompt_tokens == 3 + 4
    assert answer.usage.completion_tokens == 6 * 2
    assert answer.usage.prompt_tokens_details.cached_tokens == 2


def test_usage_says_what_was_pinned_when_that_was_asked_for():
    engine = FakeEngine(reply=Reply(num_pinned_tokens=2))
    document = {"model": "fake-1", "prompt": ["ab", "cde"], "n": 3}
    answer = request(create_app(engine, ServerConfig()), "POST", "/v1/completions", document)
    assert answer.json()["usage"]["prompt_tokens_details"] == {
        "cached_tokens": 0,
        "pinned_tokens": 4,
    }


def test_chat_goes_through_the_template():
    engine = FakeEngine()
    answer = with_client(
        engine,
        lambda client: client.chat.completions.create(
            model="fake-1",
            messages=[
                {"role": "developer", "content": "brief"},
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                },
                {"role": "assistant", "content": "c"},
                {"role": "user", "content": "d"},
            ],
        ),
    )
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "Hej!"
    assert answer.choices[0].finish_reason == "stop"
    prompt = bytes(engine.submissions[0].prompt_token_ids).decode()
    assert prompt == "<system>brief\n<user>a\nb\n<assistant>c\n<user>d\n<assistant>"
    assert engine.submissions[0].params.max_tokens is None


def test_an_answer_can_be_sent_back_as_a_message():
    engine = FakeEngine()

    async def scenario(client):
        first = await client.chat.completions.create(model="fake-1", messages=MESSAGES)
        message = first.choices[0].message
        await client.chat.completions.create(
            model="fake-1", messages=[*MESSAGES, message, *MESSAGES]
        )
        await client.chat.completions.create(
            model="fake-1", messages=[*MESSAGES, message.model_dump(), *MESSAGES]
        )

    with_client(engine, scenario)
    assert engine.submissions[1].prompt_token_ids == engine.submissions[2].prompt_token_ids


def test_streamed_completion_gives_the_same_text_and_usage():
    engine = FakeEngine(reply=Reply(text="blåbär", num_cached_tokens=2))

    async def scenario(client):
        stream = await client.completions.create(
            model="fake-1", prompt="abc", stream=True, stream_options={"include_usage": True}
        )
        return [chunk async for chunk in stream]

    chunks = with_client(engine, scenario)
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "blåbär"
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + [
        "stop"
    ]
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 8
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 2


def test_streamed_chat_gives_the_same_text_and_usage():
    async def scenario(client):
        stream = await client.chat.completions.create(
            model="fake-1",
            messages=MESSAGES,
            n=2,
            stream=True,
            stream_options={"include_usage": True},
        )
        return [chunk async for chunk in stream]

    chunks = with_client(FakeEngine(), scenario)
    for index in (0, 1):
        own = [c.choices[0] for c in chunks[:-1] if c.choices[0].index == index]
        assert own[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in own) == "Hej!"
        assert [choice.finish_reason for choice in own][-2:] == [None, "stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == chunks[-1].usage.prompt_tokens + 8


def test_stream_without_include_usage_has_no_usage():
    async def scenario(client):
        stream = await client.chat.completions.create(
            model="fake-1", messages=MESSAGES, stream=True
        )
        return [chunk async for chunk in stream]

    chunks = with_client(FakeEngine(), scenario)
    assert all(chunk.usage is None and chunk.choices for chunk in chunks)


def test_echo_comes_before_the_text():
    for prompt in ("ab", [97, 98]):
        answer = with_client(
            FakeEngine(),
            lambda client, prompt=prompt: client.completions.create(
                model="fake-1", prompt=prompt, echo=True
            ),
        )
        assert answer.choices[0].text == "abHej!"


def test_echo_alone_computes_the_prompt_only():
    engine = FakeEngine()
    answer = with_client(
        engine,
        lambda client: client.completions.create(
            model="fake-1", prompt="ab", echo=True, max_tokens=0
        ),
    )
    assert answer.choices[0].text == "ab"
    assert answer.choices[0].finish_reason == "length"
    assert engine.submissions[0].params.max_tokens == 0


def test_streamed_echo_is_the_first_piece():
    async def scenario(client):
        stream = await client.completions.create(
            model="fake-1", prompt=["ab", "cd"], echo=True, stream=True
        )
        return [chunk async for chunk in stream]

    chunks = with_client(FakeEngine(), scenario)
    assert [chunk.choices[0].text for chunk in chunks[:2]] == ["ab", "cd"]


def test_completion_logprobs_have_offsets_of_characters():
    answer = with_client(
        FakeEngine(reply=Reply(text="aåb")),
        lambda client: client.completions.create(model="fake-1", prompt="p", logprobs=2),
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["a", "bytes:\\xc3", "bytes:\\xa5", "b"]
    assert logprobs.token_logprobs == [-0.25] * 4
    assert logprobs.text_offset == [0, 1, 1, 2]
    assert logprobs.top_logprobs[0] == {"a": -0.25, "x": -1.5}


def test_completion_logprobs_of_zero_report_the_chosen_tokens_only():
    answer = with_client(
        FakeEngine(),
        lambda client: client.completions.create(model="fake-1", prompt="p", logprobs=0),
    )
    assert answer.choices[0].logprobs.tokens == list("Hej!")
    assert answer.choices[0].logprobs.top_logprobs is None


def test_streamed_completion_logprobs_continue_the_offsets():
    async def scenario(client):
        stream = await client.completions.create(
            model="fake-1", prompt="p", logprobs=1, n=2, stream=True
        )
        return [chunk.choices[0] async for chunk in stream]

    choices = with_client(FakeEngine(reply=Reply(text="åb")), scenario)
    for index in (0, 1):
        own = [choice.logprobs for choice in choices if choice.index == index and choice.logprobs]
        assert [logprobs.text_offset for logprobs in own] == [[0], [0], [1]]


def test_chat_logprobs_have_bytes_and_alternatives():
    answer = with_client(
        FakeEngine(reply=Reply(text="å")),
        lambda client: client.chat.completions.create(
            model="fake-1", messages=MESSAGES, logprobs=True, top_logprobs=2
        ),
    )
    content = answer.choices[0].logprobs.content
    assert [entry.bytes for entry in content] == [[0xC3], [0xA5]]
    assert content[0].logprob == -0.25
    assert [(top.token, top.bytes, top.logprob) for top in content[0].top_logprobs] == [
        ("bytes:\\xc3", [0xC3], -0.25),
        ("x", [ord("x")], -1.5),
    ]


def test_streamed_chat_logprobs_come_with_their_tokens():
    async def scenario(client):
        stream = await client.chat.completions.create(
            model="fake-1", messages=MESSAGES, logprobs=True, stream=True
        )
        return [chunk.choices[0] async for chunk in stream]

    choices = with_client(FakeEngine(), scenario)
    tokens = [entry.token for c in choices if c.logprobs for entry in c.logprobs.content]
    assert tokens == list("Hej!")


def test_models_lists_the_served_name():
    async def scenario(client):
        models = [model async for model in client.models.list()]
        return models, await client.models.retrieve("org/name")

    models, model = with_client(FakeEngine(), scenario, config=ServerConfig(served_name="org/name"))
    assert [m.id for m in models] == ["org/name"]
    assert model == models[0]


def test_wrong_model_is_not_found_and_the_served_name_told():
    async def scenario(client):
        for call in (
            client.completions.create(model="gpt-4", prompt="a"),
            client.chat.completions.create(model="gpt-4", messages=MESSAGES),
            client.models.retrieve("gpt-4"),
        ):
            with pytest.raises(openai.NotFoundError, match="serves 'fake-1'") as caught:
                await call
            assert caught.value.code == "model_not_found"

    with_client(FakeEngine(), scenario)


def test_full_queue_is_a_rate_limit_with_retry_after():
    engine = FakeEngine()
    engine.refusals.append(EngineOverloaded("[engine] queue full", retry_after_s=2.1))

    async def scenario(client):
        with pytest.raises(openai.RateLimitError) as caught:
            await client.completions.create(model="fake-1", prompt="a")
        assert caught.value.response.headers["retry-after"] == "3"
        assert caught.value.code == "rate_limit_exceeded"
        await client.completions.create(model="fake-1", prompt="a")

    with_client(engine, scenario)


def test_stopped_engine_is_unavailable():
    engine = FakeEngine()
    engine.refusals.append(EngineStopped("[engine] stopped"))

    async def scenario(client):
        with pytest.raises(openai.InternalServerError) as caught:
            await client.completions.create(model="fake-1", prompt="a")
        assert caught.value.status_code == 503
        assert caught.value.code == "engine_stopped"

    with_client(engine, scenario)


def test_error_in_mid_stream_is_raised_by_the_client():
    engine = FakeEngine(reply=Reply(error=RuntimeError("broken")))

    async def scenario(client):
        stream = await client.completions.create(model="fake-1", prompt="a", stream=True)
        texts = []

        async def read():
            async for chunk in stream:
                texts.append(chunk.choices[0].text)  # noqa: PERF401  # what came before counts

        with pytest.raises(openai.APIError, match="failed inside the engine"):
            await read()
        return texts

    assert "".join(with_client(engine, scenario)) == "Hej!"


def test_finish_reasons_of_the_engine_reach_the_client():
    for reason in (FinishReason.STOP, FinishReason.LENGTH):
        answer = with_client(
            FakeEngine(reply=Reply(finish_reason=reason)),
            lambda client: client.completions.create(model="fake-1", prompt="a"),
        )
        assert answer.choices[0].finish_reason == reason.value
