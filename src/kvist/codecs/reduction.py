"""Heads of K and V in fewer dimensions: per layer and KV head, the directions that matter to the model.

Responsible for the matrices, for what follows from statistics (``best_product``) and for what their file
(``calibration_file``) has. Where the statistics come from is not known here (``kvist.tune.reduction``), nor what
becomes of the rows: any codec may store them.

Of D dimensions r are kept. A query q and a key k meet as ``(q queries) . (k keys)``; a value is kept as ``v values``,
and what attention gives is ``o outputs``, o a mean of kept values. All are linear, so that the arena, the
codecs and attention see a model whose heads have r dimensions; the scale of scores is still that of D.

Letters: L layers, K KV heads, D head dim, r kept dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kvist.codecs.calibration_file import (
    Calibration,
    CalibrationKind,
    digest_of,
    load_calibration,
    save_calibration,
)

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

KIND = CalibrationKind(where="reduction", version=1)
RIDGE = 1e-3
"""Share of its own variance that a pair of channels gets added, so that weights which only one text asks for stay
small."""
FLOOR = 1e-3
"""Share of its mean diagonal that a second moment gets added: directions that were never seen are not free."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KVReduction:
    """How one model's heads are brought to r dimensions and back."""

    fingerprint: str
    """Of the model they belong to."""
    text: str
    """Digest of the tokens they were calibrated on."""
    queries: Floats
    """(L, K, D, r) of the query heads of each KV head, after the rotary embedding."""
    keys: Floats
    """(L, K, D, r), after the rotary embedding; orthonormal columns."""
    values: Floats
    """(L, K, D, r) with orthonormal columns."""
    outputs: Floats
    """(L, K, r, D) of what the query heads of each KV head give."""

    def __post_init__(self) -> None:
        num_layers, num_kv_heads, head_dim, kept = self.keys.shape
        expected = {
            "queries": (num_layers, num_kv_heads, head_dim, kept),
            "values": (num_layers, num_kv_heads, head_dim, kept),
            "outputs": (num_layers, num_kv_heads, kept, head_dim),
        }
        for name, shape in expected.items():
            if getattr(self, name).shape != shape:
                raise ValueError(f"{name} of the shape {shape}")
        if any(
            array.dtype != np.float32 or not np.isfinite(array).all()
            for array in self.arrays().values()
        ):
            raise ValueError("finite numbers of 32 bits")

    def arrays(self) -> dict[str, Floats]:
        """Return the matrices by name."""
        return {
            "queries": self.queries,
            "keys": self.keys,
            "values": self.values,
            "outputs": self.outputs,
        }

    @property
    def head_dim(self) -> int:
        """D."""
        return int(self.keys.shape[2])

    @property
    def kv_head_dim(self) -> int:
        """The kept dimensions."""
        return int(self.keys.shape[3])

    @property
    def digest(self) -> str:
        """Of all numbers."""
        return digest_of(self.arrays())


class LowRank(NamedTuple):
    """Two (..., D, r) factors of a matrix ``left right^T`` that stands for the identity."""

    left: NDArray[np.float64]
    right: NDArray[np.float64]
    """Orthonormal columns."""


def best_product(left: NDArray[Any], right: NDArray[Any], rank: int) -> LowRank:
    """Return the factors for which ``(x left) . (y right)`` is nearest to ``x . y``, x and y independent.

    The mean of the squared difference is ``|X^(1/2) (I - left right^T) Y^(1/2)|^2`` for second moments X of x and Y of
    y: smallest where the factors keep the largest singular directions of ``X^(1/2) Y^(1/2)``.

    Args:
        left: (..., D, D) second moment of x, symmetric, positive semidefinite; FLOOR of its mean diagonal is added.
        right: (..., D, D) of y, likewise.
        rank: r, at most D.
    """
    root, inverse = _roots(left)
    other, _ = _roots(right)
    directions = np.linalg.svd(root @ other)[0][..., :rank]
    first, second = inverse @ directions, root @ directions
    # Any invertible matrix may stand between the two: with this one what is stored is an orthogonal projection.
    orthonormal, triangle = np.linalg.qr(second)
    return LowRank(first @ np.swapaxes(triangle, -1, -2), orthonormal)


