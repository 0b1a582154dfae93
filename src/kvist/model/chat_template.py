"""Chat messages to the one text that a model was trained on.

Responsible for running a checkpoint's Jinja template, which is untrusted code, in a sandbox and under the conventions
that template authors rely on. Knows nothing of tokens.

Source: the conventions are those of Hugging Face transformers ("Writing a chat template" in its documentation).
"""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvist.errors import RequestError, UnsupportedParameter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jinja2.parser import Parser


MAX_NESTING = 64
"""Levels of lists and groups inside a message: far above any client's, far below what Python can follow."""


class ChatTemplate:
    """One template of one model; immutable.

    Args:
        source: Jinja source as the checkpoint has it.
        special_tokens: Texts of the special tokens under the names templates use: ``bos_token``, ``eos_token``, ...
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)

    @cached_property
    def _compiled(self) -> jinja2.Template:
        # On first use: a model with a broken template still completes plain prompts.
        try:
            return _new_environment().from_string(self.source)
        except (jinja2.TemplateError, SyntaxError, RecursionError, MemoryError) as error:
            # The latter three: nested more deeply than Python, which it is compiled to, can follow.
            raise RequestError(
                f"[chat] the model's chat template cannot be read: {error}; send a plain prompt to /v1/completions"
            ) from error

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the template does anything with the tools that it is given.

        Raises:
            RequestError: The template cannot be read.
        """
        _ = self._compiled
        return "tools" in jinja2.meta.find_undeclared_variables(
            _new_environment().parse(self.source)
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:  # Any: what a message holds is between the client and the template
        """Return the text for a conversation.

        Args:
            messages: Each with ``role`` and ``content``; keys whose value is None count as absent.
            add_generation_prompt: End with the opening of the assistant's turn.
            tools: JSON descriptions of functions, as OpenAI's API has them; None: there are none.

        Raises:
            UnsupportedParameter: There are tools, and the template has no place for them.
            RequestError: The template refused the conversation (its own message is passed on) or failed on it.
        """
        template = self._compiled
        plain = plain_messages(messages)
        plain_or_none = None if tools is None else plain_tools(tools)
        if tools is not None and not self.takes_tools:
            raise UnsupportedParameter(
                "[chat] the model's chat template has no place for tools; leave them out or describe them in a message",
                param="tools",
            )
        try:
            return template.render(
                messages=plain,
                tools=plain_or_none,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except jinja2.TemplateError as error:
            raise RequestError(
                f"[chat] the model's chat template refuses these messages: {error.message or type(error).__name__}",
                param="messages",
            ) from error
        except Exception as error:
            # Anything: the template is untrusted code, and its author did not think of every form of message.
            raise RequestError(
                f"[chat] the model's chat template fails on these messages: {str(error) or type(error).__name__}; "
                "check each message's role and content",
                param="messages",
            ) from error


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[Any]:  # Any: JSON
    """Return a copy made of plain JSON types only, without None-valued keys of messages.

    The sandbox guards attributes of types it knows; nothing else may reach the template.

    Raises:
        RequestError: The messages are no list, hold anything but JSON values, or nest more than ``MAX_NESTING`` deep.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable):
        raise RequestError(
            f"[chat] expected a list of messages, received {type(messages).__name__}",
            param="messages",
        )
    return [_without_none(_plain(message, "messages", 0)) for message in messages]


def plain_tools(tools: Sequence[Mapping[str, Any]]) -> list[Any]:  # Any: JSON
    """Return a copy made of plain JSON types only; a null inside a schema means something and stays.

    Raises:
        RequestError: As ``plain_messages``.
    """
    return [_plain(tool, "tools", 0) for tool in tools]


def _plain(value: Any, param: str, depth: int) -> Any:  # noqa: ANN401  # JSON
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return str(value)
    if depth == MAX_NESTING:
        raise RequestError(
            f"[chat] {param} must not be nested more than {MAX_NESTING} deep", param=param
        )
    if isinstance(value, Mapping):
        return {str(key): _plain(item, param, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, param, depth + 1) for item in value]
    raise RequestError(
        f"[chat] {param} must be made of JSON values, received {type(value).__name__}",
        param=param,
    )


def _without_none(value: Any) -> Any:  # noqa: ANN401  # JSON
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return value


class _GenerationBlock(jinja2.ext.Extension):
    """Take ``{% generation %}...{% endgeneration %}``, which marks the assistant's text for training, as plain text."""

    tags = {"generation"}  # noqa: RUF012  # jinja2's own declaration

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _new_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _GenerationBlock],
        autoescape=False,  # prompts are not HTML
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return dt.datetime.now().strftime(pattern)  # noqa: DTZ005  # local time is what authors mean


# Jinja's own filter escapes for HTML. Any: JSON.
def _to_json(
    value: Any,  # noqa: ANN401
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002  # authors pass these by position or name
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
