"""What sequences take while they grow, against a sequence whose blocks are aged one step at a time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.cache.footprint import AgeProfiles
from kvist.precision import PRESETS, KVBudget, KVPrecision

SIZES = {"raw16": 100, "int8": 52, "int4": 27, "int3": 20}
RULES = (
    *PRESETS.values(),
    "recent:5=raw16,rest=int8",
    "sink=int8,recent:2=raw16,recent:5=int8,recent:9=int4,rest=int3",
    "sink=raw16,recent:1=raw16,recent:30=int8,rest=int3",
)


def budget(rule: str, max_chunk: int) -> KVBudget:
    precision = KVPrecision.parse(rule)
    return KVBudget(num_bytes=0, block_bytes=SIZES, precision=precision, max_chunk=max_chunk)


def size_of(rule: KVPrecision, index: int, num_tokens: int, block_size: int) -> int:
    """Return what a block takes once so many tokens are committed."""
    age = num_tokens - (index + 1) * block_size
    if index == 0 and age >= rule.windows[0][0]:
        return SIZES[rule.sink]
    return SIZES[next((codec for length, codec in rule.windows if age < length), rule.rest)]


@settings(max_examples=300, deadline=None)
@given(
    rule=st.sampled_from(RULES),
    block_size=st.integers(1, 8),
    max_chunk=st.integers(1, 30),
    num_tokens=st.integers(1, 120),
    num_output=st.integers(0, 40),
    data=st.data(),
)
def test_a_sequence_never_needs_more_than_it_was_promised(
    rule: str,
    block_size: int,
    max_chunk: int,
    num_tokens: int,
    num_output: int,
    data: st.DataObject,
) -> None:
    """Whatever the steps: what it has and what it is promised never exceed what it began with."""
    profiles = AgeProfiles(budget(rule, max_chunk), block_size)
    precision = KVPrecision.parse(rule)
    at_end = -(-(num_tokens + num_output) // block_size)
    promised = profiles.of(num_tokens).total(at_end)
    sizes: list[int] = []
    computed, total = 0, num_tokens
    while computed < num_tokens + num_output:
        chunk = min(max_chunk, total - computed)
        step = data.draw(st.integers(1, chunk)) if chunk > 1 else 1
        sizes += [SIZES["raw16"]] * (-(-(computed + step) // block_size) - len(sizes))
        assert sum(sizes) <= promised
        assert sum(sizes) <= profiles.of(chunk).total(len(sizes))
        computed += step
        sizes = [
            min(size, size_of(precision, index, computed, block_size))
            for index, size in enumerate(sizes)
        ]
        total = max(total, computed + 1)
        need = profiles.of(total - computed).growth(len(sizes), at_end, enumerate(sizes))
        assert sum(sizes) + need <= promised
        promised = sum(sizes) + need


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
def test_growth_is_what_growing_in_pieces_comes_to(rule: str, chunk: int) -> None:
    profile = AgeProfiles(budget(rule, chunk), 16).of(chunk)
    for at_end in (1, 2, 5, 40, 300):
        assert profile.growth(0, at_end, ()) == profile.total(at_end)
        growths = [profile.growth(0, end, ()) for end in range(at_end + 1)]
        assert growths == sorted(growths)
        # Nobody counts on blocks of others.
        assert profile.growth(at_end // 2, at_end, ()) >= (at_end - at_end // 2) * SIZES["int3"]


@pytest.mark.parametrize("rule", RULES)
def test_a_sequence_alone_fills_the_memory_and_no_more(rule: str) -> None:
    profile = AgeProfiles(budget(rule, 40), 16).of(40)
    for num_units in range(0, 4000, 37):
        count = profile.max_blocks(num_units)
        assert profile.total(count) <= num_units < profile.total(count + 1)


def test_most_of_a_long_context_is_promised_small() -> None:
    profiles = AgeProfiles(budget(PRESETS["int4"], 512), 64)
    assert profiles.of(1).total(128) == 125 * 27 + 52 + 2 * 100
    # The blocks of a step are large before they are small.
    assert profiles.of(512).total(128) == 118 * 27 + 52 + 9 * 100
    assert profiles.of(10**9).total(128) == profiles.of(512).total(128)
