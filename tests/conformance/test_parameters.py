"""Every parameter does something or is refused by name: the accepted ones, OpenAI's others, and inventions."""

from __future__ import annotations

import typing

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from tests.support.asgi import events, request
from tests.support.fake_engine import FakeEngine, Reply

from kvist.config import ServerConfig
from kvist.errors import DeadlineExceeded
from kvist.server.app import create_app
from kvist.server.protocol import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    StreamOptions,
    TextPart,
)
from kvist.types import FinishReason, Keep, SamplingParams

MINIMAL = {
    CompletionRequest: {"model": "fake-1", "prompt": "p"},
    ChatRequest: {"model": "fake-1", "messages": [{"role": "user", "content": "p"}]},
}
PATHS = {CompletionRequest: "/v1/completions", ChatRequest: "/v1/chat/completions"}
DOCUMENTED = {
    CompletionRequest: completion_create_params.CompletionCreateParamsStreaming,
    ChatRequest: chat_create_params.CompletionCreateParamsStreaming,
}

# name: (value, parameters that it needs beside it, what must differ)
SAMPLING = {
    "frequency_penalty": (0.5, {}, "frequency_penalty"),
    "ignore_eos": (True, {}, "ignore_eos"),
    "logit_bias": ({"65": -100, "66": 1.5}, {}, "logit_bias"),
    "max_tokens": (3, {}, "max_tokens"),
    "min_p": (0.1, {}, "min_p"),
    "n": (2, {}, "n"),
    "presence_penalty": (-0.5, {}, "presence_penalty"),
    "repetition_penalty": (1.25, {}, "repetition_penalty"),
    "seed": (7, {}, "seed"),
    "stop": (["a", "b"], {}, "stop"),
    "stop_degenerate": (True, {}, "stop_degenerate"),
    "stop_token_ids": ([65, 66], {}, "stop_token_ids"),
    "temperature": (0, {}, "temperature"),
    "top_k": (5, {}, "top_k"),
    "top_p": (0.5, {}, "top_p"),
}
ORDER = {
    "kvist_explain": (True, {}, "answer"),
    "priority": (-3, {}, "priority"),
    "timeout_s": (2.5, {}, "deadline_s"),
    "cache_control": ({"type": "ephemeral", "ttl": "1h"}, {}, "keep"),
}
OTHERS = {
    CompletionRequest: {
        **ORDER,
        "prompt": ("q", {}, "prompt"),
        "echo": (True, {}, "answer"),
        "logprobs": (2, {}, "logprobs"),
        "stream": (True, {}, "answer"),
        "stream_options": ({"include_usage": True}, {"stream": True}, "answer"),
        "model": ("other", {}, "status"),
    },
    ChatRequest: {
        **ORDER,
        "messages": ([{"role": "system", "content": "p"}], {}, "prompt"),
        "logprobs": (True, {}, "logprobs"),
        "tools": ([{"type": "function", "function": {"name": "t"}}], {}, "prompt"),
        "top_logprobs": (3, {"logprobs": True}, "logprobs"),
        "max_completion_tokens": (3, {}, "max_tokens"),
        "prompt_cache_retention": ("24h", {}, "keep"),
        "stream": (True, {}, "answer"),
        "stream_options": ({"include_usage": True}, {"stream": True}, "answer"),
        "model": ("other", {}, "status"),
    },
}

# Values that ask for nothing, so that clients which always send them work.
NEUTRAL = {
    CompletionRequest: [("best_of", None), ("best_of", 1), ("suffix", None), ("user", None)],
    ChatRequest: [
        ("function_call", "none"),
        ("functions", []),
        ("metadata", {}),
        ("modalities", ["text"]),
        ("parallel_tool_calls", True),
        ("prompt_cache_retention", "in_memory"),
        ("prompt_cache_retention", "in-memory"),
        ("response_format", {"type": "text"}),
        ("service_tier", "auto"),
        ("service_tier", "default"),
        ("store", False),
        ("tool_choice", "none"),
        ("tool_choice", "auto"),
        ("tools", []),
        ("tools", None),
        ("verbosity", "medium"),
    ],
}

