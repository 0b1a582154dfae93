"""int4 and int3: the error bound element by element, what is exact, what is held, and every byte of the format."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.codecs import e5m3
from kvist.codecs.rotated import INT3, INT4, LEVELS, SPAN, RotatedCodec, Rows
from kvist.codecs.transforms import KeyMetric, KVTransforms, from_statistics, uncalibrated
from kvist.kernels.rotation import rotation
from kvist.spec import SPAN_CODEC_BITS, SPAN_TOKENS, span_record_bytes

CODECS = [INT4, INT3]
IDS = [codec.name for codec in CODECS]


def transforms_for(head_dim: int, shape: tuple[int, int] = (1, 1), seed: int = 3) -> KVTransforms:
    """Return calibrated transforms of a made-up model whose channels differ by orders of magnitude."""
    generator = np.random.default_rng(seed)

    def gram(num_rows: int) -> np.ndarray:
        rows = generator.normal(size=(*shape, num_rows, head_dim))
        rows *= np.exp(generator.normal(size=(*shape, 1, head_dim)))
        return np.swapaxes(rows, -1, -2) @ rows / num_rows

    return KVTransforms(
        fingerprint="of a model",
        text="of a text",
        mean=generator.normal(size=(*shape, head_dim)).astype(np.float32),
        keys=from_statistics(gram(3 * head_dim), gram(3 * head_dim)),
        values=from_statistics(gram(3 * head_dim), gram(3 * head_dim)),
        key_metric=KeyMetric(
            metric=gram(3 * head_dim).astype(np.float32),
            frequencies=generator.uniform(size=(shape[0], head_dim // 2)),
        ),
    )


def rows_of(
    head_dim: int, shape: tuple[int, int] = (1, 1), seed: int = 1, num_tokens: int = SPAN
) -> Rows:
    generator = np.random.default_rng(seed)
    size = (*shape, num_tokens, head_dim)
    return Rows(*(generator.normal(size=size).astype(np.float32) for _ in range(2)))


def encoded(codec: RotatedCodec, rows: Rows, transforms: KVTransforms) -> np.ndarray:
    """Return the records of a block in which nothing is beyond reach."""
    records, num_held = codec.encode(rows, transforms)
    assert num_held == 0
    return records


def assert_within_bounds(codec: RotatedCodec, rows: Rows, transforms: KVTransforms) -> np.ndarray:
    """Check every component in the turned basis, and every value in the model's own."""
    records, head_dim = codec.encode(rows, transforms).records, rows.keys.shape[-1]
    stored = codec.decode_turned(records, head_dim)
    bounds = codec.error_bounds(rows, records, transforms)
    turned = Rows(
        transforms.keys.turn(rows.keys - transforms.mean[:, :, None]),
        transforms.values.turn(rows.values),
    )
    decoded = codec.decode(records, transforms)
    for kind, how in (("keys", transforms.keys), ("values", transforms.values)):
        exact, bound = getattr(turned, kind), getattr(bounds, kind)
        rounding = 1e-5 * np.abs(exact).max(axis=-1, keepdims=True)
        assert (np.abs(getattr(stored, kind) - exact) <= bound + rounding).all(), kind
        # |x R^T / balance| <= |x| |R|^T / balance
        spread = np.abs(rotation(head_dim)).T / how.balance[:, :, None]
        limit = np.matmul(bound.astype(np.float64), spread)
        original = getattr(rows, kind)
        slack = 1e-4 * np.abs(original).max(axis=-1, keepdims=True) + 1e-4
        error = np.abs(getattr(decoded, kind).astype(np.float64) - original)
        assert (error <= limit + slack).all(), kind
    return records


