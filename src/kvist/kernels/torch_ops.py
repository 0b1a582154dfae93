"""Row-wise kernels in few torch operations: the versions that run by default.

Responsible for RMSNorm, RoPE and the gate with as few passes over memory, and as few Python calls, as torch allows.
Contracts: those of ``kvist.kernels.reference``. Knows nothing of attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from kvist.kernels import reference

if TYPE_CHECKING:
    from kvist.spec import Activation


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x normalised by its root mean square; see ``reference.rms_norm``."""
    if x.dtype != weight.dtype:
        return reference.rms_norm(x, weight, eps)
    return functional.rms_norm(x, (x.shape[-1],), weight, eps)


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return x rotated to its positions; see ``reference.rope``."""
    if x.dtype != cos.dtype:
        return reference.rope(x, cos, sin)
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    first, second = x[..., :half], x[..., half : 2 * half]
    rotated = torch.empty_like(x, memory_format=torch.contiguous_format)
    torch.mul(first, cos, out=rotated[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=rotated[..., half : 2 * half]).addcmul_(first, sin)
    if 2 * half < x.shape[-1]:
        rotated[..., 2 * half :] = x[..., 2 * half :]
    return rotated


def gate(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return the gated activation of a fused gate-and-up projection; see ``reference.gate``."""
    if gate_up.dtype != torch.float32:
        return reference.gate(gate_up, activation)
    gates, ups = gate_up.chunk(2, dim=-1)
    return reference.activate(gates, activation).mul_(ups)
