"""Heads in fewer dimensions: what is kept of products, and the file."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvist.codecs.reduction import (
    KVReduction,
    best_pairs,
    best_product,
    load_reduction,
    save_reduction,
)
from kvist.errors import ConfigError

D = 24


def moment(random: np.random.Generator, rank: int = D) -> np.ndarray:
    rows = random.standard_normal((4 * D, rank)) @ random.standard_normal((rank, D))
    return rows.T @ rows / len(rows)


def lost(left: np.ndarray, right: np.ndarray, product: np.ndarray) -> float:
    """Mean square of ``x (I - product) y`` for x and y with the given second moments."""
    error = np.eye(len(product)) - product
    return float(np.trace(left @ error @ right @ error.T))


def make_reduction(kept: int = 8, fingerprint: str = "model") -> KVReduction:
    random = np.random.default_rng(3)
    narrow = random.standard_normal((2, 3, D, kept)).astype(np.float32)
    outputs = random.standard_normal((2, 3, kept, D)).astype(np.float32)
    return KVReduction(
        fingerprint=fingerprint,
        text="text",
        queries=narrow,
        keys=narrow + 1,
        values=narrow + 2,
        outputs=outputs,
    )


@pytest.mark.parametrize("rank", [8, 16])
def test_no_other_product_of_the_rank_loses_less(rank):
    random = np.random.default_rng(rank)
    left, right = moment(random), moment(random)
    factors = best_product(left, right, rank)
    product = factors.left @ factors.right.T
    least = lost(left, right, product)
    assert np.allclose(factors.right.T @ factors.right, np.eye(rank), atol=1e-9)
    for _ in range(20):
        change = 1e-2 * random.standard_normal((2, D, rank))
        other = (factors.left + change[0]) @ (factors.right + change[1]).T
        assert lost(left, right, other) > least
    # What looks at keys alone, or at queries alone, keeps less.
    for moments in (right, left):
        directions = np.linalg.eigh(moments)[1][:, -rank:]
        assert lost(left, right, directions @ directions.T) >= least * (1 - 1e-3)


def test_all_dimensions_lose_nothing():
    random = np.random.default_rng(0)
    factors = best_product(moment(random), moment(random, rank=5), D)
    assert np.allclose(factors.left @ factors.right.T, np.eye(D), atol=1e-9)


def test_a_model_that_uses_few_directions_loses_nothing():
    random = np.random.default_rng(1)
    left, right = moment(random), moment(random, rank=8)
    factors = best_product(left, right, 8)
    keys = np.linalg.eigh(right)[1][:, -8:].T
    assert np.allclose(keys @ factors.right @ factors.left.T, keys, atol=2e-2)


def test_moments_of_nothing_give_finite_factors():
    factors = best_product(np.zeros((2, D, D)), np.zeros((2, D, D)), 8)
    assert np.isfinite(factors.left).all()
    assert np.isfinite(factors.right).all()


def test_a_file_gives_back_what_was_saved(tmp_path):
    path = tmp_path / "new" / "reduction.safetensors"
    saved = make_reduction()
    save_reduction(path, saved)
    loaded = load_reduction(path, "model")
    assert loaded.digest == saved.digest
    assert (loaded.text, loaded.head_dim, loaded.kv_head_dim) == ("text", D, 8)


def test_the_digest_is_of_every_number():
    reduction = make_reduction()
    for name, array in reduction.arrays().items():
        changed = array.copy()
        changed[1, 2, 3, 4] += 1
        assert replace(reduction, **{name: changed}).digest != reduction.digest


def test_files_that_do_not_fit_are_refused(tmp_path):
    path = tmp_path / "reduction.safetensors"
    with pytest.raises(ConfigError, match="cannot be read"):
        load_reduction(path, "model")
    save_reduction(path, make_reduction())
    with pytest.raises(ConfigError, match="another model; make it anew with kvist tune"):
        load_reduction(path, "other")
    whole = path.read_bytes()
    for at in (len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(ConfigError, match="damaged"):
            load_reduction(path, "model")
    path.write_bytes(whole[:-5])
    with pytest.raises(ConfigError, match="cannot be read"):
        load_reduction(path, "model")
    save_file({"x": np.zeros(1)}, path)
    with pytest.raises(ConfigError, match="no file of reduction"):
        load_reduction(path, "model")
    path.write_bytes(whole)
    save_file(load_file(path), path, {"format": "kvist-kv-reduction", "version": "9"})
    with pytest.raises(ConfigError, match="version '9'"):
        load_reduction(path, "model")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("values", np.zeros((2, 3, D, 16), np.float32)),
        ("outputs", np.zeros((2, 3, D, 8), np.float32)),
        ("queries", np.full((2, 3, D, 8), np.nan, np.float32)),
        ("keys", np.zeros((2, 3, D, 8))),
    ],
)
def test_matrices_that_do_not_go_together_are_refused(name, value):
    with pytest.raises(ValueError, match=r"shape|finite"):
        replace(make_reduction(), **{name: value})


def pair_gram(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Gram of the shares of all pairs, over all queries and keys."""
    size = queries.shape[1]
    half = size // 2
    (a, b), (c, d) = (np.split(x, [half], axis=1) for x in (queries, keys))
    real = np.einsum("qp,kp->qkp", a, c) + np.einsum("qp,kp->qkp", b, d)
    turned = np.einsum("qp,kp->qkp", b, c) - np.einsum("qp,kp->qkp", a, d)
    shares = np.concatenate((real, turned), axis=-1).reshape(-1, size)
    return shares.T @ shares / len(shares)


