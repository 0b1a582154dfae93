"""How the attention of a step is cut into parts that a dense kernel computes without waste.

Responsible for finding the blocks that several sequences share, for splitting what is left by the shape of its mask,
and for padding short sequences together. Done once per step and window, and kept in the batch: layers reuse it. Knows
no K or V, only indices.

What the rows of a step see, and which part computes it (half-open intervals of positions):

    sequence A   [ shared blocks )[ own past     )[ own tokens )
    sequence B   [ shared blocks )[ own past )[ own tokens     )
                 FULL: gathered   FULL, one     CAUSAL, one
                 once, queries    for each      for each
                 of A, B stacked

    sequence C   [ shared blocks )[ all the rest, one new token at its end )
    sequence D   [ shared blocks )[ all the rest, one new token    )
                 likewise         MASKED, one for several sequences of about the same length

Rows behind a sliding window that hides something share nothing: they are MASKED over the blocks that the window meets.

Invariants:
    1. The parts of a row hold disjoint keys and together all keys that it sees.
    2. The first part of a row, in order, is marked ``is_first``, and no other.
    3. No part hands a kernel a position that was never written, unless it is listed in ``unwritten``.

Source: stacking the queries of a shared prefix: Juravsky et al. 2024, Hydragen. Here the shared runs form a tree, since
requests may share a system prompt with many and a document with few.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvist.kernels.batch import AttentionBatch

PART_COST_POSITIONS = 512
"""A part costs about as much as gathering this many positions (benchmarks/attention.py): sharing that saves fewer, and
splitting that avoids less padding, do not pay."""
MAX_PADDING_FRACTION = 0.25
"""Sequences are attended together while at most this much of what is gathered is padding."""
MAX_GATHERED_POSITIONS = 16_384
"""Positions that one MASKED part of several sequences gathers at most, so that float32 copies of K and V stay small."""


class PartKind(Enum):
    """Which keys of a part its rows see."""

    FULL = "every row sees every key"
    CAUSAL = "as many rows as keys; row i sees the keys up to i"
    MASKED = "one or several sequences, each with keys of its own; the mask says which are seen"


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Some query rows and some keys that they see."""

    kind: PartKind
    rows: slice | torch.Tensor
    """R query rows, sequence by sequence; MASKED: equally many for each."""
    num_sequences: int
    """Sequences with keys of their own in ``table``; 1 unless MASKED."""
    table: torch.Tensor
    """(num_sequences * n,) int64 block ids to gather, n for each sequence."""
    keys: slice
    """Gathered positions of a sequence that are attended."""
    is_first: bool
    """Whether no earlier part holds these rows."""
    mask: torch.Tensor | None = None
    """(num_sequences, 1, R / num_sequences, keys) float32, 0 where seen and -inf elsewhere; None: all are seen."""
    unwritten: torch.Tensor | None = None
    """Gathered positions, counted through all sequences, that hold no token. A mask does not remove a NaN left there,
    so they must be cleared."""


@dataclass(slots=True)
class _Sequence:
    """One sequence of the batch while it is cut."""

    rows: range
    context_len: int
    blocks: tuple[int, ...]
    first_key: int = 0
    """First position that no part holds yet and a row may see; the beginning of a block."""
    has_parts: bool = False

    @property
    def start(self) -> int:
        """Position of its first row."""
        return self.context_len - len(self.rows)


def cut(batch: AttentionBatch, window: int | None) -> tuple[Part, ...]:
    """Return the parts of the batch's attention; cut on the first call of a step, remembered for the next ones.

    Args:
        batch: The step.
        window: Keys a row sees at most, itself included; None: all before it.

    Mutates: ``batch.scratch``.
    """
    if window is not None and window >= max(batch.context_lens):
        window = None
    key = ("parts", window)
    if key not in batch.scratch:
        batch.scratch[key] = tuple(_cut(batch, window))
    parts: tuple[Part, ...] = batch.scratch[key]
    return parts


def _cut(batch: AttentionBatch, window: int | None) -> Iterator[Part]:
    size = batch.block_size
    whole, windowed = [], []
    for first, stop, context_len, table in zip(
        batch.query_starts,
        batch.query_starts[1:],
        batch.context_lens,
        batch.block_tables,
        strict=False,
    ):
        sequence = _Sequence(range(first, stop), context_len, tuple(table.tolist()))
        if window is None or context_len <= window:
            whole.append(sequence)
        else:
            # The blocks before the first row's window are seen by none.
            sequence.first_key = max(0, sequence.start - window + 1) // size * size
            windowed.append(sequence)
    yield from _shared_parts(whole, 0, 0, size)
    for sequence in whole:
        if len(sequence.rows) > 1:
            yield from _chunk_parts(sequence, size)
    buckets = [[sequence] for sequence in windowed if len(sequence.rows) > 1]
    buckets += _buckets([s for s in (*whole, *windowed) if len(s.rows) == 1], size)
    for bucket in buckets:
        yield _masked_part(bucket, size, window)