KINDS = pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])


def ask(kind, document, engine=None):
    app = create_app(engine or FakeEngine(), ServerConfig())
    return request(app, "POST", PATHS[kind], document)


def observed(kind, document):
    """Return what a request did: the status, what the engine was asked, and the answer without ids and times."""
    engine = FakeEngine(reply=Reply(text="abcdef"))
    answer = ask(kind, document, engine)
    submission = engine.submissions[0] if engine.submissions else None
    documents = (
        events(answer.body)
        if answer.headers["content-type"].startswith("text/event-stream")
        else [answer.json()]
    )
    for document_ in documents:
        if isinstance(document_, dict):
            document_.pop("id", None)
            document_.pop("created", None)
    seen = {"status": answer.status, "answer": documents}
    if submission is not None:
        seen["prompt"] = submission.prompt_token_ids
        for name in SamplingParams.__dataclass_fields__:
            seen[name] = getattr(submission.params, name)
        seen |= {
            "priority": submission.priority,
            "deadline_s": submission.deadline_s,
            "keep": submission.keep,
        }
    return seen


@KINDS
def test_table_covers_the_schema_exactly(kind):
    assert set(kind.model_fields) == set(SAMPLING) | set(OTHERS[kind])


@pytest.mark.parametrize(
    ("kind", "name"),
    [(kind, name) for kind in MINIMAL for name in [*SAMPLING, *OTHERS[kind]]],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_accepted_parameter_changes_something(kind, name):
    value, needs, effect = {**SAMPLING, **OTHERS[kind]}[name]
    without = observed(kind, {**MINIMAL[kind], **needs})
    given = observed(kind, {**MINIMAL[kind], **needs, name: value})
    assert without["status"] == 200
    assert given[effect] != without[effect]
    # And nothing but that reaches the engine.
    reaching = {*SamplingParams.__dataclass_fields__, "prompt"} & set(given)
    assert all(given[other] == without[other] for other in reaching - {effect})


@pytest.mark.parametrize(
    ("kind", "name"),
    [(k, n) for k in MINIMAL for n in [*SAMPLING, *OTHERS[k]] if n not in {"model", "prompt"}],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_null_means_the_default(kind, name):
    if name == "messages":
        return
    assert observed(kind, {**MINIMAL[kind], name: None}) == observed(kind, MINIMAL[kind])


def test_sampling_values_reach_the_engine_unchanged():
    engine = FakeEngine()
    values = {name: value for name, (value, _, _) in SAMPLING.items()}
    assert ask(CompletionRequest, {**MINIMAL[CompletionRequest], **values}, engine).status == 200
    assert engine.submissions[0].params == SamplingParams(
        frequency_penalty=0.5,
        ignore_eos=True,
        logit_bias={65: -100, 66: 1.5},
        max_tokens=3,
        min_p=0.1,
        n=2,
        presence_penalty=-0.5,
        repetition_penalty=1.25,
        seed=7,
        stop=("a", "b"),
        stop_degenerate=True,
        stop_token_ids=(65, 66),
        temperature=0,
        top_k=5,
        top_p=0.5,
    )


@pytest.mark.parametrize(
    ("cache_control", "keep"),
    [
        ({"type": "ephemeral"}, Keep(ttl_s=300.0)),
        ({"type": "ephemeral", "ttl": "5m"}, Keep(ttl_s=300.0)),
        ({"type": "ephemeral", "ttl": "1h"}, Keep(ttl_s=3600.0)),
        ({"type": "pinned", "ttl": "90s"}, Keep(ttl_s=90.0, is_pinned=True)),
        ({"type": "pinned", "ttl": "2d"}, Keep(ttl_s=172_800.0, is_pinned=True)),
    ],
)
@KINDS
def test_cache_control_says_how_long_the_prompt_is_kept(kind, cache_control, keep):
    assert observed(kind, {**MINIMAL[kind], "cache_control": cache_control})["keep"] == keep


@pytest.mark.parametrize(
    ("cache_control", "param"),
    [
        ("ephemeral", "cache_control"),
        ({}, "cache_control.type"),
        ({"type": "forever"}, "cache_control.type"),
        ({"type": "pinned", "ttl": "1w"}, "cache_control.ttl"),
        ({"type": "pinned", "ttl": "0m"}, "cache_control.ttl"),
        ({"type": "pinned", "ttl": 60}, "cache_control.ttl"),
        ({"type": "pinned", "scope": "global"}, "cache_control.scope"),
    ],
)
def test_a_wrong_cache_control_is_refused_by_name(cache_control, param):
    answer = ask(ChatRequest, {**MINIMAL[ChatRequest], "cache_control": cache_control})
    assert (answer.status, answer.error["param"]) == (400, param)


def test_cache_control_belongs_to_the_request_and_not_to_a_message():
    part = {"type": "text", "text": "p", "cache_control": {"type": "ephemeral"}}
    messages = [{"role": "user", "content": [part]}]
    answer = ask(ChatRequest, {"model": "fake-1", "messages": messages})
    assert answer.status == 400
    assert "it belongs beside messages" in answer.error["message"]


def test_stop_may_be_one_string():
    engine = FakeEngine()
    ask(ChatRequest, {**MINIMAL[ChatRequest], "stop": "end"}, engine)
    assert engine.submissions[0].params.stop == ("end",)


@KINDS
def test_documented_parameter_that_is_not_accepted_is_refused_by_name(kind):
    documented = set(typing.get_type_hints(DOCUMENTED[kind]))
    assert len(documented) > 15
    for name in documented - set(kind.model_fields):
        engine = FakeEngine()
        answer = ask(kind, {**MINIMAL[kind], name: "something"}, engine)
        assert answer.status == 400, name
        assert answer.error["param"] == name
        assert name in answer.error["message"]
        assert engine.submissions == []


@KINDS
def test_unimplemented_parameter_says_why(kind):
    for name in kind.refused:
        answer = ask(kind, {**MINIMAL[kind], name: {"some": "thing"}})
        assert answer.error["code"] == "unsupported_parameter"
        assert f"{name} is part of OpenAI's API but not implemented: " in answer.error["message"]
        assert "something" not in answer.error["message"]


@KINDS
def test_values_that_ask_for_nothing_are_accepted(kind):
    plain = observed(kind, MINIMAL[kind])
    for name in kind.refused:
        assert observed(kind, {**MINIMAL[kind], name: None}) == plain, name
    for name, value in NEUTRAL[kind]:
        assert observed(kind, {**MINIMAL[kind], name: value}) == plain, name


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        (ChatRequest, {"store": 0}),
        (ChatRequest, {"prompt_cache_retention": "48h"}),
        (ChatRequest, {"prompt_cache_retention": "24h", "cache_control": {"type": "ephemeral"}}),
        (ChatRequest, {"parallel_tool_calls": 1}),
        (ChatRequest, {"response_format": {"type": "json_object"}}),
        (ChatRequest, {"tool_choice": "required"}),
        (ChatRequest, {"tool_choice": {"type": "function", "function": {"name": "t"}}}),
        (ChatRequest, {"parallel_tool_calls": False}),
        (CompletionRequest, {"best_of": 2}),
        (CompletionRequest, {"best_of": True}),
        (CompletionRequest, {"best_of": 2, "n": 3}),
        (CompletionRequest, {"suffix": ""}),
    ],
)
def test_values_that_ask_for_something_are_refused(kind, extra):
    answer = ask(kind, {**MINIMAL[kind], **extra})
    assert answer.status == 400
    assert answer.error["param"] == next(iter(extra))


