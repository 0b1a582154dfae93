"""What in a client's prompts changes from one request to the next and costs it the rest of the prefix.

Responsible for telling dates, ids, counters, reordered JSON and whitespace in the texts around a difference, and for
what each such place cost within the last hour. Knows nothing of tokens, caches and HTTP.

A difference alone is no breaker: two conversations differ at their first question, and nothing could be saved there. It
is one when both texts go on alike behind it, so that a prompt which had it elsewhere, or not at all, would have been
reused.

Invariant: what one tenant sent is counted and told for that tenant only.

Bounds: ``MAX_PLACES`` places for each tenant, an example of ``MAX_EXAMPLE_LEN`` characters and sixty counts for each
place. A difference is looked at once, in texts of ``MAX_TEXT_LEN`` characters: a millisecond, in a worker thread.
"""

from __future__ import annotations

import re
import time
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from kvist.server.parts import TOOLS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MAX_PLACES = 64
"""Places remembered for each tenant; of more, the one that cost the least is forgotten."""
MAX_TEXT_LEN = 1024
"""Characters looked at behind a difference."""
MAX_BEFORE_LEN = 256
"""Characters looked at before it."""
MAX_FORM_LEN = 96
"""Characters on either side of a difference in which a date, an id or a number is looked for."""
MAX_EXAMPLE_LEN = 120
WINDOW_MINUTES = 60

_MIN_ALIKE = 8
"""Characters that go on alike behind a date, an id or a number."""
_MIN_ALIKE_WITHOUT_FORM = 32
"""The same behind a change without such a form. More than what templates write between two messages."""
_MIN_ID_LEN = 8
_MIN_ID_DIGITS = 7
"""Longer than what people count to."""

