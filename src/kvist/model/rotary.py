"""Rotary position embedding: the frequencies of each scaling variant, and the angles of one step.

Responsible for turning a ``RopeSpec`` into cosines and sines. Knows nothing of attention or caches.

Frequencies are computed once, in float32 and in the order of operations of transformers, so that float32 results agree
with it to the last bit. Cosines and sines are computed once per step for the step's own positions and shared by all
layers: four small operations, where a table for every position would hold ``max_context_len * dim`` floats (67 MB for
131,072 positions of a 128-wide head).
"""

from __future__ import annotations

import math
from typing import NamedTuple, assert_never

import torch

from kvist.spec import RopeScaling, RopeSpec


class Rotation(NamedTuple):
    """What one rotary embedding does to the tokens of one step."""

    cos: torch.Tensor
    """(T, dim / 2) in the activations' dtype."""
    sin: torch.Tensor
    """(T, dim / 2) in the activations' dtype."""


class RotaryEmbedding:
    """One rotary embedding of a model.

    Args:
        spec: Base, dimension and scaling.
    """

    def __init__(self, spec: RopeSpec) -> None:
        self._frequencies = frequencies_of(spec)
        self._attention_factor = spec.attention_factor

    def at(self, positions: torch.Tensor, dtype: torch.dtype) -> Rotation:
        """Return the rotation of tokens at the given positions.

        Args:
            positions: (T,) int64.
            dtype: That of the activations to be rotated.

        Numerics: Angles, cosines and sines in float32, rounded once at the end.
        """
        angles = positions[:, None].to(torch.float32) * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        if self._attention_factor != 1.0:
            cos, sin = cos * self._attention_factor, sin * self._attention_factor
        return Rotation(cos.to(dtype), sin.to(dtype))


def frequencies_of(spec: RopeSpec) -> torch.Tensor:
    """Return the (dim / 2,) float32 angular frequencies, in radians per position.

    Source: Su et al. 2021 (NONE); Chen et al. 2023, position interpolation (LINEAR); the Llama 3.1 release (LLAMA3);
        Peng et al. 2023, section 3.2 (YARN); Ding et al. 2024, LongRoPE (FACTORS).
    """
    exponents = torch.arange(0, spec.dim, 2, dtype=torch.int64).to(torch.float32) / spec.dim
    match spec.scaling:
        case RopeScaling.NONE | RopeScaling.DYNAMIC:
            # Dynamic NTK changes nothing up to the original context, which is the limit the spec states.
            return 1.0 / spec.base**exponents
        case RopeScaling.LINEAR:
            return (1.0 / spec.base**exponents) / spec.factor
        case RopeScaling.LLAMA3:
            return _llama3(spec, 1.0 / spec.base**exponents)
        case RopeScaling.YARN:
            return _yarn(spec, spec.base**exponents)
        case RopeScaling.FACTORS:
            return 1.0 / (torch.tensor(spec.factors, dtype=torch.float32) * spec.base**exponents)
    assert_never(spec.scaling)


def _llama3(spec: RopeSpec, frequencies: torch.Tensor) -> torch.Tensor:
    context_len = spec.original_max_context_len
    wavelengths = 2 * math.pi / frequencies
    is_long = wavelengths > context_len / spec.low_freq_factor
    is_short = wavelengths < context_len / spec.high_freq_factor
    scaled = torch.where(is_long, frequencies / spec.factor, frequencies)
    ramp = context_len / wavelengths - spec.low_freq_factor
    ramp = ramp / (spec.high_freq_factor - spec.low_freq_factor)
    blended = (1 - ramp) * scaled / spec.factor + ramp * scaled
    return torch.where(~is_long & ~is_short, blended, scaled)


def _yarn(spec: RopeSpec, periods: torch.Tensor) -> torch.Tensor:
    low = _yarn_dimension(spec, spec.beta_fast)
    high = _yarn_dimension(spec, spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    ramp = (torch.arange(spec.dim // 2, dtype=torch.float32) - low) / (high - low)
    kept = 1 - ramp.clamp(0, 1)
    return 1.0 / (spec.factor * periods) * (1 - kept) + 1.0 / periods * kept


def _yarn_dimension(spec: RopeSpec, num_rotations: float) -> float:
    """Return the (fractional) dimension that turns so many times over the original context."""
    turns = spec.original_max_context_len / (num_rotations * 2 * math.pi)
    return spec.dim * math.log(turns) / (2 * math.log(spec.base))