FUNCTION = {"name": "t", "parameters": {"type": "object", "required": []}, "description": "d"}


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ("t", "tools"),
        ({"type": "function"}, "tools"),
        ([1], "tools[0]"),
        ([{}], "tools[0].type"),
        ([{"type": "function"}], "tools[0].function"),
        ([{"type": "function", "function": "t"}], "tools[0].function"),
        ([{"type": "function", "function": {}}], "tools[0].function.name"),
        ([{"type": "function", "function": {"name": ""}}], "tools[0].function.name"),
        ([{"type": "custom", "custom": {"name": "t"}}], "tools[0].type"),
        ([{"type": "function", "function": FUNCTION, "x": 1}], "tools[0].x"),
        (
            [{"type": "function", "function": {**FUNCTION, "strict": True}}],
            "tools[0].function.strict",
        ),
        (
            [{"type": "function", "function": {**FUNCTION, "parameters": []}}],
            "tools[0].function.parameters",
        ),
    ],
)
def test_a_wrong_tool_is_refused_by_name(tools, param):
    answer = ask(ChatRequest, {**MINIMAL[ChatRequest], "tools": tools})
    assert (answer.status, answer.error["param"]) == (400, param)


def test_tools_reach_the_template_in_the_client_s_own_order_without_what_asks_for_nothing():
    engine = FakeEngine()
    function = {"strict": False, **FUNCTION, "description": None}
    tool = {"function": function, "type": "function"}
    assert ask(ChatRequest, {**MINIMAL[ChatRequest], "tools": [tool]}, engine).status == 200
    prompt = bytes(engine.submissions[0].prompt_token_ids).decode()
    shown = '{"function": {"name": "t", "parameters": {"type": "object", "required": []}}, "type": "function"}'
    assert prompt.startswith(f"<tools>[{shown}]\n<user>p")