def test_sizes_are_those_the_control_plane_reads() -> None:
    assert SPAN_TOKENS == SPAN
    assert {codec.name: codec.bits for codec in CODECS} == SPAN_CODEC_BITS
    for codec in CODECS:
        for head_dim in (8, 64, 80, 128, 256):
            records = encoded(codec, rows_of(head_dim), uncalibrated(1, 1, head_dim))
            size = codec.record_bytes(head_dim)
            assert records.shape == (1, 1, 1, size)
            assert span_record_bytes(codec.name, head_dim) == size
            assert codec.bits_per_value(head_dim) == 8 * size / (2 * SPAN * head_dim)
    assert INT4.bits_per_value(64) == 4.1875
    assert INT3.bits_per_value(64) == 3.1875
    assert INT4.bits_per_value(256) < 4.15


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
@pytest.mark.parametrize("head_dim", [8, 24, 64, 80, 128])
def test_no_component_is_off_by_more_than_its_bound(codec: RotatedCodec, head_dim: int) -> None:
    shape = (2, 3)
    rows = rows_of(head_dim, shape, num_tokens=2 * SPAN)
    assert_within_bounds(codec, rows, transforms_for(head_dim, shape))
    assert_within_bounds(codec, rows, uncalibrated(*shape, head_dim))


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    exponent=st.integers(-140, 40),
    token=st.integers(0, SPAN - 1),
    channel=st.integers(0, 15),
    outlier=st.sampled_from([0.0, 1.0, 30.0, 1000.0, -1000.0]),
    offset=st.sampled_from([0.0, 1.0, -50.0]),
)
def test_bounds_hold_whatever_sticks_out(
    codec: RotatedCodec,
    seed: int,
    exponent: int,
    token: int,
    channel: int,
    outlier: float,
    offset: float,
) -> None:
    keys, values = (x * np.float32(2.0**exponent) for x in rows_of(16, seed=seed))
    for x in (keys, values):
        x[0, 0, :, channel] += np.float32(outlier * 2.0**exponent)
        x[0, 0, token] *= np.float32(max(1.0, abs(outlier) / 10))
        x[:] += np.float32(offset * 2.0**exponent)
    for transforms in (uncalibrated(1, 1, 16), transforms_for(16)):
        assert_within_bounds(codec, Rows(keys, values), transforms)
        if codec.encode(Rows(keys, values), transforms).num_held:
            assert exponent > -8, "only large values may be beyond reach"


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
def test_an_outlier_channel_of_k_and_an_outlier_token_of_v_leave_the_others_alone(
    codec: RotatedCodec,
) -> None:
    """In the turned basis, which is where values are rounded: K by channel, V by position."""
    transforms = uncalibrated(1, 1, 64)
    plain = rows_of(64)
    how = transforms.keys
    keys, values = how.turn(plain.keys), how.turn(plain.values)
    before = codec.decode_turned(encoded(codec, plain, transforms), 64)
    keys[..., 5] *= 1000
    values[..., 7, :] *= 1000
    rows = Rows(how.turn_back(keys), how.turn_back(values))
    after = codec.decode_turned(assert_within_bounds(codec, rows, transforms), 64)
    others = np.arange(64) != 5
    step = np.ptp(keys[..., others], axis=-2) / (2**codec.bits - 1)
    assert (np.abs(after.keys - before.keys)[..., others].max(axis=-2) <= 1.2 * step).all()
    tokens = np.arange(64) != 7
    assert np.abs(after.values - before.values)[:, :, tokens].max() <= 1e-3


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
def test_one_component_that_holds_a_whole_token_of_v_is_kept(codec: RotatedCodec) -> None:
    """A scale from the root mean square alone would clip it to a third of its size."""
    turned = np.zeros((1, 1, SPAN, 64), np.float32)
    turned[..., 3] = 10.0
    transforms = uncalibrated(1, 1, 64)
    rows = Rows(np.zeros_like(turned), transforms.values.turn_back(turned))
    stored = codec.decode_turned(encoded(codec, rows, transforms), 64).values
    # The least squares of all: the others pay for it, as the level nearest to 0 is none.
    assert (np.abs(stored[..., 3] - 10.0) <= {"int4": 2.0, "int3": 6.0}[codec.name]).all()


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
def test_zeros_are_exact_and_so_are_constants_that_have_a_step(codec: RotatedCodec) -> None:
    transforms = uncalibrated(1, 2, 64)
    zeros = np.zeros((1, 2, SPAN, 64), np.float32)
    records = encoded(codec, Rows(zeros, zeros), transforms)
    assert not codec.decode(records, transforms).keys.any()
    assert not codec.decode(records, transforms).values.any()
    for constant in (1.0, -3.0, 0.125, 100.0):
        turned = np.full_like(zeros, constant)
        rows = Rows(transforms.keys.turn_back(turned), zeros)
        stored = codec.decode_turned(encoded(codec, rows, transforms), 64).keys
        assert np.allclose(stored, constant, rtol=1e-6)


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
def test_any_constant_of_k_is_kept_to_a_few_thousandths(codec: RotatedCodec) -> None:
    transforms = uncalibrated(1, 1, 64)
    constants = np.logspace(-4, 4, 64).astype(np.float32)
    turned = np.broadcast_to(constants, (1, 1, SPAN, 64))
    rows = Rows(transforms.keys.turn_back(turned), np.zeros((1, 1, SPAN, 64), np.float32))
    exact = transforms.keys.turn(rows.keys)
    stored = codec.decode_turned(encoded(codec, rows, transforms), 64).keys
    # Half of half a step, the zero point at 110 steps and more.
    assert (np.abs(stored - exact) <= 0.0025 * np.abs(exact) + 1e-6 * constants.max()).all()


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
def test_denormals_give_zeros_and_no_noise(codec: RotatedCodec) -> None:
    tiny = np.full((1, 1, SPAN, 64), 2.0**-149, np.float32)
    transforms = uncalibrated(1, 1, 64)
    decoded = codec.decode(encoded(codec, Rows(tiny, -tiny), transforms), transforms)
    assert np.abs(decoded.keys).max() <= 2.0**-140
    assert np.abs(decoded.values).max() <= 2.0**-140


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
@pytest.mark.parametrize("wrong", [np.inf, -np.inf, np.nan, 3.4e38])
@pytest.mark.parametrize("token", [0, SPAN + 17])
@pytest.mark.filterwarnings("error")
def test_what_is_not_finite_reads_as_nan_and_touches_nothing_else(
    codec: RotatedCodec, wrong: float, token: int
) -> None:
    """A key that is not finite makes NaN of its span in its head, a value of its position. Neither is held."""
    transforms = transforms_for(64, (2, 2))
    rows = rows_of(64, (2, 2), num_tokens=2 * SPAN)
    before = codec.decode(encoded(codec, rows, transforms), transforms)
    rows.keys[1, 0, token] = rows.values[1, 0, token] = wrong
    after = codec.decode(encoded(codec, rows, transforms), transforms)
    is_nan = np.zeros((2, 2, 2 * SPAN, 64), bool)
    is_nan[1, 0, token // SPAN * SPAN :][:SPAN] = True
    assert np.array_equal(np.isnan(after.keys), is_nan)
    assert np.array_equal(after.keys[~is_nan], before.keys[~is_nan])
    is_nan[:] = False
    is_nan[1, 0, token] = True
    assert np.array_equal(np.isnan(after.values), is_nan)
    assert np.array_equal(after.values[~is_nan], before.values[~is_nan])


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
def test_what_is_beyond_reach_is_held_and_counted(codec: RotatedCodec) -> None:
    transforms = uncalibrated(1, 1, 64)
    keys, values = np.zeros((2, 1, 1, SPAN, 64), np.float32)
    keys[..., 3, 5], keys[..., 4, 5], keys[..., 3, 6] = 1e6, -1e30, 1000.0
    values[..., 3, 5], values[..., 4, 5] = -1e30, 1000.0
    rows = Rows(transforms.keys.turn_back(keys), transforms.values.turn_back(values))
    records, num_held = codec.encode(rows, transforms)
    assert num_held >= 3, "and what the rotation's rounding makes of 1e30"
    stored = codec.decode_turned(records, 64)
    for position, sign in ((3, 1), (4, -1)):
        error = stored.keys[0, 0, position, 5] - sign * codec.reach_of_keys
        assert abs(error) <= e5m3.LARGEST
    assert -1 <= stored.values[0, 0, 3, 5] / codec.reach_of_values < -0.9
    assert abs(stored.keys[0, 0, 3, 6] - 1000.0) <= 1000.0 / (2**codec.bits - 1)


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
def test_a_block_is_the_spans_of_a_layer_side_by_side(codec: RotatedCodec) -> None:
    """Records are (L, P / 64, K): what a layer reads lies together."""
    transforms = transforms_for(32, (2, 3))
    rows = rows_of(32, (2, 3), num_tokens=2 * SPAN)
    records = encoded(codec, rows, transforms)
    assert records.shape == (2, 2, 3, codec.record_bytes(32))
    for span in range(2):
        one = Rows(*(x[:, :, span * SPAN : (span + 1) * SPAN] for x in rows))
        alone = codec.encode(one, transforms, span * SPAN).records
        assert np.array_equal(records[:, span], alone[:, 0])


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
def test_feedback_lowers_what_the_queries_see(codec: RotatedCodec) -> None:
    """The reason for it: the error of scores, not that of keys. The balance alone is half of the way."""
    shape, head_dim = (2, 2), 64
    generator = np.random.default_rng(5)
    mixing = generator.normal(size=(*shape, head_dim, head_dim)) / 8
    queries = generator.normal(size=(*shape, 400, 4)) @ generator.normal(size=(*shape, 4, head_dim))
    importance = np.swapaxes(queries, -1, -2) @ queries / 400
    rows = generator.normal(size=(*shape, 4 * SPAN, head_dim)) @ mixing
    covariance = np.swapaxes(rows, -1, -2) @ rows / (4 * SPAN)
    plain = uncalibrated(*shape, head_dim)
    metric = KeyMetric(
        metric=importance.astype(np.float32),
        frequencies=np.tile(0.1 * np.arange(1, 33) ** -0.5, (2, 1)),
    )
    balanced = replace(plain, keys=from_statistics(importance, covariance))
    keys = rows[:, :, :SPAN].astype(np.float32)
    start = 3 * SPAN

    def loss(transforms: KVTransforms, at: int) -> float:
        records, _ = codec.encode(Rows(keys, keys), transforms, at)
        errors = codec.decode(records, transforms).keys - keys
        # Queries that stand where the span is.
        cost = errors @ metric.at(start) @ np.swapaxes(errors, -1, -2)
        return float(np.trace(cost, axis1=-2, axis2=-1).mean())

    with_feedback = replace(balanced, key_metric=metric)
    assert loss(with_feedback, start) < 0.4 * loss(balanced, start)
    assert loss(with_feedback, start) < 0.4 * loss(with_feedback, 0), "elsewhere it is another one"
    assert codec.encode(Rows(keys, keys), balanced, 0).num_held == 0


def test_each_span_of_a_block_has_the_feedback_of_its_own_position() -> None:
    transforms = transforms_for(32)
    rows = rows_of(32, num_tokens=2 * SPAN)
    records = INT3.encode(rows, transforms, SPAN).records
    second = Rows(*(x[:, :, SPAN:] for x in rows))
    assert np.array_equal(records[:, 1], INT3.encode(second, transforms, 2 * SPAN).records[:, 0])
    assert not np.array_equal(records[:, 1], INT3.encode(second, transforms, SPAN).records[:, 0])


def test_levels_are_a_quantiser_of_a_normal_distribution() -> None:
    """Lloyd and Max: each level is the mean of what is nearest to it, but for its rounding to a whole number."""
    sample = np.random.default_rng(0).normal(size=400_000)
    for bits, deviation, least in ((4, 46.0, 0.0096), (3, 58.0, 0.0348)):
        levels = LEVELS[bits] / deviation
        assert np.array_equal(levels, -levels[::-1])
        assert np.abs(LEVELS[bits]).max() <= 127
        nearest = np.searchsorted((levels[1:] + levels[:-1]) / 2, sample)
        assert np.square(levels[nearest] - sample).mean() < least
        for code, level in enumerate(levels):
            assert abs(sample[nearest == code].mean() - level) < 0.02


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
def test_heads_and_layers_are_coded_each_by_itself(codec: RotatedCodec) -> None:
    shape = (2, 3)
    rows, transforms = rows_of(32, shape), uncalibrated(2, 3, 32)
    whole = encoded(codec, rows, transforms)
    for layer in range(2):
        for head in range(3):
            one = Rows(*(x[layer : layer + 1, head : head + 1] for x in rows))
            alone = encoded(codec, one, uncalibrated(1, 1, 32))
            assert np.array_equal(whole[layer, 0, head], alone[0, 0, 0])


def test_bytes_of_the_worked_example() -> None:
    """docs/formats/kv_block.md: 8 channels, turned rows given."""
    transforms = uncalibrated(1, 1, 8)
    token, channel = np.arange(SPAN)[:, None], np.arange(8)
    turned_keys = ((token * (channel + 1)) % 16 - 4.0) * 2.0 ** (channel - 4)
    turned_values = np.array([-95, -74, -58, -18, 6, 30, 43, 126]) * 2.0 ** (token % 4 - 6)
    rows = Rows(
        transforms.keys.turn_back(turned_keys[None, None].astype(np.float32)),
        transforms.values.turn_back(turned_values[None, None].astype(np.float32)),
    )
    record = encoded(INT4, rows, transforms)[0, 0, 0]
    assert record[:16].tobytes().hex() == GOLDEN_GRID
    assert record[16:48].tobytes().hex() == GOLDEN_KEY_CODES
    assert record[272:336].tobytes().hex() == GOLDEN_SCALES * 16
    assert record[336:352].tobytes().hex() == GOLDEN_VALUE_CODES


GOLDEN_GRID = "80879095a0a7b0b1f8f7f8f6f8f7f8f1"
GOLDEN_KEY_CODES = "0000000011223355224466aa337799ff4499cc0055bbff5566dd22aa77ff55ff"
GOLDEN_SCALES = "70788088"
GOLDEN_VALUE_CODES = "81818181a2a2a2a2b3b3b3b3f6f6f6f6"


@pytest.mark.parametrize(
    ("codec", "digest"), [(INT4, "bc47236055ee5c35"), (INT3, "f2967880ab70cbe0")], ids=IDS
)
def test_all_bytes_are_pinned(codec: RotatedCodec, digest: str) -> None:
    """Of values that no rounding of the rotation can move over a boundary: whole numbers of steps, turned back."""
    transforms = uncalibrated(2, 1, 64)
    generator = np.random.default_rng(11)
    limit = 2**codec.bits
    codes = generator.integers(0, limit, (2, 1, SPAN, 64))
    codes[:, :, :2] = np.array([0, limit - 1])[:, None]
    keys = (codes - 3.0) * e5m3.VALUES[generator.integers(120, 180, 64)]
    levels = LEVELS[codec.bits][generator.integers(0, limit, (2, 1, SPAN, 64))]
    values = levels * e5m3.VALUES[generator.integers(100, 160, SPAN)][:, None]
    rows = Rows(
        transforms.keys.turn_back(keys.astype(np.float32)),
        transforms.values.turn_back(values.astype(np.float32)),
    )
    records = encoded(codec, rows, transforms)
    stored = codec.decode_turned(records, 64)
    assert np.allclose(stored.keys, keys, rtol=1e-6)
    assert np.allclose(stored.values, values, rtol=1e-6)
    assert hashlib.sha256(records.tobytes()).hexdigest()[:16] == digest
