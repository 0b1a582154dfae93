"""Transforms: there and back, what scores make of them, and a file that nothing foreign comes out of."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from kvist.codecs.transforms import (
    KeyMetric,
    KVTransforms,
    error_feedback,
    from_statistics,
    load_transforms,
    save_transforms,
    uncalibrated,
)
from kvist.errors import ConfigError
from kvist.kernels import dispatch
from kvist.kernels.rotation import rotation
from kvist.model.rotary import RotaryEmbedding, frequencies_of
from kvist.spec import RopeSpec

if TYPE_CHECKING:
    from pathlib import Path

SHAPE = (2, 3)


def made(head_dim: int = 16, seed: int = 0) -> KVTransforms:
    generator = np.random.default_rng(seed)
    rows = [generator.normal(size=(*SHAPE, 50, head_dim)) for _ in range(4)]
    grams = [np.swapaxes(x, -1, -2) @ x / 50 for x in rows]
    return KVTransforms(
        fingerprint="a model",
        text="a text",
        mean=generator.normal(size=(*SHAPE, head_dim)).astype(np.float32),
        keys=from_statistics(grams[0], grams[1]),
        values=from_statistics(grams[2], grams[3]),
        key_metric=KeyMetric(
            metric=grams[0].astype(np.float32),
            frequencies=generator.uniform(size=(SHAPE[0], head_dim // 2)),
        ),
    )


@pytest.mark.parametrize("transforms", [made(), uncalibrated(*SHAPE, 16)])
def test_there_and_back(transforms: KVTransforms) -> None:
    rows = np.random.default_rng(1).normal(size=(*SHAPE, 5, 16)).astype(np.float32)
    for how in (transforms.keys, transforms.values):
        assert np.allclose(how.turn_back(how.turn(rows)), rows, atol=1e-5)


def test_turned_queries_see_in_turned_keys_what_they_saw() -> None:
    transforms = made()
    generator = np.random.default_rng(2)
    queries, keys = (generator.normal(size=(*SHAPE, 7, 16)).astype(np.float32) for _ in range(2))
    mean = transforms.mean[:, :, None]
    turned = transforms.turn_queries(queries) @ np.swapaxes(
        transforms.keys.turn(keys - mean), -1, -2
    )
    offsets = queries @ np.swapaxes(mean, -1, -2)
    assert np.allclose(turned + offsets, queries @ np.swapaxes(keys, -1, -2), atol=1e-4)


def test_feedback_is_that_of_least_squares() -> None:
    """After some components are off, the best that the others can do is the regression on them."""
    generator = np.random.default_rng(3)
    rows = generator.normal(size=(200, 6))
    metric = rows.T @ rows / 200
    feedback = error_feedback(metric)
    assert not np.tril(feedback).any()
    damped = metric + 0.01 * np.trace(metric) / 6 * np.eye(6)
    for first in range(1, 6):
        errors = generator.normal(size=first)
        best = -np.linalg.solve(damped[first:, first:], damped[first:, :first] @ errors)
        # What the next one makes of it; the others follow in the same way.
        assert np.isclose(-errors @ feedback[:first, first], best[0], atol=1e-6)


def test_a_metric_moves_with_the_queries() -> None:
    """Turned to a position, it is that of queries which are turned by as much, as the model turns them."""
    head_dim, start = 16, 192
    rope = RotaryEmbedding(RopeSpec(base=10_000.0, dim=head_dim))
    queries = torch.randn(50, 1, head_dim, generator=torch.Generator().manual_seed(0))
    at = rope.at(torch.full((50,), start), torch.float32)
    moved = dispatch.rope(queries, at.cos, at.sin)[:, 0].double().numpy()
    still = queries[:, 0].double().numpy()
    frequencies = frequencies_of(RopeSpec(base=10_000.0, dim=head_dim)).double().numpy()
    metric = KeyMetric(
        metric=(still.T @ still)[None, None].astype(np.float32), frequencies=frequencies[None]
    )
    assert np.allclose(metric.at(start), moved.T @ moved, atol=1e-3)
    assert not np.allclose(metric.at(0), moved.T @ moved, atol=1.0)


def test_feedback_is_in_the_basis_of_turned_keys() -> None:
    transforms = made()
    assert transforms.key_metric is not None
    received = transforms.feedback(128)
    balance = transforms.keys.balance.astype(np.float64)
    # y = x diag(balance) R, so an error of y is one of e R^T / balance in x.
    back = rotation(16).T / balance[..., None, :]
    metric = back @ transforms.key_metric.at(128) @ np.swapaxes(back, -1, -2)
    assert received is not None
    assert np.allclose(received, error_feedback(metric), atol=1e-4)
    assert not np.allclose(received, transforms.feedback(0), atol=0.01)
    assert uncalibrated(*SHAPE, 16).feedback(0) is None


@pytest.mark.parametrize("transforms", [made(), uncalibrated(*SHAPE, 16)])
def test_those_of_a_layer_do_to_it_what_all_do(transforms: KVTransforms) -> None:
    rows = np.random.default_rng(1).normal(size=(*SHAPE, 5, 16)).astype(np.float32)
    layer = transforms.of_layers(np.array([1]))
    assert np.array_equal(layer.mean, transforms.mean[1:])
    for one, every in ((layer.keys, transforms.keys), (layer.values, transforms.values)):
        assert np.allclose(one.turn(rows[1:]), every.turn(rows)[1:])
    feedback, of_all = layer.feedback(64), transforms.feedback(64)
    assert (feedback is None) == (of_all is None)
    assert feedback is None or of_all is None or np.allclose(feedback, of_all[1:])


def test_channels_that_are_always_zero_do_not_divide_by_it() -> None:
    importance = np.zeros((*SHAPE, 16, 16))
    covariance = np.zeros((*SHAPE, 16, 16))
    importance[..., 0, 0] = covariance[..., 1, 1] = 1.0
    for pair in ((importance, covariance), (importance * 0, covariance * 0)):
        how = from_statistics(*pair)
        assert np.isfinite(how.balance).all()
        assert (how.balance > 0).all()
        assert np.isfinite(error_feedback(pair[0])).all()


def test_balance_makes_turned_rows_of_size_one() -> None:
    generator = np.random.default_rng(4)
    rows = generator.normal(size=(*SHAPE, 4000, 16)) * np.exp(generator.normal(size=16) * 3)
    covariance = np.swapaxes(rows, -1, -2) @ rows / 4000
    how = from_statistics(np.broadcast_to(np.eye(16), (*SHAPE, 16, 16)), covariance)
    assert np.allclose(
        np.square(how.turn(rows.astype(np.float32))).mean(axis=(-1, -2)), 1.0, atol=0.02
    )


def test_a_file_gives_back_what_was_put_in(tmp_path: Path) -> None:
    path, transforms = tmp_path / "new" / "t.safetensors", made()
    save_transforms(path, transforms)
    loaded = load_transforms(path, "a model")
    assert (loaded.fingerprint, loaded.text) == ("a model", "a text")
    assert np.array_equal(loaded.mean, transforms.mean)
    for mine, other in ((loaded.keys, transforms.keys), (loaded.values, transforms.values)):
        assert np.array_equal(mine.balance, other.balance)
    assert loaded.key_metric is not None
    assert transforms.key_metric is not None
    assert np.array_equal(loaded.key_metric.metric, transforms.key_metric.metric)
    assert np.array_equal(loaded.key_metric.frequencies, transforms.key_metric.frequencies)
    assert [file.name for file in path.parent.iterdir()] == ["t.safetensors"]


def test_a_file_for_another_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t"
    save_transforms(path, made())
    with pytest.raises(ConfigError, match="made for another model; make it anew with kvist tune"):
        load_transforms(path, "another")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_transforms(tmp_path / "none", "a model")


def test_no_damage_goes_unseen(tmp_path: Path) -> None:
    path = tmp_path / "t"
    save_transforms(path, made(8))
    content = path.read_bytes()
    generator = np.random.default_rng(5)
    damaged = [content[: len(content) // 2], content[:-1], content + b"\0", b"", content[:7]]
    for position in (*range(0, 400, 7), *generator.integers(0, len(content), 60)):
        flipped = bytearray(content)
        flipped[position] ^= 1 << int(generator.integers(8))
        damaged.append(bytes(flipped))
    for bad in damaged:
        path.write_bytes(bad)
        with pytest.raises(ConfigError):
            load_transforms(path, "a model")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other"}, "no file of transforms"),
        ({"version": "1"}, "has version '1', expected 2"),
        ({"text": "another"}, "checksum differs"),
        ({"blake3": "0" * 64}, "checksum differs"),
    ],
)
def test_metadata_is_checked(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    path = tmp_path / "t"
    save_transforms(path, made())
    metadata = {"format": "kvist-kv-transforms", "version": "2", "fingerprint": "a model"}
    save_file(load_file(path), path, {**metadata, "text": "a text", "blake3": "0", **changes})
    with pytest.raises(ConfigError, match=message):
        load_transforms(path, "a model")
