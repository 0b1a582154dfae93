"""Which layers to give more bits: a greedy search by what each of them costs alone.

Responsible for the search and for what it predicts. Where costs come from is not known here; they are divergences,
which nearly add up over layers as long as they are small.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCosts:
    """What each layer costs in each codec, all others as they are."""

    kl: Mapping[str, Sequence[float]]
    """By codec: a divergence for each layer."""
    bits: Mapping[str, float]
    """Of a value, by codec."""

    def bits_of(self, codecs: Sequence[str]) -> float:
        """Return the bits of a value with a codec for each layer."""
        return sum(self.bits[codec] for codec in codecs) / len(codecs)

    def kl_of(self, codecs: Sequence[str]) -> float:
        """Return the divergence that a codec for each layer should come to: the sum over layers."""
        return sum(self.kl[codec][layer] for layer, codec in enumerate(codecs))

    def kl_of_any(self, bits: float) -> float:
        """Return what so many bits should come to with layers drawn by lot, from the two nearest codecs."""
        points = sorted((self.bits[codec], sum(kl)) for codec, kl in self.kl.items())
        (low, above), (high, below) = points[0], points[0]
        for point in points:
            if point[0] <= bits:
                (low, above), (high, below) = point, point
            else:
                high, below = point
                break
        share = (bits - low) / (high - low) if high > low else 0.0
        return above + share * (below - above)


def search(costs: LayerCosts, *, max_kl: float = 0.0, max_bits: float | None = None) -> list[str]:
    """Return a codec for each layer, found greedily: the change that gains most for its bits, again and again.

    All layers begin in the smallest codec.

    Args:
        costs: Of layers.
        max_kl: Stop when the layers should come to no more than that; not looked at with ``max_bits``.
        max_bits: Spend so many bits of a value on average at most.
    """
    smallest = min(costs.bits, key=lambda codec: costs.bits[codec])
    num_layers = len(costs.kl[smallest])
    codecs = [smallest] * num_layers
    while max_bits is not None or costs.kl_of(codecs) > max_kl:
        best: tuple[float, int, str] | None = None
        for layer, codec in enumerate(codecs):
            for larger, bits in costs.bits.items():
                more = bits - costs.bits[codec]
                gain = costs.kl[codec][layer] - costs.kl[larger][layer]
                # A little more than the limit, for sums of fractions.
                fits = max_bits is None or (
                    costs.bits_of(codecs) + more / num_layers <= max_bits + 1e-9
                )
                if more > 0 and gain > 0 and fits and (best is None or gain / more > best[0]):
                    best = (gain / more, layer, larger)
        if best is None:
            break
        codecs[best[1]] = best[2]
    return codecs
