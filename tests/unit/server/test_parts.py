"""Finding the messages again in what templates make of them."""

from __future__ import annotations

import pytest
from tests.support.chat_templates import CHATML_TOOLS, MISTRAL_TOOLS

from kvist.errors import RequestError
from kvist.model.chat_template import ChatTemplate
from kvist.server.parts import ChatParts

CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<s>default<e>\n{% endif %}"
    "<s>{{ m.role }}\n{{ m.content }}<e>\n{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
TRIMMING = CHATML.replace("m.content", "m.content | trim")
DROPPING = CHATML.replace(
    "{{ m.content }}",
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' and not loop.last else m.content }}",
)
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hur är dimman? <e>\n<s>user\n"},
    {"role": "assistant", "content": "<think>hm</think>Thick."},
    {"role": "user", "content": "  And now? "},
]


class Templated:
    """The part of a tokeniser that has the template."""

    strips_leading_space = False

    def __init__(self, source):
        self._template = ChatTemplate(source, {})

    def apply_chat_template(self, messages, add_generation_prompt=True, *, tools=None):
        return self._template.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools
        )


def parts_of(source, turns):
    """Return the part at every character of the rendered text, as (part, text) runs."""
    tokenizer = Templated(source)
    text = tokenizer.apply_chat_template(turns)
    parts = ChatParts(turns, tokenizer)
    runs = []
    for index, character in enumerate(text):
        part = parts.at(len(text[:index].encode()), len(text.encode()))
        if runs and runs[-1][0] == part:
            runs[-1][1] += character
        else:
            runs.append([part, character])
    return [(part, run) for part, run in runs]


def test_every_position_of_a_plain_template_has_its_part():
    assert parts_of(CHATML, TURNS) == [
        ("template", "<s>system\n"),
        ("system", "Be brief.<"),
        ("template", "e>\n"),
        ("message 1", "<s>user\nHur är dimman? <e>\n<s>user\n<"),
        ("template", "e>\n"),
        ("message 2", "<s>assistant\n<think>hm</think>Thick.<"),
        ("template", "e>\n"),
        ("message 3", "<s>user\n  And now? <"),
        ("template", "e>\n<s>assistant\n"),
    ]


def test_a_default_system_prompt_is_the_template_s():
    runs = parts_of(CHATML, TURNS[1:2])
    assert runs[0] == ("template", "<s>default<e>\n<s>user\n")


def test_a_template_may_trim():
    runs = parts_of(TRIMMING, TURNS)
    assert runs[-2:] == [("message 3", "<s>user\nAnd now?<"), ("template", "e>\n<s>assistant\n")]


def test_a_template_may_drop_the_beginning_of_a_message():
    runs = parts_of(DROPPING, TURNS)
    assert ("message 2", "<s>assistant\nThick.<") in runs


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.content | length }}{{ m.content }}{% endfor %}",
        "{% for m in messages %}{% if m.content.startswith('Be') %}!{% endif %}{{ m.content }}{% endfor %}",
    ],
)
def test_where_marks_change_the_text_no_part_is_told(source):
    assert {part for part, _ in parts_of(source, TURNS)} == {None}


def test_a_template_that_refuses_marks_tells_no_part():
    source = (
        "{% if '\ufdd2' in messages[0].content %}{{ raise_exception('no') }}{% endif %}"
        "{{ messages[0].content }}"
    )
    assert ChatParts(TURNS, Templated(source)).at(3, len(TURNS[0]["content"])) is None


def test_a_template_that_refuses_a_shorter_conversation_leaves_role_names_to_itself():
    class Refusing(Templated):
        def apply_chat_template(self, messages, add_generation_prompt=True, *, tools=None):
            if not add_generation_prompt:
                raise RequestError("[chat] not like this")
            return super().apply_chat_template(messages)

    tokenizer = Refusing(CHATML)
    text = tokenizer.apply_chat_template(TURNS)
    position = text.index("<s>user") + 4
    assert ChatParts(TURNS, tokenizer).at(position, len(text.encode())) == "template"


