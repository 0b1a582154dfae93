"""Which part of a chat request a position of its prompt belongs to.

Responsible for finding the messages and the tools again inside the text that the model's template makes of them. Knows
nothing of caches. Runs in worker threads.

The template is untrusted code that may do anything with a message, so nothing about it is assumed: the conversation is
rendered a second time with marks around each message's text, and where that gives the same text but for the marks, they
tell where each message is. Where it does not (a template that looks at how a message begins, or writes the time), the
part is unknown, and said to be. The tools are what is there because of them: between the first and the last place where
the text differs from that of the same conversation without tools, messages excepted.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvist.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvist.server.ports import ServedTokenizer

TEMPLATE = "template"
"""What the model's template writes by itself: a default system prompt, the ends of turns, the opening of the answer."""
SYSTEM = "system"
TOOLS = "tools"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    """Where one message's text is in the rendered text, in characters."""

    index: int
    """In the request."""
    start: int
    end: int


class ChatParts:
    """The messages of one conversation, as they stand in its prompt.

    Args:
        messages: As they were given to the template.
        tokenizer: Has the template.
        tools: As they were given to the template; None: there are none.
    """

    def __init__(
        self,
        messages: Sequence[Mapping[str, str]],
        tokenizer: ServedTokenizer,
        tools: Sequence[Mapping[str, Any]] | None = None,  # Any: a JSON schema
    ) -> None:
        self.messages = messages
        self.tools = tools
        self._tokenizer = tokenizer

    def at(self, num_bytes_before: int, num_bytes: int) -> str | None:
        """Return the part that a position of the prompt belongs to.

        Args:
            num_bytes_before: Bytes of the tokens before the position.
            num_bytes: Bytes of all tokens. Those of the rendered text, or the tokeniser changed the text and positions
                in one are none in the other; a space that it puts before the text aside.

        Returns:
            ``system``, ``tools``, ``message K`` (counted from 0, as in the request), ``template``, or None: it cannot
            be told. Where a message has just ended the position is still that message's, unless the tools begin there:
            it is the message that is shorter than another. Names of roles belong to their messages, and what a
            template says around tools to the tools.
        """
        try:
            text = self._render(self.messages)
            found = self._find(text)
            tools = self._find_tools(text)
        except RequestError:  # the template accepted the messages, but not those with marks
            return None
        if found is None:
            return None
        encoded = text.encode()
        num_added = num_bytes - len(encoded)
        if num_added not in (0, int(self._tokenizer.strips_leading_space)):
            return None
        num_before = max(num_bytes_before - num_added, 0)
        position = len(encoded[:num_before].decode(errors="ignore"))
        return self._part_at(position, text, found, tools)

    def _part_at(self, position: int, text: str, found: Sequence[_Message], tools: range) -> str:
        place = bisect_right(found, position, key=lambda message: message.start)
        if place and position <= found[place - 1].end:
            has_ended = position == found[place - 1].end
            return TOOLS if has_ended and position in tools else self._name(found[place - 1].index)
        if position in tools:
            return TOOLS
        if place < len(found) and found[place].index > 0:
            following = found[place].index
            if position >= self._len_of_first(following, text):
                return self._name(following)
        return TEMPLATE

    def _name(self, index: int) -> str:
        return SYSTEM if self.messages[index]["role"] == SYSTEM else f"message {index}"

    def _render(self, messages: Sequence[Mapping[str, str]]) -> str:
        return self._tokenizer.apply_chat_template(messages, tools=self.tools)

    def _find_tools(self, text: str) -> range:
        """Return the characters that are there because of the tools; empty when there are none."""
        if self.tools is None:
            return range(0)
        without = self._tokenizer.apply_chat_template(self.messages)
        start = _num_common(text, without)
        num_after = _num_common(text[start:][::-1], without[start:][::-1])
        return range(start, len(text) - num_after)

    def _len_of_first(self, num_messages: int, text: str) -> int:
        """Return where the text of so many messages ends; past everything when that cannot be told."""
        try:
            head = self._tokenizer.apply_chat_template(
                self.messages[:num_messages], add_generation_prompt=False, tools=self.tools
            )
        except RequestError:
            return len(text)
        return len(head) if text.startswith(head) else len(text)

    def _find(self, text: str) -> list[_Message] | None:
        """Return the messages in the order of the text; None when they cannot be found."""
        opening, closing = self._marks()
        marked = self._render(
            [
                {**message, "content": _marked(message["content"], f"{opening}{index}{closing}")}
                for index, message in enumerate(self.messages)
            ]
        )
        mark = re.compile(f"{opening}([0-9]+){closing}")
        if mark.sub("", marked) != text:
            return None
        borders: dict[int, list[int]] = {}
        num_removed = 0
        for match in mark.finditer(marked):
            borders.setdefault(int(match[1]), []).append(match.start() - num_removed)
            num_removed += len(match[0])
        found: list[_Message] = []
        for index, positions in borders.items():
            start, end = positions[0], positions[-1]
            content = self.messages[index]["content"]
            lead = content[: len(content) - len(content.lstrip())]
            trail = content[len(content.rstrip()) :]
            if len(positions) == 1:
                # Only the end is left where a template cuts the beginning off, as of thoughts.
                start = min(self._len_of_first(index, text) if index else 0, end)
            if text.startswith(lead, max(start - len(lead), 0)):
                start -= len(lead)
            if text.startswith(trail, end):
                end += len(trail)
            found.append(_Message(index=index, start=start, end=end))
        return sorted(found, key=lambda message: message.start)

    def _marks(self) -> tuple[str, str]:
        # Noncharacters of Unicode should not occur; counted on until the mark certainly does not.
        number = 0
        while any(f"\ufdd2{number}\ufdd3" in message["content"] for message in self.messages):
            number += 1
        return f"\ufdd2{number}\ufdd3", "\ufdd4"


def _num_common(left: str, right: str) -> int:
    """Return how many characters two texts begin alike with. By halves: a loop in Python takes 10 ms for 100 kB."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _marked(content: str, mark: str) -> str:
    """Put marks around what a template that trims would keep."""
    kept = content.strip()
    if not kept:
        return content
    start = content.index(kept)
    return f"{content[:start]}{mark}{kept}{mark}{content[start + len(kept) :]}"
