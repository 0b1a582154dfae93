"""The tokens of one step as attention sees them: who asks, over which blocks, from which position.

Responsible for the index arithmetic of a step (positions, slots, block tables), done once and shared by all layers.
Knows neither requests nor the format of K and V.

Invariants:
    1. Sequence ``s`` owns query rows ``[query_starts[s], query_starts[s + 1])``; they are its last positions, so row
       ``r`` of ``n`` stands at position ``context_lens[s] - n + r`` and sees the keys at that position and before.
    2. ``block_tables[s]`` covers ``context_lens[s]`` positions exactly: no block behind the last position.
    3. Nothing in a batch changes after construction; implementations may keep what they derive from it in ``scratch``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvist.errors import InvariantViolation

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionBatch:
    """The flattened tokens of one step. T tokens in S sequences; every tensor is on the storage device."""

    query_starts: tuple[int, ...]
    """S + 1 row offsets, ascending, from 0 to T."""
    context_lens: tuple[int, ...]
    """Per sequence, positions that have K and V once the step's own are written."""
    block_tables: tuple[torch.Tensor, ...]
    """Per sequence, (ceil(context_len / P),) int64 block ids in order."""
    positions: torch.Tensor
    """(T,) int64 position of each token in its sequence."""
    slots: torch.Tensor
    """(T,) int64 slot each token's K and V are written to: block id * P + offset."""
    block_size: int
    """P, positions per block."""
    # Any: each implementation keeps its own metadata here, under a key that starts with its name.
    scratch: dict[tuple[object, ...], Any] = field(default_factory=dict, repr=False)
    """What implementations derived from this batch, once per step instead of once per layer."""

    @property
    def num_tokens(self) -> int:
        """T, tokens in the batch."""
        return self.query_starts[-1]

    @property
    def num_sequences(self) -> int:
        """S, sequences in the batch."""
        return len(self.context_lens)

    @classmethod
    def from_sequences(
        cls,
        *,
        starts: Sequence[int],
        num_tokens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> AttentionBatch:
        """Build the batch of S sequences, one entry each in the first three arguments.

        Args:
            starts: Position of the first token computed, >= 0.
            num_tokens: Tokens computed, >= 1.
            block_tables: Block ids in order; at least enough to cover ``start + num_tokens`` positions.
            block_size: Positions per block.
            device: Where K and V are stored.

        Raises:
            InvariantViolation: Lengths disagree, or a block table is too short.
        """
        if not len(starts) == len(num_tokens) == len(block_tables):
            raise InvariantViolation(
                "[batch] expected one start, length and block table per sequence, received "
                f"{len(starts)}, {len(num_tokens)}, {len(block_tables)}"
            )
        context_lens = [start + count for start, count in zip(starts, num_tokens, strict=True)]
        num_blocks = [-(-context_len // block_size) for context_len in context_lens]
        for index, (table, needed) in enumerate(zip(block_tables, num_blocks, strict=True)):
            if len(table) < needed or num_tokens[index] < 1 or starts[index] < 0:
                raise InvariantViolation(
                    f"[batch] sequence {index} computes {num_tokens[index]} tokens from {starts[index]} on and needs "
                    f"{needed} blocks of {block_size}, received {len(table)}"
                )
        tables = [
            np.asarray(table[:needed], dtype=np.int64)
            for table, needed in zip(block_tables, num_blocks, strict=True)
        ]
        counts = np.asarray(num_tokens, dtype=np.int64)
        query_starts = np.concatenate(([0], np.cumsum(counts)))
        first_rows = np.repeat(query_starts[:-1], counts)
        positions = np.arange(query_starts[-1]) - first_rows + np.repeat(np.asarray(starts), counts)
        table_starts = np.cumsum([0, *num_blocks[:-1]])
        flat_table = np.concatenate(tables)
        block_ids = flat_table[np.repeat(table_starts, counts) + positions // block_size]
        slots = block_ids * block_size + positions % block_size
        flat = torch.from_numpy(flat_table).to(device)
        return cls(
            query_starts=tuple(query_starts.tolist()),
            context_lens=tuple(context_lens),
            block_tables=torch.split(flat, num_blocks),
            positions=torch.from_numpy(positions).to(device),
            slots=torch.from_numpy(slots).to(device),
            block_size=block_size,
        )