def test_what_a_tool_is_chosen_by_changes_nothing_where_it_asks_for_nothing():
    tools = {"tools": OTHERS[ChatRequest]["tools"][0]}
    plain = observed(ChatRequest, {**MINIMAL[ChatRequest], **tools})
    for extra in ({"tool_choice": "auto"}, {"tool_choice": "none"}, {"parallel_tool_calls": True}):
        assert observed(ChatRequest, {**MINIMAL[ChatRequest], **tools, **extra}) == plain


def test_best_of_equal_to_n_is_accepted():
    document = {**MINIMAL[CompletionRequest], "best_of": 3, "n": 3}
    assert ask(CompletionRequest, document).status == 200


@pytest.mark.parametrize(
    ("kind", "name", "hint"),
    [
        (CompletionRequest, "temprature", "did you mean 'temperature'?"),
        (ChatRequest, "max_new_tokens", "did you mean 'max_tokens'?"),
        (CompletionRequest, "messages", "it belongs to /v1/chat/completions"),
        (CompletionRequest, "tools", "it belongs to /v1/chat/completions"),
        (ChatRequest, "echo", "it belongs to /v1/completions"),
        (ChatRequest, "guided_json", "leave it out"),
    ],
)
def test_unknown_parameter_gets_a_hint(kind, name, hint):
    answer = ask(kind, {**MINIMAL[kind], name: 1})
    assert answer.status == 400
    assert answer.error["code"] == "unknown_parameter"
    assert answer.error["param"] == name
    assert f"unknown parameter {name!r}" in answer.error["message"]
    assert hint in answer.error["message"]


def test_misspelt_required_parameter_is_told_as_unknown():
    answer = ask(CompletionRequest, {"model": "fake-1", "promt": "p"})
    assert answer.error["param"] == "promt"
    assert "did you mean 'prompt'?" in answer.error["message"]


