"""Attention over blocks in int4 and int3, alone and beside blocks of rows, against float64 on what they hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

_native = pytest.importorskip("kvist._native", reason="the native extension is not built")

from tests.native.test_attention import POOLS, draw_tables  # noqa: E402
from tests.native.test_mixed_blocks import (  # noqa: E402
    CODECS,
    MixedStep,
    codecs_of,
    error_of,
    step_of,
)

from kvist.bench.kernels import (  # noqa: E402  # after the extension was found
    AttentionSizes,
    StepKind,
    check_attention,
    make_step,
)
from kvist.codecs import e5m3  # noqa: E402  # after the extension was found
from kvist.codecs.packing import pack  # noqa: E402
from kvist.codecs.rotated import LEVELS  # noqa: E402
from kvist.errors import BenchError  # noqa: E402
from kvist.kernels.rotation import rotation  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BITS = {"int4": 4, "int3": 3}
SPAN = 64
NAN = 255
NOT_ALLOCATED = 255
# Of the range of the values. The contract is 2e-3 wherever kernels use fixed point; few rows do better.
TOLERANCE = {"serial": 1e-5, "avx2": 2e-3, "avx512": 2e-3, "neon": 1e-5}
FEW_ROWS_TOLERANCE = {"serial": 1e-5, "avx2": 6e-4, "avx512": 6e-4, "neon": 1e-5}
PATTERNS: dict[str, Callable[[int, int], str]] = {
    "int4": lambda i, n: "int4" if i < n - 1 else "raw16",
    "int3": lambda i, n: "int3" if i < n - 1 else "raw16",
    "by age": lambda i, n: "int8" if i == 0 or i == n - 2 else "raw16" if i == n - 1 else "int4",
    "all in turn": lambda i, n: CODECS[(i + 1) % 4] if i < n - 1 else "raw16",
}


@pytest.fixture(params=_native.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _native.isa()
    _native.force_isa(request.param)
    yield request.param
    _native.force_isa(before)


@dataclass
class Parts:
    """What the records of a block say: leading axes (L, spans, K)."""

    steps: np.ndarray
    """(..., D) e5m3 bytes."""
    zeros: np.ndarray
    """(..., D) int8."""
    key_codes: np.ndarray
    """(..., 64, D)."""
    scales: np.ndarray
    """(..., 64) e5m3 bytes."""
    value_codes: np.ndarray
    """(..., D, 64)."""

    def records(self, bits: int) -> np.ndarray:
        return np.concatenate(
            [
                self.steps,
                self.zeros.view(np.uint8),
                pack(self.key_codes, bits),
                self.scales,
                pack(self.value_codes, bits),
            ],
            axis=-1,
        )

    def turned(self, bits: int) -> tuple[np.ndarray, np.ndarray]:
        """Return K and V in their own basis, (..., 64, D) float64."""
        step, scale = numbers(self.steps)[..., None, :], numbers(self.scales)[..., None]
        keys = step * (self.key_codes + self.zeros[..., None, :] / 2.0)
        values = scale * LEVELS[bits].astype(np.float64)[np.swapaxes(self.value_codes, -1, -2)]
        return keys, values


def numbers(stored: np.ndarray) -> np.ndarray:
    return np.where(stored == NAN, np.nan, e5m3.VALUES[stored].astype(np.float64))


def usual(rng: np.random.Generator, outer: tuple[int, ...], head_dim: int, bits: int) -> Parts:
    """Return parts whose keys and values are about 1: steps and scales of a few binades, ranges around 0."""
    zeros = -(2**bits - 1) + rng.integers(-3, 4, (*outer, head_dim))
    return Parts(
        steps=e5m3.nearest(2.0 ** rng.uniform(-4.5, -1, (*outer, head_dim))).astype(np.uint8),
        zeros=zeros.astype(np.int8),
        key_codes=rng.integers(0, 2**bits, (*outer, SPAN, head_dim), np.uint8),
        scales=e5m3.nearest(2.0 ** rng.uniform(-8, -5, (*outer, SPAN))).astype(np.uint8),
        value_codes=rng.integers(0, 2**bits, (*outer, head_dim, SPAN), np.uint8),
    )


@dataclass
class SpanStep(MixedStep):
    """A step over blocks of rows and of records."""

    change: Callable[[Parts], None] | None = None
    """Changes what the records of int4 and int3 say."""

    def prepare(self, rng: np.random.Generator) -> None:
        shape = (self.num_layers, self.num_kv_heads, self.head_dim)
        self.mean = rng.standard_normal(shape, np.float32)
        self.key_balance = np.exp2(rng.uniform(-1, 1, shape)).astype(np.float32)
        self.value_balance = np.exp2(rng.uniform(-1, 1, shape)).astype(np.float32)
        self.transforms = _native.KvTransforms(self.mean, self.key_balance, self.value_balance)

    def make_block(self, block_id: int, rng: np.random.Generator) -> np.ndarray:
        codec, outer = self.codecs[block_id], (self.num_layers, self.num_kv_heads)
        if codec not in BITS:
            return super().make_block(block_id, rng)
        bits, spans = BITS[codec], self.block_size // SPAN
        parts = usual(rng, (self.num_layers, spans, self.num_kv_heads), self.head_dim, bits)
        if self.change is not None:
            self.change(parts)
        with np.errstate(invalid="ignore"):
            keys, values = (
                np.swapaxes(x, 1, 2).reshape(*outer, self.block_size, self.head_dim)
                for x in parts.turned(bits)
            )
            turn = rotation(self.head_dim).astype(np.float64)
            keys = keys @ turn.T / self.key_balance[:, :, None] + self.mean[:, :, None]
            self.keys[block_id] = keys @ turn
            self.values[block_id] = values @ turn.T / self.value_balance[:, :, None]
        return parts.records(bits).reshape(-1)

    def layout(self) -> dict[str, object]:
        return {**super().layout(), "transforms": self.transforms}


def check(step: SpanStep, isa: str, threads: int = 1) -> None:
    error = error_of(step, threads)
    assert error <= TOLERANCE[isa], f"{error=:.2e}"


def private_step(
    pattern: str, num_rows: list[int], context_lens: list[int], **more: object
) -> SpanStep:
    sizes = {"block_size": SPAN, **more}
    return step_of(SpanStep, PATTERNS[pattern], num_rows, context_lens, **sizes)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("head_dim", [8, 32, 64, 72, 80, 96, 128, 192, 256])
def test_head_dims(isa: str, pattern: str, head_dim: int) -> None:
    more = {"head_dim": head_dim, "num_heads": 4, "num_layers": 1, "layer": 0}
    check(private_step(pattern, [1, 3, 5], [200, 150, 290], **more), isa)


@pytest.mark.parametrize("pattern", ["int4", "int3"])
@pytest.mark.parametrize("heads", [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (8, 2), (14, 2)])
def test_head_groups_and_numbers_of_rows(isa: str, pattern: str, heads: tuple[int, int]) -> None:
    more = {"num_heads": heads[0], "num_kv_heads": heads[1], "block_size": 128}
    check(private_step(pattern, [1, 2, 7, 30], [300, 270, 200, 290], **more), isa, threads=2)


@pytest.mark.parametrize("pattern", ["int4", "int3", "by age"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_long_contexts_are_split_over_threads(isa: str, pattern: str, threads: int) -> None:
    step = private_step(pattern, [1, 7], [2500, 1100], num_heads=3, num_kv_heads=1)
    check(step, isa, threads)


@pytest.mark.parametrize("spread", [0.1, 1.0, 3.0, 10.0])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_few_rows_are_well_within_the_tolerance(isa: str, spread: float, num_rows: int) -> None:
    """Flat and sharp attention alike: what is rounded more coarsely must not matter."""
    for pattern in ("int4", "int3"):
        more = {"num_heads": 3, "num_kv_heads": 1, "spread": spread}
        step = private_step(pattern, [num_rows], [1500], **more)
        assert error_of(step) <= FEW_ROWS_TOLERANCE[isa]


@pytest.mark.parametrize("pattern", ["int4", "all in turn"])
@pytest.mark.parametrize("window", [1, 50, 64, 100, 333])
def test_windows(isa: str, pattern: str, window: int) -> None:
    step = private_step(pattern, [1, 1, 40, 3], [500, 60, 400, 321], window=window)
    check(step, isa, threads=2)


@pytest.mark.parametrize("pattern", ["int4", "int3", "all in turn"])
@pytest.mark.parametrize("block_size", [64, 128, 192])
def test_rows_inside_blocks_of_codes(isa: str, pattern: str, block_size: int) -> None:
    """The limits by cause and by the end of a context fall into the middle of spans."""
    tables = [[0, 1, 2], [0, 3], [0, 1, 2, 4]]
    lengths = [3 * block_size - 7, 2 * block_size - 30, 3 * block_size + 1]
    codecs = [CODECS[(2 + i) % 4] if pattern == "all in turn" else pattern for i in range(5)]
    for num_rows in ([1, 1, 1], [70, 5, 20]):
        step = SpanStep(4, 2, 64, block_size, num_rows, lengths, tables, codecs)
        check(step, isa, threads=2)


@pytest.mark.parametrize("pattern", ["int4", "all in turn"])
def test_softcap(isa: str, pattern: str) -> None:
    check(private_step(pattern, [1, 40, 3], [400, 190, 270], softcap=2.0), isa)


@pytest.mark.parametrize("pattern", ["int3", "by age"])
def test_prefixes_that_several_sequences_share(isa: str, pattern: str) -> None:
    root, branch = list(range(4)), list(range(4, 9))
    tables = [[*root, *branch, 20], [*root, *branch, 21, 22], [*root, 30, 31], [40, 41]]
    tables += [[*root, *branch, 23 + i] for i in range(6)]
    lengths = [64 * len(table) - 3 for table in tables]
    num_rows = [1, 2, 1, 1, 3, 1, 1, 1, 1, 20]
    check(
        SpanStep(6, 2, 64, 64, num_rows, lengths, tables, codecs_of(tables, PATTERNS[pattern])), isa
    )


def test_a_uniform_arena_needs_no_tables(isa: str) -> None:
    step = private_step("int4", [1, 3], [256, 192], num_layers=1, layer=0)
    step = SpanStep(
        6, 2, 64, 64, [1, 3], [256, 192], step.tables, ["int4"] * len(step.codecs), 0, 0.0, 1, 0
    )
    size = 2 * (2 * 64 + 64 + 16 * 64 * 4)
    uniform = np.stack([step.arena[0, at : at + size] for at in step.offsets])
    layout = {**step.layout(), "codec": "int4", "offsets": None, "codecs": None}
    out = _native.attention(
        POOLS[1], step.queries, uniform, num_layers=1, layer=0, scale=64**-0.5, **layout
    )
    np.testing.assert_array_equal(out, step.run())


# --- extremes


def no_steps(parts: Parts) -> None:
    parts.steps[:] = 0
    parts.zeros[:] = 0


def no_scales(parts: Parts) -> None:
    parts.scales[:] = 0


def smallest_numbers(parts: Parts) -> None:
    parts.steps[:] = np.arange(parts.steps.shape[-1]) % 9
    parts.scales[:] = np.arange(SPAN) % 9


def largest_steps(parts: Parts) -> None:
    parts.steps[..., 1::7] = 254
    parts.zeros[..., 1::14] = 127
    parts.zeros[..., 8::14] = -128


def largest_scales(parts: Parts) -> None:
    parts.scales[:] = 254


def one_scale_sticks_out(parts: Parts) -> None:
    parts.scales[..., 5] = 254


def constant_keys(parts: Parts) -> None:
    """Every product is as large as it can be, and of one sign."""
    parts.key_codes[:] = parts.key_codes.max()
    parts.steps[:] = 140


def constant_values(parts: Parts) -> None:
    parts.value_codes[..., ::2, :] = 0
    parts.value_codes[..., 1::2, :] = parts.value_codes.max()


def a_key_that_takes_all(parts: Parts) -> None:
    parts.steps[:] += 8
    parts.key_codes[..., 1:, :] = parts.key_codes.max() // 2
    parts.key_codes[..., 0, :] = parts.key_codes.max()


@pytest.mark.parametrize("pattern", ["int4", "int3"])
@pytest.mark.parametrize(
    "change",
    [
        no_steps,
        no_scales,
        smallest_numbers,
        largest_scales,
        one_scale_sticks_out,
        constant_keys,
        constant_values,
        a_key_that_takes_all,
    ],
)
def test_extremes(isa: str, pattern: str, change: Callable[[Parts], None]) -> None:
    for num_rows in (1, 40):
        check(private_step(pattern, [num_rows], [700], change=change), isa)


@pytest.mark.parametrize("pattern", ["int4", "int3"])
def test_the_largest_steps(isa: str, pattern: str) -> None:
    for num_rows in (1, 40):
        check(private_step(pattern, [num_rows], [700], spread=1e-3, change=largest_steps), isa)
        # Which of two keys wins is not known to float32 any more.
        step = private_step(pattern, [num_rows], [700], spread=30.0, change=largest_steps)
        assert np.abs(step.run()).max() <= step.value_range() * 1.001


def test_queries_of_zeros_and_of_any_size(isa: str) -> None:
    for spread in (0.0, 1e-30, 1e-38, 1e4):
        check(private_step("int4", [1, 20], [400, 300], spread=spread), isa)


@pytest.mark.parametrize("pattern", ["int4", "int3"])
@pytest.mark.parametrize("num_rows", [1, 2, 40])
@pytest.mark.parametrize("part", ["steps", "scales"])
@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_what_is_no_number_reaches_the_rows_that_see_it(
    isa: str, pattern: str, num_rows: int, part: str, softcap: float
) -> None:
    def spoil(parts: Parts) -> None:
        getattr(parts, part)[1, 0, 1, 9] = NAN

    step = private_step(pattern, [num_rows], [700], softcap=softcap, change=spoil)
    out = step.run()
    group = step.num_heads // step.num_kv_heads
    assert np.isfinite(out[:, :group]).all()
    assert not np.isfinite(out[:, group:]).all(axis=-1).any()


def test_rows_whose_window_is_past_what_is_no_number_are_whole(isa: str) -> None:
    def spoil(parts: Parts) -> None:
        parts.scales[1, 0, :, 9] = NAN

    step = private_step("int4", [40], [240], window=150, change=spoil)
    whole = np.isfinite(step.run()).all(axis=(1, 2))
    # Of the three blocks of codes the window of the last rows begins in the second, past its tenth position.
    oldest = np.arange(200, 240) - 149
    np.testing.assert_array_equal(whole, (oldest > 64 + 9) & (oldest > 128 + 9))


# --- any step


@st.composite
def random_steps(draw: st.DrawFn) -> SpanStep:
    block_size = draw(st.sampled_from([64, 64, 128]))
    num_kv_heads = draw(st.integers(1, 2))
    drawn = draw_tables(draw, block_size, max_sequences=5, max_fresh=6, max_rows=20)
    codecs = st.lists(st.sampled_from(CODECS), min_size=drawn.num_blocks, max_size=drawn.num_blocks)
    return SpanStep(
        num_heads=num_kv_heads * draw(st.integers(1, 4)),
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.sampled_from([8, 32, 64, 80, 96])),
        block_size=block_size,
        num_rows=drawn.num_rows,
        context_lens=drawn.context_lens,
        tables=drawn.tables,
        codecs=draw(codecs),
        window=draw(st.sampled_from([0, 0, 30, 200])),
        softcap=draw(st.sampled_from([0.0, 0.0, 20.0])),
        num_layers=1,
        layer=0,
        seed=draw(st.integers(0, 1000)),
        spread=draw(st.sampled_from([0.3, 2.0, 6.0])),
    )


@settings(max_examples=40, deadline=None)
@given(step=random_steps(), threads=st.integers(1, 3))
def test_random_tables(step: SpanStep, threads: int) -> None:
    before = _native.isa()
    try:
        for name in _native.isas():
            _native.force_isa(name)
            check(step, name, threads)
    finally:
        _native.force_isa(before)


# --- what is refused


def test_blocks_of_codes_that_cannot_be_read_are_refused() -> None:
    step = private_step("int4", [1], [200])
    step.run()
    other = private_step("int4", [1], [200], num_layers=1, layer=0)
    size = step.arena.size
    moved = step.offsets.copy()
    moved[step.tables[0][0]] = size - 100
    for changed, message in [
        ({"transforms": None}, "int4 blocks cannot be read without transforms"),
        ({"transforms": other.transforms}, "transforms must be of 2 layers, 2 KV heads and 64"),
        (
            {
                "block_size": 32,
                "block_ids": np.repeat(step.layout()["block_ids"], 2),
                "table_starts": np.array([0, 8], np.int32),
            },
            "a multiple of 64 positions",
        ),
        ({"offsets": moved}, "not in an arena"),
        ({"codecs": np.full_like(step.codes, 4)}, "the codec 4, which is none"),
    ]:
        with pytest.raises(ValueError, match=message):
            step.run(**changed)


def test_transforms_that_make_no_sense_are_refused() -> None:
    good = np.ones((2, 3, 8), np.float32)
    _native.KvTransforms(good, good, good)
    bad = good.copy()
    for value, places in [(np.nan, (0, 1, 2)), (np.inf, (0, 1, 2)), (0.0, (1, 2)), (-1.0, (1, 2))]:
        bad[1, 2, 3] = value
        for place in places:
            with pytest.raises(ValueError, match="finite, and balances above 0"):
                _native.KvTransforms(*(bad if i == place else good for i in range(3)))
    bad[:] = -1.0
    _native.KvTransforms(bad, good, good)
    with pytest.raises(ValueError, match="the same shape"):
        _native.KvTransforms(good, good[:1], good)
    with pytest.raises(TypeError):
        _native.KvTransforms(good.astype(np.float64), good, good)


def test_rows_are_not_written_in_codecs_of_spans() -> None:
    x = np.ones((1, 1, 8), np.float32)
    for codec in BITS:
        with pytest.raises(ValueError, match="rows are written in raw16 or int8"):
            _native.encode_kv(codec, x)


@pytest.mark.parametrize("codec", BITS)
def test_what_the_benchmark_times_is_checked_first(isa: str, codec: str) -> None:
    sizes = AttentionSizes(num_heads=3, num_kv_heads=1, head_dim=64)
    step = make_step(_native, sizes, StepKind(codec, [1, 3], [[0, 1], [0, 2]]), 2)
    check_attention(_native, POOLS[1], step)
    step.arena[:, 200:] ^= 0x11
    with pytest.raises(BenchError, match=f"wrong over {codec} blocks"):
        check_attention(_native, POOLS[1], step)
