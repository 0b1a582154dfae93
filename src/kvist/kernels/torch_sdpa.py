"""Attention over blocks in fast torch operations, on the CPU.

Responsible for gathering, attending and merging the parts that ``kvist.kernels.parts`` cuts a step into. Knows neither
codecs nor requests.

A row's parts see disjoint keys, so their softmax states merge by log-sum-exp: with outputs ``o_i`` and log-sums
``l_i``, the row's output is ``sum(exp(l_i - l) * o_i)`` with ``l = log(sum(exp(l_i)))``.

Numerics: float32 throughout, whatever the dtype of queries and blocks.
Source: the merge is that of Dao et al. 2022, FlashAttention, section 3.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvist.errors import KernelUnavailable
from kvist.kernels.kv_rows import decode_int8
from kvist.kernels.parts import PartKind, cut

if TYPE_CHECKING:
    from kvist.kernels.batch import AttentionBatch
    from kvist.kernels.parts import Part, Piece

# The public scaled_dot_product_attention calls this operator on the CPU but drops the log-sum-exp that merging needs.
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001

GATHERED_BYTES = 1_280_000
"""Float32 K and V gathered at once for few rows. Of one layer of SmolLM2 that is 13 blocks of 64; on a Zen 3 core with
512 KiB of L2, decode at 6,000 took 4.3 ms in pieces of 16 blocks, 5.7 in pieces of 8 and 6.1 at once."""


def attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Return attention of each token over the blocks of its sequence; see ``reference.attention``.

    Raises:
        KernelUnavailable: K and V are not in the CPU's memory.
    """
    if kv.device.type != "cpu":
        raise KernelUnavailable(f"[torch_sdpa] expected K and V on the cpu, received {kv.device}")
    queries = q.to(torch.float32)
    output = torch.empty_like(queries, memory_format=torch.contiguous_format)
    log_sums = torch.empty(q.shape[:2])
    max_gathered = max(1, GATHERED_BYTES // (2 * 4 * kv.shape[2] * q.shape[2]))
    for part in cut(batch, window, max_gathered):
        rows = queries[part.rows]
        states = [] if part.is_first else [(output[part.rows], log_sums[part.rows])]
        for piece in part.pieces:
            keys, values = _gather(kv, part, piece, q.shape[2])
            if softcap is not None:
                states.append(_attend_capped(rows, keys, values, part, scale, softcap))
            elif part.kind is PartKind.FULL and len(rows) > 1:
                states.append(_attend_full(rows, keys, values, scale))
            else:
                states.append(_attend(rows, keys, values, part, scale))
        output[part.rows], log_sums[part.rows] = _merge(states)
    return output.to(q.dtype)


def _merge(states: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the softmax state (outputs (R, H, D), log-sums (R, H)) over the keys of all states together."""
    if len(states) == 1:
        return states[0]
    log_sums = torch.stack([sums for _, sums in states])
    total = log_sums.logsumexp(dim=0)
    weights = torch.exp(log_sums - total)[..., None]
    merged = states[0][0] * weights[0]
    for (attended, _), weight in zip(states[1:], weights[1:], strict=True):
        merged.addcmul_(attended, weight)
    return merged, total


def _gather(
    kv: torch.Tensor, part: Part, piece: Piece, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the piece's keys and values, (num_sequences, K, keys, D) float32 each."""
    num_kv_heads, block_size = kv.shape[2:4]
    blocks = kv.index_select(0, piece.table)
    if blocks.dtype == torch.uint8:
        blocks = decode_int8(blocks, head_dim)
    blocks = blocks.view(part.num_sequences, -1, 2, num_kv_heads, block_size, head_dim)
    blocks = blocks.permute(2, 3, 0, 1, 4, 5)
    # One pass converts and transposes; .to(float32) would keep the strides and need a second.
    widened = torch.empty(blocks.shape).copy_(blocks)
    if part.unwritten is not None:
        widened.view(2, num_kv_heads, -1, head_dim).index_fill_(2, part.unwritten, 0.0)
    keys, values = widened.flatten(3, 4).transpose(1, 2)[..., piece.keys, :]
    return keys, values


def _attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, part: Part, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs (R, H, D) and log-sums (R, H) of a part of any kind."""
    num_rows, num_heads, head_dim = queries.shape
    stacked = queries.view(part.num_sequences, -1, num_heads, head_dim).transpose(1, 2)
    is_causal = part.kind is PartKind.CAUSAL
    attended, log_sums = _flash(
        stacked, keys, values, is_causal=is_causal, attn_mask=part.mask, scale=scale
    )
    attended = attended.transpose(1, 2).reshape(queries.shape)
    return attended, log_sums.transpose(1, 2).reshape(num_rows, num_heads)


def _attend_full(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs (R, H, D) and log-sums (R, H) of rows that see every key.

    The query heads of one KV head become rows of it: with no mask they differ in nothing else, and the kernel reaches
    the machine's GEMM rate on long runs of rows.
    """
    num_rows, num_heads, head_dim = queries.shape
    num_kv_heads = keys.shape[1]
    grouped = queries.view(num_rows, num_kv_heads, -1, head_dim).transpose(0, 1)
    attended, log_sums = _flash(
        grouped.reshape(1, num_kv_heads, -1, head_dim), keys, values, scale=scale
    )
    attended = attended.view(num_kv_heads, num_rows, -1, head_dim).transpose(0, 1)
    log_sums = log_sums.view(num_kv_heads, num_rows, -1).transpose(0, 1)
    return attended.reshape(queries.shape), log_sums.reshape(num_rows, num_heads)


def _attend_capped(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    part: Part,
    scale: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs (R, H, D) and log-sums (R, H) with capped scores, which the flash kernel cannot compute."""
    num_rows, num_heads, head_dim = queries.shape
    shape = (part.num_sequences, num_rows // part.num_sequences, keys.shape[1], -1, head_dim)
    grouped = queries.view(shape).permute(0, 2, 3, 1, 4)  # (sequences, K, H / K, queries, D)
    scores = torch.matmul(grouped, keys[:, :, None].transpose(-1, -2)).mul_(scale / softcap)
    scores = scores.tanh_().mul_(softcap)
    if part.kind is PartKind.CAUSAL:
        scores += torch.full(scores.shape[-2:], float("-inf")).triu_(1)
    elif part.mask is not None:
        scores += part.mask[:, None]
    log_sums = scores.logsumexp(dim=-1)
    attended = torch.matmul(scores.softmax(dim=-1), values[:, :, None])
    attended = attended.permute(0, 3, 1, 2, 4).reshape(queries.shape)
    return attended, log_sums.permute(0, 3, 1, 2).reshape(num_rows, num_heads)
