"""Random batches over shuffled blocks, for kernel tests and benchmarks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvist.kernels.batch import AttentionBatch

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Head counts of one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Inputs of one attention call."""

    q: torch.Tensor
    kv: torch.Tensor
    batch: AttentionBatch


def make_case(
    lengths: Sequence[tuple[int, int]],
    heads: Heads,
    *,
    block_size: int,
    shared: Sequence[tuple[int, ...]] = (),
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """Return queries, blocks and batch for sequences of (positions before the step, tokens in it).

    Args:
        lengths: One pair per sequence.
        heads: Head counts.
        block_size: Positions per block.
        shared: Groups of sequence indices, each followed by the number of leading blocks that they share, as
            ``(index, index, ..., num_blocks)``; later groups win over earlier ones from block 0 on.
        dtype: Of the blocks.
        seed: Of everything random.

    Slots that no sequence has written hold NaN, and unused blocks hold nothing else.
    """
    rng = np.random.default_rng(seed)
    num_blocks = [-(-(start + count) // block_size) for start, count in lengths]
    ids = iter(rng.permutation(sum(num_blocks) + 3).tolist())
    tables = [[next(ids) for _ in range(count)] for count in num_blocks]
    for *members, depth in shared:
        for member in members[1:]:
            tables[member][:depth] = tables[members[0]][:depth]
    shape = (sum(num_blocks) + 3, 2, heads.num_kv_heads, block_size, heads.head_dim)
    kv = torch.full(shape, float("nan"), dtype=dtype)
    for (start, count), table in zip(lengths, tables, strict=True):
        for index, block in enumerate(table):
            filled = min(block_size, start + count - index * block_size)
            values = rng.standard_normal((2, heads.num_kv_heads, filled, heads.head_dim))
            kv[block, :, :, :filled] = torch.from_numpy(values).to(dtype)
    num_tokens = sum(count for _, count in lengths)
    q = rng.standard_normal((num_tokens, heads.num_heads, heads.head_dim))
    batch = AttentionBatch.from_sequences(
        starts=[start for start, _ in lengths],
        num_tokens=[count for _, count in lengths],
        block_tables=tables,
        block_size=block_size,
    )
    return Case(q=torch.from_numpy(q).to(torch.float32), kv=kv, batch=batch)
