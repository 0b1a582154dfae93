"""From stored K and V to numbers: what every attention in torch does first with the blocks it reads.

Responsible for telling what an element of a block is by its type, and for the arithmetic of int8 rows, in both
directions. A block of floating-point numbers holds the values themselves; a block of bytes holds int8 rows
(``kvist.codecs.int8`` has the layout), keys among them turned, as the queries that meet them must be (``turn``). Knows
neither blocks' owners nor requests.
"""

from __future__ import annotations

from functools import cache

import torch

from kvist.kernels.rotation import rotation

INT8_GROUP = 64
"""Values of a row that share a scale; the last group of a row may be shorter."""
INT8_LIMIT = 127
"""Largest code; -128 is never stored."""


def widen(x: torch.Tensor) -> torch.Tensor:
    """Return x in float32; float64 stays."""
    return x if x.dtype == torch.float64 else x.to(torch.float32)


def read(stored: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return the values of stored rows.

    Args:
        stored: (..., N) of a block: floating-point numbers, N == D, or the bytes of int8 rows.
        head_dim: D.

    Returns:
        (..., D) float32, or float64 where that is what is stored; may share the memory of ``stored``.
    """
    return decode_int8(stored, head_dim) if stored.dtype == torch.uint8 else widen(stored)


def encode_int8(values: torch.Tensor) -> torch.Tensor:
    """Return the (..., N) uint8 int8 rows of ``values`` (..., D), any float dtype; see ``kvist.codecs.int8``."""
    head_dim = values.shape[-1]
    groups = _grouped(values.to(torch.float32))
    largest = groups.abs().amax(dim=-1)
    scales = (largest / INT8_LIMIT).to(torch.float16)
    # The smallest number above zero: a group that is not all zeros never has the scale of one that is.
    smallest = torch.tensor(2.0**-24, dtype=torch.float16)
    scales = torch.where((scales == 0) & (largest > 0), smallest, scales)
    wide = scales.to(torch.float32)
    inverse = torch.where(wide == 0, wide, 1.0 / wide)
    codes = (groups * inverse[..., None]).round_().clamp_(-INT8_LIMIT, INT8_LIMIT)
    # A NaN has no code; its group's scale is NaN or infinite, and so is what is read back.
    codes = codes.nan_to_num_(0.0).to(torch.int8).flatten(-2)[..., :head_dim]
    return torch.cat((codes.view(torch.uint8), scales.contiguous().view(torch.uint8)), dim=-1)


def decode_int8(stored: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return the (..., D) float32 values of int8 rows ``stored`` (..., N) uint8."""
    codes = _grouped(stored[..., :head_dim].view(torch.int8).to(torch.float32))
    scales = stored[..., head_dim:].contiguous().view(torch.float16).to(torch.float32)
    return (codes * scales[..., None]).flatten(-2)[..., :head_dim]


def turn(x: torch.Tensor) -> torch.Tensor:
    """Return (..., D) queries or keys times ``rotation(D)``, in x's dtype; the sums are float32."""
    return (widen(x) @ _rotation(x.shape[-1]).to(widen(x).dtype)).to(x.dtype)


def turn_back(x: torch.Tensor) -> torch.Tensor:
    """Return what ``turn`` made x from."""
    return (widen(x) @ _rotation(x.shape[-1]).to(widen(x).dtype).T).to(x.dtype)


@cache
def _rotation(head_dim: int) -> torch.Tensor:
    return torch.from_numpy(rotation(head_dim).copy())


def _grouped(values: torch.Tensor) -> torch.Tensor:
    """Return (..., D) values as (..., groups, INT8_GROUP), zeros behind the last."""
    head_dim = values.shape[-1]
    num_groups = -(-head_dim // INT8_GROUP)
    padded = torch.nn.functional.pad(values, (0, num_groups * INT8_GROUP - head_dim))
    return padded.reshape(*values.shape[:-1], num_groups, INT8_GROUP)