HINTS = {
    "timestamp": "move the date or time behind what does not change, into the last message, or round it to the day",
    "id": "leave the id out of the prompt, or move it behind what does not change",
    "counter": "move the number behind what does not change, or leave it out",
    "reordered_json": "serialise JSON with sorted keys, and list tools and items in a fixed order",
    "whitespace": "send the text with the same spaces and line ends every time; do not trim or reformat old messages",
    "other": "move what changes behind what does not; do not edit messages that were sent before",
}
"""What to do about each kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A place where a prompt went on differently from the nearest earlier one."""

    part: str | None
    """As ``ChatParts.at`` names it."""
    before: str
    """The end of what both have."""
    expected: str
    """How the earlier one went on, to the end of its message at most."""
    received: str
    """How this one does; the first characters of the two are not the same."""
    tokens_lost: int
    """What had to be computed because of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Breaker:
    """A difference that need not have cost what it did."""

    part: str | None
    kind: str
    """A key of ``HINTS``."""
    before: str
    expected: str
    """What changed, as the earlier prompt had it."""
    received: str
    tokens_lost: int

    @property
    def example(self) -> str:
        """The change with a little of what stands before it, clipped."""
        room = (MAX_EXAMPLE_LEN - 24 - len("[ -> ]")) // 2
        old, new = (_clipped(text, room) for text in (self.expected, self.received))
        return f"{self.before[-24:]}[{old} -> {new}]"


def find_breaker(difference: Difference) -> Breaker | None:
    """Return what changed and of what kind it is; None: behind it the texts do not go on alike."""
    texts = _Texts(
        difference.before[-MAX_BEFORE_LEN:],
        difference.expected[:MAX_TEXT_LEN],
        difference.received[:MAX_TEXT_LEN],
    )
    has_json = difference.part == TOOLS or re.search(r"[{\[]", texts.before) is not None
    spans = (
        ("reordered_json", texts.reordered() if has_json else None),
        ("whitespace", texts.whitespace()),
        ("timestamp", texts.changed(_TIMESTAMP, _is_timestamp)),
        ("counter", texts.changed(_WORD, _is_near_number)),
        ("id", texts.changed(_WORD, _is_id)),
        ("counter", texts.changed(_NUMBER, _is_number)),
        ("other", texts.anything()),
    )
    for kind, span in spans:
        if span is not None:
            return Breaker(
                part=difference.part,
                kind=kind,
                before=texts.before[: span.start],
                expected=span.expected,
                received=span.received,
                tokens_lost=difference.tokens_lost,
            )
    return None


class Breakers:
    """What breakers cost each tenant within the last hour. One event loop.

    Args:
        clock_ns: Monotonic clock in nanoseconds.
    """

    def __init__(self, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock_ns = clock_ns
        self._tenants: dict[str, dict[tuple[str | None, str, str], _Place]] = {}

    def note(self, tenant: str, breakers: Iterable[Breaker]) -> None:
        """Count some. O(places of the tenant) when there is one too many."""
        minute = self._minute()
        for breaker in breakers:
            places = self._tenants.setdefault(tenant, {})
            # Digits, since a place may have a number before it that changes too.
            key = breaker.part, breaker.kind, re.sub(r"\d", "0", breaker.before[-16:])
            place = places.setdefault(key, _Place())
            place.add(minute, breaker)
            if len(places) > MAX_PLACES:
                del places[min(places, key=lambda other: places[other].tokens_since(0))]

    def report(self, tenant: str) -> list[dict[str, Any]]:  # Any: JSON values
        """Return what cost this tenant tokens within the last hour, the most costly first.

        Side effects: forgets what is older.
        """
        first = self._minute() - WINDOW_MINUTES + 1
        places = self._tenants.get(tenant, {})
        for key in [key for key, place in places.items() if not place.count_since(first)]:
            del places[key]
        rows = [
            {
                "part": part,
                "kind": kind,
                "example": place.example,
                "tokens_per_hour": place.tokens_since(first),
                "count": place.count_since(first),
                "hint": HINTS[kind],
            }
            for (part, kind, _), place in places.items()
        ]
        return sorted(rows, key=lambda row: -row["tokens_per_hour"])

    def _minute(self) -> int:
        return self._clock_ns() // 60_000_000_000


@dataclass(slots=True)
class _Place:
    """What one place cost, by minute."""

    example: str = ""
    """The latest."""
    minutes: deque[_Minute] = field(default_factory=lambda: deque(maxlen=WINDOW_MINUTES))

    def add(self, minute: int, breaker: Breaker) -> None:
        self.example = breaker.example
        if not self.minutes or self.minutes[-1].number != minute:
            self.minutes.append(_Minute(minute))
        self.minutes[-1].count += 1
        self.minutes[-1].tokens += breaker.tokens_lost

    def count_since(self, first: int) -> int:
        return sum(minute.count for minute in self.minutes if minute.number >= first)

    def tokens_since(self, first: int) -> int:
        return sum(minute.tokens for minute in self.minutes if minute.number >= first)


@dataclass(slots=True)
class _Minute:
    number: int
    count: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Span:
    """What changed."""

    start: int
    """In the text before the difference: a date that differs in its last digit begins there."""
    expected: str
    received: str


class _Texts:
    """Two texts that begin alike.

    Args:
        before: What they begin with.
        expected: How one goes on.
        received: How the other does.
    """

    def __init__(self, before: str, expected: str, received: str) -> None:
        self.before = before
        self._expected = expected
        self._received = received

    def changed(self, form: re.Pattern[str], is_change: Callable[[str, str], bool]) -> _Span | None:
        """Return the piece of a given form that the difference is in, on both sides, if they go on alike behind it."""
        begun = self.before[-MAX_FORM_LEN:]
        wholes = [f"{begun}{text[:MAX_FORM_LEN]}" for text in (self._expected, self._received)]
        old, new = (_covering(form, whole, len(begun)) for whole in wholes)
        if old is None or new is None or not is_change(old[0], new[0]):
            return None
        rests = [wholes[0][old.end() :], wholes[1][new.end() :]]
        num_alike = _num_common(*rests)
        # Where one of them ends, what there is has to be alike, and there has to be something.
        wanted = min(_MIN_ALIKE, *map(len, rests)) if any(rests) else _MIN_ALIKE
        is_whole = not any(rests) and is_change is not _is_number
        if num_alike < wanted and not is_whole:
            return None
        start = len(self.before) - len(begun) + min(old.start(), new.start())
        return _Span(start, old[0], new[0])

    def whitespace(self) -> _Span | None:
        """Return the spaces that differ, if that is all that does."""
        if not any(text[:1].isspace() for text in (self._expected, self._received)):
            return None
        old, new = ("".join(text.split()) for text in (self._expected, self._received))
        num_alike = _num_common(old, new)
        if num_alike < min(16, len(old), len(new)) or bool(old) != bool(new):
            return None
        spaces = (_spaces(text) for text in (self._expected, self._received))
        return _Span(len(self.before), *spaces)

    def reordered(self) -> _Span | None:
        """Return the first string of JSON that differs, if each side has the other's further on."""
        start = self.before.rfind('"')
        if start < 0:
            return None
        begun = self.before[start:]
        pieces = [text.partition('"') for text in (self._expected, self._received)]
        if not all(quote for _, quote, _ in pieces):
            return None
        old, new = (f"{begun}{piece}{quote}" for piece, quote, _ in pieces)
        if old not in self._received or new not in self._expected:
            return None
        return _Span(start, old, new)

    def anything(self) -> _Span | None:
        """Return what differs up to where both go on alike for long."""
        size = _MIN_ALIKE_WITHOUT_FORM
        text = self._received
        places = {text[i : i + size]: i for i in reversed(range(len(text) - size + 1))}
        for start in range(len(self._expected) - size + 1):
            there = places.get(self._expected[start : start + size])
            if there is not None:
                return _Span(len(self.before), self._expected[:start], text[:there])
        return None


