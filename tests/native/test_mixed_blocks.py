"""Attention over tables whose blocks are in several codecs, and the native change of a block's codec."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

_native = pytest.importorskip("kvist._native", reason="the native extension is not built")

from tests.native.test_attention import (  # noqa: E402  # nothing there without the extension
    GROUPING_TOLERANCE,
    POOLS,
    TOLERANCE,
    consecutive,
    decode,
    draw_tables,
    encode,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CODECS = ("raw16", "int8", "int4", "int3")
"""By their numbers."""
NAMES = CODECS[:2]
NOT_ALLOCATED = 255
PATTERNS = {
    "by age": lambda i, n: "raw16" if i == 0 or i >= n - 3 else "int8",
    "alternating": lambda i, n: NAMES[i % 2],
    "young ones lossy": lambda i, n: "int8" if i >= n - 4 else "raw16",
    "all raw16": lambda i, n: "raw16",
    "all int8": lambda i, n: "int8",
}


@pytest.fixture(params=_native.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _native.isa()
    _native.force_isa(request.param)
    yield request.param
    _native.force_isa(before)


@dataclass
class MixedStep:
    """A step over blocks of the codecs given, scattered over an arena of NaN bytes."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    num_rows: list[int]
    context_lens: list[int]
    tables: list[list[int]]
    codecs: list[str]
    """By block id."""
    window: int = 0
    softcap: float = 0.0
    num_layers: int = 2
    layer: int = 1
    seed: int = 0
    spread: float = 2.0
    """Of the queries."""
    queries: np.ndarray = field(init=False)
    arena: np.ndarray = field(init=False)
    offsets: np.ndarray = field(init=False)
    codes: np.ndarray = field(init=False)
    keys: np.ndarray = field(init=False)
    """(B, L, K, P, D): in the basis in which queries are given."""
    values: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        shape = (sum(self.num_rows), self.num_heads, self.head_dim)
        self.queries = rng.standard_normal(shape, np.float32) * np.float32(self.spread)
        self.prepare(rng)
        num_blocks = len(self.codecs)
        block = (self.num_layers, self.num_kv_heads, self.block_size, self.head_dim)
        self.codes = np.array([CODECS.index(codec) for codec in self.codecs], np.uint8)
        self.offsets = np.zeros(num_blocks, np.int64)
        self.keys = np.zeros((num_blocks, *block))
        self.values = np.zeros_like(self.keys)
        pieces, used = [], 0
        for block_id in rng.permutation(num_blocks).tolist():
            stored = self.make_block(block_id, rng)
            gap = np.full(int(rng.integers(0, 40)), 0xFF, np.uint8)
            self.offsets[block_id] = used + len(gap)
            pieces += [gap, stored]
            used += len(gap) + stored.size
        self.arena = np.concatenate([*pieces, np.zeros(0, np.uint8)])[None]

    def prepare(self, rng: np.random.Generator) -> None:
        """Draw what all blocks have in common."""

    def make_block(self, block_id: int, rng: np.random.Generator) -> np.ndarray:
        """Return the bytes of a block, and set what they stand for."""
        codec = self.codecs[block_id]
        shape = (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)
        rows = encode(codec, rng.standard_normal(shape, np.float32))
        held = decode(codec, rows, self.head_dim)
        self.keys[block_id], self.values[block_id] = held[:, 0], held[:, 1]
        # Bytes of all ones are NaN as a bfloat16 and as the scale of int8.
        rows[..., ~self._written(block_id), :] = 0xFF
        return rows.reshape(-1)

    def _written(self, block_id: int) -> np.ndarray:
        written = np.zeros(self.block_size, bool)
        for table, context_len in zip(self.tables, self.context_lens, strict=True):
            for place, other in enumerate(table):
                if other == block_id:
                    written[: max(0, context_len - place * self.block_size)] = True
        return written

    def layout(self) -> dict[str, object]:
        return {
            "codec": "raw16",
            "num_kv_heads": self.num_kv_heads,
            "block_size": self.block_size,
            "query_starts": np.cumsum([0, *self.num_rows], dtype=np.int32),
            "context_lens": np.array(self.context_lens, np.int32),
            "table_starts": np.cumsum([0, *map(len, self.tables)], dtype=np.int32),
            "block_ids": np.array([i for table in self.tables for i in table], np.int32),
            "window": self.window,
            "offsets": self.offsets,
            "codecs": self.codes,
        }

    def run(self, threads: int = 1, **changed: object) -> np.ndarray:
        arguments = {
            "num_layers": self.num_layers,
            "layer": self.layer,
            "scale": self.head_dim**-0.5,
            "softcap": self.softcap,
            **self.layout(),
            **changed,
        }
        return _native.attention(POOLS[threads], self.queries, self.arena, **arguments)

    def info(self, threads: int = 1) -> dict[str, int]:
        # The arena of this call is of raw blocks of one layer; the tables must be inside of it.
        offsets = np.zeros_like(self.offsets)
        return _native.attention_plan_info(
            num_threads=threads,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            num_blocks=len(self.codes),
            **{**self.layout(), "offsets": offsets},
        )

    def expected(self) -> np.ndarray:
        """Return what float64 makes of the decoded blocks."""
        out = np.zeros(self.queries.shape)
        group = self.num_heads // self.num_kv_heads
        row = 0
        for table, num_rows, context_len in zip(
            self.tables, self.num_rows, self.context_lens, strict=True
        ):
            k, v = (
                x[table, self.layer].swapaxes(0, 1).reshape(self.num_kv_heads, -1, self.head_dim)
                for x in (self.keys, self.values)
            )
            for i in range(num_rows):
                end = context_len - num_rows + i + 1
                first = max(0, end - self.window) if self.window else 0
                q = self.queries[row + i].astype(np.float64)
                q = q.reshape(self.num_kv_heads, group, self.head_dim)
                scores = np.einsum("kgd,kpd->kgp", q, k[:, first:end]) * self.head_dim**-0.5
                if self.softcap:
                    scores = self.softcap * np.tanh(scores / self.softcap)
                weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
                weights /= weights.sum(axis=-1, keepdims=True)
                mean = np.einsum("kgp,kpd->kgd", weights, v[:, first:end])
                out[row + i] = mean.reshape(self.num_heads, self.head_dim)
            row += num_rows
        return out

    def value_range(self) -> float:
        return float(np.nanmax(np.abs(self.values[:, self.layer])))


