"""The readable version of every kernel: the specification that all other implementations are compared with.

Responsible for being obviously right. Everything accumulates in float32 (float64 stays float64) and returns the dtype
of its first argument. Knows nothing of speed, codecs or requests. Checked itself against an independent float64 numpy
version in the tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

import torch
from torch.nn import functional

from kvist.kernels.kv_rows import read, widen
from kvist.spec import Activation

if TYPE_CHECKING:
    from kvist.kernels.batch import AttentionBatch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return ``x / sqrt(mean(x**2) + eps) * weight`` over the last axis.

    Args:
        x: (..., N) any float dtype.
        weight: (N,) as multiplied: a family that stores ``w - 1`` adds the one when its weights are loaded.
        eps: Added to the mean square, > 0.

    Returns:
        (..., N) in x's dtype.
    """
    values = widen(x)
    scale = torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + eps)
    return (values * scale * widen(weight)).to(x.dtype)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return x with the leading R dimensions of each head rotated; the rest passes through.

    Dimension ``i`` pairs with ``i + R / 2`` (the layout of Hugging Face checkpoints), not with its neighbour.

    Args:
        x: (T, heads, D).
        cos: (T, R / 2) cosines of the angles of each token's position.
        sin: (T, R / 2) sines.

    Returns:
        (T, heads, D) in x's dtype, a new tensor.

    Source: Su et al. 2021, RoFormer, eq. 34, with the pairing of Hugging Face's ``rotate_half``.
    """
    half = cos.shape[-1]
    values = widen(x)
    cos, sin = widen(cos)[:, None], widen(sin)[:, None]
    first, second, rest = torch.split(values, [half, half, x.shape[-1] - 2 * half], dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)
    return rotated.to(x.dtype)


def gate(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return ``activation(g) * u`` for the halves ``g, u`` of the last axis.

    Args:
        gate_up: (T, 2 * I), the gate projection first.
        activation: The model's gate activation.

    Returns:
        (T, I) in gate_up's dtype.
    """
    gates, ups = widen(gate_up).chunk(2, dim=-1)
    return (activate(gates, activation) * ups).to(gate_up.dtype)


def activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return the activation of every element of x."""
    match activation:
        case Activation.SILU:
            return functional.silu(x)
        case Activation.GELU:
            return functional.gelu(x)
        case Activation.GELU_TANH:
            return functional.gelu(x, approximate="tanh")
    assert_never(activation)


def attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    batch: AttentionBatch,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Return softmax attention of each token over the blocks of its own sequence, itself included.

    Args:
        q: (T, H, D) queries, the rows of ``batch``.
        kv: (B, 2, K, P, N) one layer of the arena, the step's own K and V already written: D numbers of any float
            dtype, or the bytes of an int8 row (``kv_rows.read``). H is a multiple of K: query head ``h`` reads KV head
            ``h // (H / K)``.
        batch: Which rows read which blocks.
        scale: Multiplies q.k.
        window: Keys a token sees at most, itself included (>= 1); None: all before it.
        softcap: Scores become ``softcap * tanh(scores / softcap)`` before the mask; None: unchanged.

    Returns:
        (T, H, D) in q's dtype.

    Numerics: Scores, softmax and sums in float32. Positions no query may see are never read, so whatever is left in
        unwritten slots (NaN included) cannot reach the result.
    """
    num_heads, num_kv_heads = q.shape[1], kv.shape[2]
    outputs = []
    for index, context_len in enumerate(batch.context_lens):
        rows = slice(batch.query_starts[index], batch.query_starts[index + 1])
        queries = widen(q[rows])
        blocks = kv[batch.block_tables[index]]
        # (blocks, 2, K, P, D) -> (2, positions, K, D), then one copy of each KV head per query head
        keys, values = (
            read(blocks, q.shape[2]).permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :context_len]
        )
        keys = keys.repeat_interleave(num_heads // num_kv_heads, dim=1)
        values = values.repeat_interleave(num_heads // num_kv_heads, dim=1)
        scores = torch.einsum("thd,chd->htc", queries, keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        key_positions = torch.arange(context_len, device=q.device)
        distance = batch.positions[rows, None] - key_positions
        is_visible = distance >= 0
        if window is not None:
            is_visible &= distance < window
        weights = scores.masked_fill(~is_visible, float("-inf")).softmax(dim=-1)
        outputs.append(torch.einsum("htc,chd->thd", weights, values))
    return torch.cat(outputs).to(q.dtype)
