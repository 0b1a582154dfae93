"""K and V as plain floating-point numbers: ``raw16`` (bfloat16) and ``float32``.

Responsible for the two codecs without metadata. N == D: a stored element is a value.

    codec     element             bytes of one position and head
    raw16     bfloat16, 2 bytes   2 * D
    float32   IEEE 754, 4 bytes   4 * D

Worked example, raw16, D = 2: (1.0, -2.5) is stored as the little-endian bytes 80 3f 20 c0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_EXPONENTS = {
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float32: (torch.int32, 0x7F80_0000),
}
"""Integers of the same size, and the bits of the exponent in them."""


@dataclass(frozen=True, slots=True)
class RawCodec:
    """Stores each value as one number of a floating-point type.

    Numerics: Rounds to nearest, ties to even. Finite values beyond the type's range become infinite; NaN stays NaN.
    """

    name: str
    """Name in options and on disk."""
    dtype: torch.dtype
    """The floating-point type."""
    turns_keys: bool = False
    """K is stored as it is."""

    def stored_dim(self, head_dim: int) -> int:
        """Return ``head_dim``: an element is a value."""
        return head_dim

    def bits_per_value(self, head_dim: int) -> float:  # noqa: ARG002  # the protocol's signature
        """Return the bits of the type."""
        return 8.0 * self.dtype.itemsize

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values rounded to the type."""
        return values.to(self.dtype)

    def encode_keys(self, keys: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:  # noqa: ARG002  # the protocol's
        """Return the keys rounded to the type."""
        return keys.to(self.dtype)

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the values, exact, in float32."""
        return stored.to(torch.float32)

    def is_finite(self, stored: torch.Tensor) -> torch.Tensor:
        """Return (...): which rows have no exponent of all ones."""
        # On integers, since a vectorised isfinite there is none.
        integers, exponent = _EXPONENTS[self.dtype]
        return (stored.view(integers) & exponent).amax(dim=-1) < exponent

    def error_bound(self, values: torch.Tensor) -> torch.Tensor:
        """Return half a unit in the last place, for values within the type's range."""
        kind = torch.finfo(self.dtype)
        if kind.bits >= 32:
            return torch.zeros_like(values, dtype=torch.float32)
        # Below the smallest normal number the spacing no longer shrinks with the value.
        return values.abs().to(torch.float32).clamp_min(kind.tiny) * (kind.eps / 2)


RAW16 = RawCodec("raw16", torch.bfloat16)
FLOAT32 = RawCodec("float32", torch.float32)
