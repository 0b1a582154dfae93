"""Output tokens to text that may be streamed: whole characters, nothing of a stop string.

Responsible for joining the bytes of tokens into characters and for finding stop strings across token borders. Knows
nothing of requests, sampling or stop *tokens*: whoever owns the sequence does not append those.

Invariants:
    1. The concatenated deltas are a prefix of the one-shot decoding of all tokens, and equal to it after ``finish``
       when no stop string occurs.
    2. How the text is cut into tokens has no influence on where a stop string is found: the match that *ends* first
       wins, as if the text had been produced one character at a time; of several that end together, the longest.
    3. Text that could be the beginning of a stop string is held back until it is decided.

Source: Aho and Corasick, "Efficient string matching" (1975), for the matching of several strings in one pass.
"""

from __future__ import annotations

import codecs
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

_new_decoder = codecs.getincrementaldecoder("utf-8")


class TokenText(Protocol):
    """What the detokeniser needs of a tokeniser."""

    @property
    def strips_leading_space(self) -> bool:
        """Whether encoding puts a space before a text that decoding takes away again (SentencePiece)."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that one token stands for; empty for ids without text."""
        ...

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a control token, which is not part of the text."""
        ...


class StopStrings:
    """Several stop strings compiled for one pass over the text; immutable, shared by the sequences of a request.

    A state is the longest suffix of the text that begins some stop string: a node of the strings' prefix tree,
    0 being the empty suffix.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self.strings = tuple(strings)
        self._children: list[dict[str, int]] = [{}]
        self._depths = [0]
        self._matches: list[str | None] = [None]
        """The longest stop string that ends in each state."""
        for string in self.strings:
            self._insert(string)
        self._failures = [0] * len(self._depths)
        """For each state, the longest proper suffix of it that is a state too."""
        self._link()
        self._first_characters = frozenset(self._children[0])

    def _insert(self, string: str) -> None:
        if not string:
            raise ValueError("a stop string must not be empty")
        state = 0
        for character in string:
            following = self._children[state].get(character)
            if following is None:
                following = len(self._depths)
                self._children[state][character] = following
                self._children.append({})
                self._depths.append(self._depths[state] + 1)
                self._matches.append(None)
            state = following
        self._matches[state] = string

    def _link(self) -> None:
        # Breadth first: a state's failure is shallower, so it is linked and knows its match already.
        queue = deque(self._children[0].values())
        while queue:
            state = queue.popleft()
            if self._matches[state] is None:
                self._matches[state] = self._matches[self._failures[state]]
            for character, following in self._children[state].items():
                self._failures[following] = self._step(self._failures[state], character)
                queue.append(following)

    def _step(self, state: int, character: str) -> int:
        children = self._children
        while (following := children[state].get(character)) is None:
            if state == 0:
                return 0
            state = self._failures[state]
        return following

    def advance(self, state: int, text: str) -> Advance:
        """Read more text.

        Args:
            state: 0 at the start of the text, then that of the last result.
            text: What follows.

        Complexity: amortised O(1) per character, whatever the number and length of the strings.
        """
        if state == 0 and self._first_characters.isdisjoint(text):
            return Advance(state=0, num_pending=0)
        for index, character in enumerate(text):
            state = self._step(state, character)
            match = self._matches[state]
            if match is not None:
                return Advance(state=state, num_pending=0, match=match, match_end=index + 1)
        return Advance(state=state, num_pending=self._depths[state])


@dataclass(frozen=True, slots=True, kw_only=True)
class Advance:
    """What reading more text led to."""

    state: int
    num_pending: int
    """Characters at the end of the text so far that begin a stop string."""
    match: str | None = None
    """The stop string that was found; the text behind it was not read."""
    match_end: int = 0
    """Characters of the new text up to the end of the match."""


NO_STOP_STRINGS = StopStrings(())
"""Nothing to look for."""


class Detokenizer:
    """The text of one sequence, token by token. Not thread-safe.

    Args:
        tokenizer: Gives the bytes of tokens.
        stop: Strings that end the text; not part of it.
        previous_token_id: Last token before the sequence (of its prompt); None when there is none. A tokeniser that
            puts a space before each text does so at the start and behind control tokens, so there, and only there,
            the first space is taken away; a completion that continues a sentence keeps it.
    """

    def __init__(
        self,
        tokenizer: TokenText,
        stop: StopStrings = NO_STOP_STRINGS,
        *,
        previous_token_id: int | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._decode = _new_decoder(errors="replace").decode
        self._state = 0
        self._held = ""
        self._is_space_due = tokenizer.strips_leading_space and (
            previous_token_id is None or tokenizer.is_special(previous_token_id)
        )
        self._is_finished = False
        self.stop_string: str | None = None
        """The stop string that was found; None so far."""

    def append(self, token_id: int) -> str:
        """Take the next token and return the text that can now be shown, possibly none.

        After a stop string was found, or after ``finish``, every call returns nothing.

        Complexity: amortised O(1) per byte; at most one stop string's length of text is held.
        """
        if self._is_finished or self._tokenizer.is_special(token_id):
            return ""
        data = self._tokenizer.token_bytes(token_id)
        if self._is_space_due and data:
            self._is_space_due = False
            data = data.removeprefix(b" ")
        return self._release(self._decode(data))

    def finish(self) -> str:
        """Return what is still held: an unfinished character as U+FFFD, and the beginning of a stop string.

        Called once no token follows. A stop string may still be found.
        """
        if self._is_finished:
            return ""
        text = self._release(self._decode(b"", True))
        if not self._is_finished:
            text, self._held = text + self._held, ""
            self._is_finished = True
        return text

    def _release(self, text: str) -> str:
        if not text:
            return ""
        advance = self._stop.advance(self._state, text)
        if advance.match is not None:
            self.stop_string = advance.match
            self._is_finished = True
            seen = self._held + text[: advance.match_end]
            self._held = ""
            return seen[: len(seen) - len(advance.match)]
        self._state = advance.state
        text = self._held + text
        cut = len(text) - advance.num_pending
        self._held = text[cut:]
        return text[:cut]