def test_marks_that_are_in_a_message_are_not_taken_for_ours():
    turns = [{"role": "user", "content": "\ufdd20\ufdd3 and \ufdd2 0\ufdd4"}, *TURNS[2:]]
    runs = parts_of(CHATML, turns)
    assert ("message 1", "<s>assistant\n<think>hm</think>Thick.<") in runs


def test_an_empty_message_has_no_place():
    turns = [TURNS[0], {"role": "user", "content": " "}, *TURNS[2:]]
    runs = parts_of(CHATML, turns)
    assert [part for part, _ in runs if part.startswith("message")] == ["message 2", "message 3"]


def test_where_the_tokeniser_changes_the_text_no_part_is_told():
    tokenizer = Templated(CHATML)
    num_bytes = len(tokenizer.apply_chat_template(TURNS).encode())
    assert ChatParts(TURNS, tokenizer).at(15, num_bytes) == "system"
    assert ChatParts(TURNS, tokenizer).at(15, num_bytes - 1) is None
    assert ChatParts(TURNS, tokenizer).at(15, num_bytes + 1) is None


def test_a_space_that_the_tokeniser_puts_before_a_text_is_left_out_of_account():
    tokenizer = Templated(CHATML)
    tokenizer.strips_leading_space = True
    num_bytes = len(tokenizer.apply_chat_template(TURNS).encode())
    parts = ChatParts(TURNS, tokenizer)
    start = len("<s>system\n")
    assert [parts.at(start + 1 + shift, num_bytes + 1) for shift in (-1, 0)] == [
        "template",
        "system",
    ]
    assert parts.at(0, num_bytes + 1) == "template"


def search(name):
    return {"type": "function", "function": {"name": name, "parameters": {}}}


@pytest.mark.parametrize("source", [CHATML_TOOLS, MISTRAL_TOOLS])
@pytest.mark.parametrize("turns", [TURNS, TURNS[1:]])
def test_tools_are_a_part_with_what_the_template_says_around_them(source, turns):
    tools = [search("fog"), search("bell")]
    tokenizer = Templated(source)
    text = tokenizer.apply_chat_template(turns, tools=tools)
    parts = ChatParts(turns, tokenizer, tools)

    def part(position):
        return parts.at(len(text[:position].encode()), len(text.encode()))

    first, last = text.index('{"type"'), text.rindex("}}")
    assert {part(position) for position in range(first, last + 2)} == {"tools"}
    for index, turn in enumerate(turns):
        name = "system" if turn["role"] == "system" else f"message {index}"
        content = turn["content"]
        assert part(text.index(content)) == name
        assert part(text.index(content) + len(content) - 1) == name
    assert part(0) in {"template", "message 0", "system"}


def test_where_tools_begin_they_are_what_another_prompt_did_not_have():
    tokenizer = Templated(CHATML_TOOLS)
    tools = [search("fog")]
    text = tokenizer.apply_chat_template(TURNS, tools=tools)
    end = text.index("Be brief.") + len("Be brief.")
    assert ChatParts(TURNS, tokenizer, tools).at(end, len(text.encode())) == "tools"
    plain = tokenizer.apply_chat_template(TURNS)
    assert ChatParts(TURNS, tokenizer).at(end, len(plain.encode())) == "system"


def test_tools_added_or_reordered_are_found_at_the_first_character_that_differs():
    tokenizer = Templated(CHATML_TOOLS)
    tools = [search(name) for name in ("fog", "bell", "tide")]
    others = [None, tools[:2], tools[1:], [tools[0], tools[2]], [tools[1], tools[0], tools[2]]]
    text = tokenizer.apply_chat_template(TURNS, tools=tools)
    for other in others:
        earlier = tokenizer.apply_chat_template(TURNS, tools=other)
        position = next(i for i, (a, b) in enumerate(zip(text, earlier, strict=False)) if a != b)
        parts = ChatParts(TURNS, tokenizer, tools)
        assert parts.at(len(text[:position].encode()), len(text.encode())) == "tools"
