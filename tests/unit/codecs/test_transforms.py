"""Transforms: there and back, what scores make of them, and a file that nothing foreign comes out of."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvist.codecs.transforms import (
    KVTransforms,
    error_feedback,
    from_statistics,
    load_transforms,
    save_transforms,
    uncalibrated,
)
from kvist.errors import ConfigError

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
    """After one component is off, the best that the others can do is the regression on it."""
    generator = np.random.default_rng(3)
    rows = generator.normal(size=(200, 6))
    metric = rows.T @ rows / 200
    feedback = error_feedback(metric)
    assert not np.tril(feedback).any()
    damped = metric + 0.01 * np.trace(metric) / 6 * np.eye(6)
    best = np.linalg.solve(damped[1:, 1:], damped[1:, 0])
    assert np.allclose(feedback[0, 1:], -best, atol=1e-6)


def test_channels_that_are_always_zero_do_not_divide_by_it() -> None:
    importance = np.zeros((*SHAPE, 16, 16))
    covariance = np.zeros((*SHAPE, 16, 16))
    importance[..., 0, 0] = covariance[..., 1, 1] = 1.0
    for pair in ((importance, covariance), (importance * 0, covariance * 0)):
        how = from_statistics(*pair)
        assert np.isfinite(how.balance).all()
        assert (how.balance > 0).all()
        assert how.feedback is not None
        assert np.isfinite(how.feedback).all()


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
        assert np.array_equal(mine.order, other.order)
        assert mine.feedback is not None
        assert other.feedback is not None
        assert np.array_equal(mine.feedback, other.feedback)
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
        ({"version": "2"}, "has version '2', expected 1"),
        ({"text": "another"}, "checksum differs"),
        ({"blake3": "0" * 64}, "checksum differs"),
    ],
)
def test_metadata_is_checked(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    path = tmp_path / "t"
    save_transforms(path, made())
    metadata = {"format": "kvist-kv-transforms", "version": "1", "fingerprint": "a model"}
    save_file(load_file(path), path, {**metadata, "text": "a text", "blake3": "0", **changes})
    with pytest.raises(ConfigError, match=message):
        load_transforms(path, "a model")
