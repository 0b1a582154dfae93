"""Linear layers against float64, for every instruction set: shapes and values at the edges of tiles and formats."""

from __future__ import annotations

import math

import numpy as np
import pytest

native = pytest.importorskip("kvist._native", reason="the native extension is not built")

KINDS = [("int8", 0), ("bf16", 0)]  # int4 has a file of its own
QUANTISED = [kind for kind in KINDS if kind[0] != "bf16"]
GATES = ["silu", "gelu_tanh", "gelu"]
# Outputs around half a panel, a panel, several; inputs around a pair, a unit, a group, and past a cut of K.
OUTPUTS = [1, 7, 8, 9, 15, 16, 17, 33]
INPUTS = [1, 2, 3, 7, 8, 9, 31, 33, 64, 65, 257]
ROWS = [1, 2, 3, 4, 5, 6, 7, 12, 13]
EPS = 2.0**-24


@pytest.fixture(params=native.isas())
def isa(request):
    before = native.isa()
    native.force_isa(request.param)
    assert native.isa() == request.param
    yield request.param
    native.force_isa(before)


@pytest.fixture(scope="module")
def pool():
    return native.Pool(2)


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def pack(weights, kind, group, pool, gate="none"):
    packed = native.PackedLinear(weights, kind, group, gate, pool)
    assert packed.layout == native.linear_layout()
    return packed


def quantised_rows(x, limit):
    """The rows as the kernels see them, in float64, by the rule of the contract."""
    if limit == 0:
        return x.astype(np.float64)
    largest = np.abs(x).max(axis=1, keepdims=True)
    inverse = np.divide(
        np.float32(limit), largest, out=np.zeros_like(largest), where=largest >= 1e-30
    )
    codes = np.rint(x * inverse).astype(np.float64)
    scale = np.where(largest >= 1e-30, largest / np.float32(limit), np.float32(0))
    return codes * scale.astype(np.float64)


@np.errstate(over="ignore")
def activate(gate, x):
    if gate == "silu":
        return x / (1 + np.exp(-x))
    if gate == "gelu_tanh":
        return x / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * np.vectorize(math.erfc)(-x / math.sqrt(2))


def expected(packed, x, bias=None):
    """The product of the quantised operands before any gate, and how far float32 sums may be from it."""
    rows = quantised_rows(x, packed.activation_limit)
    weights = packed.unpack().astype(np.float64)
    weights[np.abs(weights) < 2.0**-126] = 0  # denormals are flushed
    value = rows @ weights.T
    # Sums of codes are exact: what is left is the scaling and, for bf16, float32 sums over K. Rounding errors
    # add like a random walk; ten of its standard deviations.
    terms = np.abs(rows) @ np.abs(weights).T
    bound = 10 * EPS * terms + 1e-35
    if bias is not None:
        value = value + bias
        bound = bound + 4 * EPS * (np.abs(bias) + np.abs(value))
    return value, bound


def check(packed, pool, x, *, bias=None, residual=None):
    out = native.linear(pool, packed, x, bias, residual)
    value, bound = expected(packed, x, bias)
    if residual is not None:
        value = value + residual
        bound = bound + 4 * EPS * (np.abs(residual) + np.abs(value))
    assert out.dtype == np.float32
    assert out.shape == value.shape
    excess = np.abs(out - value) / bound
    assert excess.max() <= 1, (
        f"{excess.max():.2f} of the bound at {np.unravel_index(excess.argmax(), out.shape)}"
    )
    return out


@pytest.mark.parametrize(("kind", "group"), KINDS)
def test_matches_float64_on_boundary_shapes(isa, pool, kind, group):
    for n in OUTPUTS:
        for k in INPUTS:
            packed = pack(normal(n * 1000 + k, n, k), kind, group, pool)
            for rows in ROWS if k == 65 else (1, 7):
                check(packed, pool, normal(rows, rows, k))


@pytest.mark.parametrize(("kind", "group"), KINDS)
@pytest.mark.parametrize(
    ("n", "k", "rows"), [(40, 4500, 9), (272, 100, 200), (16, 2100, 97), (3, 576, 512)]
)
def test_matches_float64_past_blocks_of_rows_and_cuts_of_inputs(isa, pool, kind, group, n, k, rows):
    packed = pack(normal(1, n, k), kind, group, pool)
    check(packed, pool, normal(2, rows, k), bias=normal(3, n), residual=normal(4, rows, n))