WRONG_TYPES = {
    "frequency_penalty": ["0.5", True, [], {}],
    "ignore_eos": [1, "true", 0],
    "stop_degenerate": [1, "true", 0],
    "logit_bias": [
        [],
        5,
        {"x": 1},
        {"-1": 1},
        {"1": "2"},
        {"1": True},
        {"1": None},
        {"²": 1},
        {"1": 1, "01": 2},
        {"9" * 400: 1},
    ],
    "max_tokens": ["3", 3.0, True],
    "min_p": ["0", True],
    "n": ["2", 2.0, True],
    "presence_penalty": ["0.5"],
    "repetition_penalty": ["1"],
    "seed": ["7", 7.5, True],
    "stop": [5, [5], {}, [None], [["a"]], True],
    "stop_token_ids": [5, ["a"], [1.0], [True], [-1], {}, [10**30]],
    "temperature": ["hot", True, [1]],
    "top_k": ["5", 5.0, False],
    "top_p": ["0.5"],
    "stream": [1, "true"],
    "stream_options": [True, [], "usage"],
    "model": [None, 5, ["fake-1"]],
}
OUT_OF_RANGE = {
    "frequency_penalty": [-2.5, 2.5, 1e300],
    "logit_bias": [{"1": 101}, {"1": -(10**400)}],
    "max_tokens": [-1],
    "min_p": [-0.1, 1.1],
    "n": [0, -1, 129, 10**30],
    "presence_penalty": [-3, 3],
    "repetition_penalty": [0, -1, 11],
    "seed": [-1, 2**63],
    "stop": ["", ["a", ""], ["s"] * 17],
    "temperature": [-0.1, 2.1],
    "top_k": [-1],
    "top_p": [0, 1.5],
}


@KINDS
@pytest.mark.parametrize("table", [WRONG_TYPES, OUT_OF_RANGE], ids=["type", "range"])
def test_wrong_value_is_refused_by_name(kind, table):
    for name, values in table.items():
        for value in values:
            engine = FakeEngine()
            answer = ask(kind, {**MINIMAL[kind], name: value}, engine)
            assert answer.status == 400, (name, value)
            assert answer.error["param"] == name, (name, value)
            assert answer.error["type"] == "invalid_request_error"
            assert name in answer.error["message"]
            assert len(answer.error["message"]) < 400
            assert engine.submissions == []


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        5,
        True,
        {},
        [],
        [[]],
        [1, "a"],
        ["a", [1]],
        [[1], []],
        [[1], 2],
        [1.0],
        [True],
        [-1],
        [258],
        [10**30],
        "",
        ["a", ""],
    ],
)
def test_wrong_prompt_is_refused(prompt):
    answer = ask(CompletionRequest, {"model": "fake-1", "prompt": prompt})
    assert answer.status == 400
    assert answer.error["param"] == "prompt"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hej", "messages"),
        ({"role": "user"}, "messages"),
        (["hej"], "messages[0]"),
        ([{}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "bot", "content": "a"}], "messages[0].role"),
        ([{"role": "tool", "content": "a", "tool_call_id": "1"}], "messages[0].role"),
        ([{"role": "user", "content": "a", "name": "Bo"}], "messages[0].name"),
        ([{"role": "user", "content": "a", "nmae": "Bo"}], "messages[0].nmae"),
        (
            [
                {"role": "user", "content": "a"},
                {"role": "assistant", "content": "b", "tool_calls": [{"id": "1"}]},
            ],
            "messages[1].tool_calls",
        ),
        ([{"role": "user", "content": ["a"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"text": "a"}]}], "messages[0].content[0].type"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0].type",
        ),
        (
            [
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "text",
                            "text": "a",
                            "prompt_cache_breakpoint": {"mode": "explicit"},
                        }
                    ],
                }
            ],
            "messages[0].content[0].prompt_cache_breakpoint",
        ),
        ([{"role": "assistant", "content": "the template refuses this"}], "messages"),
    ],
)
def test_wrong_messages_are_refused_where_they_are_wrong(messages, param):
    answer = ask(ChatRequest, {"model": "fake-1", "messages": messages})
    assert answer.status == 400
    assert answer.error["param"] == param