_MONTHS = "jan|feb|mar|apr|may|jun|jul|aug|sep|sept|oct|nov|dec"
_MONTHS += "|january|february|march|april|june|july|august|september|october|november|december"
_DAYS = "mon|tue|tues|wed|thu|thurs|fri|sat|sun"
_DAYS += "|monday|tuesday|wednesday|thursday|friday|saturday|sunday"
_NAMES = re.compile(rf"(?i)\b(?:{_MONTHS}|{_DAYS})\b")
_CLOCK = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?"
_DATE = r"\d{4}-\d{1,2}(?:-\d{1,2})?|\d{1,4}[/.]\d{1,2}[/.]\d{1,4}"
_PIECE = (
    rf"(?:{_DATE}|{_CLOCK}|{_MONTHS}|{_DAYS}|\d{{1,2}}(?:st|[nr]d|th)|\d{{1,19}}(?:\.\d+)?|[ap]m|utc|gmt|of|at)"
    r"(?:Z|[+-]\d{2}:?\d{2})?(?=T\d|\b)"
)
"""A word or number that dates are made of; ends where a word does, so that a run can be cut into them in one way."""
_TIMESTAMP = re.compile(rf"(?i)\b{_PIECE}(?:(?:T(?=\d)|[ ,/-]{{1,3}}){_PIECE})*")
_EPOCH = re.compile(r"1[4-9]\d{8}(?:\d{3}){0,3}(?:\.\d+)?")
"""Seconds, milliseconds, microseconds or nanoseconds from 2014 to 2033."""
_WORD = re.compile(r"[A-Za-z0-9_-]+")
_NUMBER = re.compile(r"\d+")


def _is_timestamp(old: str, new: str) -> bool:
    return all(
        _NAMES.search(text) is not None
        or re.search(f"{_DATE}|{_CLOCK}", text) is not None
        or _EPOCH.fullmatch(text.strip()) is not None
        for text in (old, new)
    )


def _is_near_number(old: str, new: str) -> bool:
    """Return whether both are numbers of at most 15 digits and the second is a little larger."""
    both = (old, new)
    return all(text.isdecimal() and len(text) <= 15 for text in both) and (
        0 < int(new) - int(old) <= 1000
    )


def _is_number(old: str, new: str) -> bool:  # noqa: ARG001  # the form says all there is to say
    return True


def _is_id(old: str, new: str) -> bool:
    return _looks_drawn(old) and _looks_drawn(new)


def _looks_drawn(word: str) -> bool:
    """Return whether a word is one that machines write: long, with digits among its letters, or of many digits."""
    pieces = [piece for piece in re.split("[_-]", word) if piece]
    joined = "".join(pieces[1:] if len(pieces) > 1 and pieces[0].isalpha() else pieces)
    num_digits = sum(map(str.isdecimal, joined))
    if num_digits == len(joined):
        return num_digits >= _MIN_ID_DIGITS
    if num_digits and len(joined) >= _MIN_ID_LEN and not joined.strip("0123456789abcdefABCDEF"):
        return True
    # A name like "version2" has its digits at one end; in an id letters and digits alternate.
    num_turns = sum(a.isdecimal() != b.isdecimal() for a, b in pairwise(joined))
    return len(joined) >= _MIN_ID_LEN and num_digits >= 1 and num_turns >= 2


def _covering(form: re.Pattern[str], text: str, position: int) -> re.Match[str] | None:
    """Return the piece of that form that a position is in or at the end of; the later one where two meet there."""
    found = None
    for match in form.finditer(text):
        if match.start() > position:
            break
        if match.end() >= position and match.end() > match.start():
            found = match
    return found


def _num_common(left: str, right: str) -> int:
    length = min(len(left), len(right))
    return next((i for i in range(length) if left[i] != right[i]), length)


def _spaces(text: str) -> str:
    return text[: len(text) - len(text.lstrip())]


def _clipped(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 3]}..."
