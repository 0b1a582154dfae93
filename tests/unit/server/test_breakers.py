"""Telling what keeps changing in prompts, and what it costs."""

from __future__ import annotations

import random
import string
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.server.breakers import (
    HINTS,
    MAX_EXAMPLE_LEN,
    MAX_PLACES,
    MAX_TEXT_LEN,
    Breakers,
    Difference,
    find_breaker,
)

RULES = ". Be brief, and never leave the lamp alone at night."
MINUTE_NS = 60_000_000_000


def difference(old: str, new: str, *, part="system", lost=100):
    """Return where two texts differ, as the server would."""
    num = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), None)
    num = min(len(old), len(new)) if num is None else num
    return Difference(
        part=part, before=old[:num], expected=old[num:], received=new[num:], tokens_lost=lost
    )


def kind_of(old: str, new: str, *, part="system"):
    found = find_breaker(difference(old, new, part=part))
    return None if found is None else found.kind


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("2026-11-14", "2026-11-15"),
        ("2026-11-14T10:00:12Z", "2026-11-14T10:07:55Z"),
        ("2026-11-14 10:00:12.123456+01:00", "2026-11-14 10:07:55.000001+01:00"),
        ("Saturday", "Sunday"),
        ("Monday, 3 August 2026", "Tuesday, 4 August 2026"),
        ("August 3rd, 2026 at 9:15 pm", "August 4th, 2026 at 10:02 am"),
        ("Sat Nov 14 10:00:12 UTC 2026", "Sun Nov 15 09:59:01 UTC 2026"),
        ("14/11/2026", "15/11/2026"),
        ("3.8.2026", "14.8.2026"),
        ("10:15", "10:16"),
        ("1795000000", "1795003600"),
        ("1795000000123", "1795003600456"),
    ],
)
def test_dates_and_times_are_told(old, new):
    assert kind_of(f"Today is {old}{RULES}", f"Today is {new}{RULES}") == "timestamp"
    assert kind_of(f"Today is {old}", f"Today is {new}") == "timestamp"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("123e4567-e89b-12d3-a456-426614174000", "9b2d0c11-aaaa-4bbb-8ccc-0123456789ab"),
        ("deadbeef01", "abadcafe99"),
        ("chatcmpl-8Zq0fX7bK2", "chatcmpl-1Ypp3XkbZ9"),
        ("482910375", "917264038"),
        ("01J9ZQ3V7K8M2N4P5R6S7T8V9W", "01J9ZQ4A1B2C3D4E5F6G7H8J9K"),
    ],
)
def test_ids_are_told(old, new):
    assert kind_of(f"x-request-id: {old}\n{RULES}", f"x-request-id: {new}\n{RULES}") == "id"


@pytest.mark.parametrize(("old", "new"), [("7", "8"), ("99", "100"), ("4711", "0815")])
def test_numbers_are_counters(old, new):
    assert kind_of(f"This is request {old}{RULES}", f"This is request {new}{RULES}") == "counter"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('{"city": "Paris", "date": "x"}', '{"date": "x", "city": "Paris"}'),
        ('{"a": 1, "ab": 2}', '{"ab": 2, "a": 1}'),
        ('["fog", "bell", "tide"]', '["bell", "fog", "tide"]'),
        ('{"name": "fog"}\n{"name": "bell"}', '{"name": "bell"}\n{"name": "fog"}'),
    ],
)
def test_reordered_json_is_told(old, new):
    assert kind_of(f"Data: {old}{RULES}", f"Data: {new}{RULES}") == "reordered_json"


def test_a_changed_value_is_not_a_reordered_one():
    assert kind_of('{"city": "Paris"}' + RULES, '{"city": "Rome"}' + RULES) == "other"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (f"a  b{RULES}", f"a b{RULES}"),
        (f"a\nb{RULES}", f"a\r\n b{RULES}"),
        (f"ab{RULES}", f"ab{RULES}\n"),
        (f"ab{RULES} ", f"ab{RULES}"),
    ],
)
def test_whitespace_is_told(old, new):
    assert kind_of(old, new) == "whitespace"


def test_another_text_in_the_middle_is_told_without_a_name():
    found = find_breaker(difference(f"I keep a lamp{RULES}", f"I keep a mill{RULES}"))
    assert (found.kind, found.expected, found.received) == ("other", "lamp", "mill")
    assert found.example == "I keep a [lamp -> mill]"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("How thick is the fog?", "How thick is the frost on the pier?"),
        ("Question 1: fog mill harbour", "Question 2: bell tide lantern"),
        ("The fog is thick.", "The fog"),
        ("The fog", "The fog is thick."),
        ("It is 3 am in the morning here.", "It is 7 pm, and I would like to know more."),
        ("a" * 31, "b" + "a" * 20),
    ],
)
def test_what_only_goes_on_differently_is_no_breaker(old, new):
    assert kind_of(old, new) is None