def test_pairs_that_do_nothing_are_left_out():
    random = np.random.default_rng(5)
    queries, keys = random.standard_normal((2, 40, D))
    idle = [1, 4, 9, 11]
    queries[:, idle] = queries[:, np.add(idle, D // 2)] = 0
    factors = best_pairs(pair_gram(queries, keys), 16)
    assert not factors.right[idle].any()
    assert np.allclose(factors.right.T @ factors.right, np.eye(16))
    scores = (queries @ factors.left) @ (keys @ factors.right).T
    assert np.allclose(scores, queries @ keys.T, atol=0.05)


def test_what_is_left_makes_up_for_what_is_left_out():
    """A pair that says the same as another is left out, and the other counts twice."""
    random = np.random.default_rng(6)
    queries, keys = random.standard_normal((2, 40, D))
    for rows in (queries, keys):
        rows[:, [2, 2 + D // 2]] = rows[:, [7, 7 + D // 2]]
    factors = best_pairs(pair_gram(queries, keys), D - 2)
    assert factors.right[2].any() != factors.right[7].any()
    scores = (queries @ factors.left) @ (keys @ factors.right).T
    assert np.allclose(scores, queries @ keys.T, atol=0.1)


def test_pairs_commute_with_rope():
    """What is kept of products depends on the distance of query and key alone."""
    random = np.random.default_rng(7)
    queries, keys = random.standard_normal((2, 10, D))
    factors = best_pairs(pair_gram(queries, keys), 16)
    angles = random.uniform(0, 6, D // 2)

    def turned(rows: np.ndarray) -> np.ndarray:
        a, b = np.split(rows, 2, axis=1)
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=1)

    here = (queries @ factors.left) @ (keys @ factors.right).T
    there = (turned(queries) @ factors.left) @ (turned(keys) @ factors.right).T
    assert np.allclose(here, there)


@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_all_pairs_lose_nothing(scale):
    gram = scale * moment(np.random.default_rng(8))
    factors = best_pairs(gram, D)
    assert np.allclose(factors.left @ factors.right.T, np.eye(D))


def test_a_turned_share_makes_up_for_another():
    """A pair whose share is that of another, turned by a quarter."""
    random = np.random.default_rng(9)
    queries, keys = random.standard_normal((2, 40, D))
    here, there = [7, 7 + D // 2], [2, 2 + D // 2]
    keys[:, there] = keys[:, here]
    queries[:, there] = queries[:, here[::-1]] * [1.0, -1.0]
    factors = best_pairs(pair_gram(queries, keys), D - 2)
    scores = (queries @ factors.left) @ (keys @ factors.right).T
    assert np.allclose(scores, queries @ keys.T, atol=0.1)
