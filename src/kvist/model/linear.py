"""Linear projections of the decoder.

Responsible for what one projection stores and how it is applied. Knows nothing of layers or files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

if TYPE_CHECKING:
    import torch


class Linear:
    """``y = x W^T + b`` in the weights' own dtype.

    Args:
        weight: (N, M) float32 or bfloat16, contiguous.
        bias: (N,) of the same dtype, or None.
    """

    __slots__ = ("bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the projection of each row.

        Args:
            x: (T, M) of the weight's dtype.

        Returns:
            (T, N) of the same dtype, a new tensor.
        """
        return functional.linear(x, self.weight, self.bias)
