"""Miss reports over HTTP: scripted changes of a chat prompt, the two ways to ask, and who may."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from openai.types.responses import response as openai_response
from pydantic import TypeAdapter
from tests.support.asgi import JSON_HEADERS, events, request
from tests.support.cache import make_manager
from tests.support.chat_templates import CHATML_TOOLS
from tests.support.engine_fakes import ByteTokenizer, make_parts

from kvist.cache.namespaces import Namespace
from kvist.config import ServerConfig
from kvist.model.chat_template import ChatTemplate
from kvist.model.tokenizer import load_tokenizer
from kvist.server.app import create_app
from kvist.server.explanation import History, anthropic_diagnostics, explain_prompt
from kvist.server.prompts import Prompt, encode_messages
from kvist.server.protocol import ChatMessage
from kvist.types import MissReason, Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvist.engine.async_engine import AsyncEngine

Turns = list[dict[str, str]]

NUM_VARIANTS = 12
WORDS = (
    "fog",
    "mill",
    "harbour",
    "bell",
    "tide",
    "lantern",
    "gull",
    "rope",
    "anchor",
    "pier",
    "salt",
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {name[0]: {"type": "string"}}},
        },
    }
    for name in ("search", "weather", "calendar", "translate")
]
Tools = list[dict[str, object]]


def sentence(chance: random.Random, num_words: int) -> str:
    return " ".join(chance.choice(WORDS) for _ in range(num_words)).capitalize() + "."


def conversation(chance: random.Random, system: str) -> Turns:
    turns = [{"role": "system", "content": f"{system}{sentence(chance, 30)}"}]
    for turn in range(3):
        turns += [
            {"role": "user", "content": f"Question {turn}: {sentence(chance, 14)}"},
            {
                "role": "assistant",
                "content": f"<think>{sentence(chance, 8)}</think>\nAnswer {turn}: {sentence(chance, 18)}",
            },
        ]
    return [*turns, {"role": "user", "content": sentence(chance, 9)}]


def edited(turns: Turns, index: int, content: str) -> Turns:
    return [{**turn, "content": content} if i == index else turn for i, turn in enumerate(turns)]


@dataclass
class Change:
    """One scripted change of a prompt, and what is to be said of it."""

    before: Turns
    after: Turns
    part: str
    reason: MissReason = MissReason.TOKENS_DIFFER
    tenant: str = ""
    """Of the second request."""
    between: list[Turns] = field(default_factory=list)
    """Prompts that sweep the cache."""
    tools: tuple[Tools | None, Tools | None] = (None, None)
    """Of the two requests."""


def nonce(chance: random.Random) -> Change:
    rest = sentence(chance, 30)
    both = [f"x-request-id: {chance.randrange(10**9):09}\n{rest}" for _ in range(2)]
    turns = conversation(chance, "")
    return Change(edited(turns, 0, both[0]), edited(turns, 0, both[1]), "system")


def date(chance: random.Random) -> Change:
    day = chance.randint(10, 27)
    turns = conversation(chance, "You keep a lighthouse. ")
    both = [f"{turns[0]['content']} Today is 2026-11-{d}, be brief." for d in (day, day + 1)]
    return Change(edited(turns, 0, both[0]), edited(turns, 0, both[1]), "system")


def tool_reordered(chance: random.Random) -> Change:
    first, second = chance.sample(range(len(TOOLS)), 2)
    tools = list(TOOLS)
    tools[first], tools[second] = tools[second], tools[first]
    turns = conversation(chance, "")
    return Change(turns, turns, "tools", tools=(TOOLS, tools))


def tool_added(chance: random.Random) -> Change:
    place = chance.randrange(len(TOOLS))
    turns = conversation(chance, "")
    fewer = [*TOOLS[:place], *TOOLS[place + 1 :]]
    return Change(turns, turns, "tools", tools=(chance.choice((fewer, None)), TOOLS))


def message_edited(chance: random.Random) -> Change:
    turns = conversation(chance, "")
    index = chance.randrange(1, len(turns) - 1)
    words = turns[index]["content"].split(" ")
    words[chance.randrange(1, len(words))] = "QUITE"
    return Change(turns, edited(turns, index, " ".join(words)), f"message {index}")


def history_truncated(chance: random.Random) -> Change:
    turns = conversation(chance, "")
    num_dropped = chance.choice((2, 4))
    return Change(turns, [turns[0], *turns[1 + num_dropped :]], "message 1")


def thinking_dropped(chance: random.Random) -> Change:
    turns = conversation(chance, "")
    index = chance.choice((2, 4, 6))
    content = turns[index]["content"].split("</think>\n")[1]
    return Change(turns, edited(turns, index, content), f"message {index}")


def whitespace(chance: random.Random) -> Change:
    turns = conversation(chance, "")
    index = chance.randrange(1, len(turns) - 1)
    content = turns[index]["content"]
    changed = chance.choice(
        (content.replace(" ", "  ", 1), content + " ", content + "\n", content.replace(". ", ".\n"))
    )
    if changed == content:
        changed = content + "\n\n"
    return Change(turns, edited(turns, index, changed), f"message {index}")


def other_tenant(chance: random.Random) -> Change:
    turns = conversation(chance, "")
    reason = MissReason.NAMESPACE_DIFFERS
    return Change(turns, turns, "template", reason, tenant="somebody else")


def evicted(chance: random.Random) -> Change:
    turns = conversation(chance, "")
    sweep = [edited(conversation(chance, ""), 0, sentence(chance, 500)) for _ in range(3)]
    return Change(turns, turns, "template", MissReason.EVICTED, between=sweep)


KINDS: tuple[Callable[[random.Random], Change], ...] = (
    nonce,
    date,
    tool_reordered,
    tool_added,
    message_edited,
    history_truncated,
    thinking_dropped,
    whitespace,
    other_tenant,
    evicted,
)


@pytest.fixture(scope="module", params=["bytes", pytest.param("smollm2", marks=pytest.mark.model)])
def tokenizer(request):
    if request.param == "bytes":
        return ByteTokenizer()
    tokenizer = load_tokenizer(request.getfixturevalue("smollm2_path"))
    # SmolLM2's own template has no place for tools; otherwise this one writes what that does.
    tokenizer.chat_template = ChatTemplate(CHATML_TOOLS, {})
    return tokenizer


@pytest.mark.parametrize("variant", range(NUM_VARIANTS))
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_scripted_change_has_the_right_reason_part_and_first_differing_token(
    tokenizer, kind, variant
):
    change = kind(random.Random(f"{kind.__name__} {variant}"))
    both = zip((change.before, change.after), change.tools, strict=True)
    prompts = [prompt_of(turns, tokenizer, tools) for turns, tools in both]
    size = 16
    # So that there is room to copy, but for the prompt that is to be swept out.
    num_spare = 8 if change.between else 64
    manager = make_manager(len(prompts[0].token_ids) // size + num_spare, size)
    served(manager, prompts[0])
    for turns in change.between:
        served(manager, prompt_of(turns, tokenizer), is_cut=True)
    told = explain_prompt(prompts[1], served(manager, prompts[1], change.tenant), tokenizer)

    before, after = (prompt.token_ids for prompt in prompts)
    differing = next(
        (i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), len(after)
    )
    miss = told["miss"]
    assert miss["reason"] == change.reason.value
    if change.reason is MissReason.TOKENS_DIFFER:
        assert miss["part"] == change.part
        assert miss["position"] == differing
        assert told["reused_tokens"] == differing
        assert tokenizer.token_bytes(after[differing]).decode(errors="replace")[:1] in (
            "\ufffd",
            miss["received"][:1],
        )
        assert miss["expected"] != miss["received"]
    else:
        assert miss["position"] == told["reused_tokens"]
        assert miss["expected"] is miss["received"] is None
        if miss["position"] == 0:
            assert miss["part"] == change.part
    assert told["reused_tokens"] + told["computed_tokens"] == len(after)
    lost = sum(span["tokens_lost"] for span in told["spans"])
    assert lost == told["computed_tokens"] - 1


def prompt_of(turns: Turns, tokenizer, tools: Tools | None = None) -> Prompt:
    return encode_messages([ChatMessage(**turn) for turn in turns], tokenizer, tools)


def served(manager, prompt: Prompt, tenant: str = "", *, is_cut: bool = False) -> Usage:
    """Take a prompt through the cache; ``is_cut`` to what the pool holds."""
    limit = manager.num_blocks * manager.block_size
    token_ids = prompt.token_ids[:limit] if is_cut else prompt.token_ids
    chain = manager.new_chain(Namespace(model="m", tenant=tenant), token_ids)
    lease = manager.admit(manager.lookup(chain, len(token_ids) - 1), chain, len(token_ids))
    num_cached = lease.num_computed_tokens
    assert manager.extend(lease, len(token_ids))
    manager.commit(lease, chain, len(token_ids))
    manager.release(lease)
    return Usage(
        num_prompt_tokens=len(token_ids),
        num_cached_tokens=num_cached,
        num_computed_tokens=len(token_ids) - num_cached,
        num_output_tokens=0,
        miss=lease.miss,
    )


# --- over HTTP

CHAT = {
    "model": "fake",
    "messages": [{"role": "user", "content": "How thick is the fog?"}],
    "max_tokens": 3,
    "temperature": 0,
    "ignore_eos": True,
}
OTHER = {**CHAT, "messages": [{"role": "user", "content": "How thick was the fog?"}]}


@pytest.fixture
def engine() -> Iterator[AsyncEngine]:
    with make_parts().engine as engine:
        yield engine


@pytest.fixture
def app(engine):
    return create_app(engine, ServerConfig())


def ask(app, body, **changes):
    key = changes.pop("key", None)
    headers = {**JSON_HEADERS, "authorization": f"Bearer {key}"} if key else None
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return request(app, "POST", path, {**body, **changes}, headers=headers)


def told_later(app, request_id, key=None):
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return request(app, "GET", f"/v1/cache/explain/{request_id}", headers=headers)


MISS = {
    "reason": "tokens_differ",
    "part": "message 0",
    "position": 16,
    "tokens_lost": 23,
    "before": "w thick ",
    "received": "was the fog?\nass",
    "expected": "is the fog?\nassi",
    "left_s_ago": None,
}


def test_answers_say_nothing_of_it_unless_asked(app):
    assert "kvist" not in ask(app, CHAT).json()
    assert "kvist" not in ask(app, CHAT, kvist_explain=False).json()


def test_an_answer_that_was_asked_says_what_was_reused_and_why_not_the_rest(app):
    ask(app, CHAT)
    answer = ask(app, OTHER, kvist_explain=True).json()
    num_prompt = answer["usage"]["prompt_tokens"]
    assert answer["kvist"] == {
        "reused_tokens": 16,
        "computed_tokens": num_prompt - 16,
        "recomputed_tokens": 0,
        "miss": MISS,
        "spans": [MISS],
        "rerendered": {
            "is_same": True,
            "position": num_prompt + 2,
            "tokens_lost": 0,
            "generated": None,
            "rendered": None,
        },
    }
    again = ask(app, OTHER, kvist_explain=True).json()["kvist"]
    assert (again["reused_tokens"], again["miss"], again["spans"]) == (num_prompt - 1, None, [])


@pytest.mark.parametrize("has_usage", [False, True])
def test_the_last_piece_of_a_stream_says_it(app, has_usage):
    ask(app, CHAT)
    options = {"stream_options": {"include_usage": True}} if has_usage else {}
    answer = ask(app, OTHER, kvist_explain=True, stream=True, **options)
    *pieces, end = events(answer.body)
    assert end == "[DONE]"
    assert [piece for piece in pieces if "kvist" in piece] == [pieces[-1]]
    assert pieces[-1]["kvist"]["miss"] == MISS
    assert has_usage == (pieces[-1]["choices"] == [])


def test_completions_have_no_parts_and_each_prompt_an_object_of_its_own(app):
    body = {"model": "fake", "prompt": "once upon a time", "max_tokens": 1, "temperature": 0}
    ask(app, body)
    told = ask(
        app,
        body,
        prompt=["once upon a mile", "a time once", "once upon a time"],
        kvist_explain=True,
    ).json()["kvist"]
    assert told["miss"]["reason"] == "tokens_differ"
    assert told["miss"]["part"] is None
    assert told["miss"]["position"] == 12
    assert [each["reused_tokens"] for each in told["prompts"]] == [12, 0, 15]
    assert told["reused_tokens"] == 27
    assert told["prompts"][1]["miss"]["reason"] == "new_prompt"
    assert told["prompts"][2]["miss"] is None


def test_openai_s_own_object_is_read_by_openai_s_own_type(app):
    adapter = TypeAdapter(openai_response.PromptCacheDiagnostics)
    kinds = []
    for body in (CHAT, CHAT, OTHER):
        document = ask(app, body, kvist_explain=True).json()["prompt_cache_diagnostics"]
        kinds.append(adapter.validate_python(document))
    assert [kind.type for kind in kinds] == [
        "comparison_response_not_found",
        "cache_hit",
        "cache_miss",
    ]
    assert kinds[2].reason == "input_changed"
    assert kinds[2].comparison_reusable_tokens == 16


TOOL = {"type": "function", "function": {"name": "fog"}}
OTHER_TOOL = {"type": "function", "function": {"name": "mist"}}
SYSTEM = {"role": "system", "content": "You keep a lighthouse."}
LATER = [*CHAT["messages"], {"role": "assistant", "content": "A"}, {"role": "user", "content": "B"}]


def test_changed_tools_are_told_in_openai_s_word_for_them(app):
    ask(app, CHAT, messages=[SYSTEM], tools=[TOOL])
    answer = ask(app, CHAT, messages=[SYSTEM], tools=[OTHER_TOOL], kvist_explain=True).json()
    adapter = TypeAdapter(openai_response.PromptCacheDiagnostics)
    told = adapter.validate_python(answer["prompt_cache_diagnostics"])
    assert (told.type, told.reason) == ("cache_miss", "tools_changed")
    assert answer["kvist"]["miss"]["part"] == "tools"


def test_a_conversation_that_goes_on_is_a_hit_in_openai_s_terms(app):
    ask(app, CHAT)
    answer = ask(app, CHAT, messages=LATER, kvist_explain=True).json()
    assert answer["kvist"]["reused_tokens"] >= len("user: How thick is the fog?\nassistant: ")
    assert answer["prompt_cache_diagnostics"]["type"] in ("cache_hit", "cache_miss")


ANTHROPIC_TYPES = {
    "model_changed",
    "system_changed",
    "tools_changed",
    "messages_changed",
    "previous_message_not_found",
    "unavailable",
}
"""Anthropic's list; those that end in changed come with a number of tokens and the others without."""


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        (None, {}, "previous_message_not_found"),
        ({}, {}, None),
        ({}, {"messages": OTHER["messages"]}, "messages_changed"),
        (
            {"messages": [SYSTEM]},
            {"messages": [{**SYSTEM, "content": "You ring a bell."}]},
            "system_changed",
        ),
        (
            {"messages": [SYSTEM], "tools": [TOOL]},
            {"messages": [SYSTEM], "tools": [OTHER_TOOL]},
            "tools_changed",
        ),
    ],
)
def test_anthropic_s_own_object_says_what_changed(app, before, after, kind):
    if before is not None:
        ask(app, CHAT, **before)
    answer = ask(app, CHAT, kvist_explain=True, **after).json()
    told = answer["diagnostics"]
    if kind is None:
        assert told is None
        return
    assert set(told) == {"cache_miss_reason"}
    reason = told["cache_miss_reason"]
    assert reason["type"] == kind
    assert reason["type"] in ANTHROPIC_TYPES
    counts = {name: value for name, value in reason.items() if name != "type"}
    lost = answer["kvist"]["miss"]["tokens_lost"]
    assert counts == ({"cache_missed_input_tokens": lost} if kind.endswith("_changed") else {})


