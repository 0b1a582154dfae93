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
"""A part is taken to cost as much as gathering this many positions: sharing that saves fewer, and splitting that avoids
less padding, is left alone. Chosen by estimate; no benchmark varies it."""
MAX_PADDING_FRACTION = 0.25
"""Sequences are attended together while at most this much of what is gathered is padding."""
POSITIONS_PER_ROW = 16
"""A part of R rows is not gathered in pieces of less than R times this: merging a piece costs more for more rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Blocks that are gathered at once, so that their float32 copy stays in the processor's cache."""

    table: torch.Tensor
    """(num_sequences * n,) int64 block ids, n for each sequence."""
    keys: slice
    """Gathered positions of a sequence that are attended."""


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
    """Sequences with keys of their own; 1 unless MASKED."""
    pieces: tuple[Piece, ...]
    """The keys; one piece unless there is one sequence and no mask."""
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


def cut(batch: AttentionBatch, window: int | None, max_gathered: int) -> tuple[Part, ...]:
    """Return the parts of the batch's attention; cut on the first call of a step, remembered for the next ones.

    Args:
        batch: The step.
        window: Keys a row sees at most, itself included; None: all before it.
        max_gathered: Positions worth gathering at once for few rows, >= 1.

    Mutates: ``batch.scratch``.
    """
    if window is not None and window >= max(batch.context_lens):
        window = None
    key = ("parts", window, max_gathered)
    if key not in batch.scratch:
        batch.scratch[key] = tuple(_Cutter(batch.block_size, max_gathered).cut(batch, window))
    parts: tuple[Part, ...] = batch.scratch[key]
    return parts


@dataclass(frozen=True, slots=True)
class _Cutter:
    """Cuts one batch."""

    block_size: int
    max_gathered: int

    def cut(self, batch: AttentionBatch, window: int | None) -> Iterator[Part]:
        """Yield the parts of all rows."""
        size = self.block_size
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
        yield from self._shared_parts(whole, 0, 0)
        for sequence in whole:
            if len(sequence.rows) > 1:
                yield from self._chunk_parts(sequence)
        buckets = [[sequence] for sequence in windowed if len(sequence.rows) > 1]
        buckets += self._buckets([s for s in (*whole, *windowed) if len(s.rows) == 1])
        for bucket in buckets:
            yield self._masked_part(bucket, window)

    def _shared_parts(
        self, members: list[_Sequence], first_block: int, num_equal: int
    ) -> Iterator[Part]:
        """Yield FULL parts for the runs of whole blocks that several members share; the trunk before its branches.

        Args:
            members: Sequences whose blocks ``[0, num_equal)`` are the same.
            first_block: Blocks before this one are in parts already.
            num_equal: Leading blocks known to be equal.
        """
        size = self.block_size
        if len(members) < 2:
            return
        # What lies between the first and the last in sorted order shares whatever these two share.
        shareable = [member.blocks[: member.start // size] for member in members]
        low, high = min(shareable), max(shareable)
        while num_equal < min(len(low), len(high)) and low[num_equal] == high[num_equal]:
            num_equal += 1
        num_saved = (len(members) - 1) * (num_equal - first_block) * size
        if num_saved >= PART_COST_POSITIONS:
            rows = [row for member in members for row in member.rows]
            yield Part(
                kind=PartKind.FULL,
                rows=_row_index(rows),
                num_sequences=1,
                pieces=self._pieces(
                    low[first_block:num_equal], (num_equal - first_block) * size, len(rows)
                ),
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
            yield from self._shared_parts(branch, first_block, num_equal + 1)

    def _chunk_parts(self, sequence: _Sequence) -> Iterator[Part]:
        """Yield the parts of a sequence with several rows: its past, which all of them see, and its own square."""
        size = self.block_size
        rows = slice(sequence.rows.start, sequence.rows.stop)
        start = sequence.start
        if start > sequence.first_key:
            yield Part(
                kind=PartKind.FULL,
                rows=rows,
                num_sequences=1,
                pieces=self._pieces(
                    sequence.blocks[sequence.first_key // size : -(-start // size)],
                    start - sequence.first_key,
                    len(sequence.rows),
                ),
                is_first=not sequence.has_parts,
            )
            sequence.has_parts = True
        yield Part(
            kind=PartKind.CAUSAL,
            rows=rows,
            num_sequences=1,
            pieces=(
                Piece(
                    table=torch.tensor(sequence.blocks[start // size :]),
                    keys=slice(start % size, start % size + len(sequence.rows)),
                ),
            ),
            is_first=not sequence.has_parts,
        )

    def _buckets(self, sequences: list[_Sequence]) -> list[list[_Sequence]]:
        """Return the sequences, one row each, in groups that are worth padding to one length."""
        size = self.block_size
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
                    or num_gathered * size > self.max_gathered
                ):
                    buckets.append([])
                    longest, num_real = num_blocks, 0
                buckets[-1].append(sequence)
                num_real += num_blocks
        return buckets

    def _masked_part(self, bucket: list[_Sequence], window: int | None) -> Part:
        """Return one part for all that the bucket's sequences, equally many rows each, have left to see."""
        size = self.block_size
        first_keys = np.array([[s.first_key] for s in bucket])
        context_lens = np.array([[s.context_len] for s in bucket])
        num_keys = int((context_lens - first_keys).max())
        positions = first_keys + np.arange(num_keys)  # (sequences, keys)
        row_positions = context_lens + np.arange(-len(bucket[0].rows), 0)  # (sequences, rows)
        distance = row_positions[:, None, :, None] - positions[:, None, None, :]
        is_seen = distance >= 0
        if window is not None:
            is_seen &= distance < window
        mask = unwritten = None
        if not is_seen.all():
            mask = torch.from_numpy(np.where(is_seen, np.float32(0), np.float32(-np.inf)))
        tables = [sequence.blocks[sequence.first_key // size :] for sequence in bucket]
        if mask is None and len(bucket) == 1:
            pieces = self._pieces(tables[0], num_keys, 1)
        else:
            num_blocks = max(len(table) for table in tables)
            # Padded with the sequence's own last block: never another sequence's bytes.
            padded = [(*table, *(table[-1:] * (num_blocks - len(table)))) for table in tables]
            pieces = (Piece(table=torch.tensor(padded).view(-1), keys=slice(0, num_keys)),)
            if len(bucket) > 1:
                # That block's tail may never have been written: clear all of the padding.
                gathered = first_keys + np.arange(num_blocks * size)
                unwritten = torch.from_numpy(np.flatnonzero(gathered >= context_lens))
        return Part(
            kind=PartKind.MASKED,
            rows=_row_index([row for sequence in bucket for row in sequence.rows]),
            num_sequences=len(bucket),
            pieces=pieces,
            is_first=not bucket[0].has_parts,
            mask=mask,
            unwritten=unwritten,
        )

    def _pieces(self, blocks: tuple[int, ...], num_keys: int, num_rows: int) -> tuple[Piece, ...]:
        """Return the pieces of the first ``num_keys`` positions of the blocks, all of them seen by every row."""
        size = self.block_size
        step = -(-max(self.max_gathered, POSITIONS_PER_ROW * num_rows) // size)
        return tuple(
            Piece(
                table=torch.tensor(blocks[first : first + step]),
                keys=slice(0, min(step * size, num_keys - first * size)),
            )
            for first in range(0, len(blocks), step)
        )


def _row_index(rows: list[int]) -> slice | torch.Tensor:
    """Return an index of the rows; a slice, which copies nothing, where they follow each other."""
    if rows == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows))
    return torch.tensor(rows)
