"""Linear layers in every format, and what is particular to int4, against float64 on what the weights stand for."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

_native = pytest.importorskip("kvist._native", reason="the native extension is not built")

if TYPE_CHECKING:
    from collections.abc import Iterator

POOLS = {count: _native.Pool(count) for count in (1, 2, 3)}
FORMATS = [("int8", 0), ("int4", 32), ("int4", 64), ("bf16", 0)]
# (outputs, inputs): whole panels and groups, and remainders of both.
SHAPES = [(64, 256), (50, 100), (6, 31), (2, 1), (34, 1000)]


@pytest.fixture(params=_native.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _native.isa()
    _native.force_isa(request.param)
    assert _native.isa() == request.param
    yield request.param
    _native.force_isa(before)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def pack(weights: np.ndarray, kind: str, group: int = 0, gate: str = "none", threads: int = 1):
    return _native.PackedLinear(np.ascontiguousarray(weights), kind, group, gate, POOLS[threads])


def quantised(x: np.ndarray, limit: int, span: int) -> np.ndarray:
    """Return x, (T, K) float32, as its codes stand for it, with a scale for each row and ``span`` inputs.

    Codes are rounded from float32 products, as in the kernels: a value in the middle between two may take either.
    """
    values = np.empty(x.shape, np.float64)
    for first in range(0, x.shape[1], span):
        part = x[:, first : first + span]
        largest = np.abs(part).max(axis=1, keepdims=True)
        inverse = np.divide(
            np.float32(limit), largest, out=np.zeros_like(largest), where=largest > 0
        )
        values[:, first : first + span] = np.rint(part * inverse) * (
            largest / np.float32(limit)
        ).astype(np.float64)
    return values


def activate(gate: str, x: np.ndarray) -> np.ndarray:
    if gate == "silu":
        return x / (1 + np.exp(-x))
    if gate == "gelu_tanh":
        return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x / 2 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def expected(packed, x: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the products in float64 and what rounding may add to each."""
    weights = packed.unpack().astype(np.float64)
    values = x.astype(np.float64)
    if packed.activation_limit:
        values = quantised(x, packed.activation_limit, group or x.shape[1])
    # Each of a few hundred additions in float32 rounds what has been added up.
    allowed = 4e-6 * np.abs(values) @ np.abs(weights).T + 1e-30
    return values @ weights.T, allowed


@pytest.mark.parametrize(("kind", "group"), FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_those_of_the_rounded_values(isa, kind, group, shape):
    packed = pack(normal(1, *shape), kind, group)
    for rows in (1, 5, 6, 7, 23, 40):
        x = normal(rows, rows, shape[1])
        want, allowed = expected(packed, x, group)
        got = _native.linear(POOLS[1], packed, x)
        np.testing.assert_array_less(np.abs(got - want), allowed)


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize(("kind", "group"), FORMATS)
def test_the_epilogue_adds_bias_and_residual_and_applies_the_gate(isa, kind, group, gate):
    packed = pack(normal(1, 44, 96), kind, group, gate)
    x, bias, residual = normal(2, 9, 96) / 8, normal(3, 44), normal(4, 9, 22)
    products = expected(packed, x, group)[0] + bias
    want = activate(gate, products[:, :22]) * products[:, 22:] + residual
    got = _native.linear(POOLS[1], packed, x, bias, residual)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("kind", "group"), FORMATS)
def test_a_row_does_not_depend_on_the_others_nor_on_threads(isa, kind, group):
    packed = pack(normal(1, 72, 1632), kind, group)
    by_three = pack(normal(1, 72, 1632), kind, group, threads=3)
    np.testing.assert_array_equal(by_three.unpack(), packed.unpack())
    x = normal(2, 131, 1632)
    together = _native.linear(POOLS[1], packed, x)
    for count in (2, 3):
        np.testing.assert_array_equal(_native.linear(POOLS[count], packed, x), together)
    for first, last in ((0, 1), (3, 5), (7, 13), (40, 59), (90, 121), (130, 131)):
        alone = _native.linear(POOLS[1], packed, x[first:last].copy())
        np.testing.assert_array_equal(alone, together[first:last])


@pytest.mark.parametrize(("kind", "group"), FORMATS)
def test_what_is_not_finite_stays_in_its_row(isa, kind, group):
    packed = pack(normal(1, 20, 128), kind, group)
    x = normal(2, 8, 128)
    clean = _native.linear(POOLS[1], packed, x)
    x[3, 70], x[5, 0] = np.nan, np.inf
    dirty = _native.linear(POOLS[1], packed, x)
    kept = [0, 1, 2, 4, 6, 7]
    np.testing.assert_array_equal(dirty[kept], clean[kept])
    assert not np.isfinite(dirty[[3, 5]]).any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_int4_weights_that_are_not_finite_spoil_their_group_only(isa, value):
    weights = normal(1, 20, 128)
    clean = pack(weights, "int4", 32).unpack()
    weights[7, 40] = value
    packed = pack(weights, "int4", 32)
    got = packed.unpack()
    assert np.isnan(got[7, 32:64]).all()
    got[7, 32:64] = clean[7, 32:64]
    np.testing.assert_array_equal(got, clean)
    assert np.isnan(_native.linear(POOLS[1], packed, normal(2, 3, 128))[:, 7]).all()