@pytest.mark.parametrize(
    ("reason", "part", "kind"),
    [
        ("evicted", "system", None),
        ("new_prompt", "message 3", None),
        ("tokens_differ", "template", "unavailable"),
        ("tokens_differ", None, "unavailable"),
        ("namespace_differs", None, "previous_message_not_found"),
        ("model_changed", "system", "model_changed"),
    ],
)
def test_anthropic_has_a_word_for_what_was_sent_and_none_for_the_cache(reason, part, kind):
    span = {"reason": reason, "part": part, "position": 9, "tokens_lost": 4}
    told = anthropic_diagnostics({"spans": [span]})
    assert (None if told is None else told["cache_miss_reason"]["type"]) == kind
    assert anthropic_diagnostics({"prompts": [{"spans": []}, {"spans": [span]}]}) == told


def test_a_finished_request_can_be_asked_about_later(app):
    ask(app, CHAT)
    answer = ask(app, OTHER).json()
    later = told_later(app, answer["id"])
    assert later.status == 200
    assert later.json()["object"] == "kvist.explanation"
    assert later.json()["id"] == answer["id"]
    assert later.json()["miss"] == MISS


def test_another_key_s_request_is_as_unknown_as_one_that_never_was(engine):
    app = create_app(engine, ServerConfig(api_key=("key-1", "key-2")))
    name = ask(app, CHAT, key="key-1").json()["id"]
    assert told_later(app, name, "key-1").status == 200
    foreign, never = told_later(app, name, "key-2"), told_later(app, f"{name}x", "key-2")
    assert foreign.status == never.status == 404
    assert foreign.error["message"].replace(name, "ID") == never.error["message"].replace(
        f"{name}x", "ID"
    )
    assert told_later(app, name).status == 401


