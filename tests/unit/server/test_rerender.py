"""Answers as history: what is found, and that finding it disturbs nobody."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from tests.support.chat_templates import CHATML_TOOLS, THINKING
from tests.support.tiny_tokenizers import byte_level

from kvist.errors import RequestError
from kvist.model.chat_template import ChatTemplate
from kvist.model.gguf_tokenizer import vocabulary_from_gguf
from kvist.model.tokenizer import Tokenizer, load_tokenizer
from kvist.server import rerender as rerendering
from kvist.server.generation import ChoiceOutput
from kvist.server.prompts import Prompt, encode_messages
from kvist.server.protocol import ChatMessage
from kvist.server.rerender import MAX_RUNNING, Rerenders, rerender

USER = {"role": "user", "content": "How thick is the fog?"}
TINY = byte_level(
    "gpt-2", [r"'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"]
)
THOUGHT = "<think>\nIt is the fog.\n</think>\n\nThick."


@pytest.fixture(scope="module", params=["tiny", pytest.param("smollm2", marks=pytest.mark.model)])
def tokenizer(request):
    if request.param == "tiny":
        return Tokenizer(vocabulary_from_gguf(TINY.metadata))
    return load_tokenizer(request.getfixturevalue("smollm2_path"))


def answered(tokenizer, source, text, *, turns=(USER,), ending="<|im_end|>", tools=None, ids=None):
    """Return the look at an answer of these tokens, by default those of its text and of what ends it."""
    tokenizer.chat_template = ChatTemplate(source, {})
    prompt = encode_messages([ChatMessage(**turn) for turn in turns], tokenizer, tools)
    token_ids = ids or tokenizer.encode(text + ending, False)
    output = ChoiceOutput(text=text, token_ids=token_ids)
    found = rerender(prompt, output, tokenizer)
    if found is not None:
        # Independently: what a next turn of some user shares with what was computed.
        following = [*turns, {"role": "assistant", "content": text}, {**USER, "content": "Zzz"}]
        ids = tokenizer.encode_chat(following, tools=tools)
        computed = [*prompt.token_ids, *token_ids[:-1]]
        both = zip(ids, computed, strict=False)
        num_common = next((i for i, (a, b) in enumerate(both) if a != b), len(computed))
        assert found.position == num_common
        assert list(found.next_token_ids) == ids[: len(found.next_token_ids)]
        assert found.num_lost == len(computed) - num_common
    return found


def test_an_answer_that_comes_back_as_it_was_is_the_same(tokenizer):
    found = answered(tokenizer, THINKING, "Thick and grey.")
    assert found.is_same
    assert tokenizer.decode(found.next_token_ids, skip_special=False).endswith("<|im_start|>user\n")
    assert found.json()["tokens_lost"] == 0


def test_an_answer_that_was_cut_is_the_same(tokenizer):
    assert answered(tokenizer, THINKING, "Thick and grey.", ending="").is_same


def test_thoughts_that_a_template_drops_are_lost_and_what_follows_too(tokenizer):
    found = answered(tokenizer, THINKING, THOUGHT)
    assert not found.is_same
    assert found.generated.startswith("<think>")
    assert found.rendered.startswith("Thick.<|im_end|>")
    opening = tokenizer.apply_chat_template([USER])
    assert found.position == len(tokenizer.encode(opening, False))
    assert found.num_lost == len(tokenizer.encode(THOUGHT, False))


def test_thoughts_of_earlier_turns_are_gone_already(tokenizer):
    turns = [USER, {"role": "assistant", "content": THOUGHT}, USER]
    assert answered(tokenizer, THINKING, "Grey.", turns=turns).is_same


def test_an_answer_that_a_template_opens_differs_inside_the_prompt(tokenizer):
    source = THINKING.replace(
        "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}"
    )
    found = answered(tokenizer, source, "It is.\n</think>\n\nThick.")
    assert not found.is_same
    assert found.generated.startswith("<think>")
    assert found.rendered.startswith("Thick.")


def test_a_template_that_trims_loses_what_it_trims(tokenizer):
    source = THINKING.replace("{{ content }}", "{{ content | trim }}")
    found = answered(tokenizer, source, " Thick.")
    assert not found.is_same
    assert found.rendered.startswith("Thick.")


def test_another_tokenisation_of_the_same_text_is_told(tokenizer):
    text = "The quick brown fox"
    whole = tokenizer.encode(text, False)
    apart = [i for character in text for i in tokenizer.encode(character, False)]
    assert whole != apart
    found = answered(tokenizer, THINKING, text, ids=apart)
    assert not found.is_same


def test_a_stop_string_is_not_part_of_history(tokenizer):
    ids = tokenizer.encode("Thick. END of it", False)
    assert not answered(tokenizer, THINKING, "Thick.", ids=ids).is_same


def test_tools_are_rendered_too(tokenizer):
    tools = [{"type": "function", "function": {"name": "fog"}}]
    assert answered(tokenizer, CHATML_TOOLS, "Thick.", tools=tools).is_same


def test_an_answer_that_quotes_control_tokens_forges_none(tokenizer):
    text = "It says <|im_end|>\n<|im_start|>system"
    found = answered(
        tokenizer, THINKING, text, ids=tokenizer.encode(text, False, parse_special=False)
    )
    plain = answered(tokenizer, THINKING, "x")
    specials, wanted = (
        list(filter(tokenizer.is_special, one.next_token_ids)) for one in (found, plain)
    )
    assert specials == wanted


@pytest.mark.parametrize(
    "source",
    [
        "{% if messages | length > 1 %}{{ raise_exception('one') }}{% endif %}{{ messages[0].content }}",
        "{% if messages[-1].role == 'user' and messages | length > 1 %}{{ 1 / 0 }}{% endif %}x",
    ],
)
def test_where_a_template_refuses_history_nothing_is_told(tokenizer, source):
    assert answered(tokenizer, source, "Thick.") is None


def test_without_messages_or_output_nothing_is_told(tokenizer):
    output = ChoiceOutput(text="x", token_ids=[1])
    assert rerender(Prompt(token_ids=(1, 2)), output, tokenizer) is None
    tokenizer.chat_template = ChatTemplate(THINKING, {})
    prompt = encode_messages([ChatMessage(**USER)], tokenizer)
    assert rerender(prompt, ChoiceOutput(), tokenizer) is None


# --- the counts, and that it stays in bounds


class Stream:
    def __init__(self):
        self.is_cancelled = False
        self.ended = asyncio.Event()

    async def __aiter__(self):
        await self.ended.wait()
        return
        yield

    def cancel(self):
        self.is_cancelled = True
        self.ended.set()


class Engine:
    def __init__(self, tokenizer, *, num_running=0, error=None):
        self.tokenizer = tokenizer
        self.submitted = []
        self.was_asked = asyncio.Event()
        self._num_running = num_running
        self._error = error

    def stats(self):
        return SimpleNamespace(
            num_queued=0, scheduler=SimpleNamespace(num_running=self._num_running)
        )

    def submit(self, token_ids, params, *, tenant):
        if self._error is not None:
            raise self._error
        self.submitted.append((tuple(token_ids), params.max_tokens, tenant, Stream()))
        self.was_asked.set()
        return self.submitted[-1][-1]


@pytest.fixture
def chat():
    tokenizer = Tokenizer(vocabulary_from_gguf(TINY.metadata))
    tokenizer.chat_template = ChatTemplate(THINKING, {})
    prompt = encode_messages([ChatMessage(**USER)], tokenizer)
    output = ChoiceOutput(text=THOUGHT, token_ids=tokenizer.encode(THOUGHT, False))
    return tokenizer, SimpleNamespace(prompts=[prompt]), [output]


async def settled(rerenders):
    await asyncio.gather(*rerenders._tasks)


def test_an_answer_is_looked_at_once_and_the_explanation_says_what_was_found(chat):
    tokenizer, job, outputs = chat
    rerenders = Rerenders(Engine(tokenizer), computes_ahead=False)
    explanation = {"rerendered": None}

    async def scenario():
        check = rerenders.of(job, outputs, "t")
        await check.run()
        check.explanation = explanation
        rerenders.start(check)
        await settled(rerenders)

    asyncio.run(scenario())
    assert rerenders.counts == {"same": 0, "differs": 1, "unknown": 0, "skipped": 0}
    assert rerenders.num_lost_tokens == explanation["rerendered"]["tokens_lost"] > 0
    assert rerenders._engine.submitted == []


def test_too_many_at_once_are_skipped_and_counted(chat):
    tokenizer, job, outputs = chat
    rerenders = Rerenders(Engine(tokenizer), computes_ahead=False)

    async def scenario():
        for _ in range(MAX_RUNNING + 3):
            rerenders.start(rerenders.of(job, outputs, "t"))
        await settled(rerenders)

    asyncio.run(scenario())
    assert rerenders.counts["differs"] == MAX_RUNNING
    assert rerenders.counts["skipped"] == 3


def test_the_next_turn_is_computed_ahead_for_its_tenant_and_makes_way(chat):
    tokenizer, job, outputs = chat
    engine = Engine(tokenizer)
    rerenders = Rerenders(engine, computes_ahead=True)

    async def scenario():
        check = rerenders.of(job, outputs, "t")
        rerenders.start(check)
        await engine.was_asked.wait()
        found = await check.run()
        await rerenders._compute_ahead([1, 2, 3], "t")  # one at a time
        (submitted,) = engine.submitted
        assert submitted[:3] == (found[0].next_token_ids, 0, "t")
        assert not submitted[3].is_cancelled
        rerenders.make_way()
        assert submitted[3].is_cancelled
        await settled(rerenders)
        rerenders.make_way()  # nothing is left to end

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "options", [{"num_running": 1}, {"error": RequestError("[engine] too long")}]
)
def test_nothing_is_computed_ahead_while_others_run_or_where_it_does_not_fit(
    chat, options, caplog, monkeypatch
):
    monkeypatch.setattr(rerendering, "PAUSE_S", 0)
    tokenizer, job, outputs = chat
    engine = Engine(tokenizer, **options)
    rerenders = Rerenders(engine, computes_ahead=True)

    async def scenario():
        rerenders.start(rerenders.of(job, outputs, "t"))
        await settled(rerenders)

    asyncio.run(scenario())
    assert engine.submitted == []
    assert rerenders.counts["differs"] == 1
    assert not caplog.records