def best_pairs(gram: NDArray[Any], kept: int) -> LowRank:
    """Return the factors that keep some pairs of channels of a head, which RoPE turns together.

    A pair's share of a score is ``q_c k_c + q_d k_d`` with d = c + D / 2; turned by a quarter it is ``q_d k_c - q_c
    k_d``. Neither depends on where q and k are, only on how far apart. Pairs are left out one after another, each time
    the one without which the sum of all shares can be told best from what is left: a kept pair's share and its turned
    share are weighted, which is a matrix for queries, ``left``; ``right`` picks the kept channels.

    Args:
        gram: (D, D) of the shares of all pairs and of their turned shares; symmetric, positive semidefinite.
        kept: Channels to keep, r, even.
    """
    size = len(gram)
    half = size // 2
    gram = np.asarray(gram, np.float64)
    tiny = np.finfo(np.float32).tiny + np.trace(gram) / size * 1e-9
    damped = gram + np.diag(RIDGE * np.diagonal(gram) + tiny)
    # Of the inverse given those that are dropped, and of what they cannot say of the sum: leaving out another one
    # costs the quadratic form of its two rows, and takes them out of the rest as elimination does.
    inverse = np.linalg.inv(damped)
    missing = np.repeat([1.0, 0.0], half)
    remaining = list(range(half))
    dropped: list[int] = []
    while len(remaining) > kept // 2:
        rows = np.array(remaining)[:, None] + [0, half]
        corners = inverse[rows[:, :, None], rows[:, None, :]]
        wanted = missing[rows]
        losses = (wanted * np.linalg.solve(corners, wanted[..., None])[..., 0]).sum(axis=-1)
        pair = rows[int(np.argmin(losses))]
        across = np.linalg.solve(inverse[np.ix_(pair, pair)], inverse[pair])
        missing = missing - across.T @ missing[pair]
        inverse = inverse - inverse[:, pair] @ across
        dropped.append(int(pair[0]))
        remaining.remove(int(pair[0]))
    first = np.array(remaining)
    both = np.concatenate((first, first + half))
    weights = np.linalg.solve(
        damped[np.ix_(both, both)], gram[both][:, np.array(dropped, np.intp)].sum(axis=1)
    )
    real, turned = weights[: len(first)] + 1.0, weights[len(first) :]
    left, right = np.zeros((size, kept)), np.zeros((size, kept))
    column = np.arange(len(first))
    right[first, column] = right[first + half, column + len(first)] = 1.0
    left[first, column] = left[first + half, column + len(first)] = real
    left[first + half, column] = turned
    left[first, column + len(first)] = -turned
    return LowRank(left, right)


def save_reduction(path: Path, reduction: KVReduction) -> None:
    """Write a reduction to a file, replacing what is there in one step.

    Raises:
        OSError: The file cannot be written.
    """
    calibration = Calibration(
        fingerprint=reduction.fingerprint, text=reduction.text, arrays=reduction.arrays()
    )
    save_calibration(path, KIND, calibration)


def load_reduction(path: Path, fingerprint: str) -> KVReduction:
    """Return the reduction of a file.

    Args:
        path: Written by ``save_reduction``.
        fingerprint: Of the model it is wanted for.

    Raises:
        ConfigError: The file is missing or unreadable, is damaged or no file of a reduction, or belongs to another
            model; the message says which, and what to do.
    """
    calibration = load_calibration(path, KIND, fingerprint)
    arrays = calibration.arrays
    try:
        return KVReduction(
            fingerprint=fingerprint,
            text=calibration.text,
            queries=arrays["queries"],
            keys=arrays["keys"],
            values=arrays["values"],
            outputs=arrays["outputs"],
        )
    except (KeyError, ValueError) as error:
        raise KIND.unusable(path, f"lacks {error}") from error


def _roots(moment: NDArray[Any]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the symmetric square roots of (..., D, D) and of its inverse."""
    moment = np.asarray(moment, np.float64)
    mean = np.trace(moment, axis1=-2, axis2=-1)[..., None, None] / moment.shape[-1]
    floor = FLOOR * mean + np.finfo(np.float32).tiny
    sizes, directions = np.linalg.eigh(moment + floor * np.eye(moment.shape[-1]))
    roots = np.sqrt(np.maximum(sizes, floor[..., 0]))[..., None, :]
    turned = np.swapaxes(directions, -1, -2)
    return (directions * roots) @ turned, (directions / roots) @ turned
