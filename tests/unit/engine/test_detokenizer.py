"""Incremental text equals one-shot text, cut where a stop string first ends."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.engine.detokenizer import NO_STOP_STRINGS, Detokenizer, StopStrings

SPECIAL = 1000


@dataclass
class Bytes:
    """A vocabulary in which ids index a list of byte strings; from SPECIAL on, ids are control tokens."""

    tokens: list[bytes]
    strips_leading_space: bool = False
    calls: int = field(default=0)

    def token_bytes(self, token_id: int) -> bytes:
        self.calls += 1
        return b"<control>" if token_id >= SPECIAL else self.tokens[token_id]

    def is_special(self, token_id: int) -> bool:
        return token_id >= SPECIAL


def run(tokens: list[bytes], stop: tuple[str, ...] = (), **options) -> tuple[str, str | None]:
    """Return the concatenated deltas and the stop string found."""
    detokenizer = Detokenizer(Bytes(tokens), StopStrings(stop), **options)
    text = "".join(detokenizer.append(i) for i in range(len(tokens)))
    return text + detokenizer.finish(), detokenizer.stop_string


def cut_naively(text: str, stop: tuple[str, ...]) -> tuple[str, str | None]:
    """Return the text before the match that ends first, and the longest such match, by trying every end."""
    for end in range(1, len(text) + 1):
        matches = [s for s in stop if text[:end].endswith(s)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    borders = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(borders)]


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        "naïve café",
        "漢字かな交じり",
        "👩‍👩‍👧‍👦 🇸🇪 👍🏽",
        "e\u0301a\u0308o\u0302",
        "\x00\u200d\ufeff\uffff",
        "𝕏𐍈",
    ],
)
def test_characters_come_out_whole_when_tokens_are_single_bytes(text):
    detokenizer = Detokenizer(Bytes([bytes([b]) for b in range(256)]))
    deltas = [detokenizer.append(byte) for byte in text.encode()]
    assert "".join(deltas) == text
    assert [len(d) for d in deltas if d] == [1] * len(text)
    assert detokenizer.finish() == ""


def test_unfinished_character_is_flushed_as_replacement():
    detokenizer = Detokenizer(Bytes([b"a", b"\xf0\x9f", b"\x98"]))
    assert [detokenizer.append(i) for i in range(3)] == ["a", "", ""]
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_invalid_bytes_do_not_hold_back_what_follows():
    assert run([b"\xff", b"a", b"\xe6\xbc", b"b"]) == ("\ufffda\ufffdb", None)


def test_control_tokens_have_no_text():
    detokenizer = Detokenizer(Bytes([b"\xe6\xbc", b"\xa2"]))
    # Between the bytes of a character too, as decoding without control tokens has it.
    assert [detokenizer.append(i) for i in (SPECIAL, 0, SPECIAL + 1, 1)] == ["", "", "", "漢"]


def test_stop_string_across_tokens_is_not_leaked():
    detokenizer = Detokenizer(Bytes([b"yes", b"\n#", b"#", b"# more"]), StopStrings(["\n###"]))
    assert [detokenizer.append(i) for i in range(4)] == ["yes", "", "", ""]
    assert detokenizer.stop_string == "\n###"
    assert detokenizer.append(0) == ""
    assert detokenizer.finish() == ""


def test_false_beginning_of_a_stop_string_is_released_as_soon_as_it_is_decided():
    detokenizer = Detokenizer(Bytes([b"a<", b"|e", b"x"]), StopStrings(["<|end|>"]))
    assert [detokenizer.append(i) for i in range(3)] == ["a", "", "<|ex"]


def test_beginning_of_a_stop_string_is_flushed_at_the_end():
    assert run([b"a", b"<|en"], ("<|end|>",)) == ("a<|en", None)


def test_overlapping_beginnings_are_followed():
    """A matcher that starts over behind a failed match misses aab in aaab."""
    assert run([b"aa", b"a", b"bc"], ("aab",)) == ("a", "aab")


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("xabcd", ("abcd", "bc"), ("xa", "bc")),  # bc ends first, though abcd begins first
        ("xabc", ("bc", "abc"), ("x", "abc")),  # both end together: the longer one
        ("say stop", ("STOP", "stop", "sto"), ("say ", "sto")),
        ("ab", ("b", "ab"), ("", "ab")),
    ],
)
def test_the_match_that_ends_first_wins_however_the_text_is_cut(text, stop, expected):
    data = text.encode()
    assert run([data], stop) == expected
    assert run([bytes([b]) for b in data], stop) == expected


def test_replacement_flushed_at_the_end_can_complete_a_stop_string():
    assert run([b"ab\xe6"], ("b\ufffd",)) == ("a", "b\ufffd")


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([b" Hello", b" you"], "Hello you"),
        ([b"  Hello"], " Hello"),
        ([b"", b" ", b" a"], " a"),
        ([b"a", b" b"], "a b"),
    ],
)
def test_first_space_is_taken_away_once(tokens, expected):
    detokenizer = Detokenizer(Bytes(tokens, strips_leading_space=True))
    assert "".join(detokenizer.append(i) for i in range(len(tokens))) == expected


def test_first_space_stays_when_a_sentence_goes_on():
    tokens = Bytes([b"Once", b" upon"], strips_leading_space=True)
    assert Detokenizer(tokens, previous_token_id=0).append(1) == " upon"
    assert Detokenizer(tokens, previous_token_id=SPECIAL).append(1) == "upon"


def test_stop_strings_must_not_be_empty():
    with pytest.raises(ValueError, match="must not be empty"):
        StopStrings([""])


pieces = st.one_of(
    st.text(alphabet="ab<|", max_size=12).map(str.encode),
    st.text(max_size=8).map(str.encode),
    st.sampled_from(["漢字", "👩‍👩‍👧", "e\u0301", "<|end|>"]).map(str.encode),
    st.binary(max_size=4),
)
stops = st.lists(
    st.one_of(st.text(alphabet="ab<|", min_size=1, max_size=5), st.text(min_size=1, max_size=3)),
    max_size=4,
).map(tuple)


@given(st.lists(pieces, max_size=6).map(b"".join), st.lists(st.integers(0, 99)), stops)
def test_deltas_equal_the_truncated_one_shot_text(data, cuts, stop):
    expected = cut_naively(data.decode(errors="replace"), stop)
    assert run(split(data, cuts), stop) == expected


@given(st.lists(pieces, max_size=6).map(b"".join), st.lists(st.integers(0, 99)), stops)
def test_nothing_that_could_begin_a_stop_string_is_ever_shown(data, cuts, stop):
    tokens = split(data, cuts)
    detokenizer = Detokenizer(Bytes(tokens), StopStrings(stop))
    shown = ""
    for index in range(len(tokens)):
        shown += detokenizer.append(index)
        if detokenizer.stop_string is not None:
            break
        seen = b"".join(tokens[: index + 1])
        # Bytes that may still become a character are not text yet.
        whole = Detokenizer(Bytes([seen]))
        text = whole.append(0)
        held = text.removeprefix(shown)
        assert text == shown + held
        # Exactly the longest beginning of a stop string is held: no more, no less.
        assert len(held) == max(
            (k for s in stop for k in range(1, len(s)) if text.endswith(s[:k])), default=0
        )


def test_held_text_is_bounded_and_each_token_is_read_once():
    tokens = Bytes([b"a"])
    detokenizer = Detokenizer(tokens, StopStrings(["a" * 50 + "b"]))
    for count in range(2000):
        detokenizer.append(0)
        assert len(detokenizer._held) == min(count + 1, 50)
    assert tokens.calls == 2000


def test_no_stop_strings_match_nothing():
    assert NO_STOP_STRINGS.advance(0, "anything").match is None