@given(st.text(max_size=400), st.text(max_size=400), st.text(max_size=300), st.booleans())
def test_nothing_that_a_client_writes_breaks_the_search(old, new, before, is_tool):
    found = find_breaker(
        Difference(
            part="tools" if is_tool else None,
            before=before,
            expected=old,
            received=new,
            tokens_lost=1,
        )
    )
    if found is not None:
        assert found.kind in HINTS
        assert len(found.example) <= MAX_EXAMPLE_LEN
        whole_old, whole_new = before[-256:] + old, before[-256:] + new
        assert whole_old.startswith(found.before + found.expected)
        assert whole_new.startswith(found.before + found.received)


@given(st.uuids(), st.uuids())
def test_any_two_uuids_are_ids(old, new):
    if old != new:
        text = f"Session {{}}{RULES}"
        assert kind_of(text.format(old), text.format(new)) in ("id", "timestamp", "counter")


def test_most_random_ids_are_told():
    chance = random.Random(7)
    text = f"nonce={{}}{RULES}"
    forms = [
        lambda: str(uuid.UUID(int=chance.getrandbits(128))),
        lambda: f"{chance.getrandbits(128):032x}",
        lambda: "".join(chance.choices(string.ascii_letters + string.digits, k=22)),
    ]
    kinds = [kind_of(text.format(form()), text.format(form())) for form in forms * 100]
    assert kinds.count("id") >= 295


class Clock:
    now_ns = 0

    def __call__(self):
        return self.now_ns


def breaker(number=0, *, lost=100, part="system"):
    return find_breaker(
        difference(
            f"Today is 2026-11-1{number}{RULES}", f"Today is 2026-11-0{number}{RULES}",
            part=part, lost=lost,
        )
    )  # fmt: skip


def test_what_comes_again_at_the_same_place_is_counted_together():
    counts = Breakers(Clock())
    for number in range(5):
        counts.note("t", [breaker(number)])
    (row,) = counts.report("t")
    assert set(row) == {"part", "kind", "example", "tokens_per_hour", "count", "hint"}
    assert (row["part"], row["kind"], row["count"]) == ("system", "timestamp", 5)
    assert row["tokens_per_hour"] == 500
    assert "2026-11-04" in row["example"]


def test_an_hour_later_it_is_forgotten():
    clock = Clock()
    counts = Breakers(clock)
    counts.note("t", [breaker(lost=1)])
    clock.now_ns = 59 * MINUTE_NS
    counts.note("t", [breaker(lost=10)])
    assert counts.report("t")[0]["tokens_per_hour"] == 11
    clock.now_ns = 60 * MINUTE_NS
    assert counts.report("t")[0]["tokens_per_hour"] == 10
    clock.now_ns = 119 * MINUTE_NS
    assert counts.report("t") == []


def test_a_place_that_comes_every_minute_is_counted_over_the_last_hour_only():
    clock = Clock()
    counts = Breakers(clock)
    for minute in range(500):
        clock.now_ns = minute * MINUTE_NS
        counts.note("t", [breaker(lost=2)])
    assert counts.report("t")[0]["tokens_per_hour"] == 120


def test_the_most_costly_places_are_kept_and_come_first():
    counts = Breakers(Clock())
    for index in range(MAX_PLACES * 2):
        counts.note("t", [breaker(part=f"message {index}", lost=index + 1)])
    rows = counts.report("t")
    assert len(rows) == MAX_PLACES
    assert rows[0]["tokens_per_hour"] == MAX_PLACES * 2
    assert [row["tokens_per_hour"] for row in rows] == sorted(
        (row["tokens_per_hour"] for row in rows), reverse=True
    )


def test_tenants_see_their_own_only():
    counts = Breakers(Clock())
    counts.note("a", [breaker()])
    assert counts.report("b") == []
    assert len(counts.report("a")) == 1


def test_texts_are_clipped():
    old, new = ("".join(chr(65 + (i * k) % 23) for i in range(5000)) for k in (3, 5))
    found = find_breaker(difference(f"x{old[:300]}{RULES}", f"x{new[:300]}{RULES}"))
    assert found.kind == "other"
    assert len(found.example) <= MAX_EXAMPLE_LEN
    assert (
        find_breaker(difference(f"x{old[:MAX_TEXT_LEN]}{RULES}", f"x{new[:2000]}{RULES}")) is None
    )
