"""int4 and int3 written and read by the native kernels: against the reference, and between all codecs of a block."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.codecs.e5m3 import LARGEST, VALUES
from kvist.codecs.rotated import INT3, INT4, LEVELS, RotatedCodec, Rows
from kvist.codecs.transforms import KeyMetric, KVTransforms, RowTransform, uncalibrated
from kvist.kernels.rotation import rotation

_native = pytest.importorskip("kvist._native", reason="the native extension is not built")

from tests.native.test_attention import (  # noqa: E402  # nothing there without the extension
    POOLS,
    decode,
    encode,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

SPAN = 64
CODECS = {"int4": INT4, "int3": INT3}
ALL = ("raw16", "int8", "int4", "int3")
HEAD_DIMS = [8, 16, 24, 64, 72, 80, 96, 128, 248, 256]
ROUNDING = 2e-5
"""Of float32, against the largest of a row: rows are turned twice or three times."""


@pytest.fixture(params=_native.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _native.isa()
    _native.force_isa(request.param)
    yield request.param
    _native.force_isa(before)


class Sizes(NamedTuple):
    """L, K, P and D."""

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int


def calibrated(sizes: Sizes, seed: int = 3) -> KVTransforms:
    """Return transforms of a made-up model whose channels differ by orders of magnitude, without error feedback."""
    generator = np.random.default_rng(seed)
    shape = (sizes.num_layers, sizes.num_kv_heads, sizes.head_dim)

    def rows() -> RowTransform:
        balance = np.exp(generator.normal(size=shape)).astype(np.float32)
        return replace(uncalibrated(*shape).keys, balance=balance)

    mean = generator.normal(size=shape).astype(np.float32) * 3
    return replace(uncalibrated(*shape), mean=mean, keys=rows(), values=rows())


def plain(sizes: Sizes) -> KVTransforms:
    return uncalibrated(sizes.num_layers, sizes.num_kv_heads, sizes.head_dim)


def with_metric(transforms: KVTransforms, seed: int = 4) -> KVTransforms:
    """Return them with a metric in which a few directions count for more than all others, as those of models do."""
    generator = np.random.default_rng(seed)
    *shape, head_dim = transforms.mean.shape
    rows = generator.normal(size=(*shape, 2 * head_dim, head_dim))
    rows *= np.exp(generator.normal(size=(*shape, 1, head_dim)))
    rows[..., : head_dim // 2, :] += 3 * generator.normal(size=(*shape, 1, head_dim))
    metric = (np.swapaxes(rows, -1, -2) @ rows / (2 * head_dim)).astype(np.float32)
    frequencies = 10_000.0 ** (-np.arange(head_dim // 2) * 2 / head_dim)
    return replace(
        transforms,
        key_metric=KeyMetric(
            metric=(metric + np.swapaxes(metric, -1, -2)) / 2,
            frequencies=np.tile(frequencies, (shape[0], 1)),
        ),
    )


def plain_with_metric(sizes: Sizes) -> KVTransforms:
    return with_metric(plain(sizes))


def calibrated_with_metric(sizes: Sizes, seed: int = 3) -> KVTransforms:
    return with_metric(calibrated(sizes, seed))


def block_of(rows: Rows) -> np.ndarray:
    """Return (L, K, P, D) turned keys and plain values as (L, 2, K, P, D): what blocks of rows hold."""
    return np.ascontiguousarray(np.stack((rows.keys, rows.values), axis=1), np.float32)


def model_rows(block: np.ndarray) -> Rows:
    """Return keys and values as the model has them."""
    block = block.astype(np.float64)
    turned_back = block[:, 0] @ rotation(block.shape[-1]).T.astype(np.float64)
    return Rows(turned_back.astype(np.float32), block[:, 1].astype(np.float32))


def random_block(sizes: Sizes, seed: int = 1) -> np.ndarray:
    """Return values of a model, with channels and positions that stick out, as bfloat16 has them."""
    generator = np.random.default_rng(seed)
    block = generator.normal(
        size=(sizes.num_layers, 2, sizes.num_kv_heads, sizes.block_size, sizes.head_dim)
    )
    block[:, 0, :, :, 1] += 5
    block[:, 1] *= np.exp(generator.normal(size=(*block.shape[2:4], 1)))
    return as_bfloat16(block)


def as_bfloat16(x: np.ndarray) -> np.ndarray:
    return decode("raw16", encode("raw16", x.astype(np.float32)), x.shape[-1]).astype(np.float32)


def bytes_of(codec: str, block: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(encode(codec, block)).reshape(-1)


def block_bytes(codec: str, sizes: Sizes) -> int:
    if codec in CODECS:
        records = sizes.num_layers * (sizes.block_size // SPAN) * sizes.num_kv_heads
        return records * CODECS[codec].record_bytes(sizes.head_dim)
    width = encode(codec, np.zeros(sizes.head_dim, np.float32)).size
    return 2 * sizes.num_layers * sizes.num_kv_heads * sizes.block_size * width


class Recoded(NamedTuple):
    """The bytes of a block, and what was held."""

    target: np.ndarray
    num_held: int


def recode(
    source: np.ndarray,
    source_codec: str,
    target_codec: str,
    sizes: Sizes,
    transforms: KVTransforms | None,
    *,
    num_tokens: int | None = None,
    threads: int = 2,
    start: int = 0,
) -> Recoded:
    """Return the block over bytes of 0xEE, from and to odd addresses."""
    memory = np.full(block_bytes(target_codec, sizes) + 65, 0xEE, np.uint8)
    target = memory[1:-64]
    copy = np.empty(source.size + 3, np.uint8)[3:]
    copy[:] = source.reshape(-1)
    held = _native.recode_block(
        POOLS[threads],
        copy,
        target,
        source_codec=source_codec,
        target_codec=target_codec,
        **sizes._asdict(),
        num_tokens=sizes.block_size if num_tokens is None else num_tokens,
        transforms=None if transforms is None else transforms.to_native(),
        start=start,
    )
    assert memory[0] == 0xEE
    assert (memory[-64:] == 0xEE).all()
    return Recoded(target, held)


def records_of(target: np.ndarray, sizes: Sizes) -> np.ndarray:
    return target.reshape(sizes.num_layers, sizes.block_size // SPAN, sizes.num_kv_heads, -1)


def encode_block(
    codec: str, block: np.ndarray, transforms: KVTransforms, threads: int = 2, start: int = 0
) -> Recoded:
    """Return the records of a block that was raw16."""
    sizes = Sizes(block.shape[0], block.shape[2], *block.shape[3:])
    source = bytes_of("raw16", block)
    target, held = recode(source, "raw16", codec, sizes, transforms, threads=threads, start=start)
    return Recoded(records_of(target, sizes), held)


def reference_block(codec: str, records: np.ndarray, transforms: KVTransforms) -> np.ndarray:
    """Return what records stand for, as blocks of rows hold it."""
    rows = CODECS[codec].decode(records, transforms)
    return block_of(Rows(rows.keys @ rotation(rows.keys.shape[-1]), rows.values))


def turned(rows: Rows, transforms: KVTransforms) -> Rows:
    return Rows(
        transforms.keys.turn(rows.keys - transforms.mean[:, :, None]),
        transforms.values.turn(rows.values),
    )


def squared_errors(
    codec: RotatedCodec, records: np.ndarray, block: np.ndarray, transforms: KVTransforms
) -> np.ndarray:
    exact = turned(model_rows(block), transforms)
    stored = codec.decode_turned(records, block.shape[-1])
    return np.array([np.square(x - y).sum() for x, y in zip(stored, exact, strict=True)])


def cost_to_queries(
    codec: RotatedCodec,
    records: np.ndarray,
    block: np.ndarray,
    transforms: KVTransforms,
    start: int,
) -> float:
    """Return what errors of the keys of a block of one span cost under the metric, heads weighted alike."""
    assert transforms.key_metric is not None
    exact = model_rows(block).keys
    errors = (codec.decode(records, transforms).keys - exact).astype(np.float64)
    metric = transforms.key_metric.at(start)
    costs = np.einsum("lkpc,lkcd,lkpd->lk", errors, metric, errors)
    return float((costs / np.trace(metric, axis1=-2, axis2=-1)).sum())


def assert_within_bounds(
    codec: RotatedCodec, records: np.ndarray, block: np.ndarray, transforms: KVTransforms
) -> None:
    rows = model_rows(block)
    stored = codec.decode_turned(records, block.shape[-1])
    bounds = codec.error_bounds(rows, records, transforms)
    for got, exact, bound in zip(stored, turned(rows, transforms), bounds, strict=True):
        rounding = ROUNDING * np.abs(exact).max(axis=-1, keepdims=True)
        assert (np.abs(got - exact) <= bound + rounding).all()


# --- against the reference


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("make", [plain, calibrated])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_blocks_are_encoded_as_the_reference_does_it(
    isa: str, name: str, make: object, head_dim: int
) -> None:
    sizes = Sizes(2, 3, 2 * SPAN, head_dim)
    codec, transforms, block = CODECS[name], make(sizes), random_block(sizes)
    records, held = encode_block(name, block, transforms)
    assert held == 0
    assert_within_bounds(codec, records, block, transforms)
    reference = codec.encode(model_rows(block), transforms).records
    errors = squared_errors(codec, records, block, transforms)
    assert (errors <= 1.01 * squared_errors(codec, reference, block, transforms)).all()
    # Nearly all: rounding of what is half-way depends on the order of additions.
    assert (records == reference).mean() > 0.98


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("make", [plain, calibrated])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_records_are_read_as_the_reference_does_it(
    isa: str, name: str, make: object, head_dim: int
) -> None:
    """All bytes but those of infinite sizes, whether an encoder would write them or not."""
    sizes = Sizes(2, 2, 2 * SPAN, head_dim)
    transforms = make(sizes)
    size = block_bytes(name, sizes)
    records = np.random.default_rng(5).integers(0, 256, size).astype(np.uint8)
    records = records_of(records, sizes)
    # Steps and scales of like sizes, or the largest of a row would hide all others.
    records[..., :head_dim] = records[..., :head_dim] % 32 + 120
    scales = slice(2 * head_dim + 8 * CODECS[name].bits * head_dim, None)
    records[..., scales][..., :SPAN] = records[..., scales][..., :SPAN] % 32 + 100
    target, held = recode(records, name, "raw16", sizes, transforms)
    assert held == 0
    expected = reference_block(name, records, transforms)
    got = decode("raw16", target.reshape(*expected.shape[:-1], -1), head_dim)
    largest = np.abs(expected).max(axis=-1, keepdims=True)
    assert (np.abs(got - expected) <= 2.0**-8 * np.abs(expected) + ROUNDING * largest).all()
    # Without a calibration K is whole numbers of steps, often half-way between two bfloat16.
    rows = slice(None) if make is calibrated else 1
    assert (got == as_bfloat16(expected))[:, rows].mean() > 0.98


def test_bytes_of_the_worked_example(isa: str) -> None:
    """docs/formats/kv_block.md: 8 channels, turned rows given."""
    transforms = uncalibrated(1, 1, 8)
    token, channel = np.arange(SPAN)[:, None], np.arange(8)
    turned_keys = ((token * (channel + 1)) % 16 - 4.0) * 2.0 ** (channel - 4)
    turned_values = np.array([-95, -74, -58, -18, 6, 30, 43, 126]) * 2.0 ** (token % 4 - 6)
    values = transforms.values.turn_back(turned_values[None, None].astype(np.float32))
    block = block_of(Rows(turned_keys[None, None], values))
    record = encode_block("int4", block, transforms).target[0, 0, 0]
    assert record[:16].tobytes().hex() == "80879095a0a7b0b1f8f7f8f6f8f7f8f1"
    codes = "0000000011223355224466aa337799ff4499cc0055bbff5566dd22aa77ff55ff"
    assert record[16:48].tobytes().hex() == codes
    assert record[272:336].tobytes().hex() == "70788088" * 16
    assert record[336:352].tobytes().hex() == "81818181a2a2a2a2b3b3b3b3f6f6f6f6"


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("head_dim", [8, 24, 64])
def test_whole_numbers_of_steps_have_the_bytes_of_the_reference(
    isa: str, name: str, head_dim: int
) -> None:
    """No rounding can move these over a boundary, and bfloat16 holds the keys."""
    sizes, codec = Sizes(2, 2, 2 * SPAN, head_dim), CODECS[name]
    transforms, limit = plain(sizes), 2**codec.bits
    generator = np.random.default_rng(11)
    shape = (2, 2, 2 * SPAN, head_dim)
    codes = generator.integers(0, limit, shape)
    codes[:, :, ::SPAN], codes[:, :, 1::SPAN] = 0, limit - 1
    keys = (codes - 3.0) * VALUES[generator.integers(120, 180, head_dim)]
    levels = LEVELS[codec.bits][generator.integers(0, limit, shape)]
    values = levels * VALUES[generator.integers(100, 160, 2 * SPAN)][:, None]
    values = transforms.values.turn_back(values.astype(np.float32))
    block = block_of(Rows(keys, values))
    block[:, 1] = as_bfloat16(block[:, 1])
    records = encode_block(name, block, transforms).target
    np.testing.assert_array_equal(records, codec.encode(model_rows(block), transforms).records)


# --- what sticks out


def every_isa_agrees(
    name: str, block: np.ndarray, transforms: KVTransforms, start: int = 0
) -> Recoded:
    """Return what all instruction sets write, after a check that it is the same."""
    before = _native.isa()
    results = []
    try:
        for other in _native.isas():
            _native.force_isa(other)
            results.append(encode_block(name, block, transforms, start=start))
    finally:
        _native.force_isa(before)
    for result in results[1:]:
        np.testing.assert_array_equal(result.target, results[0].target)
        assert result.num_held == results[0].num_held
    return results[0]


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from(list(CODECS)),
    head_dim=st.sampled_from([8, 24, 64, 80, 160]),
    is_calibrated=st.booleans(),
    has_metric=st.booleans(),
    seed=st.integers(0, 10_000),
    exponent=st.integers(-140, 30),
    token=st.integers(0, SPAN - 1),
    channel=st.integers(0, 7),
    outlier=st.sampled_from([0.0, 1.0, 30.0, 1000.0, -1e6]),
    offset=st.sampled_from([0.0, 1.0, -50.0]),
)
def test_bounds_hold_whatever_sticks_out_and_all_write_the_same_bytes(
    name: str,
    head_dim: int,
    is_calibrated: bool,
    has_metric: bool,
    seed: int,
    exponent: int,
    token: int,
    channel: int,
    outlier: float,
    offset: float,
) -> None:
    sizes = Sizes(1, 2, SPAN, head_dim)
    transforms = calibrated(sizes, seed) if is_calibrated else plain(sizes)
    transforms = with_metric(transforms, seed) if has_metric else transforms
    block = np.random.default_rng(seed).normal(size=(1, 2, 2, SPAN, head_dim))
    block[..., channel] += outlier
    block[..., token, :] *= max(1.0, abs(outlier) / 10)
    block = as_bfloat16((block + offset) * 2.0**exponent)
    records, held = every_isa_agrees(name, block, transforms)
    assert_within_bounds(CODECS[name], records, block, transforms)
    largest = max(np.abs(x).max() for x in turned(model_rows(block), transforms))
    if largest < 0.99 * CODECS[name].reach_of_keys:
        assert held == 0


@pytest.mark.parametrize("name", CODECS)
def test_zeros_are_exact_and_so_are_constants_that_have_a_step(isa: str, name: str) -> None:
    sizes = Sizes(1, 2, SPAN, 64)
    zeros = np.zeros((1, 2, 2, SPAN, 64), np.float32)
    for transforms in (plain(sizes), replace(calibrated(sizes), mean=plain(sizes).mean)):
        records = encode_block(name, zeros, transforms).target
        assert not reference_block(name, records, transforms).any()
    transforms = plain(sizes)
    for constant in (1.0, -3.0, 0.125, 100.0):
        block = zeros + np.float32(constant)
        stored = CODECS[name].decode_turned(encode_block(name, block, transforms).target, 64).keys
        np.testing.assert_allclose(stored, constant, rtol=1e-6)
    # Half of half a step, the zero point at 110 steps and more.
    constants = as_bfloat16(np.logspace(-4, 4, 64)[None])[0]
    block = zeros + constants
    stored = CODECS[name].decode_turned(encode_block(name, block, transforms).target, 64).keys
    assert (np.abs(stored - constants) <= 0.0025 * constants + 1e-6 * constants.max()).all()


@pytest.mark.parametrize("name", CODECS)
def test_channels_far_from_zero_are_encoded_as_the_reference_does_it(isa: str, name: str) -> None:
    """Where the zero point cannot reach the middle at the step that the range asks for."""
    sizes = Sizes(1, 1, SPAN, 64)
    transforms, codec = plain(sizes), CODECS[name]
    generator = np.random.default_rng(2)
    block = generator.normal(size=(1, 2, 1, SPAN, 64)) / 16
    block[:, 0] += generator.choice([-1.0, 1.0], 64) * generator.uniform(10, 20, 64)
    block = as_bfloat16(block)
    records = encode_block(name, block, transforms).target
    assert_within_bounds(codec, records, block, transforms)
    reference = codec.encode(model_rows(block), transforms).records
    errors = squared_errors(codec, records, block, transforms)
    assert (errors <= 1.01 * squared_errors(codec, reference, block, transforms)).all()
    near = as_bfloat16(generator.normal(size=(SPAN, 32)))
    block[0, 0, 0, :, ::2] = near
    mixed = encode_block(name, block, transforms).target
    block[0, 0, 0, :, 1::2] = 0
    alone = encode_block(name, block, transforms).target
    steps = slice(0, 64, 2)
    # The choice for a channel does not depend on others'.
    assert (mixed[..., steps] == alone[..., steps]).mean() > 0.9


@pytest.mark.parametrize("name", CODECS)
def test_one_outlier_leaves_other_channels_of_k_and_other_positions_of_v_alone(
    isa: str, name: str
) -> None:
    sizes = Sizes(1, 1, SPAN, 64)
    transforms, codec = plain(sizes), CODECS[name]
    block = random_block(sizes)
    before = codec.decode_turned(encode_block(name, block, transforms).target, 64)
    block[0, 0, 0, 9, 5] = 1000.0
    block[0, 1, 0, 7] *= 1000
    after = codec.decode_turned(encode_block(name, block, transforms).target, 64)
    others = np.arange(64) != 5
    # The outlier's rounding is turned into the others'.
    step = np.ptp(block[0, 0, 0, :, others], axis=-1) / (2**codec.bits - 1)
    moved = np.abs(after.keys - before.keys)[0, 0][:, others].max(axis=0)
    assert (moved <= 1.2 * step).all()
    positions = np.arange(SPAN) != 7
    np.testing.assert_array_equal(after.values[0, 0, positions], before.values[0, 0, positions])


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("make", [plain, plain_with_metric])
@pytest.mark.parametrize("value", [2.0**-149, 2.0**-133, 2.0**-126, 2.0**-30])
def test_denormals_give_zeros_and_no_noise(isa: str, name: str, make: object, value: float) -> None:
    sizes = Sizes(1, 1, SPAN, 80)
    transforms = make(sizes)
    block = np.full((1, 2, 1, SPAN, 80), value, np.float32)
    records, held = encode_block(name, block, transforms)
    assert held == 0
    assert np.abs(reference_block(name, records, transforms)).max() <= value * 9


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("wrong", [np.inf, -np.inf, np.nan, 3e38])
@pytest.mark.parametrize("position", [0, SPAN + 17])
@pytest.mark.parametrize("make", [calibrated, calibrated_with_metric])
def test_what_is_not_finite_reads_as_nan_and_touches_nothing_else(
    isa: str, name: str, wrong: float, position: int, make: object
) -> None:
    """A key that is not finite makes NaN of its span in its head, a value of its position. Neither is held."""
    sizes = Sizes(2, 2, 2 * SPAN, 64)
    transforms = make(sizes)
    block = random_block(sizes)
    before = encode_block(name, block, transforms).target
    # Where the turned sum overflows whatever the signs.
    block[1, :, 0, position, :] = np.float32(wrong) * np.sign(rotation(64)[:, 3])
    block[1, 0, 0, position, :] = np.float32(wrong) * np.sign(rotation(64)[3])
    records, held = encode_block(name, block, transforms)
    assert held == 0
    changed = np.zeros(before.shape[:3], bool)
    changed[1, position // SPAN, 0] = True
    np.testing.assert_array_equal(records[~changed], before[~changed])
    record = records[1, position // SPAN, 0]
    grid = 2 * 64 + 32 * CODECS[name].bits * 16
    assert (record[:64] == 255).all()
    assert not record[64:grid].any()
    scales = record[grid : grid + SPAN]
    assert scales[position % SPAN] == 255
    assert (scales == 255).sum() == 1
    decoded = reference_block(name, records, transforms)
    is_nan = np.zeros(decoded.shape, bool)
    is_nan[1, 0, 0, position // SPAN * SPAN :][:SPAN] = True
    is_nan[1, 1, 0, position] = True
    np.testing.assert_array_equal(np.isnan(decoded), is_nan)
    for target in ("raw16", "int8"):
        back, _ = recode(records, name, target, sizes, transforms)
        rows = decode(target, back.reshape(*decoded.shape[:-1], -1), 64)
        np.testing.assert_array_equal(np.isnan(rows), is_nan)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("make", [plain, plain_with_metric])
def test_what_is_beyond_reach_is_held_and_counted(isa: str, name: str, make: object) -> None:
    sizes, codec = Sizes(1, 1, SPAN, 64), CODECS[name]
    transforms = make(sizes)
    block = np.zeros((1, 2, 1, SPAN, 64), np.float32)
    block[0, 0, 0, 3, 5], block[0, 0, 0, 4, 5], block[0, 0, 0, 3, 6] = 1e6, -1e7, 1000.0
    values = np.zeros((1, 1, SPAN, 64), np.float32)
    values[..., 3, 5], values[..., 4, 5] = -1e7, 1000.0
    block[:, 1] = as_bfloat16(transforms.values.turn_back(values))
    records, held = encode_block(name, block, transforms)
    expected = codec.encode(model_rows(block), transforms)
    assert held == expected.num_held == 3
    stored = codec.decode_turned(records, 64)
    for position, sign in ((3, 1), (4, -1)):
        error = stored.keys[0, 0, position, 5] - sign * codec.reach_of_keys
        assert abs(error) <= LARGEST
    reference = codec.decode_turned(expected.records, 64)
    # At half the largest scale the other components, near 0, may win more than the held one loses.
    assert stored.values[0, 0, 3, 5] == reference.values[0, 0, 3, 5] <= -0.5 * codec.reach_of_values
    assert abs(stored.keys[0, 0, 3, 6] - 1000.0) <= 1000.0 / (2**codec.bits - 1)
    huge = np.full_like(block, 1e30)
    records, held = encode_block(name, huge, transforms)
    assert held > 0
    assert np.isfinite(reference_block(name, records, transforms)).all()
    assert 255 not in records[..., :64]


# --- feedback


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_errors_are_fed_back_as_the_reference_does_it(isa: str, name: str, head_dim: int) -> None:
    sizes = Sizes(2, 2, SPAN, head_dim)
    codec, transforms, block = CODECS[name], calibrated_with_metric(sizes), random_block(sizes)
    start = 5 * SPAN
    records, held = encode_block(name, block, transforms, start=start)
    assert held == 0
    assert_within_bounds(codec, records, block, transforms)
    reference = codec.encode(model_rows(block), transforms, start).records
    cost = cost_to_queries(codec, records, block, transforms, start)
    assert cost <= 1.01 * cost_to_queries(codec, reference, block, transforms, start)
    # What is half-way goes either way, and takes the channels after it along.
    assert (records == reference).mean() > 0.98
    alone = encode_block(name, block, replace(transforms, key_metric=None)).target
    assert cost < 0.4 * cost_to_queries(codec, alone, block, transforms, start)
    # Steps, zero points and V do not depend on it.
    codes = slice(2 * head_dim, 2 * head_dim + 8 * codec.bits * head_dim)
    np.testing.assert_array_equal(
        np.delete(records, codes, axis=-1), np.delete(alone, codes, axis=-1)
    )


@pytest.mark.parametrize("name", CODECS)
def test_each_span_has_the_feedback_of_its_own_position(isa: str, name: str) -> None:
    sizes = Sizes(2, 2, 2 * SPAN, 64)
    transforms, block = calibrated_with_metric(sizes), random_block(sizes)
    both = encode_block(name, block, transforms, start=1280).target
    for span, start in enumerate((1280, 1344)):
        part = np.ascontiguousarray(block[:, :, :, span * SPAN :][:, :, :, :SPAN])
        own = encode_block(name, part, transforms, start=start).target
        np.testing.assert_array_equal(own[:, 0], both[:, span])
        elsewhere = encode_block(name, part, transforms, start=start + 64).target
        costs = [
            cost_to_queries(CODECS[name], records, part, transforms, start)
            for records in (own, elsewhere)
        ]
        assert costs[0] < 0.9 * costs[1]


@pytest.mark.parametrize("name", CODECS)
def test_a_block_has_the_same_bytes_wherever_it_was_encoded_from(isa: str, name: str) -> None:
    """What int8 holds exactly is the same block in raw16."""
    sizes = Sizes(1, 2, SPAN, 64)
    transforms = calibrated_with_metric(sizes)
    block = np.random.default_rng(0).integers(-127, 128, (1, 2, 2, SPAN, 64)).astype(np.float32)
    block[..., 0] = 127
    results = [
        recode(bytes_of(source, block), source, name, sizes, transforms, start=640).target
        for source in ("raw16", "int8")
    ]
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("name", CODECS)
def test_zeros_are_exact_with_feedback_and_constants_off_by_a_step_at_most(
    isa: str, name: str
) -> None:
    sizes, codec = Sizes(1, 1, SPAN, 64), CODECS[name]
    transforms = plain_with_metric(sizes)
    zeros = np.zeros((1, 2, 1, SPAN, 64), np.float32)
    assert not reference_block(name, encode_block(name, zeros, transforms).target, transforms).any()
    block = zeros + as_bfloat16(np.logspace(-4, 4, 64)[None])[0]
    records = encode_block(name, block, transforms, start=128).target
    assert_within_bounds(codec, records, block, transforms)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("kind", ["zero", "tiny", "huge", "overflowing", "no metric"])
def test_a_metric_that_is_none_moves_codes_within_their_bounds(name: str, kind: str) -> None:
    sizes = Sizes(1, 2, SPAN, 64)
    transforms, block = calibrated_with_metric(sizes), random_block(sizes)
    assert transforms.key_metric is not None
    metric = transforms.key_metric.metric.copy()
    if kind == "no metric":
        metric -= 3 * metric.mean() * (1 - np.eye(64, dtype=np.float32))
        metric[..., 5, 5] = 0
    factor = {"zero": 0.0, "tiny": 1e-40, "huge": 1e20, "overflowing": 1e36}.get(kind, 1.0)
    metric = metric.astype(np.float64)
    metric = (metric * factor).clip(-3e38, 3e38).astype(np.float32)
    hostile = replace(transforms, key_metric=replace(transforms.key_metric, metric=metric))
    records, held = every_isa_agrees(name, block, hostile, start=SPAN)
    assert held == 0
    assert_within_bounds(CODECS[name], records, block, hostile)
    if kind == "zero":
        alone = encode_block(name, block, replace(transforms, key_metric=None)).target
        np.testing.assert_array_equal(records, alone)
    if kind == "huge":
        expected = encode_block(name, block, transforms, start=SPAN).target
        assert (records == expected).mean() > 0.97


def test_metrics_that_do_not_fit_are_refused() -> None:
    transforms = calibrated_with_metric(Sizes(2, 3, SPAN, 16))
    assert transforms.key_metric is not None
    metric, frequencies = transforms.key_metric.metric, transforms.key_metric.frequencies
    plain_parts = (transforms.mean, transforms.keys.balance, transforms.values.balance)

    def changed(array: np.ndarray, value: float) -> np.ndarray:
        copy = array.copy()
        copy[1, ..., 4, 4] = value
        return copy

    for parts, message in [
        ((metric, None), "key_metric and frequencies go together"),
        ((None, frequencies), "key_metric and frequencies go together"),
        ((metric[:1].copy(), frequencies), r"key_metric must be \(L, K, D, D\)"),
        ((metric[..., :8, :8].copy(), frequencies), r"key_metric must be \(L, K, D, D\)"),
        ((metric, frequencies[:1].copy()), r"frequencies must be \(L, D / 2\)"),
        ((metric, np.zeros((2, 16))), r"frequencies must be \(L, D / 2\)"),
        ((changed(metric, np.nan), frequencies), "must be finite"),
        ((changed(metric, np.inf), frequencies), "must be finite"),
        ((metric, np.full_like(frequencies, np.inf)), "must be finite"),
        ((changed(metric, -1.0), frequencies), "must not be below 0, received -1.0"),
    ]:
        with pytest.raises(ValueError, match=message):
            _native.KvTransforms(*plain_parts, *parts)
    with pytest.raises(TypeError):
        _native.KvTransforms(*plain_parts, metric.astype(np.float64), frequencies)


# --- between codecs


@pytest.mark.parametrize("source", ALL)
@pytest.mark.parametrize("target", ALL)
@pytest.mark.parametrize("head_dim", [8, 64, 80])
def test_every_codec_becomes_every_other(isa: str, source: str, target: str, head_dim: int) -> None:
    sizes = Sizes(2, 3, 2 * SPAN, head_dim)
    transforms, block = calibrated(sizes), random_block(sizes)
    shape = block.shape[:-1]
    if source in CODECS:
        held = encode_block(source, block, transforms).target
        exact = reference_block(source, held, transforms)
    else:
        held = encode(source, block)
        exact = decode(source, held, head_dim).astype(np.float32)
    result, num_held = recode(held, source, target, sizes, transforms)
    assert num_held == 0
    if source == target:
        np.testing.assert_array_equal(result, held.reshape(-1))
    elif target in CODECS:
        codec, records = CODECS[target], records_of(result, sizes)
        assert_within_bounds(codec, records, exact, transforms)
        reference = codec.encode(model_rows(exact), transforms).records
        errors = squared_errors(codec, records, exact, transforms)
        expected = squared_errors(codec, reference, exact, transforms)
        # A range in the middle of two steps may take either, as rows that were decoded are rounded.
        assert (errors <= 1.03 * expected + 1e-9 * np.square(exact).sum()).all()
    else:
        got = decode(target, result.reshape(*shape, -1), head_dim)
        expected = decode(target, encode(target, exact), head_dim)
        largest = np.abs(exact).max(axis=-1, keepdims=True)
        step = 2.0**-7 * np.abs(exact) if target == "raw16" else largest / 127
        assert (np.abs(got - expected) <= 1.01 * step + ROUNDING * largest).all()
        assert (got == expected).mean() > 0.9


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("target", ["raw16", "int8"])
@pytest.mark.parametrize("num_tokens", [0, 1, 63, 64, 65, 128, 191])
def test_heads_of_blocks_are_copied_into_rows(
    isa: str, name: str, target: str, num_tokens: int
) -> None:
    sizes = Sizes(2, 2, 3 * SPAN, 24)
    transforms = calibrated(sizes)
    records = encode_block(name, random_block(sizes), transforms).target
    whole, _ = recode(records, name, target, sizes, transforms)
    part, _ = recode(records, name, target, sizes, transforms, num_tokens=num_tokens)
    shape = (2, 2, 2, 3 * SPAN, -1)
    whole, part = whole.reshape(shape), part.reshape(shape)
    np.testing.assert_array_equal(part[..., :num_tokens, :], whole[..., :num_tokens, :])
    assert (part[..., num_tokens:, :] == 0xEE).all()


@pytest.mark.parametrize("source", ["raw16", "int4"])
@pytest.mark.parametrize("target", ["raw16", "int4", "int3"])
@pytest.mark.parametrize("make", [calibrated, calibrated_with_metric])
def test_threads_and_instruction_sets_give_the_same_bytes(
    source: str, target: str, make: object
) -> None:
    sizes = Sizes(5, 3, 2 * SPAN, 96)
    transforms, block = make(sizes), random_block(sizes)
    held = bytes_of("raw16", block)
    if source in CODECS:
        held = encode_block(source, block, transforms).target
    before = _native.isa()
    results = []
    try:
        for other in _native.isas():
            _native.force_isa(other)
            results += [
                recode(held, source, target, sizes, transforms, threads=threads).target
                for threads in POOLS
            ]
    finally:
        _native.force_isa(before)
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def test_equal_codecs_are_copied_without_transforms() -> None:
    sizes = Sizes(2, 2, SPAN, 8)
    held = np.random.default_rng(0).integers(0, 256, block_bytes("int3", sizes)).astype(np.uint8)
    np.testing.assert_array_equal(recode(held, "int3", "int3", sizes, None).target, held)


def test_what_does_not_fit_is_refused() -> None:
    sizes = Sizes(2, 2, SPAN, 8)
    source = bytes_of("raw16", random_block(sizes))
    packed = np.zeros(block_bytes("int4", sizes), np.uint8)
    good = {
        "source": source,
        "target": packed,
        "source_codec": "raw16",
        "target_codec": "int4",
        **sizes._asdict(),
        "num_tokens": SPAN,
        "transforms": plain(sizes).to_native(),
    }
    back = {
        "source": packed,
        "target": source.copy(),
        "source_codec": "int4",
        "target_codec": "raw16",
    }
    assert _native.recode_block(POOLS[1], **good) == 0
    assert _native.recode_block(POOLS[1], **{**good, **back}) == 0
    for changed, message in [
        ({"transforms": None}, "transforms are needed between raw16 and int4"),
        ({**back, "transforms": None}, "transforms are needed between int4 and raw16"),
        (
            {"transforms": plain(sizes._replace(num_layers=1)).to_native()},
            "transforms must be of 2",
        ),
        ({"transforms": plain(sizes._replace(head_dim=16)).to_native()}, "transforms must be of 2"),
        ({"num_tokens": SPAN - 1}, "num_tokens must be the whole block of 64 .*int4, received 63"),
        ({"num_tokens": 0}, "num_tokens must be the whole block"),
        ({"num_tokens": SPAN + 1}, "within a block of 64"),
        ({"block_size": 96, "num_tokens": 96}, "block_size must be a multiple of 64 for int4"),
        ({**back, "block_size": 32, "num_tokens": 8}, "block_size must be a multiple of 64"),
        ({"block_size": 2 * SPAN, "num_tokens": 2 * SPAN}, "the source must have"),
        ({"target": packed[1:]}, "the target must have the 2368 bytes"),
        ({"target_codec": "int3"}, "the target must have the 1856 bytes"),
        ({"target_codec": "int5"}, "raw16, int8, int4 or int3"),
        ({"start": -64}, "start must be the position of the block's first token, received -64"),
    ]:
        with pytest.raises(ValueError, match=message):
            _native.recode_block(POOLS[1], **{**good, **changed})
    with pytest.raises(TypeError):
        _native.recode_block(POOLS[1], **{**good, "transforms": plain(sizes)})
