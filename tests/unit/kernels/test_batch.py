"""The batch: positions and slots of every token, and refusal of plans that cannot be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.errors import InvariantViolation
from kvist.kernels.batch import AttentionBatch


@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=5),
    block_size=st.integers(1, 9),
    num_spare=st.integers(0, 3),
)
def test_positions_and_slots(
    lengths: list[tuple[int, int]], block_size: int, num_spare: int
) -> None:
    ids = iter(range(1000, 0, -1))
    tables = [
        [next(ids) for _ in range(-(-(start + count) // block_size) + num_spare)]
        for start, count in lengths
    ]
    batch = AttentionBatch.from_sequences(
        starts=[start for start, _ in lengths],
        num_tokens=[count for _, count in lengths],
        block_tables=tables,
        block_size=block_size,
    )
    positions = [start + i for start, count in lengths for i in range(count)]
    slots = [
        table[p // block_size] * block_size + p % block_size
        for (start, count), table in zip(lengths, tables, strict=True)
        for p in range(start, start + count)
    ]
    assert batch.positions.tolist() == positions
    assert batch.slots.tolist() == slots
    assert batch.num_tokens == len(positions)
    assert batch.num_sequences == len(lengths)
    assert batch.context_lens == tuple(start + count for start, count in lengths)
    for table, given_table, context_len in zip(
        batch.block_tables, tables, batch.context_lens, strict=True
    ):
        assert table.tolist() == given_table[: -(-context_len // block_size)]


def build(starts: list[int], num_tokens: list[int], tables: list[list[int]]) -> None:
    AttentionBatch.from_sequences(
        starts=starts, num_tokens=num_tokens, block_tables=tables, block_size=4
    )


def test_a_block_table_that_is_too_short_is_a_bug() -> None:
    with pytest.raises(
        InvariantViolation,
        match="sequence 1 computes 2 tokens from 3 on and needs 2 blocks of 4, received 1",
    ):
        build([0, 3], [1, 2], [[0], [1]])


def test_an_empty_sequence_is_a_bug() -> None:
    with pytest.raises(InvariantViolation, match="computes 0 tokens"):
        build([0], [0], [[0]])


def test_disagreeing_lengths_are_a_bug() -> None:
    with pytest.raises(InvariantViolation, match="per sequence, received 2, 1, 1"):
        build([0, 0], [1], [[0]])
