"""Attention over blocks in fast torch operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from kvist.kernels import reference

if TYPE_CHECKING:
    from kvist.kernels.batch import AttentionBatch


def attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Return attention of each token over the blocks of its sequence; see ``reference.attention``."""
    if softcap is not None:
        return reference.attention(q, kv, batch, scale=scale, window=window, softcap=softcap)
    output = torch.empty_like(q, dtype=torch.float32)
    for index, context_len in enumerate(batch.context_lens):
        rows = slice(batch.query_starts[index], batch.query_starts[index + 1])
        queries = q[rows].to(torch.float32).transpose(0, 1)[None]
        blocks = kv.index_select(0, batch.block_tables[index]).permute(1, 2, 0, 3, 4)
        widened = blocks.to(torch.float32, memory_format=torch.contiguous_format).flatten(2, 3)
        keys, values = widened[:, None, :, :context_len]
        mask = None
        if queries.shape[2] > 1 or window is not None:
            distance = batch.positions[rows, None] - torch.arange(context_len, device=q.device)
            mask = distance >= 0
            if window is not None:
                mask &= distance < window
        attended = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=scale, enable_gqa=True
        )
        output[rows] = attended[0].transpose(0, 1)
    return output.to(q.dtype)