def test_no_text_of_one_key_reaches_another(engine):
    app = create_app(engine, ServerConfig(api_key=("key-1", "key-2")))
    secret = {**CHAT, "messages": [{"role": "user", "content": "How thick is the SECRET?"}]}
    ask(app, secret, key="key-1")
    for guess in ("How thick is the SECRE!", "How thick is the fog?", "x"):
        body = {**CHAT, "messages": [{"role": "user", "content": guess}]}
        answer = ask(app, body, key="key-2", kvist_explain=True)
        assert b"SECRET" not in answer.body
    first = ask(app, secret, key="key-2", kvist_explain=True).json()["kvist"]["miss"]
    assert first["position"] <= len("user: How thick is the SECRE")


def test_the_log_line_says_why_and_holds_no_text(app, caplog):
    caplog.set_level("INFO", logger="kvist")
    ask(app, CHAT)
    ask(app, OTHER)
    lines = [r.getMessage() for r in caplog.records if r.name == "kvist.server.generation"]
    assert len(lines) == 2
    assert "miss: new_prompt at 0 (" in lines[0]
    assert "miss: tokens_differ at 16 (23)" in lines[1]
    assert "thick" not in caplog.text


def test_statistics_show_the_latest_requests_of_the_same_key_without_their_text(engine):
    app = create_app(engine, ServerConfig(api_key=("key-1", "key-2")))
    first = ask(app, CHAT, key="key-1").json()["id"]
    second = ask(app, OTHER, key="key-1").json()["id"]
    answer = request(app, "GET", "/v1/cache/stats", headers={"authorization": "Bearer key-1"})
    rows = answer.json()["recent_requests"]
    assert [row["id"] for row in rows] == [second, first]
    assert rows[0] == {
        "id": second,
        "reused_tokens": 16,
        "computed_tokens": 24,
        "recomputed_tokens": 0,
        "miss": {name: MISS[name] for name in ("reason", "part", "position", "tokens_lost")},
    }
    assert b"thick" not in answer.body
    other = request(app, "GET", "/v1/cache/stats", headers={"authorization": "Bearer key-2"})
    assert other.json()["recent_requests"] == []


def test_history_is_bounded():
    history = History(max_calls=2)
    for name in "abc":
        history.add(name, "", {"name": name})
    assert history.get("a", "") is None
    assert history.get("c", "") == {"name": "c"}
    assert history.get("c", "tenant") is None


def test_every_reason_is_documented():
    text = (Path(__file__).resolve().parents[2] / "docs" / "explain.md").read_text()
    assert re.findall(r"^### `(\w+)`$", text, re.MULTILINE) == [
        reason.value for reason in MissReason
    ]
