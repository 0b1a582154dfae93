"""From stored K and V to numbers: what every attention in torch does first with the blocks it reads.

Responsible for telling what an element of a block is by its type, and for the arithmetic of int8 rows, in both
directions. A block of floating-point numbers holds the values themselves; a block of bytes holds int8 rows
(``kvist.codecs.int8`` has the layout), keys among them turned, as the queries that meet them must be (``turn``). Knows
neither blocks' owners nor requests.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import torch

from kvist.kernels.rotation import rotation

INT8_GROUP = 64
"""Values of a row that share a scale; the last group of a row may be shorter."""
INT8_LIMIT = 127
"""Largest code; -128 is never stored."""
_LANES = 8
"""Native code adds so many sums side by side."""


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
    scales, inverse = _grids(groups)
    codes = (groups * inverse[..., None]).round_().clamp_(-INT8_LIMIT, INT8_LIMIT)
    return _int8_rows(codes.flatten(-2)[..., :head_dim], scales)


def encode_int8_keys(keys: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """Return the int8 rows of keys whose positions' queries are known; see ``kvist.codecs.int8``.

    Args:
        keys: (..., K, D) turned keys, any float dtype.
        queries: (..., H, D) turned queries of the same positions, H a multiple of K.

    Returns:
        (..., K, N) uint8.
    """
    head_dim = keys.shape[-1]
    keys = keys.to(torch.float32)
    groups = _grouped(keys)
    scales, inverse = _grids(groups)
    wide = scales.to(torch.float32)
    scale, inverse = (
        x[..., None].expand_as(groups).flatten(-2)[..., :head_dim] for x in (wide, inverse)
    )
    heads = queries.to(torch.float32).reshape(*keys.shape[:-1], -1, head_dim).unbind(-2)
    query = heads[0]
    for head in heads[1:]:
        query = query + head
    exact = keys * inverse
    stages = list(pairwise(_stage_starts(head_dim)))
    squares = query * query
    sums = [_sum_of_lanes(squares[..., first:end]) for first, end in stages]
    for stage in reversed(range(len(sums) - 1)):
        sums[stage] = sums[stage] + sums[stage + 1]
    damping = sums[0] / head_dim
    knows = (damping > 0) & torch.isfinite(damping)
    query = torch.where(knows[..., None], query, torch.zeros(()))
    codes = torch.empty_like(exact)
    moved = torch.zeros_like(damping)
    for (first, end), rest in zip(stages, sums, strict=True):
        part = slice(first, end)
        back = torch.where(knows, moved / (damping + rest), torch.zeros(()))[..., None]
        wanted = (exact[..., part] - query[..., part] * back * inverse[..., part]).round_()
        near = torch.minimum(
            torch.maximum(wanted, exact[..., part].floor()), exact[..., part].ceil()
        )
        codes[..., part] = near.clamp_(-INT8_LIMIT, INT8_LIMIT)
        error = codes[..., part] * scale[..., part] - keys[..., part]
        # A group that reads as NaN has no errors to make up for.
        error = torch.where(torch.isfinite(error), error, torch.zeros(()))
        moved = moved + _sum_of_lanes(query[..., part] * error)
    return _int8_rows(codes, scales)


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


def _grids(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (...) float16 scales of (..., INT8_GROUP) values, and in float32 what values are multiplied by."""
    largest = groups.abs().amax(dim=-1)
    scales = (largest / INT8_LIMIT).to(torch.float16)
    # The smallest number above zero: a group that is not all zeros never has the scale of one that is.
    smallest = torch.tensor(2.0**-24, dtype=torch.float16)
    scales = torch.where((scales == 0) & (largest > 0), smallest, scales)
    wide = scales.to(torch.float32)
    return scales, torch.where(wide == 0, wide, 1.0 / wide)


def _int8_rows(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    # A NaN has no code; its group's scale is NaN or infinite, and so is what is read back.
    whole = codes.nan_to_num_(0.0).to(torch.int8).view(torch.uint8)
    return torch.cat((whole, scales.contiguous().view(torch.uint8)), dim=-1)


@cache
def _stage_starts(head_dim: int) -> tuple[int, ...]:
    """Return where stages of rounding begin, and D: each has half of what is left, in whole lanes."""
    starts = [0]
    while starts[-1] < head_dim:
        half = (head_dim - starts[-1]) // 2 // _LANES * _LANES
        starts.append(starts[-1] + half if half else head_dim)
    return tuple(starts)


def _sum_of_lanes(x: torch.Tensor) -> torch.Tensor:
    """Return the (...) sums of (..., n) in the order in which native code adds."""
    x = torch.nn.functional.pad(x, (0, -x.shape[-1] % _LANES)) if x.shape[-1] % _LANES else x
    parts = x.reshape(*x.shape[:-1], -1, _LANES).unbind(-2)
    lanes = parts[0]
    for part in parts[1:]:
        lanes = lanes + part
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def _grouped(values: torch.Tensor) -> torch.Tensor:
    """Return (..., D) values as (..., groups, INT8_GROUP), zeros behind the last."""
    head_dim = values.shape[-1]
    num_groups = -(-head_dim // INT8_GROUP)
    padded = torch.nn.functional.pad(values, (0, num_groups * INT8_GROUP - head_dim))
    return padded.reshape(*values.shape[:-1], num_groups, INT8_GROUP)
