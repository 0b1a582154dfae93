"""What the rotated codecs know of a model: per layer and KV head, how K and V are turned before they are rounded.

Responsible for the numbers, for turning rows there and back, for what follows from statistics (``from_statistics``) and
for what their file (``calibration_file``) has. Where the statistics come from is not known here
(``kvist.tune.calibration``).

An encoder of K may also know what an error costs (``KeyMetric``), and round one channel so that it makes up for the
errors of those before it (``KVTransforms.feedback``). Queries are turned by their positions (RoPE), so what they look
at most depends on where they are; seen from the span that they look at it does not. So the metric is kept turned back
to the start of the span, and turned to wherever a span is.

A row x of K or V becomes ``y = (x - mean) diag(balance) R``. R is the same orthonormal matrix everywhere
(``kvist.kernels.rotation``). ``balance`` makes channels alike that the
model looks at with unlike care. V has no mean: subtracting one costs more than it gives (measured).

Letters: L layers, K KV heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from blake3 import blake3

from kvist.codecs.calibration_file import (
    Calibration,
    CalibrationKind,
    load_calibration,
    save_calibration,
)
from kvist.kernels import native
from kvist.kernels.rotation import rotation

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    Floats = NDArray[np.float32]

KIND = CalibrationKind(where="transforms", version=2)
DAMPING = 0.01
"""Share of its mean diagonal that a metric gets added before it is inverted."""
FLOOR = 1e-4
"""Share of the mean importance and variance that a channel has at least; channels that are always 0 have none."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowTransform:
    """How rows of K, or of V, are turned, in all layers and KV heads."""

    balance: Floats
    """(L, K, D) > 0, a factor for each channel."""

    def turn(self, rows: Floats) -> Floats:
        """Return (L, K, ..., D) rows times diag(balance) R."""
        turned: Floats = np.matmul(rows * _along(self.balance, rows), rotation(rows.shape[-1]))
        return turned

    def turn_back(self, turned: Floats) -> Floats:
        """Return the (L, K, ..., D) rows that ``turn`` made ``turned`` from."""
        rows: Floats = np.matmul(turned, rotation(turned.shape[-1]).T)
        rows /= _along(self.balance, turned)
        return rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeyMetric:
    """What an error of a key costs, in all layers and KV heads: ``e metric e^T``."""

    metric: Floats
    """(L, K, D, D) symmetric, positive semidefinite: the mean of ``w q^T q`` over queries q that look at a span, turned
    back by the position of its start, w what they give to it."""
    frequencies: NDArray[np.float64]
    """(L, D / 2) by how much a position turns a pair of channels (c, c + D / 2), in radians; 0 where it does not."""

    def at(self, start: int) -> NDArray[np.float64]:
        """Return the (L, K, D, D) metric of a span that starts at the given position."""
        angles = start * self.frequencies[:, None]
        return turned_metric(self.metric.astype(np.float64), angles)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KVTransforms:
    """The transforms of one model."""

    fingerprint: str
    """Of the model they belong to; empty where they were not calibrated and fit all."""
    text: str
    """Digest of the tokens they were calibrated on; empty where they were not."""
    mean: Floats
    """(L, K, D) subtracted from K, which is taken after RoPE."""
    keys: RowTransform
    values: RowTransform
    key_metric: KeyMetric | None
    """For encoders; None: each channel is rounded by itself."""

    @property
    def is_calibrated(self) -> bool:
        """Whether they come from a model's own statistics."""
        return bool(self.fingerprint)

    @property
    def digest(self) -> str:
        """Of all numbers that readers and encoders use."""
        digest = blake3()
        parts: list[NDArray[Any]] = [self.mean, self.keys.balance, self.values.balance]
        if self.key_metric is not None:
            parts += [self.key_metric.metric, self.key_metric.frequencies]
        for part in parts:
            digest.update(f"{part.dtype} {part.shape}".encode())
            digest.update(np.ascontiguousarray(part).tobytes())
        return str(digest.hexdigest())

    def to_native(self) -> Any:  # noqa: ANN401  # native.KvTransforms
        """Return a copy of them for the native kernels.

        Raises:
            KernelUnavailable: There are none here.
        """
        parts: list[NDArray[Any]] = [self.mean, self.keys.balance, self.values.balance]
        if self.key_metric is not None:
            parts += [self.key_metric.metric, self.key_metric.frequencies]
        return native.extension().KvTransforms(*map(np.ascontiguousarray, parts))

    def of_layers(self, layers: NDArray[np.intp]) -> KVTransforms:
        """Return those of some layers, as those of a model that has no others."""
        metric = self.key_metric
        if metric is not None:
            metric = KeyMetric(metric=metric.metric[layers], frequencies=metric.frequencies[layers])
        return KVTransforms(
            fingerprint=self.fingerprint,
            text=self.text,
            mean=self.mean[layers],
            keys=RowTransform(balance=self.keys.balance[layers]),
            values=RowTransform(balance=self.values.balance[layers]),
            key_metric=metric,
        )

    def turn_queries(self, queries: Floats) -> Floats:
        """Return the (L, K, ..., D) vectors whose product with a turned key is the query's with the key minus mean."""
        scaled = queries / _along(self.keys.balance, queries)
        turned: Floats = np.matmul(scaled, rotation(queries.shape[-1]))
        return turned

    def feedback(self, start: int) -> Floats | None:
        """Return what the error of one channel of a turned key takes from those after it.

        Args:
            start: Position at which the span starts.

        Returns:
            (L, K, D, D) strictly upper triangular: an error of e at channel i moves channel j by ``-e * result[i, j]``.
            None: each channel is rounded by itself.
        """
        if self.key_metric is None:
            return None
        # e diag(1 / balance) is the error in the model's own basis, R orthonormal.
        scaled = self.key_metric.at(start)
        scaled /= self.keys.balance[..., :, None] * self.keys.balance[..., None, :]
        matrix = rotation(scaled.shape[-1]).astype(np.float64)
        return error_feedback(matrix.T @ scaled @ matrix).astype(np.float32)