def on_grid(scale: np.ndarray, minimum: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Return (N, G * 32) weights from (N, G) float16 scales and minima and (N, G, 32) codes."""
    values = minimum.astype(np.float32)[..., None] + scale.astype(np.float32)[..., None] * codes
    return values.reshape(len(values), -1).astype(np.float32)


@pytest.mark.parametrize(("first", "last"), [(0, 15), (0, 14), (1, 15), (2, 13), (3, 12), (7, 15)])
@pytest.mark.parametrize("is_symmetric", [True, False], ids=["q4_0", "q4_1"])
def test_weights_on_a_grid_of_int4_are_kept_exactly(isa, first, last, is_symmetric):
    rng = np.random.default_rng(first)
    scale = (rng.normal(size=(40, 7)) * 0.01).astype(np.float16)
    # Q4_0 scales have either sign, and the minimum is -8 of them.
    minimum = -8 * scale if is_symmetric else (rng.normal(size=(40, 7)) * 0.05).astype(np.float16)
    scale = scale if is_symmetric else np.abs(scale)
    codes = rng.integers(first, last + 1, size=(40, 7, 32))
    codes[..., 4], codes[..., 9] = first, last
    weights = on_grid(scale, minimum, codes)
    np.testing.assert_array_equal(pack(weights, "int4", 32).unpack(), weights)


def test_equal_weights_are_kept_exactly(isa):
    # 13 bits, more than a minimum alone can hold.
    weights = np.full((16, 64), 5231 / 2**15, np.float32)
    weights[3] = 0
    packed = pack(weights, "int4", 32)
    np.testing.assert_array_equal(packed.unpack(), weights)


def test_ordinary_weights_lose_less_than_to_the_span_of_their_group(isa):
    weights = normal(1, 256, 512)
    groups = weights.reshape(256, -1, 32)
    low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    scale = (high - low) / 15
    plain = low + np.rint((groups - low) / scale) * scale
    loss = np.square(pack(weights, "int4", 32).unpack() - weights).mean()
    assert loss < 0.85 * np.square(plain - groups).mean()


@settings(max_examples=60, deadline=None)
@given(
    exponent=st.integers(-44, 38),
    spread=st.integers(0, 8),
    inputs=st.integers(1, 70),
    seed=st.integers(0, 2**32 - 1),
)
def test_int4_values_are_near_whatever_their_size(exponent, spread, inputs, seed):
    rng = np.random.default_rng(seed)
    size = 10.0 ** (exponent - rng.integers(0, spread + 1, size=(17, inputs)))
    weights = np.clip(rng.uniform(-3.4, 3.4, size=(17, inputs)) * size, -3.4e38, 3.4e38).astype(
        np.float32
    )
    for name in _native.isas():
        before = _native.isa()
        _native.force_isa(name)
        got = pack(weights, "int4", 32).unpack()
        _native.force_isa(before)
        assert np.isfinite(got).all()
        if np.abs(weights).max() > 60000:
            continue
        for first in range(0, inputs, 32):
            part = weights[:, first : first + 32]
            span = part.max(1, keepdims=True) - part.min(1, keepdims=True)
            # Clipping is chosen for the group's sake, so a single value may be off by more than half a step.
            bound = 0.2 * span + 1e-3 * np.abs(part).max(1, keepdims=True) + 1e-6
            assert (np.abs(got[:, first : first + 32] - part) <= bound).all()


def test_packed_bytes_can_be_taken_back(isa):
    x = normal(2, 4, 96)
    for kind, group in FORMATS:
        packed = pack(normal(1, 40, 96), kind, group)
        again = _native.PackedLinear.from_data(40, 96, kind, group, "none", packed.data().copy())
        np.testing.assert_array_equal(
            _native.linear(POOLS[1], again, x), _native.linear(POOLS[1], packed, x)
        )


def test_int4_takes_five_bits_a_weight():
    if _native.isa() == "serial":
        pytest.skip("the serial layout keeps a code in a byte")
    assert pack(normal(1, 64, 256), "int4", 32).nbytes == 64 * 256 * 5 // 8
    assert pack(normal(1, 64, 256), "int4", 64).nbytes == 64 * 256 * 9 // 16


@pytest.mark.parametrize(
    ("kind", "group", "gate", "message"),
    [
        ("int3", 0, "none", "int8, int4 or bf16"),
        ("int4", 16, "none", "groups of 32 or 64"),
        ("int8", 32, "none", "no groups"),
        ("int8", 0, "relu", "gate must be"),
        ("int8", 0, "silu", "even number"),
    ],
)
def test_formats_that_do_not_exist_are_refused(kind, group, gate, message):
    with pytest.raises(ValueError, match=message):
        pack(normal(1, 5, 32), kind, group, gate)


def test_arrays_that_do_not_fit_are_refused():
    packed = pack(normal(1, 8, 32), "int8")
    x = normal(2, 3, 32)
    for arguments, message in [
        ((normal(1, 3, 31),), r"x must be \(T, 32\)"),
        ((x, normal(1, 7)), r"bias must be \(8,\)"),
        ((x, None, normal(1, 3, 7)), r"residual must be \(3, 8\)"),
        ((x, None, None, np.zeros((2, 8), np.float32)), r"out must be \(3, 8\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            _native.linear(POOLS[1], packed, *arguments)
    with pytest.raises(ValueError, match="bytes"):
        _native.PackedLinear.from_data(8, 32, "int8", 0, "none", packed.data()[:-1].copy())
