"""Attention over blocks in int4 and int3, alone and beside blocks of rows, against numpy in float64 on what they hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

_native = pytest.importorskip("kvist._native", reason="the native extension is not built")

from kvist.codecs import e5m3  # noqa: E402  # after the extension was found
from kvist.codecs.packing import pack  # noqa: E402
from kvist.codecs.rotated import LEVELS  # noqa: E402
from kvist.kernels.rotation import rotation  # noqa: E402
from tests.native.test_attention import POOLS, consecutive, decode, encode  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

CODECS = ("raw16", "int8", "int4", "int3")
BITS = {"int4": 4, "int3": 3}
SPAN = 64
NAN = 255
NOT_ALLOCATED = 255
# Of the range of the values. The contract is 2e-3 wherever kernels use fixed point; few rows do better.
TOLERANCE = {"serial": 1e-5, "avx2": 2e-3, "avx512": 2e-3, "neon": 2e-3}
FEW_ROWS_TOLERANCE = {"serial": 1e-5, "avx2": 3e-4, "avx512": 3e-4, "neon": 1e-5}
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
class SpanStep:
    """A step over blocks of the codecs given, scattered over an arena of bytes that are NaN wherever they are read."""

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
    change: Callable[[Parts], None] | None = None
    """Changes what the records of int4 and int3 say."""
    queries: np.ndarray = field(init=False)
    arena: np.ndarray = field(init=False)
    offsets: np.ndarray = field(init=False)
    codes: np.ndarray = field(init=False)
    keys: np.ndarray = field(init=False)
    """(B, L, K, P, D): in the basis in which queries are given."""
    values: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        num_blocks = len(self.codecs)
        outer = (self.num_layers, self.num_kv_heads)
        block = (*outer, self.block_size, self.head_dim)
        shape = (sum(self.num_rows), self.num_heads, self.head_dim)
        self.queries = (rng.standard_normal(shape) * self.spread).astype(np.float32)
        self.mean = rng.standard_normal((*outer, self.head_dim), np.float32)
        self.key_balance = np.exp2(rng.uniform(-1, 1, self.mean.shape)).astype(np.float32)
        self.value_balance = np.exp2(rng.uniform(-1, 1, self.mean.shape)).astype(np.float32)
        self.transforms = _native.KvTransforms(self.mean, self.key_balance, self.value_balance)
        self.codes = np.array([CODECS.index(codec) for codec in self.codecs], np.uint8)
        self.offsets = np.zeros(num_blocks, np.int64)
        self.keys = np.zeros((num_blocks, *block))
        self.values = np.zeros_like(self.keys)
        pieces, used = [], 0
        for block_id in rng.permutation(num_blocks).tolist():
            stored = self._make(block_id, rng)
            gap = np.full(int(rng.integers(0, 40)), 0xFF, np.uint8)
            self.offsets[block_id] = used + len(gap)
            pieces += [gap, stored]
            used += len(gap) + stored.size
        self.arena = np.concatenate([*pieces, np.zeros(0, np.uint8)])[None]

    def _make(self, block_id: int, rng: np.random.Generator) -> np.ndarray:
        """Return the bytes of a block, and set what they stand for."""
        codec, outer = self.codecs[block_id], (self.num_layers, self.num_kv_heads)
        if codec not in BITS:
            shape = (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)
            rows = encode(codec, rng.standard_normal(shape, np.float32))
            held = decode(codec, rows, self.head_dim)
            self.keys[block_id], self.values[block_id] = held[:, 0], held[:, 1]
            rows[..., ~self._written(block_id), :] = 0xFF
            return rows.reshape(-1)
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
            "transforms": self.transforms,
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


def error_of(step: SpanStep, threads: int = 1) -> float:
    return float(np.abs(step.run(threads) - step.expected()).max() / step.value_range())


def check(step: SpanStep, isa: str, threads: int = 1) -> None:
    error = error_of(step, threads)
    assert error <= TOLERANCE[isa], f"{error=:.2e}"


def codecs_of(tables: list[list[int]], pattern: str) -> list[str]:
    codecs = ["raw16"] * (1 + max((i for table in tables for i in table), default=0))
    for table in tables:
        for place, block_id in enumerate(table):
            codecs[block_id] = PATTERNS[pattern](place, len(table))
    return codecs


def private_step(
    pattern: str, num_rows: list[int], context_lens: list[int], **more: object
) -> SpanStep:
    sizes = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 64, "block_size": 64, **more}
    tables = consecutive(num_rows, context_lens, sizes["block_size"])
    return SpanStep(
        num_rows=num_rows,
        context_lens=context_lens,
        tables=tables,
        codecs=codecs_of(tables, pattern),
        **sizes,
    )


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("head_dim", [8, 32, 64, 72, 80, 96, 128, 192, 256])
def test_head_dims(isa: str, pattern: str, head_dim: int) -> None:
    check(private_step(pattern, [1, 3, 10], [300, 200, 410], head_dim=head_dim), isa)


@pytest.mark.parametrize("pattern", ["int4", "int3"])
@pytest.mark.parametrize("heads", [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (8, 2), (14, 2)])
def test_head_groups_and_numbers_of_rows(
    isa: str, pattern: str, heads: tuple[int, int]
) -> None:
    more = {"num_heads": heads[0], "num_kv_heads": heads[1], "block_size": 128}
    check(private_step(pattern, [1, 2, 7, 30], [300, 270, 400, 290], **more), isa, threads=2)
