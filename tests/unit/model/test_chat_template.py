"""Chat templates render as in transformers, and cannot break out."""

from __future__ import annotations

import datetime as dt
import enum
import json

import pytest

from kvist.errors import RequestError, UnsupportedParameter
from kvist.model.chat_template import ChatTemplate

MESSAGES = [
    {"role": "user", "content": "Hi <b> 'x' é"},
    {"role": "assistant", "content": "Yo", "tool_calls": [{"name": "f", "arguments": {"a": [1, 2.5, None, True]}}]},
    {"role": "user", "content": [{"type": "text", "text": "part"}]},
]  # fmt: skip


def render(source: str, messages=MESSAGES, *, prompt: bool = True) -> str:
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    return ChatTemplate(source, tokens).render(messages, add_generation_prompt=prompt)


@pytest.mark.parametrize(
    "source",
    [
        "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m.content }}{{ eos_token }}{% endfor %}",
        # Block tags take their line with them.
        "{% for m in messages %}\n    {% if m.role == 'user' %}\n  {{ m.content }}\n    {% endif %}\n{% endfor %}\nend",
        "{% if add_generation_prompt %}A{% else %}B{% endif %}",
        "{{ messages[1].tool_calls | tojson }} {{ messages[1].tool_calls[0] | tojson(indent=2) }}",
        "{{ messages[0].content | tojson }}",
        "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}{{ loop.first }}{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
        "{% if tools is not none %}tools{% else %}no tools{% endif %}{{ documents is none }}",
        "{{ undefined_name }}{{ messages[0].undefined_key }}|",
        "{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{% endfor %}",
        "{{ messages[2].content[0]['text'] | trim | upper }}",
        "{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(messages[0].role) }}",
        "{{ messages[1].tool_calls[0].arguments.items() | list }}",
        "{{ messages[0].content is string }} {{ messages[2].content is iterable }}",
    ],
)
@pytest.mark.parametrize("prompt", [True, False])
def test_renders_as_transformers(source, prompt):
    from transformers.utils.chat_template_utils import render_jinja_template

    (expected,), _ = render_jinja_template(
        [MESSAGES],
        chat_template=source,
        add_generation_prompt=prompt,
        bos_token="<s>",
        eos_token="</s>",
    )
    assert render(source, prompt=prompt) == expected


def test_date_is_the_local_one():
    year = str(dt.datetime.now().year)  # noqa: DTZ005  # what the template function means
    assert render("{{ strftime_now('%Y') }}") == year


def test_the_templates_own_message_reaches_the_client():
    source = "{{ raise_exception('roles must alternate user/assistant') }}"
    with pytest.raises(RequestError, match="roles must alternate user/assistant") as caught:
        render(source)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    ["{{ messages[0]['content'] + 1 }}", "{{ messages.x.y }}", "{{ 1 // 0 }}", "{{ nothing() }}"],
)
def test_failures_inside_a_template_are_request_errors(source):
    with pytest.raises(RequestError, match="chat template"):
        render(source)


def test_broken_template_fails_on_use_with_its_reason():
    template = ChatTemplate("{% for m in %}", {})
    with pytest.raises(RequestError, match="cannot be read: Expected an expression"):
        template.render([], add_generation_prompt=True)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ '{0.__class__.__mro__}'.format(messages) }}",
        "{% set _ = messages.append({'role': 'x'}) %}",
        "{% include '/etc/hostname' %}",
        "{{ range(10 ** 9) | list | length }}",
    ],
)
def test_templates_cannot_leave_the_sandbox(source):
    with pytest.raises(RequestError):
        render(source)


def test_functions_given_to_templates_show_nothing():
    assert render("{{ raise_exception.__globals__ }}") == ""


def test_rendering_leaves_the_messages_alone():
    messages = [{"role": "user", "content": None, "name": "n"}]
    assert render("{{ 'content' in messages[0] }}", messages) == "False"
    assert messages == [{"role": "user", "content": None, "name": "n"}]


def test_strings_of_other_types_come_out_as_their_value():
    class Role(enum.StrEnum):
        USER = "user"

    assert render("{{ messages[0].role }}", [{"role": Role.USER}]) == "user"


def test_messages_must_be_json():
    with pytest.raises(RequestError, match="JSON values, received object"):
        render("{{ messages }}", [{"role": object()}])


@pytest.mark.parametrize(
    "source",
    [
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ [].pop() }}{{ messages | first | random }}",
        "{{ 'x' * 10 ** 18 }}",
        "".join("{% for m in messages %}" for _ in range(30)) + "{% endfor %}" * 30,
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    ],
    ids=["recursion", "types", "memory", "nested loops", "nested brackets"],
)
def test_whatever_a_template_raises_is_a_request_error(source):
    with pytest.raises(RequestError, match="chat template"):
        render(source)


def test_messages_nested_too_deeply_or_no_list_are_request_errors():
    content: list = []
    for _ in range(5000):
        content = [content]
    with pytest.raises(RequestError, match="nested more than 64"):
        render("x", [{"role": "user", "content": content}])
    with pytest.raises(RequestError, match="list of messages"):
        render("x", None)


TOOLS = [{"type": "function", "function": {"name": "t", "parameters": {"default": None}}}]


def test_tools_are_given_to_a_template_that_knows_them_nulls_included():
    template = ChatTemplate("{% if tools %}{{ tools | tojson }}{% endif %}", {})
    assert json.loads(template.render([], add_generation_prompt=False, tools=TOOLS)) == TOOLS
    assert template.render([], add_generation_prompt=False) == ""


def test_tools_are_refused_where_the_template_has_no_place_for_them():
    template = ChatTemplate("{% for tools in messages %}{{ tools.content }}{% endfor %}", {})
    with pytest.raises(UnsupportedParameter, match="no place for tools") as caught:
        template.render([], add_generation_prompt=False, tools=TOOLS)
    assert caught.value.param == "tools"


def test_tools_nested_too_deeply_are_a_request_error():
    schema: dict = {}
    for _ in range(5000):
        schema = {"items": schema}
    with pytest.raises(RequestError, match="tools must not be nested more than 64") as caught:
        ChatTemplate("{{ tools }}", {}).render(
            [], add_generation_prompt=False, tools=[{"function": schema}]
        )
    assert caught.value.param == "tools"