@pytest.mark.parametrize(("kind", "group"), KINDS)
def test_adds_bias_and_residual_in_the_tail_of_a_panel(isa, pool, kind, group):
    for n in (1, 7, 8, 9, 16, 23, 41):
        packed = pack(normal(n, n, 40), kind, group, pool)
        check(packed, pool, normal(2, 8, 40), bias=normal(3, n))
        check(packed, pool, normal(2, 8, 40), residual=normal(4, 8, n))


@pytest.mark.parametrize(("kind", "group"), KINDS)
def test_writes_in_place_of_the_residual_and_nothing_else(isa, pool, kind, group):
    packed = pack(normal(1, 21, 48), kind, group, pool)
    x, residual = normal(2, 7, 48), normal(3, 7, 21)
    plain = native.linear(pool, packed, x, None, residual)
    guarded = np.full(7 * 21 + 64, 77, np.float32)
    out = guarded[32:-32].reshape(7, 21)
    out[:] = residual
    assert native.linear(pool, packed, x, None, out, out) is out
    np.testing.assert_array_equal(out, plain)
    assert (guarded[:32] == 77).all()
    assert (guarded[-32:] == 77).all()


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize(("kind", "group"), KINDS)
def test_gate_multiplies_the_two_halves(isa, pool, kind, group, gate):
    for half, k, rows in ((1, 5, 1), (7, 33, 6), (8, 64, 7), (9, 31, 2), (100, 70, 13)):
        weights, bias, residual = (
            normal(half, 2 * half, k),
            normal(2, 2 * half),
            normal(3, rows, half),
        )
        packed = pack(weights, kind, group, pool, gate)
        x = normal(4, rows, k)
        out = native.linear(pool, packed, x, bias, residual)
        value, bound = expected(packed, x, bias)
        left, right = value[:, :half], value[:, half:]
        want = activate(gate, left) * right + residual
        # |act'| < 1.13; the functions themselves are good to a few units in the last place of their terms.
        allowed = 1.13 * bound[:, :half] * np.abs(right) + np.abs(left) * bound[:, half:]
        allowed += 16 * EPS * np.abs(left * right) + 2 * EPS * (np.abs(want) + np.abs(residual))
        assert (np.abs(out - want) <= allowed).all()


@pytest.mark.parametrize("gate", GATES)
@np.errstate(divide="ignore")
def test_gate_is_accurate_over_its_whole_range(isa, pool, gate):
    # One input and weights of 1: both halves are the input itself.
    packed = pack(np.ones((2, 1), np.float32), "bf16", 0, pool, gate)
    x = np.concatenate(
        [np.linspace(-100, 100, 4001), np.geomspace(1e-20, 1, 500), -np.geomspace(1e-20, 1, 500)]
    )
    x = x.astype(np.float32)[:, None]
    out = native.linear(pool, packed, x)
    wide = x.astype(np.float64)
    want = activate(gate, wide) * wide
    # An exponential has the error of its argument: the relative error grows with the logarithm of the result. Below the
    # smallest normal number nothing is left.
    size = np.maximum(np.abs(want), 1e-30)
    allowed = (16 + 4 * np.abs(np.log(size / wide**2))) * EPS
    small = np.abs(want) < 1e-30
    assert (np.abs(out - want)[~small] <= (allowed * size)[~small]).all()
    assert (np.abs(out[small]) <= 1.1e-30).all()


@pytest.mark.parametrize(("kind", "group"), KINDS)
def test_extreme_values(isa, pool, kind, group):
    k, n = 70, 19
    weights = normal(1, n, k)
    weights[0] = 0
    weights[1] = 1e-40
    weights[2, 3] = 3000
    weights[3] = 127
    weights[4] = -weights[4].max()
    weights[5] *= 1e-12
    weights[6] = np.where(np.arange(k) % 2, 1, -1)
    x = normal(2, 9, k)
    x[0] = 0
    x[1] = 1e-41
    x[2, 5] = 1e8
    x[3] = 2.5
    x[4] = -3e20
    x[5] *= 1e-25
    x[6] = np.where(np.arange(k) % 2, 1e3, -1e3)
    out = check(pack(weights, kind, group, pool), pool, x)
    assert (out[0] == 0).all()
    assert (out[:, 0] == 0).all()


