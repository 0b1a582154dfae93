"""What instruction sets owe each other: where the arithmetic is exact or in one order, the same bits."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest

_native = pytest.importorskip("kvist._native", reason="the native extension is not built")

if TYPE_CHECKING:
    from collections.abc import Iterator

POOL = _native.Pool(1)


@pytest.fixture(autouse=True)
def isa_afterwards() -> Iterator[None]:
    before = _native.isa()
    yield
    _native.force_isa(before)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def in_every_isa(compute) -> dict[str, np.ndarray]:
    results = {}
    for name in _native.isas():
        _native.force_isa(name)
        results[name] = compute()
    return results


def assert_same(results: dict[str, np.ndarray]) -> None:
    for (name, one), (other_name, other) in itertools.pairwise(results.items()):
        np.testing.assert_array_equal(one, other, err_msg=f"{name} and {other_name}")


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 25, 200])
@pytest.mark.parametrize(("n", "k"), [(1, 1), (31, 33), (33, 200), (96, 576), (64, 4500)])
def test_int8_layers_agree_to_the_bit(n: int, k: int, rows: int) -> None:
    weights, x = normal(1, n, k), normal(2, rows, k) * 10

    def compute() -> np.ndarray:
        packed = _native.PackedLinear(weights, "int8", 0, "none", POOL)
        return _native.linear(POOL, packed, x)

    assert_same(in_every_isa(compute))


@pytest.mark.parametrize(("kind", "group"), [("int8", 0), ("bf16", 0)])
def test_weights_are_rounded_alike(kind: str, group: int) -> None:
    weights = normal(1, 45, 130) * np.geomspace(1e-6, 1e6, 45, dtype=np.float32)[:, None]
    assert_same(
        in_every_isa(lambda: _native.PackedLinear(weights, kind, group, "none", POOL).unpack())
    )


@pytest.mark.parametrize("codec", ["raw16", "int8"])
def test_rows_of_keys_are_written_alike(codec: str) -> None:
    x = normal(1, 50, 2, 72) * 100
    assert_same(in_every_isa(lambda: _native.encode_kv(codec, x)))
    queries = normal(2, 50, 6, 72)
    assert_same(in_every_isa(lambda: _native.encode_kv_keys(codec, x, queries)))


def test_layouts_have_names_of_their_own() -> None:
    names = {}
    for name in _native.isas():
        _native.force_isa(name)
        names[name] = _native.linear_layout()
    assert len(set(names.values())) == len(names), names


@pytest.mark.parametrize("name", _native.isas())
def test_the_self_check_passes_and_changes_nothing(name: str) -> None:
    before = _native.isa()
    assert _native.self_check(name) == ""
    assert _native.isa() == before


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("linear", "linear int8 with 1 rows: "),
        ("attention", "attention over raw16, head_dim 64: "),
        ("spans", "attention over int4, head_dim 64: "),
        ("codec", "rows of keys in raw16"),
        ("rowwise", "row-wise work: "),
        ("span codec", "spans in int4, head_dim 64"),
    ],
)
def test_the_self_check_finds_a_wrong_part(part: str, message: str) -> None:
    for name in _native.isas()[:-1]:
        assert _native.self_check(name, falsify=part).startswith(message)


def test_the_self_check_refuses_what_does_not_exist() -> None:
    with pytest.raises(ValueError, match=r"must be one of .*serial, received 'sse9'"):
        _native.self_check("sse9")
    with pytest.raises(ValueError, match=r"falsify must be linear, .*, received 'clock'"):
        _native.self_check("serial", falsify="clock")