def turned_metric(metric: NDArray[np.float64], angles: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return what (..., D, D) sums of ``q^T q`` are when RoPE turns the queries.

    Args:
        metric: Symmetric.
        angles: (..., D / 2) by how much each pair of channels (c, c + D / 2) is turned, in radians.
    """
    cos, sin = np.cos(angles)[..., None, :], np.sin(angles)[..., None, :]
    turned = metric
    for _ in range(2):  # its rows, then its columns
        first, second = np.split(np.swapaxes(turned, -1, -2), 2, axis=-1)
        turned = np.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
    return turned


def uncalibrated(num_layers: int, num_kv_heads: int, head_dim: int) -> KVTransforms:
    """Return transforms that fit any model of these sizes: the rotation alone."""
    shape = (num_layers, num_kv_heads, head_dim)
    plain = RowTransform(balance=np.ones(shape, np.float32))
    return KVTransforms(
        fingerprint="",
        text="",
        mean=np.zeros(shape, np.float32),
        keys=plain,
        values=plain,
        key_metric=None,
    )


def from_statistics(importance: NDArray[Any], covariance: NDArray[Any]) -> RowTransform:
    """Return the transform for rows whose errors cost ``e importance e^T``.

    A channel's factor is the fourth root of its importance over its variance: rounding then costs every channel alike.

    Args:
        importance: (L, K, D, D) symmetric, positive semidefinite: for K the mean of ``q^T q``, for V the sum of
            ``W^T W`` over the output projections of the head's group.
        covariance: (L, K, D, D) of the rows.
    """
    balance = _balance(_diagonal(importance), _diagonal(covariance))
    return RowTransform(balance=balance.astype(np.float32))


def error_feedback(metric: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return what rounding one component of a row takes from those after it, so that ``e metric e^T`` is small.

    With ``metric = V V^T``, V upper triangular, ``e metric e^T`` is the sum of squares of ``e V``; component i of it
    has the errors up to i in it, and e_i is chosen to make it 0. The same as the feedback of Frantar et al. 2022
    (GPTQ), without an inverse.

    Args:
        metric: (..., D, D) symmetric, positive semidefinite; DAMPING of its mean diagonal is added.

    Returns:
        (..., D, D) strictly upper triangular: an error of e at component i moves component j by ``-e * result[i, j]``.
    """
    identity = np.eye(metric.shape[-1])
    mean = _diagonal(metric).mean(axis=-1)[..., None, None]
    damped = metric + (DAMPING * mean + np.finfo(np.float32).tiny) * identity
    # Of the matrix with its components in reverse, the lower factor is the upper one wanted, in reverse.
    upper = np.linalg.cholesky(damped[..., ::-1, ::-1])[..., ::-1, ::-1]
    feedback: NDArray[np.float64] = upper / _diagonal(upper)[..., None, :] - identity
    return feedback


def save_transforms(path: Path, transforms: KVTransforms) -> None:
    """Write calibrated transforms to a file, replacing what is there in one step.

    Raises:
        OSError: The file cannot be written.
    """
    arrays: dict[str, NDArray[Any]] = {
        "mean": transforms.mean,
        "keys.balance": transforms.keys.balance,
        "values.balance": transforms.values.balance,
    }
    if transforms.key_metric is not None:
        lower = np.tril_indices(transforms.key_metric.metric.shape[-1])
        arrays["keys.metric"] = transforms.key_metric.metric[..., *lower]
        arrays["keys.frequencies"] = transforms.key_metric.frequencies
    calibration = Calibration(
        fingerprint=transforms.fingerprint, text=transforms.text, arrays=arrays
    )
    save_calibration(path, KIND, calibration)


def load_transforms(path: Path, fingerprint: str) -> KVTransforms:
    """Return the transforms of a file.

    Args:
        path: Written by ``save_transforms``.
        fingerprint: Of the model they are wanted for.

    Raises:
        ConfigError: The file is missing or unreadable, is damaged or no file of transforms, or belongs to another
            model; the message says which, and what to do.
    """
    calibration = load_calibration(path, KIND, fingerprint)
    arrays = calibration.arrays
    try:
        return KVTransforms(
            fingerprint=fingerprint,
            text=calibration.text,
            mean=arrays["mean"],
            keys=RowTransform(balance=arrays["keys.balance"]),
            values=RowTransform(balance=arrays["values.balance"]),
            key_metric=_key_metric(arrays),
        )
    except (KeyError, ValueError) as error:
        raise KIND.unusable(path, f"lacks {error}") from error


def _key_metric(arrays: Mapping[str, NDArray[Any]]) -> KeyMetric | None:
    if "keys.metric" not in arrays:
        return None
    packed, head_dim = arrays["keys.metric"], arrays["mean"].shape[-1]
    rows, columns = np.tril_indices(head_dim)
    metric = np.empty((*packed.shape[:-1], head_dim, head_dim), np.float32)
    metric[..., rows, columns] = metric[..., columns, rows] = packed
    return KeyMetric(metric=metric, frequencies=arrays["keys.frequencies"])


def _balance(importance: NDArray[np.float64], variance: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return (..., D) factors, scaled so that a turned channel has the variance 1 on average."""
    tiny = np.finfo(np.float32).tiny
    cost = importance + FLOOR * importance.mean(axis=-1, keepdims=True) + tiny
    spread = variance + FLOOR * variance.mean(axis=-1, keepdims=True) + tiny
    balance = (cost / spread) ** 0.25
    scale = np.sqrt((balance**2 * spread).mean(axis=-1, keepdims=True))
    result: NDArray[np.float64] = balance / scale
    return result


def _diagonal(matrices: NDArray[Any]) -> NDArray[Any]:
    return np.diagonal(matrices, axis1=-2, axis2=-1)


def _along(channels: Floats, rows: Floats) -> Floats:
    """Return (L, K, D) channels as (L, K, 1, ..., D), to go with ``rows``."""
    return channels.reshape(*channels.shape[:2], *(1,) * (rows.ndim - 3), channels.shape[-1])