@pytest.mark.parametrize(("kind", "group"), KINDS)
def test_longest_sums_of_the_largest_codes_are_exact(isa, pool, kind, group):
    k = 16640
    packed = pack(np.full((17, k), -1, np.float32), kind, group, pool)
    for rows in (1, 7):
        check(packed, pool, np.full((rows, k), -1, np.float32))
        check(packed, pool, np.full((rows, k), 1, np.float32))


@pytest.mark.parametrize(("kind", "group"), KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_stays_alone(isa, pool, kind, group, bad):
    packed = pack(normal(1, 40, 65), kind, group, pool)
    x = normal(2, 8, 65)
    clean = native.linear(pool, packed, x)
    x[3, 64] = bad
    out = native.linear(pool, packed, x)
    assert not np.isfinite(out[3]).any()
    np.testing.assert_array_equal(np.delete(out, 3, 0), np.delete(clean, 3, 0))


@pytest.mark.parametrize(("kind", "group"), KINDS)
def test_an_output_that_is_not_finite_stays_alone(isa, pool, kind, group):
    weights = normal(1, 40, 65)
    clean = native.linear(pool, pack(weights, kind, group, pool), normal(2, 8, 65))
    weights[11, 7] = np.nan
    weights[12, 7] = np.inf
    out = native.linear(pool, pack(weights, kind, group, pool), normal(2, 8, 65))
    assert not np.isfinite(out[:, 11:13]).any()
    np.testing.assert_array_equal(np.delete(out, [11, 12], 1), np.delete(clean, [11, 12], 1))


@pytest.mark.parametrize(("kind", "group"), KINDS)
@pytest.mark.parametrize("gate", ["none", "silu"])
def test_a_row_alone_is_the_same_as_in_a_batch(isa, pool, kind, group, gate):
    packed = pack(normal(1, 66, 2200), kind, group, pool, gate)
    x = normal(2, 201, 2200)
    bias = normal(3, 66)
    batch = native.linear(pool, packed, x, bias)
    for count in (1, 2, 5, 6, 7, 96, 97):
        np.testing.assert_array_equal(native.linear(pool, packed, x[:count], bias), batch[:count])
    np.testing.assert_array_equal(native.linear(pool, packed, x[-1:], bias), batch[-1:])


@pytest.mark.parametrize(("kind", "group"), KINDS)
def test_the_number_of_threads_does_not_matter(isa, pool, kind, group):
    weights, x = normal(1, 300, 96), normal(2, 100, 96)
    one = native.Pool(1)
    packed = pack(weights, kind, group, one)
    alone = native.linear(one, packed, x)
    for threads in (2, 5):
        several = native.Pool(threads)
        again = pack(weights, kind, group, several)
        np.testing.assert_array_equal(again.data(), packed.data())
        np.testing.assert_array_equal(native.linear(several, packed, x), alone)


@pytest.mark.parametrize(("kind", "group"), QUANTISED)
def test_every_instruction_set_has_the_same_activations(pool, kind, group):
    limits = set()
    before = native.isa()
    for name in native.isas():
        native.force_isa(name)
        limits.add(pack(normal(1, 3, 8192), kind, group, pool).activation_limit)
    native.force_isa(before)
    assert limits == {(2**31 - 1) // (127 * 8192) if kind == "int8" else 127}


def test_int8_weights_are_rounded_per_output(isa, pool):
    weights = normal(1, 37, 211) * np.geomspace(1e-6, 1e6, 37, dtype=np.float32)[:, None]
    largest = np.abs(weights).max(axis=1, keepdims=True)
    unpacked = pack(weights, "int8", 0, pool).unpack()
    np.testing.assert_array_equal(
        np.abs(unpacked).max(axis=1, keepdims=True), largest / np.float32(127) * 127
    )
    assert (np.abs(unpacked - weights) <= largest / 127 * 0.5001).all()


def test_bf16_weights_are_rounded_to_nearest_even(isa, pool):
    weights = normal(1, 37, 211)
    bits = weights.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)
    np.testing.assert_array_equal(pack(weights, "bf16", 0, pool).unpack(), rounded)


@pytest.mark.parametrize(("kind", "group"), KINDS)
@pytest.mark.parametrize("gate", ["none", "silu"])
def test_packed_bytes_travel(isa, pool, kind, group, gate):
    weights, x = normal(1, 36, 130), normal(2, 3, 130)
    packed = pack(weights, kind, group, pool, gate)
    data = packed.data()
    assert data.nbytes == packed.nbytes
    assert not data.flags.writeable
    room = np.zeros(packed.nbytes + 64, np.uint8)
    shift = -room.ctypes.data % 64
    for offset in (shift, (shift + 4) % 64):
        copy = room[offset : offset + packed.nbytes]
        copy[:] = data
        again = native.PackedLinear.from_data(36, 130, kind, group, gate, copy)
        assert (again.data().ctypes.data == copy.ctypes.data) == (offset == shift)
        np.testing.assert_array_equal(native.linear(pool, again, x), native.linear(pool, packed, x))
    del copy, room
    np.testing.assert_array_equal(again.unpack(), packed.unpack())


def test_no_rows_give_no_rows(isa, pool):
    packed = pack(normal(1, 5, 7), "int8", 0, pool)
    assert native.linear(pool, packed, np.empty((0, 7), np.float32)).shape == (0, 5)


def test_time_linear_times_a_call(isa, pool):
    matrices = [pack(normal(seed, 64, 64), "int8", 0, pool) for seed in range(3)]
    assert 0 < native.time_linear(pool, matrices, 2, 3) < 1
    with pytest.raises(ValueError, match="one shape"):
        native.time_linear(pool, [*matrices, pack(normal(1, 64, 63), "int8", 0, pool)], 2, 3)
    with pytest.raises(ValueError, match="needs a matrix"):
        native.time_linear(pool, [], 2, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((4, 4), "int3", 0, "none"), "int8, int4 or bf16, received 'int3'"),
        (((4, 4), "int8", 32, "none"), "no groups"),
        (((4, 4), "int4", 0, "none"), "groups of 32 or 64"),
        (((4, 4), "int8", 0, "relu"), "gate must be"),
        (((5, 4), "int8", 0, "silu"), "even number of outputs, received 5"),
        (((0, 4), "int8", 0, "none"), r"received weights \(0, 4\)"),
        (((4, 0), "int8", 0, "none"), r"received weights \(4, 0\)"),
        (((1, 131073), "int8", 0, "none"), r"received weights \(1, 131073\)"),
    ],
)
def test_refuses_what_it_can_not_pack(pool, arguments, message):
    shape, kind, group, gate = arguments
    with pytest.raises(ValueError, match=message):
        native.PackedLinear(np.zeros(shape, np.float32), kind, group, gate, pool)
    if 0 not in shape:
        with pytest.raises(ValueError, match=message):
            native.PackedLinear.from_data(*shape, kind, group, gate, np.zeros(64, np.uint8))


def test_refuses_arrays_that_do_not_fit(pool):
    packed = pack(normal(1, 6, 10), "int8", 0, pool)
    x = normal(2, 3, 10)
    for arguments, message in (
        ((normal(2, 3, 9),), r"x must be \(T, 10\), received \(3, 9\)"),
        ((x, normal(2, 5)), r"bias must be \(6,\), received \(5,\)"),
        ((x, None, normal(2, 3, 5)), r"residual must be \(3, 6\), received \(3, 5\)"),
        ((x, None, None, np.empty((2, 6), np.float32)), r"out must be \(3, 6\), received \(2, 6\)"),
    ):
        with pytest.raises(ValueError, match=message):
            native.linear(pool, packed, *arguments)
    for wrong in (x.astype(np.float64), x[0], normal(1, 10, 3).T):
        with pytest.raises(TypeError):
            native.linear(pool, packed, wrong)
    with pytest.raises((TypeError, RuntimeError)):
        native.linear(pool, packed, x, None, None, np.empty((3, 6), np.float64))
    with pytest.raises(ValueError, match=r"are .* bytes, received 63"):
        native.PackedLinear.from_data(6, 10, "int8", 0, "none", np.zeros(63, np.uint8))