def _shared_parts(
    members: list[_Sequence], first_block: int, num_equal: int, size: int
) -> Iterator[Part]:
    """Yield FULL parts for the runs of whole blocks that several of the members share; the trunk before its branches.

    Args:
        members: Sequences whose blocks ``[0, num_equal)`` are the same.
        first_block: Blocks before this one are in parts already.
        num_equal: Leading blocks known to be equal.
        size: Positions per block.
    """
    if len(members) < 2:
        return
    # What lies between the first and the last in sorted order shares whatever these two share.
    shareable = [member.blocks[: member.start // size] for member in members]
    low, high = min(shareable), max(shareable)
    while num_equal < min(len(low), len(high)) and low[num_equal] == high[num_equal]:
        num_equal += 1
    num_saved = (len(members) - 1) * (num_equal - first_block) * size
    if num_saved >= PART_COST_POSITIONS:
        yield Part(
            kind=PartKind.FULL,
            rows=_row_index([row for member in members for row in member.rows]),
            num_sequences=1,
            table=torch.tensor(low[first_block:num_equal]),
            keys=slice(0, (num_equal - first_block) * size),
            is_first=not members[0].has_parts,
        )
        first_block = num_equal
        for member in members:
            member.first_key = num_equal * size
            member.has_parts = True
    branches: dict[int, list[_Sequence]] = {}
    for member, blocks in zip(members, shareable, strict=True):
        if len(blocks) > num_equal:
            branches.setdefault(blocks[num_equal], []).append(member)
    for branch in branches.values():
        yield from _shared_parts(branch, first_block, num_equal + 1, size)


def _chunk_parts(sequence: _Sequence, size: int) -> Iterator[Part]:
    """Yield the parts of a sequence with several rows: its past, which all of them see, and the square of its own."""
    rows = slice(sequence.rows.start, sequence.rows.stop)
    start = sequence.start
    if start > sequence.first_key:
        yield Part(
            kind=PartKind.FULL,
            rows=rows,
            num_sequences=1,
            table=torch.tensor(sequence.blocks[sequence.first_key // size : -(-start // size)]),
            keys=slice(0, start - sequence.first_key),
            is_first=not sequence.has_parts,
        )
        sequence.has_parts = True
    yield Part(
        kind=PartKind.CAUSAL,
        rows=rows,
        num_sequences=1,
        table=torch.tensor(sequence.blocks[start // size :]),
        keys=slice(start % size, start % size + len(sequence.rows)),
        is_first=not sequence.has_parts,
    )


def _buckets(sequences: list[_Sequence], size: int) -> list[list[_Sequence]]:
    """Return the sequences, one row each, in groups that are worth padding to one length."""
    buckets: list[list[_Sequence]] = []
    for has_parts in (False, True):
        alike = [s for s in sequences if s.has_parts is has_parts]
        alike.sort(key=lambda s: len(s.blocks) - s.first_key // size, reverse=True)
        longest = num_real = 0
        for sequence in alike:
            num_blocks = len(sequence.blocks) - sequence.first_key // size
            num_gathered = (len(buckets[-1]) + 1) * longest if longest else 0
            num_padding = num_gathered - num_real - num_blocks
            is_wasteful = num_padding > MAX_PADDING_FRACTION * num_gathered
            if (
                not longest
                or (is_wasteful and num_padding * size > PART_COST_POSITIONS)
                or num_gathered * size > MAX_GATHERED_POSITIONS
            ):
                buckets.append([])
                longest, num_real = num_blocks, 0
            buckets[-1].append(sequence)
            num_real += num_blocks
    return buckets


def _masked_part(bucket: list[_Sequence], size: int, window: int | None) -> Part:
    """Return one part for all that the bucket's sequences, equally many rows each, have left to see."""
    first_keys = np.array([[s.first_key] for s in bucket])
    context_lens = np.array([[s.context_len] for s in bucket])
    num_blocks = max(len(s.blocks) - s.first_key // size for s in bucket)
    table = np.empty((len(bucket), num_blocks), dtype=np.int64)
    for row, sequence in zip(table, bucket, strict=True):
        blocks = sequence.blocks[sequence.first_key // size :]
        row[: len(blocks)] = blocks
        # Padded with the last block: never another sequence's bytes.
        row[len(blocks) :] = blocks[-1]
    num_keys = int((context_lens - first_keys).max())
    positions = first_keys + np.arange(num_keys)  # (sequences, keys)
    row_positions = context_lens + np.arange(-len(bucket[0].rows), 0)  # (sequences, rows)
    distance = row_positions[:, None, :, None] - positions[:, None, None, :]
    is_seen = distance >= 0
    if window is not None:
        is_seen &= distance < window
    gathered = first_keys + np.arange(num_blocks * size)
    # Padding repeats the last block, whose own tail may never have been written: clear all of it.
    unwritten = np.flatnonzero(gathered >= context_lens)
    is_exact = len(bucket) == 1
    return Part(
        kind=PartKind.MASKED,
        rows=_row_index([row for sequence in bucket for row in sequence.rows]),
        num_sequences=len(bucket),
        table=torch.from_numpy(table.reshape(-1)),
        keys=slice(0, num_keys),
        is_first=not bucket[0].has_parts,
        mask=None
        if is_seen.all()
        else torch.from_numpy(np.where(is_seen, np.float32(0), np.float32(-np.inf))),
        unwritten=None if is_exact or not unwritten.size else torch.from_numpy(unwritten),
    )


def _row_index(rows: list[int]) -> slice | torch.Tensor:
    """Return an index of the rows; a slice, which copies nothing, where they follow each other."""
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return torch.tensor(rows)
