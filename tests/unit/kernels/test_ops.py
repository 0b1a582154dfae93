"""RMSNorm, RoPE and the gate: the reference against float64 numpy, the fast versions against the reference."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kvist.kernels import dispatch
from kvist.spec import Activation

# Elementwise results of unit size, a few float32 operations each.
TOLERANCE = 1e-6
NAMES = dispatch.available()
SIZES = [1, 2, 7, 8, 9, 31, 32, 33, 64, 97, 576]


def difference(output: torch.Tensor, expected: np.ndarray) -> float:
    return float(np.abs(output.to(torch.float64).numpy() - expected).max())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", SIZES)
def test_rms_norm(name: str, size: int) -> None:
    x, weight = torch.randn(5, size), torch.randn(size)
    before = dispatch.num_calls("rms_norm", name)
    with dispatch.forced(name):
        output = dispatch.rms_norm(x, weight, 1e-5)
    assert dispatch.num_calls("rms_norm", name) == before + 1
    wide = x.double().numpy()
    expected = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * weight.double().numpy()
    assert difference(output, expected) <= 4 * TOLERANCE


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("head_dim", "rotated"), [(8, 8), (64, 64), (16, 6), (2, 2)])
def test_rope(name: str, head_dim: int, rotated: int) -> None:
    x = torch.randn(5, 3, head_dim + 4)[..., :head_dim]
    angles = np.arange(5)[:, None] * 10.0 ** -np.arange(rotated // 2)
    before = dispatch.num_calls("rope", name)
    with dispatch.forced(name):
        output = dispatch.rope(
            x, torch.from_numpy(np.cos(angles)).float(), torch.from_numpy(np.sin(angles)).float()
        )
    assert dispatch.num_calls("rope", name) == before + 1
    wide, half = x.double().numpy(), rotated // 2
    # A rotation is a product of complex numbers.
    turned = (wide[..., :half] + 1j * wide[..., half:rotated]) * np.exp(1j * angles)[:, None]
    expected = np.concatenate((turned.real, turned.imag, wide[..., rotated:]), axis=-1)
    assert difference(output, expected) <= TOLERANCE
    assert output.is_contiguous()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("activation", list(Activation))
def test_gate(name: str, activation: Activation) -> None:
    gate_up = torch.randn(5, 66)
    kept = gate_up.clone()
    before = dispatch.num_calls("gate", name)
    with dispatch.forced(name):
        output = dispatch.gate(gate_up, activation)
    assert dispatch.num_calls("gate", name) == before + 1
    gates, ups = np.split(gate_up.double().numpy(), 2, axis=-1)
    if activation is Activation.SILU:
        activated = gates / (1 + np.exp(-gates))
    elif activation is Activation.GELU:
        activated = gates * 0.5 * (1 + np.vectorize(math.erf)(gates / math.sqrt(2)))
    else:
        inner = math.sqrt(2 / math.pi) * (gates + 0.044715 * gates**3)
        activated = 0.5 * gates * (1 + np.tanh(inner))
    assert difference(output, activated * ups) <= 4 * TOLERANCE
    assert torch.equal(gate_up, kept)


@pytest.mark.parametrize("name", NAMES)
def test_narrow_inputs_compute_in_float32_and_come_back_narrow(name: str) -> None:
    x = torch.randn(4, 64).to(torch.bfloat16)
    weight, cos, sin = torch.randn(64), torch.randn(4, 16), torch.randn(4, 16)
    with dispatch.forced(name):
        outputs = (
            dispatch.rms_norm(x, weight, 1e-6),
            dispatch.rope(x[:, None], cos, sin),
            dispatch.gate(x, Activation.SILU),
        )
    with dispatch.forced("reference"):
        expected = (
            dispatch.rms_norm(x, weight, 1e-6),
            dispatch.rope(x[:, None], cos, sin),
            dispatch.gate(x, Activation.SILU),
        )
    for output, reference in zip(outputs, expected, strict=True):
        assert output.dtype == torch.bfloat16
        assert torch.equal(output, reference)