AnyStep = TypeVar("AnyStep", bound=MixedStep)


def error_of(step: MixedStep, threads: int = 1) -> float:
    """Return how far off attention is, as a share of the values' range."""
    return float(np.abs(step.run(threads) - step.expected()).max() / step.value_range())


def check(step: MixedStep, isa: str, threads: int = 1) -> None:
    error = error_of(step, threads)
    assert error <= TOLERANCE[isa], f"{error=:.2e}"


def codecs_of(tables: list[list[int]], pattern: Callable[[int, int], str]) -> list[str]:
    """Return codecs by block id; the pattern knows a block's place in its table, and how many there are."""
    codecs = ["raw16"] * (1 + max((i for table in tables for i in table), default=0))
    for table in tables:
        for place, block_id in enumerate(table):
            codecs[block_id] = pattern(place, len(table))
    return codecs


def step_of(
    kind: type[AnyStep],
    pattern: Callable[[int, int], str],
    num_rows: list[int],
    context_lens: list[int],
    **more: object,
) -> AnyStep:
    """Return a step of sequences that share nothing."""
    sizes = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 64, "block_size": 16, **more}
    tables = consecutive(num_rows, context_lens, sizes["block_size"])
    return kind(
        num_rows=num_rows,
        context_lens=context_lens,
        tables=tables,
        codecs=codecs_of(tables, pattern),
        **sizes,
    )


def private_step(
    pattern: str, num_rows: list[int], context_lens: list[int], **more: object
) -> MixedStep:
    return step_of(MixedStep, PATTERNS[pattern], num_rows, context_lens, **more)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("head_dim", [8, 64, 72, 128, 256])
def test_patterns_of_codecs(isa: str, pattern: str, block_size: int, head_dim: int) -> None:
    more = {"block_size": block_size, "head_dim": head_dim}
    check(private_step(pattern, [1, 40, 3, 100], [500, 300, 65, 130], **more), isa)