@pytest.mark.parametrize(
    ("kind", "extra", "param"),
    [
        (CompletionRequest, {"echo": True, "logprobs": 1}, "echo"),
        (CompletionRequest, {"stream_options": {"include_usage": True}}, "stream_options"),
        (CompletionRequest, {"logprobs": 21}, "logprobs"),
        (CompletionRequest, {"logprobs": True}, "logprobs"),
        (CompletionRequest, {"echo": 1}, "echo"),
        (ChatRequest, {"stream_options": {}, "stream": False}, "stream_options"),
        (ChatRequest, {"top_logprobs": 2}, "top_logprobs"),
        (ChatRequest, {"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        (ChatRequest, {"logprobs": 1}, "logprobs"),
        (ChatRequest, {"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        (
            ChatRequest,
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        (
            ChatRequest,
            {"stream": True, "stream_options": {"usage": True}},
            "stream_options.usage",
        ),
    ],
)
def test_parameters_in_conflict_are_refused(kind, extra, param):
    answer = ask(kind, {**MINIMAL[kind], **extra})
    assert answer.status == 400
    assert answer.error["param"] == param


def test_prompt_text_is_never_in_an_error():
    secret = "the-secret-text"
    for kind, document in (
        (CompletionRequest, {"model": "fake-1", "prompt": {"a": secret}}),
        (CompletionRequest, {"model": "fake-1", "prompt": secret, "temperature": secret}),
        (CompletionRequest, {"model": "fake-1", "prompt": secret * 200}),
        (ChatRequest, {"model": "fake-1", "messages": [{"role": "user", "content": {secret: 1}}]}),
        (ChatRequest, {"model": "fake-1", "messages": secret}),
    ):
        answer = ask(kind, document)
        assert answer.status == 400
        assert secret not in answer.body.decode()


def test_nested_objects_have_no_field_without_effect():
    assert set(StreamOptions.model_fields) == {"include_usage"}
    assert set(ChatMessage.model_fields) == {"role", "content"}
    assert set(TextPart.model_fields) == {"type", "text"}


@KINDS
def test_query_parameters_are_refused(kind):
    app = create_app(FakeEngine(), ServerConfig())
    answer = request(app, "POST", f"{PATHS[kind]}?temperature=0", MINIMAL[kind])
    assert answer.status == 400
    assert answer.error["param"] == "temperature"


@KINDS
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("priority", 0.5),
        ("priority", True),
        ("priority", 2**31),
        ("timeout_s", 0),
        ("timeout_s", -1.0),
        ("timeout_s", "2"),
    ],
)
def test_order_of_a_wrong_kind_is_refused_by_name(kind, name, value):
    answer = ask(kind, {**MINIMAL[kind], name: value})
    assert answer.status == 400
    assert answer.error["param"] == name


@KINDS
def test_time_that_runs_out_is_504_without_output_and_length_with_some(kind):
    engine = FakeEngine()
    engine.refusals.append(DeadlineExceeded("[engine] too late"))
    answer = ask(kind, {**MINIMAL[kind], "timeout_s": 1}, engine)
    assert answer.status == 504
    assert (answer.error["code"], answer.error["type"]) == ("deadline_exceeded", "timeout_error")
    engine = FakeEngine(reply=Reply(finish_reason=FinishReason.TIMEOUT))
    answer = ask(kind, {**MINIMAL[kind], "timeout_s": 1}, engine)
    assert answer.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("kind", "extra", "param"),
    [
        (CompletionRequest, {"max_tokens": 1000}, "max_tokens"),
        (CompletionRequest, {"prompt": "p" * 2000, "max_tokens": 1}, "prompt"),
        (CompletionRequest, {"prompt": "p" * 995}, "prompt"),
        (ChatRequest, {"max_tokens": 1000}, "max_tokens"),
        (ChatRequest, {"max_completion_tokens": 1000}, "max_completion_tokens"),
    ],
)
def test_what_does_not_fit_the_context_is_named_by_the_parameter_at_fault(kind, extra, param):
    answer = ask(kind, {**MINIMAL[kind], **extra})
    assert answer.status == 400
    assert (answer.error["code"], answer.error["param"]) == ("context_length_exceeded", param)


@KINDS
def test_too_many_stop_token_ids_are_refused(kind):
    answer = ask(kind, {**MINIMAL[kind], "stop_token_ids": [1] * 257})
    assert (answer.status, answer.error["param"]) == (400, "stop_token_ids")
