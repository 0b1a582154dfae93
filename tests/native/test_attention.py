"""Block attention and the K/V formats, each instruction set forced, against numpy in float64 on the decoded values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.codecs.raw import RAW16
from kvist.kernels.kv_rows import encode_int8_keys

_native = pytest.importorskip("kvist._native", reason="the native extension is not built")

if TYPE_CHECKING:
    from collections.abc import Iterator

GROUP = 64
# Of the range of the values: half a unit in the last place of a bfloat16 near the range's end.
TOLERANCE = {"serial": 1e-6, "avx2": 2e-3, "avx512": 2e-3, "neon": 2e-3}
# What separates two ways to group the same work.
GROUPING_TOLERANCE = {"serial": 1e-6, "avx2": 1e-3, "avx512": 1e-3, "neon": 1e-3}
POOLS = {count: _native.Pool(count) for count in (1, 2, 3)}


@pytest.fixture(params=_native.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _native.isa()
    _native.force_isa(request.param)
    assert _native.isa() == request.param
    yield request.param
    _native.force_isa(before)


def round_bfloat16(x: np.ndarray) -> np.ndarray:
    bits = x.astype(np.float32).view(np.uint32)
    bits = bits + 0x7FFF + ((bits >> 16) & 1)
    return (bits & np.uint32(0xFFFF0000)).view(np.float32)


def encode(codec: str, x: np.ndarray) -> np.ndarray:
    """Return the rows of x, (..., D) float32, as bytes (..., N), by the format's definition."""
    if codec == "raw16":
        return (round_bfloat16(x).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    head_dim = x.shape[-1]
    codes, scales = [], []
    for first in range(0, head_dim, GROUP):
        part = x[..., first : first + GROUP]
        largest = np.abs(part).max(axis=-1, keepdims=True)
        scale = (largest / np.float32(127)).astype(np.float16)
        scale = np.where((scale == 0) & (largest > 0), np.float16(2**-24), scale)
        wide = scale.astype(np.float32)
        inverse = np.divide(1, wide, out=np.zeros_like(wide), where=wide > 0)
        codes.append(np.clip(np.rint(part * inverse), -127, 127).astype(np.int8).view(np.uint8))
        scales.append(scale.view(np.uint8))
    return np.concatenate([*codes, *scales], axis=-1)


def decode(codec: str, rows: np.ndarray, head_dim: int) -> np.ndarray:
    if codec == "raw16":
        return (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    codes = rows[..., :head_dim].view(np.int8).astype(np.float64)
    scales = np.ascontiguousarray(rows[..., head_dim:]).view(np.float16).astype(np.float64)
    return codes * np.repeat(scales, GROUP, axis=-1)[..., :head_dim]


@dataclass
class Step:
    """A step: its blocks hold what `keys` and `values` say, and NaN bytes wherever no position is."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    codec: str
    block_size: int
    num_rows: list[int]
    context_lens: list[int]
    tables: list[list[int]]
    window: int = 0
    softcap: float = 0.0
    scale: float = 0.0
    num_layers: int = 2
    layer: int = 1
    seed: int = 0
    shape_keys: object = None
    queries: np.ndarray = field(init=False)
    arena: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        self.scale = self.scale or self.head_dim**-0.5
        total = sum(self.num_rows)
        self.queries = rng.standard_normal((total, self.num_heads, self.head_dim), np.float32) * 2
        num_blocks = max((max(table, default=0) for table in self.tables), default=0) + 2
        shape = (num_blocks, self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)
        values = rng.standard_normal(shape, np.float32)
        if self.shape_keys is not None:
            self.shape_keys(values)
        rows = encode(self.codec, values)
        self.blocks = rows.copy()
        written = np.zeros((num_blocks, self.block_size), bool)
        for table, context_len in zip(self.tables, self.context_lens, strict=True):
            for position in range(context_len):
                written[table[position // self.block_size], position % self.block_size] = True
        # Bytes of all ones are NaN as a bfloat16 and as the scale of int8.
        self.blocks[~np.broadcast_to(written[:, None, None, None, :], self.blocks.shape[:-1])] = (
            0xFF
        )
        self.arena = self.blocks.reshape(num_blocks, -1)

    def layout(self) -> dict[str, object]:
        return {
            "codec": self.codec,
            "num_kv_heads": self.num_kv_heads,
            "block_size": self.block_size,
            "query_starts": np.cumsum([0, *self.num_rows], dtype=np.int32),
            "context_lens": np.array(self.context_lens, np.int32),
            "table_starts": np.cumsum([0, *map(len, self.tables)], dtype=np.int32),
            "block_ids": np.array([i for table in self.tables for i in table], np.int32),
            "window": self.window,
        }

    def run(self, threads: int = 1) -> np.ndarray:
        return _native.attention(
            POOLS[threads],
            self.queries,
            self.arena,
            num_layers=self.num_layers,
            layer=self.layer,
            scale=self.scale,
            softcap=self.softcap,
            **self.layout(),
        )

    def info(self, threads: int = 1, **more: int) -> dict[str, int]:
        return _native.attention_plan_info(
            num_threads=threads,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            num_blocks=len(self.arena),
            **self.layout(),
            **more,
        )

    def expected(self) -> np.ndarray:
        out = np.zeros(self.queries.shape)
        group = self.num_heads // self.num_kv_heads
        row = 0
        for table, num_rows, context_len in zip(
            self.tables, self.num_rows, self.context_lens, strict=True
        ):
            rows = self.blocks[table, self.layer]  # (blocks, 2, K, P, N)
            rows = rows.transpose(1, 2, 0, 3, 4).reshape(2, self.num_kv_heads, -1, rows.shape[-1])
            rows = np.ascontiguousarray(rows[:, :, :context_len])
            k, v = decode(self.codec, rows, self.head_dim)
            for i in range(num_rows):
                position = context_len - num_rows + i
                first = max(0, position + 1 - self.window) if self.window else 0
                q = self.queries[row + i].astype(np.float64)
                q = q.reshape(self.num_kv_heads, group, self.head_dim)
                scores = np.einsum("kgd,kpd->kgp", q, k[:, first : position + 1]) * self.scale
                if self.softcap:
                    scores = self.softcap * np.tanh(scores / self.softcap)
                weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
                weights /= weights.sum(axis=-1, keepdims=True)
                mean = np.einsum("kgp,kpd->kgd", weights, v[:, first : position + 1])
                out[row + i] = mean.reshape(self.num_heads, self.head_dim)
            row += num_rows
        return out

    def value_range(self) -> float:
        written = decode(self.codec, self.blocks[:, self.layer, 1], self.head_dim)
        return float(np.nanmax(np.abs(np.where(np.isfinite(written), written, 0))))


def check(step: Step, isa: str, threads: int = 1) -> None:
    out = step.run(threads)
    error = np.abs(out - step.expected()).max() / step.value_range()
    assert error <= TOLERANCE[isa], f"{error=:.2e}"


def consecutive(num_rows: list[int], context_lens: list[int], block_size: int) -> list[list[int]]:
    """Return tables of private blocks, out of order in the arena."""
    counts = [-(-length // block_size) for length in context_lens]
    ids = np.random.default_rng(1).permutation(sum(counts)).tolist()
    ends = np.cumsum(counts)
    return [ids[end - count : end] for end, count in zip(ends, counts, strict=True)]


def private_step(num_rows: list[int], context_lens: list[int], **more: object) -> Step:
    settings = {
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 64,
        "codec": "int8",
        "block_size": 16,
        **more,
    }
    return Step(
        num_rows=num_rows,
        context_lens=context_lens,
        tables=consecutive(num_rows, context_lens, settings["block_size"]),
        **settings,
    )


@pytest.mark.parametrize("codec", ["raw16", "int8"])
@pytest.mark.parametrize("head_dim", [8, 64, 72, 96, 128, 200, 256])
def test_decode_and_prefill_of_every_boundary_length(isa: str, codec: str, head_dim: int) -> None:
    lengths = [1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129, 300]
    check(private_step([1] * len(lengths), lengths, codec=codec, head_dim=head_dim), isa)
    lengths = [1, 7, 16, 17, 65, 130]
    rows = [1, 7, 9, 17, 40, 129]
    check(private_step(rows, lengths, codec=codec, head_dim=head_dim), isa)


@pytest.mark.parametrize("codec", ["raw16", "int8"])
@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (4, 1), (8, 1), (6, 2), (5, 1), (2, 2), (14, 1)])
def test_head_groups_and_numbers_of_rows(isa: str, codec: str, heads: tuple[int, int]) -> None:
    num_heads, num_kv_heads = heads
    more = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "codec": codec}
    check(private_step([1, 2, 3, 5, 8], [70, 64, 33, 80, 100], **more), isa)


@pytest.mark.parametrize("codec", ["raw16", "int8"])
@pytest.mark.parametrize("block_size", [1, 3, 32, 48, 64, 128])
def test_block_sizes(isa: str, codec: str, block_size: int) -> None:
    lengths = [1, max(1, block_size - 1), block_size, block_size + 1, 150]
    step = private_step([1, 1, 1, 1, 70], lengths, codec=codec, block_size=block_size)
    check(step, isa, threads=2)


@pytest.mark.parametrize("codec", ["raw16", "int8"])
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 176, 256])
@pytest.mark.parametrize("window", [0, 100])
def test_results_do_not_depend_on_how_rows_lie(
    isa: str, codec: str, head_dim: int, window: int
) -> None:
    """Rows that follow each other over 64 keys may be read in another way."""
    for num_heads in (1, 2, 3, 4, 5, 6, 8):
        more = {"num_heads": num_heads, "num_kv_heads": 1, "head_dim": head_dim, "window": window}
        step = private_step([1, 1], [240, 64], codec=codec, block_size=64, **more)
        check(step, isa)
        apart = private_step([1, 1], [240, 64], codec=codec, block_size=16, **more)
        apart.queries = step.queries
        apart.tables = [[4 * i + part for i in table for part in range(4)] for table in step.tables]
        count, layers, kinds, heads, _, size = step.blocks.shape
        pieces = step.blocks.reshape(count, layers, kinds, heads, 4, 16, size)
        apart.arena = pieces.transpose(0, 4, 1, 2, 3, 5, 6).reshape(4 * count, -1)
        assert np.array_equal(step.run(), apart.run())


@pytest.mark.parametrize("codec", ["raw16", "int8"])
@pytest.mark.parametrize("window", [1, 5, 16, 64, 100])
def test_sliding_windows(isa: str, codec: str, window: int) -> None:
    more = {"codec": codec, "window": window}
    check(private_step([1, 1, 40, 100, 3], [200, 60, 200, 100, 101], **more), isa, threads=2)


@pytest.mark.parametrize("codec", ["raw16", "int8"])
@pytest.mark.parametrize("softcap", [2.0, 50.0])
def test_softcap(isa: str, codec: str, softcap: float) -> None:
    check(private_step([1, 40, 3], [200, 90, 70], codec=codec, softcap=softcap), isa)


def attention_sink(values: np.ndarray) -> None:
    """One key in a few blocks that takes nearly all weight, with a value near zero."""
    values[::3, :, 0, :, 0] *= 12
    values[::3, :, 1, :, 0] *= 0.01


def outlier_channels(values: np.ndarray) -> None:
    """Channels of K with a large mean, as models with biased keys have."""
    values[:, :, 0, ..., 3] += 60
    values[:, :, 0, ..., 7] -= 200
    values[:, :, 1, ..., 5] *= 20


def huge_scores(values: np.ndarray) -> None:
    values[:, :, 0] *= 30


def tiny_values(values: np.ndarray) -> None:
    values *= 1e-6


def zero_rows(values: np.ndarray) -> None:
    values[:, :, :, :, ::2] = 0
    values[::2] = 0


@pytest.mark.parametrize("codec", ["raw16", "int8"])
@pytest.mark.parametrize(
    "shape_keys", [attention_sink, outlier_channels, huge_scores, tiny_values, zero_rows]
)
def test_adversarial_values(isa: str, codec: str, shape_keys: object) -> None:
    more = {"codec": codec, "shape_keys": shape_keys}
    check(private_step([1, 2, 90, 8], [400, 64, 200, 300], **more), isa)


def test_a_query_of_zeros_takes_the_mean(isa: str) -> None:
    step = private_step([1, 40], [90, 90], codec="raw16")
    step.queries[:] = 0
    check(step, isa)


@pytest.mark.parametrize("codec", ["raw16", "int8"])
@pytest.mark.parametrize("num_rows", [1, 2, 40])
@pytest.mark.parametrize("part", [0, 1], ids=["key", "value"])
@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_a_nan_in_a_block_is_in_the_result(
    isa: str, codec: str, num_rows: int, part: int, softcap: float
) -> None:
    """A damaged key used to count as one of weight zero, and the answer as whole."""
    step = private_step([num_rows], [150], codec=codec, softcap=softcap)
    position, kv_head = 70, 1
    block = step.tables[0][position // step.block_size]
    row = step.blocks[block, step.layer, part, kv_head, position % step.block_size]
    row[-2:] = np.frombuffer(
        np.float16(np.nan).tobytes() if codec == "int8" else b"\xc0\x7f", np.uint8
    )
    out = step.run()
    group = step.num_heads // step.num_kv_heads
    heads = range(kv_head * group, (kv_head + 1) * group)
    for head in range(step.num_heads):
        is_whole = np.isfinite(out[:, head])
        if head in heads:
            assert not is_whole.all(axis=-1).any()
        else:
            assert is_whole.all()


@pytest.mark.parametrize("codec", ["raw16", "int8"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_long_contexts_are_split_over_threads(isa: str, codec: str, threads: int) -> None:
    step = private_step([1, 30], [2500, 1100], codec=codec, num_heads=3, num_kv_heads=1)
    assert (step.info(threads)["num_items"] > 2) == (threads > 1)
    check(step, isa, threads)


@pytest.mark.parametrize("codec", ["raw16", "int8"])
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(3, 64), (8, 64), (5, 128), (8, 256)])
@pytest.mark.parametrize("window", [0, 100])
def test_kv_heads_side_by_side(
    isa: str, codec: str, num_kv_heads: int, head_dim: int, window: int
) -> None:
    """Heads that one item takes together, also where not all of them fit, and where a part of the keys is not seen."""
    step = private_step(
        [1, 2],
        [700, 90],
        codec=codec,
        num_heads=2 * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        window=window,
    )
    for threads in (1, 2):
        check(step, isa, threads)


def test_short_contexts_keep_heads_apart_for_the_threads() -> None:
    step = private_step([1], [120], num_heads=9, num_kv_heads=3, codec="int8")
    assert step.info(threads=2)["num_items"] == 3


def test_results_do_not_depend_on_the_thread(isa: str) -> None:
    step = private_step([1, 30, 100], [1500, 700, 100])
    first = step.run(3)
    for _ in range(5):
        np.testing.assert_array_equal(step.run(3), first)


def shared_steps(
    tables: list[list[int]], num_rows: list[int], context_lens: list[int], **more: object
) -> tuple[Step, Step]:
    """Return a step with the tables and one in which every sequence has copies of the blocks."""
    settings = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 64, "block_size": 16, **more}
    shared = Step(num_rows=num_rows, context_lens=context_lens, tables=tables, **settings)
    copies, blocks, next_id = [], [], 0
    for table in tables:
        copies.append(list(range(next_id, next_id + len(table))))
        blocks.append(shared.blocks[table])
        next_id += len(table)
    private = Step(num_rows=num_rows, context_lens=context_lens, tables=copies, **settings)
    private.blocks[:next_id] = np.concatenate(blocks)
    private.queries[:] = shared.queries
    return shared, private


@pytest.mark.parametrize("codec", ["raw16", "int8"])
@pytest.mark.parametrize("threads", [1, 2])
def test_shared_blocks_equal_private_copies(isa: str, codec: str, threads: int) -> None:
    prefix = list(range(12))
    tables = [[*prefix, 20 + 2 * i, 21 + 2 * i] for i in range(5)]
    steps = shared_steps(
        tables, [1, 4, 1, 20, 1], [200, 210, 193, 220, 224], codec=codec, num_layers=1, layer=0
    )
    shared, private = steps
    check(shared, isa, threads)
    difference = np.abs(shared.run(threads) - private.run(threads)).max() / shared.value_range()
    assert difference <= GROUPING_TOLERANCE[isa]


def test_shared_blocks_are_read_once(isa: str) -> None:
    prefix = list(range(12))
    tables = [[*prefix, 20 + 2 * i, 21 + 2 * i] for i in range(5)]
    shared, private = shared_steps(tables, [1] * 5, [224] * 5, codec="int8")
    heads_apart = 1 if isa == "avx2" else 2  # of items with few rows
    assert shared.info() | {"seconds": 0, "scratch_bytes": 0} == {
        "num_items": 2 + 5 * heads_apart,
        "num_merges": 1,
        "num_shared": 1,
        "blocks_read": 12 + 5 * 2,
        "seconds": 0,
        "scratch_bytes": 0,
    }
    assert private.info()["blocks_read"] == 5 * 14
    assert private.info()["num_shared"] == 0
    assert private.info()["num_merges"] == 0


def test_nested_sharing_reads_each_range_once(isa: str) -> None:
    root, branch = list(range(4)), list(range(4, 14))
    tables = [
        [*root, *branch, 20],
        [*root, *branch, 21, 22],
        [*root, 30, 31, 32, 33, 34],
        [40, 41, 42],
        [*root, *branch, 23],
    ]
    lengths = [16 * len(table) - 3 for table in tables]
    shared, private = shared_steps(
        tables, [1, 2, 1, 1, 3], lengths, codec="int8", num_layers=1, layer=0
    )
    info = shared.info()
    assert info["num_shared"] == 2
    assert info["blocks_read"] == 4 + 10 + 1 + 2 + 5 + 3 + 1
    check(shared, isa)
    difference = np.abs(shared.run() - private.run()).max() / shared.value_range()
    assert difference <= GROUPING_TOLERANCE[isa]


def test_a_block_with_a_query_in_it_is_not_shared(isa: str) -> None:
    """Two samples of one prompt have the same last block in their tables while it is full of their queries."""
    tables = [list(range(8)), list(range(8))]
    step = Step(6, 2, 64, "raw16", 16, [20, 20], [128, 128], tables)
    info = step.info()
    assert info["blocks_read"] == 6 + 2 * 2  # 108 positions before the first query
    check(step, isa)


def test_short_contexts_and_sharing_that_saves_little_are_left_alone() -> None:
    tables = [[0, 1, 2], [0, 3, 4]]
    step = Step(6, 2, 64, "int8", 16, [1, 1], [40, 40], tables)
    assert step.info()["num_shared"] == 0
    assert step.info()["num_merges"] == 0


def test_windows_longer_than_the_context_share() -> None:
    tables = [[*range(8), 10 + i] for i in range(3)]
    shared = Step(6, 2, 64, "int8", 16, [1] * 3, [140] * 3, tables, window=140)
    assert shared.info()["num_shared"] == 1
    windowed = Step(6, 2, 64, "int8", 16, [1] * 3, [140] * 3, tables, window=139)
    assert windowed.info()["num_shared"] == 0


def test_a_window_skips_the_blocks_before_it() -> None:
    step = private_step([1], [1000], window=32, block_size=16)
    assert step.info()["blocks_read"] == 3  # keys 968 to 999


def test_causal_tiles_are_many_and_not_split() -> None:
    step = private_step([1000], [1000], num_heads=9, num_kv_heads=3)
    info = step.info(threads=2)
    assert info["num_items"] == 16 * 3
    assert info["num_merges"] == 0


def test_sequences_without_rows_and_empty_steps(isa: str) -> None:
    check(private_step([0, 2, 0], [0, 40, 10]), isa)
    assert private_step([], []).run().shape == (0, 6, 64)


@dataclass(frozen=True)
class Tables:
    """Sequences of a step, some of which begin with blocks of others."""

    num_rows: list[int]
    context_lens: list[int]
    tables: list[list[int]]
    num_blocks: int


def draw_tables(
    draw: st.DrawFn, block_size: int, *, max_sequences: int, max_fresh: int, max_rows: int
) -> Tables:
    """Draw up to so many sequences with up to so many blocks of their own and rows in the step."""
    tables: list[list[int]] = []
    num_rows, context_lens, next_id = [], [], 0
    for _ in range(draw(st.integers(1, max_sequences))):
        table: list[int] = []
        if tables and draw(st.booleans()):
            other = draw(st.sampled_from(tables))
            table = other[: draw(st.integers(0, len(other)))]
        fresh = draw(st.integers(0 if table else 1, max_fresh))
        table = [*table, *range(next_id, next_id + fresh)]
        next_id += fresh
        length = draw(st.integers((len(table) - 1) * block_size + 1, len(table) * block_size))
        tables.append(table)
        context_lens.append(length)
        num_rows.append(min(length, draw(st.integers(1, max_rows))))
    return Tables(num_rows, context_lens, tables, next_id)


@st.composite
def random_steps(draw: st.DrawFn) -> Step:
    block_size = draw(st.sampled_from([4, 16, 24]))
    group = draw(st.integers(1, 4))
    num_kv_heads = draw(st.integers(1, 2))
    drawn = draw_tables(draw, block_size, max_sequences=6, max_fresh=8, max_rows=40)
    return Step(
        num_heads=group * num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=draw(st.sampled_from([8, 32, 64])),
        codec=draw(st.sampled_from(["raw16", "int8"])),
        block_size=block_size,
        num_rows=drawn.num_rows,
        context_lens=drawn.context_lens,
        tables=drawn.tables,
        window=draw(st.sampled_from([0, 0, 30, 1000])),
        num_layers=1,
        layer=0,
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=60, deadline=None)
@given(step=random_steps(), threads=st.integers(1, 3))
def test_random_tables(step: Step, threads: int) -> None:
    before = _native.isa()
    try:
        for name in _native.isas():
            _native.force_isa(name)
            check(step, name, threads)
    finally:
        _native.force_isa(before)


@pytest.mark.parametrize("codec", ["raw16", "int8"])
@pytest.mark.parametrize("head_dim", [8, 64, 72, 128, 256])
def test_encoding_is_the_format_to_the_bit(isa: str, codec: str, head_dim: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((60, 3, head_dim)).astype(np.float32)
    x *= np.exp2(rng.integers(-30, 14, (60, 3, 1))).astype(np.float32)
    x[0] = 0
    x[1, :, ::2] = 0
    x[2] = np.float32(2**-23)  # a scale that rounds to nothing
    x[3] = np.arange(head_dim) + np.float32(0.5)  # ties
    x[4] = np.float32(1) + np.float32(2**-8) * np.arange(head_dim)
    np.testing.assert_array_equal(_native.encode_kv(codec, x), encode(codec, x))


@pytest.mark.parametrize("codec", ["raw16", "int8"])
@pytest.mark.parametrize("head_dim", [8, 40, 64, 72, 128, 256])
def test_keys_that_know_their_queries_are_what_torch_writes(
    isa: str, codec: str, head_dim: int
) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((60, 3, head_dim)).astype(np.float32)
    x *= np.exp2(rng.integers(-30, 14, (60, 3, 1))).astype(np.float32)
    queries = rng.standard_normal((60, 6, head_dim)).astype(np.float32)
    queries *= np.exp2(rng.integers(-60, 60, (60, 6, 1))).astype(np.float32)
    x[0] = 0
    x[1, :, ::2] = 0
    queries[2] = 0
    queries[3, :, ::3] = 0
    queries[4, 0, 0] = np.nan
    queries[5] = np.float32(1e30)
    # The readable encoders: those of the codecs may be native themselves.
    readable = encode_int8_keys if codec == "int8" else RAW16.encode_keys
    expected = readable(torch.from_numpy(x), torch.from_numpy(queries))
    np.testing.assert_array_equal(
        _native.encode_kv_keys(codec, x, queries), expected.view(torch.uint8).numpy()
    )
    is_changed = _native.encode_kv_keys(codec, x, queries) != _native.encode_kv(codec, x)
    assert is_changed.any() == (codec == "int8" and head_dim > 8)


@pytest.mark.parametrize("shape", [(2, 6, 64), (3, 5, 64), (3, 6, 72), (3, 0, 64)])
def test_queries_that_are_not_those_of_the_keys_are_refused(shape: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="expected queries"):
        _native.encode_kv_keys("int8", np.ones((3, 2, 64), np.float32), np.ones(shape, np.float32))


@pytest.mark.parametrize("codec", ["raw16", "int8"])
@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf, 3.4e38])
@pytest.mark.parametrize("place", [0, 7, 65, 71])
def test_encoding_reports_values_that_are_not_finite(
    isa: str, codec: str, value: float, place: int
) -> None:
    x = np.ones((1, 1, 72), np.float32)
    x[0, 0, place] = value
    with pytest.raises(ValueError, match="not finite"):
        _native.encode_kv(codec, x)
    with pytest.raises(ValueError, match="not finite"):
        _native.encode_kv_keys(codec, x, np.ones((1, 2, 72), np.float32))


def test_arguments_that_do_not_fit_are_refused() -> None:
    step = private_step([1, 2], [20, 30])
    good = {**step.layout(), "num_layers": 2, "layer": 1, "scale": 0.1}

    def run(queries: np.ndarray = step.queries, **changed: object) -> None:
        _native.attention(POOLS[1], queries, step.arena, **{**good, **changed})

    run()
    for changed, message in [
        ({"codec": "int7"}, "raw16, int8, int4 or int3"),
        ({"codec": "raw16"}, "bytes"),
        ({"num_layers": 3}, "bytes"),
        ({"layer": 2}, "layer must be below"),
        ({"num_kv_heads": 4}, "multiple of num_kv_heads"),
        ({"block_size": 0}, "at least 1"),
        ({"scale": float("nan")}, "finite scale"),
        ({"window": -1}, "finite scale"),
        ({"query_starts": np.array([0, 1, 4], np.int32)}, "query_starts must go"),
        ({"query_starts": np.array([0, 4, 3], np.int32)}, "query rows"),
        ({"query_starts": np.array([0, 3], np.int32)}, "expected 3"),
        ({"context_lens": np.array([20, 33], np.int32)}, "expected rows"),
        ({"context_lens": np.array([20, 1], np.int32)}, "expected rows"),
        ({"block_ids": np.array([0, 1, 2, 99], np.int32)}, "block id 99"),
        ({"block_ids": np.array([0, 1, 2, -1], np.int32)}, "block id -1"),
        ({"block_ids": np.array([0, 1, 2], np.int32)}, "table_starts must go"),
    ]:
        with pytest.raises(ValueError, match=message):
            run(**changed)
    with pytest.raises(ValueError, match="head_dim"):
        run(queries=np.ones((3, 6, 60), np.float32))
    with pytest.raises(TypeError):
        run(queries=step.queries.astype(np.float64))
    with pytest.raises(TypeError):
        run(queries=step.queries[:, ::2])