@pytest.mark.parametrize("pattern", ["by age", "alternating"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_long_contexts_are_split_over_threads(isa: str, pattern: str, threads: int) -> None:
    step = private_step(pattern, [1, 30], [2500, 1100], num_heads=3, num_kv_heads=1)
    check(step, isa, threads)


@pytest.mark.parametrize("pattern", ["by age", "alternating"])
@pytest.mark.parametrize("window", [1, 5, 16, 64, 100, 250])
def test_windows(isa: str, pattern: str, window: int) -> None:
    step = private_step(pattern, [1, 1, 40, 100, 3], [260, 60, 200, 100, 101], window=window)
    check(step, isa, threads=2)


def test_softcap(isa: str) -> None:
    check(private_step("alternating", [1, 40, 3], [200, 90, 70], softcap=2.0), isa)


@pytest.mark.parametrize("pattern", ["by age", "alternating", "young ones lossy"])
@pytest.mark.parametrize("block_size", [16, 64])
def test_prefixes_that_several_sequences_share(isa: str, pattern: str, block_size: int) -> None:
    root, branch = list(range(4)), list(range(4, 14))
    tables = [
        [*root, *branch, 20],
        [*root, *branch, 21, 22],
        [*root, 30, 31, 32, 33, 34],
        [40, 41, 42],
        [*root, *branch, 23],
    ]
    lengths = [block_size * len(table) - 3 for table in tables]
    codecs = codecs_of(tables, PATTERNS[pattern])
    step = MixedStep(6, 2, 64, block_size, [1, 2, 1, 1, 3], lengths, tables, codecs)
    assert step.info()["num_shared"] == 2
    assert step.info()["blocks_read"] == 4 + 10 + 1 + 2 + 5 + 3 + 1
    check(step, isa, threads=2)


@pytest.mark.parametrize("codec", NAMES)
def test_one_codec_everywhere_equals_a_uniform_arena(isa: str, codec: str) -> None:
    """To the bit: the same plan, the same kernels."""
    more = {"num_layers": 1, "layer": 0}
    step = private_step(f"all {codec}", [1, 40, 3], [400, 300, 70], **more)
    size = 2 * step.num_kv_heads * step.block_size
    size *= encode(codec, np.zeros(step.head_dim, np.float32)).size
    uniform = np.stack([step.arena[0, offset : offset + size] for offset in step.offsets])
    layout = {**step.layout(), "codec": codec, "offsets": None, "codecs": None}
    expected = _native.attention(
        POOLS[2], step.queries, uniform, num_layers=1, layer=0, scale=step.head_dim**-0.5, **layout
    )
    np.testing.assert_array_equal(step.run(2), expected)


def test_codecs_that_alternate_cost_one_read_each_and_few_merges() -> None:
    """Blocks are collected by codec, or every change of codec would be a partial result of its own."""
    step = private_step("alternating", [1], [16 * 40], num_kv_heads=1, num_heads=1)
    assert step.info()["num_items"] <= 3
    assert step.info()["blocks_read"] == 40
    windowed = private_step("alternating", [1], [640], num_kv_heads=1, num_heads=1, window=160)
    assert windowed.info()["num_items"] == 10


def test_what_alternates_equals_what_does_not(isa: str) -> None:
    """The order in which a row meets its keys means nothing: the same keys in another order of blocks."""
    step = private_step("alternating", [1], [640])
    by_codec = sorted(step.tables[0][:-1], key=lambda i: step.codecs[i])
    ordered = MixedStep(
        6, 2, 64, 16, [1], [640], [[*by_codec, step.tables[0][-1]]], step.codecs, seed=step.seed
    )
    difference = np.abs(step.run() - ordered.run()).max() / step.value_range()
    assert difference <= GROUPING_TOLERANCE[isa]


def test_blocks_beyond_four_gib(isa: str) -> None:
    """Only the pages of the blocks are ever touched."""
    step = private_step("by age", [1, 40], [200, 100])
    expected = step.run()
    start = 2**32 + 24
    try:
        far = np.zeros((1, start + step.arena.size), np.uint8)
    except MemoryError:
        pytest.skip("no 4 GiB of addresses")
    far[0, start:] = step.arena[0]
    step.arena, step.offsets = far, step.offsets + start
    np.testing.assert_array_equal(step.run(), expected)


@st.composite
def random_steps(draw: st.DrawFn) -> MixedStep:
    block_size = draw(st.sampled_from([4, 16, 24, 64]))
    num_kv_heads = draw(st.integers(1, 2))
    drawn = draw_tables(draw, block_size, max_sequences=6, max_fresh=12, max_rows=40)
    codecs = st.lists(st.sampled_from(NAMES), min_size=drawn.num_blocks, max_size=drawn.num_blocks)
    return MixedStep(
        num_heads=num_kv_heads * draw(st.integers(1, 4)),
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.sampled_from([8, 32, 64, 96])),
        block_size=block_size,
        num_rows=drawn.num_rows,
        context_lens=drawn.context_lens,
        tables=drawn.tables,
        codecs=draw(codecs),
        window=draw(st.sampled_from([0, 0, 30, 1000])),
        num_layers=1,
        layer=0,
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=80, deadline=None)
@given(step=random_steps(), threads=st.integers(1, 3))
def test_random_tables(step: MixedStep, threads: int) -> None:
    before = _native.isa()
    try:
        for name in _native.isas():
            _native.force_isa(name)
            check(step, name, threads)
    finally:
        _native.force_isa(before)


def test_tables_that_do_not_fit_are_refused() -> None:
    step = private_step("by age", [1], [100])
    step.run()

    def table(values: np.ndarray, index: int, value: int) -> np.ndarray:
        changed = values.copy()
        changed[index] = value
        return changed

    used = step.tables[0][2]
    size = step.arena.size
    for changed, message in [
        ({"codecs": table(step.codes, used, NOT_ALLOCATED)}, f"block id {used} is not allocated"),
        ({"codecs": table(step.codes, used, 7)}, "the codec 7, which is none"),
        ({"offsets": table(step.offsets, used, -1)}, f"block id {used} is at -1"),
        ({"offsets": table(step.offsets, used, size - 8)}, "not in an arena"),
        ({"offsets": table(step.offsets, used, 2**62)}, "not in an arena"),
        ({"offsets": None}, "go together"),
        ({"codecs": None}, "go together"),
        ({"codecs": step.codes[:-1]}, "as many offsets as codecs"),
        ({"block_ids": np.full(7, len(step.codes), np.int32)}, "not in an arena of"),
    ]:
        with pytest.raises(ValueError, match=message):
            step.run(**changed)
    with pytest.raises(TypeError):
        step.run(offsets=step.offsets.astype(np.int32))


# --- change of codec

BLOCK = {"num_layers": 3, "num_kv_heads": 2, "block_size": 16}


def recode(
    source: np.ndarray, source_codec: str, target_codec: str, num_tokens: int = 16, threads: int = 2
) -> tuple[np.ndarray, int]:
    """Return a block, (L, 2, K, P, N), over bytes of 0xEE, and what was held within the range."""
    head_dim = len(source[0, 0, 0, 0]) // 2
    if source_codec == "int8":
        head_dim = next(d for d in range(8, 264, 8) if d + 2 * -(-d // 64) == source.shape[-1])
    width = encode(target_codec, np.zeros(head_dim, np.float32)).size
    target = np.full((*source.shape[:-1], width), 0xEE, np.uint8)
    held = _native.recode_block(
        POOLS[threads],
        np.ascontiguousarray(source).reshape(-1),
        target.reshape(-1),
        source_codec=source_codec,
        target_codec=target_codec,
        head_dim=head_dim,
        num_tokens=num_tokens,
        **BLOCK,
    )
    return target, held


def random_block(head_dim: int) -> np.ndarray:
    """Return values of every size, (L, 2, K, P, D), as bfloat16 has them."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 2, 2, 16, head_dim)).astype(np.float32)
    x *= np.exp2(rng.integers(-30, 14, (3, 2, 2, 16, 1))).astype(np.float32)
    x[0, 0, 0, 0] = 0
    x[0, 0, 0, 1, ::2] = 0
    x[0, 0, 0, 2] = np.float32(2**-23)
    x[0, 0, 0, 3] = np.arange(head_dim) + np.float32(0.5)
    x[0, 0, 0, 4, 5] = 8e6  # an outlier near the end of the range
    return decode("raw16", encode("raw16", x), head_dim).astype(np.float32)


@pytest.mark.parametrize("head_dim", [8, 64, 72, 128, 200, 256])
@pytest.mark.parametrize("threads", [1, 3])
def test_demoting_a_block_writes_the_bytes_of_the_format(
    isa: str, head_dim: int, threads: int
) -> None:
    values = random_block(head_dim)
    target, held = recode(encode("raw16", values), "raw16", "int8", threads=threads)
    np.testing.assert_array_equal(target, encode("int8", values))
    assert held == 0


@pytest.mark.parametrize("head_dim", [8, 72, 256])
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 16])
@pytest.mark.parametrize("codec", NAMES)
def test_heads_of_blocks_are_copied_into_raw_ones(
    isa: str, head_dim: int, num_tokens: int, codec: str
) -> None:
    rows = encode(codec, random_block(head_dim))
    target, _ = recode(rows, codec, "raw16", num_tokens)
    expected = encode("raw16", decode(codec, rows, head_dim).astype(np.float32))
    np.testing.assert_array_equal(target[..., :num_tokens, :], expected[..., :num_tokens, :])
    assert (target[..., num_tokens:, :] == 0xEE).all()


def test_values_beyond_the_range_are_held_and_counted(isa: str) -> None:
    values = random_block(72)
    values[1, 0, 1, 3, 4] = 3e38
    values[1, 0, 1, 3, 5] = -1e10
    values[2, 1, 0, 9, 70] = 1e7
    target, held = recode(encode("raw16", values), "raw16", "int8")
    assert held == 2
    expected = encode("int8", np.clip(values, -65504 * 127, 65504 * 127))
    np.testing.assert_array_equal(target, expected)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_groups_that_are_not_finite_read_as_nan_and_others_do_not(isa: str, value: float) -> None:
    values = random_block(72)
    values[1, 1, 0, 2, 66] = value
    target, _ = recode(encode("raw16", values), "raw16", "int8")
    decoded = decode("int8", target, 72)
    assert np.isnan(decoded[1, 1, 0, 2, 64:]).all()
    assert np.isnan(decoded).sum() == 8
    back, _ = recode(target, "int8", "raw16")
    assert np.isnan(decode("raw16", back, 72)[1, 1, 0, 2, 64:]).all()


def test_blocks_that_do_not_fit_are_refused() -> None:
    raw, packed = np.zeros(3 * 2 * 2 * 16 * 16, np.uint8), np.zeros(3 * 2 * 2 * 16 * 10, np.uint8)
    good = {
        "source": raw,
        "target": packed,
        "source_codec": "raw16",
        "target_codec": "int8",
        "head_dim": 8,
        "num_tokens": 16,
        **BLOCK,
    }
    assert _native.recode_block(POOLS[1], **good) == 0
    both = np.zeros(raw.size + packed.size - 1, np.uint8)
    for changed, message in [
        ({"source": raw[1:]}, "the source must have the 3072 bytes"),
        ({"target": raw}, "the target must have the 1920 bytes"),
        ({"source_codec": "int5"}, "raw16, int8, int4 or int3"),
        ({"num_tokens": 17}, "within a block of 16"),
        ({"num_tokens": -1}, "within a block of 16"),
        ({"head_dim": 12}, "head_dim"),
        ({"num_layers": 0}, "at least 1"),
        ({"num_layers": 2**31 - 1}, "at least 1"),
        ({"source": both[: raw.size], "target": both[raw.size - 1 :]}, "overlap"),
    ]:
        with pytest.raises(ValueError, match=message):
            _native.recode_block(POOLS[1], **{**good, **changed})
    packed.flags.writeable = False
    with pytest.raises(TypeError):
        _native.recode_block(POOLS[1], **good)
