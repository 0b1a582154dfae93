"""K and V in 8 bits: ``int8``, one symmetric scale for each 64 values of a position and head.

Responsible for the codec's promises; the arithmetic is shared with attention in ``kvist.kernels.kv_rows``. The native
kernels write and read the same bytes.

A row, the N = D + 2 * ceil(D / 64) bytes of one position and head (an element is a byte):

    bytes                         what
    [0, D)                        int8 codes in [-127, 127], in order
    [D + 2 g, D + 2 g + 2)        scale of the values [64 g, 64 g + 64): IEEE 754 half, little-endian; 0 if all are 0

A value is its code times the scale. The scale is the group's max|x| / 127, divided in float32 and rounded to nearest
half, but never down to 0; a code is x times the float32 reciprocal of the rounded scale, rounded to nearest, ties to
even, and held within [-127, 127].

Rows of K hold turned keys (``kvist.kernels.rotation``): whoever writes turns them after RoPE, and whoever reads turns
the queries. On SmolLM2-135M that divides the divergence by 3.5 (docs/decisions/0003-kv-codecs.md).

A key is read by the queries of its own position and of those that follow, which are much alike. Where the former are
known, codes are rounded so that the product with their sum stays as it was, each to one of the two grid points around
its value (``encode_keys``). That takes another half off the divergence; whoever reads need not know.

Stages of rounding: the first half of the values, half of the rest, and so on, in multiples of 8, the last 8 together.
With e the errors of the stages before, q the sum of the queries and S the sum of its squares over the values not yet
rounded, value d is rounded as if it were x_d - q_d (q . e) / (S + |q|^2 / D): the change that takes (q . e) back at the
least cost, q . e and the errors weighted alike.

Worked example, D = 2: (1.0, -2.5). 2.5 / 127 rounds to the half 0x250a, 0.0196838; the codes are 51 and -127; the row
is 33 81 0a 25, which reads (1.00388, -2.49985).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvist.kernels import native
from kvist.kernels.kv_rows import (
    INT8_GROUP,
    INT8_LIMIT,
    decode_int8,
    encode_int8,
    encode_int8_keys,
)
from kvist.spec import is_native_head_dim


@dataclass(frozen=True, slots=True)
class Int8Codec:
    """Stores each value as a code of 8 bits, with a scale of 16 bits for each 64 of them.

    Numerics: Zeros are exact, and a group of equal values is exact up to the rounding of its scale, 2^-11 of it.
    Otherwise a value is off by half a scale at most, that is by max|x| / 254 of its group, unless the group is so small
    that its scale is a denormal half. A group whose max|x| / 127 is beyond the largest half (max|x| > 8,321,000), and a
    group with an infinity or a NaN in it, reads as NaN.
    """

    name: str = "int8"
    """Name in options and on disk."""
    dtype: torch.dtype = torch.uint8
    """A stored element is a byte."""
    turns_keys: bool = True
    """A few channels of K are much larger than the others, which a common scale would round away."""

    def stored_dim(self, head_dim: int) -> int:
        """Return the bytes of a row: the codes and the scales."""
        return head_dim + 2 * -(-head_dim // INT8_GROUP)

    def bits_per_value(self, head_dim: int) -> float:
        """Return the bits stored per value, its share of the scales included."""
        return 8.0 * self.stored_dim(head_dim) / head_dim

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return the rows of the values."""
        return encode_int8(values)

    def encode_keys(self, keys: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        """Return the rows of turned keys, rounded as the turned queries of their positions have it."""
        rows = _encode_natively(keys, queries)
        return encode_int8_keys(keys, queries) if rows is None else rows

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        """Return what the rows stand for."""
        return decode_int8(stored, self._head_dim(stored.shape[-1]))

    def is_finite(self, stored: torch.Tensor) -> torch.Tensor:
        """Return (...): which rows have finite scales only; codes always are."""
        scales = stored[..., self._head_dim(stored.shape[-1]) :].contiguous()
        return torch.isfinite(scales.view(torch.float16)).all(dim=-1)

    def error_bound(self, values: torch.Tensor) -> torch.Tensor:
        """Return half the group's scale, or what the largest code cannot reach, and a little for float32's rounding.

        Infinite where the group's scale is.
        """
        head_dim = values.shape[-1]
        row = encode_int8(values)
        scales = row[..., head_dim:].contiguous().view(torch.float16).to(torch.float32)
        scales = scales.repeat_interleave(INT8_GROUP, dim=-1)[..., :head_dim]
        unreached = values.abs().to(torch.float32) - INT8_LIMIT * scales
        bound = torch.maximum(scales * 0.5, unreached) + scales * 2.0**-14
        return torch.where(torch.isfinite(scales), bound, torch.inf)

    def _head_dim(self, stored_dim: int) -> int:
        # A group is INT8_GROUP + 2 bytes, the last one fewer.
        return stored_dim - 2 * -(-stored_dim // (INT8_GROUP + 2))


def _encode_natively(keys: torch.Tensor, queries: torch.Tensor) -> torch.Tensor | None:
    """Return what ``encode_int8_keys`` does, many times faster; None where native code cannot or refuses a value.

    In torch it takes about a hundred small operations, which a step that computes one token would wait for.
    """
    is_on_cpu = keys.device.type == "cpu"
    if not native.available() or not is_on_cpu or not is_native_head_dim(keys.shape[-1]):
        return None
    k, q = (
        x.detach().to(torch.float32).reshape(-1, *x.shape[-2:]).contiguous().numpy()
        for x in (keys, queries)
    )
    try:
        rows = native.extension().encode_kv_keys("int8", k, q)
    except ValueError:  # not finite
        return None
    return torch.from_numpy(rows).reshape(*keys.shape[:-1], -1)


INT8 = Int8Codec()
