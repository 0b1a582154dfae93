"""What every KV codec offers: float values in, stored elements out, and back.

Responsible for the protocol alone. A codec knows neither blocks' owners nor where they are stored; it works on spans,
any number of positions of any number of heads.

A block is one contiguous byte range of shape (L, 2, K, P, N): N stored elements of the codec's dtype per position and
head, holding D values and whatever the codec keeps beside them (docs/formats/kv_block.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class KVCodec(Protocol):
    """Format of K and V in a block. Stateless; one instance serves all threads."""

    @property
    def name(self) -> str:
        """Name in options and on disk."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Type of a stored element."""
        ...

    @property
    def turns_keys(self) -> bool:
        """Whether K is to be turned before it is stored (``kv_rows.turn``), and queries before they meet it."""
        ...

    def stored_dim(self, head_dim: int) -> int:
        """Return N, stored elements that hold the ``head_dim`` values of one position and head."""
        ...

    def bits_per_value(self, head_dim: int) -> float:
        """Return the bits stored per K or V value, metadata included."""
        ...

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return (..., N) stored elements of ``values`` (..., D), any float dtype.

        Each position and head is encoded on its own, so a span encoded in parts equals the span encoded at once.
        """
        ...

    def encode_keys(self, keys: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        """Return (..., K, N) stored elements of keys (..., K, D), knowing the queries (..., H, D) of their positions.

        Both in the basis in which keys are stored, H a multiple of K. What an encoder makes of the queries is its own
        matter; what it returns reads as any other row, within twice ``error_bound``.
        """
        ...

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        """Return the (..., D) float32 values of ``stored`` (..., N); may share its memory."""
        ...

    def is_finite(self, stored: torch.Tensor) -> torch.Tensor:
        """Return (...) booleans: which of the rows ``stored`` (..., N) stand for finite values only."""
        ...

    def error_bound(self, values: torch.Tensor) -> torch.Tensor:
        """Return (..., D) float32 bounds of ``|values - decode(encode(values))|`` for finite values (..., D)."""
        ...
