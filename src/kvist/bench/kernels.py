"""Each native kernel against the ceiling of the resource that bounds it on this machine, measured in the same run.

Responsible for the cases, for checking a kernel's result before timing it, and for the bound. Knows nothing of models
beyond their shapes.

    time >= max(bytes / read bandwidth, operations / rate of the dominating instructions)

``bytes`` is what must be read or written at least once: weights or K and V, rows in, rows out. The bandwidth is that of
plain reads by as many threads over a buffer as large as what the timed loop goes through, so a case whose data stays in
a cache is compared with that cache. ``operations`` are multiplications and additions; their rate is that of a loop of
the same instructions on registers. The fraction is the bound over the best time. What a kernel does beside that
(quantising rows, exponentials, merging) counts as loss.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from kvist.bench.machine import machine_document
from kvist.codecs import e5m3
from kvist.codecs.packing import packed_bytes, unpack
from kvist.codecs.rotated import LEVELS
from kvist.errors import BenchError
from kvist.kernels.native import extension
from kvist.kernels.rotation import rotation
from kvist.spec import SPAN_CODEC_BITS, SPAN_TOKENS, span_record_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvist.spec import ModelSpec

# The extension, or what tests put in its place.
Native = Any
Pool = Any
Array = np.ndarray[Any, np.dtype[Any]]

WEIGHT_KINDS = {"int8": (0, "int8_madd"), "int4": (32, "int8_maddubs"), "bf16": (0, "f32_fma")}
"""Group, and the ceiling of the instructions that dominate, by kind of weights."""
CODECS = {
    "raw16": "f32_fma",
    "int8": "int8_madd",
    "int4": "int8_maddubs",
    "int3": "int8_maddubs",
}
ROW_COUNTS = (1, 4, 16, 64, 512)
LARGE_SHAPE = (8192, 2048)
"""Outputs and inputs."""

NUM_CHECKED_ROWS = 8
ATTENTION_TOLERANCE = {"raw16": 0.02, "int8": 0.05, "int4": 0.005, "int3": 0.005}
"""Of the largest |v|. Scores are spread so that a few keys have most of the weight: a wrong one costs more."""
SCORE_SPREAD = 3.0
CEILING_SECONDS = 0.3
MIN_REPEATS = 3
BLOCK_SIZE = 64
CONTEXT, LONG_CONTEXT = 2048, 8192
FANOUT = 16
MAX_HEAD_ROWS = 16
MAX_MEMORY_BOUND_ROWS = 16
"""With more rows, weights are read from a cache most of the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSizes:
    """The attention of a model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kernel on one shape."""

    name: str
    kernel: str
    num_bytes: int
    """Read or written at least once in a call."""
    num_operations: int
    ceiling: str
    """Of the operations."""
    footprint_bytes: int
    """What the timed loop cycles through."""
    check: Callable[[], None]
    """Raises ``BenchError`` when the kernel computes something else than the reference."""
    time_s: Callable[[float], float]
    """Seconds of the best call, in about so many seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One row of the table."""

    case: str
    kernel: str
    num_bytes: int
    num_operations: int
    time_s: float
    bound_by: str
    ceiling: float
    """Bytes or operations a second, of what bounds it."""
    bound_s: float
    fraction: float
    """Of the ceiling."""


@dataclass(frozen=True, slots=True)
class PlannedCase:
    """A case that allocates nothing before it is made."""

    name: str
    make: Callable[[], Case]


class Ceilings:
    """What the machine can do, measured when it is asked for first.

    Args:
        native: The extension.
        pool: The threads that the kernels are timed with.
        seconds: For each measurement.
    """

    def __init__(self, native: Native, pool: Pool, seconds: float) -> None:
        self._native = native
        self._pool = pool
        self._seconds = seconds
        self.rates: dict[str, float] = {}
        """Operations a second, and bytes a second by size of the buffer (``read 4 MiB``)."""

    def rate(self, what: str) -> float:
        """Return operations a second."""
        return self._kept(what, what, 0)

    def bandwidth(self, footprint_bytes: int) -> tuple[str, float]:
        """Return name and bytes a second of reads over a buffer of about this size (the power of two below)."""
        size = 2 ** max(14, math.floor(math.log2(footprint_bytes)))
        name = f"read {size / 2**20:g} MiB"
        return name, self._kept(name, "read", size)

    def _kept(self, name: str, what: str, num_bytes: int) -> float:
        if name not in self.rates:
            self.rates[name] = self._native.measure_ceiling(
                self._pool, what, num_bytes, self._seconds
            )
        return self.rates[name]


def run_case(case: Case, ceilings: Ceilings, seconds: float) -> Result:
    """Check a case, time it, and compare it with its bound.

    Raises:
        BenchError: The kernel's result is wrong; it is not timed.
    """
    case.check()
    time_s = case.time_s(seconds)
    read_name, bandwidth = ceilings.bandwidth(case.footprint_bytes)
    bounds = {
        read_name: (case.num_bytes / bandwidth, bandwidth),
        case.ceiling: (
            case.num_operations / ceilings.rate(case.ceiling),
            ceilings.rate(case.ceiling),
        ),
    }
    bound_by = max(bounds, key=lambda name: bounds[name][0])
    bound_s, ceiling = bounds[bound_by]
    return Result(
        case=case.name,
        kernel=case.kernel,
        num_bytes=case.num_bytes,
        num_operations=case.num_operations,
        time_s=time_s,
        bound_by=bound_by,
        ceiling=ceiling,
        bound_s=bound_s,
        fraction=bound_s / time_s,
    )


@dataclass(frozen=True, slots=True)
class KernelOptions:
    """What is measured, and for how long."""

    only: str
    """Cases whose name has this in it; empty: all."""
    seconds: float
    """For timing each case."""
    footprint_bytes: int
    """What a timed loop goes through."""


def measure_kernels(
    spec: ModelSpec, threads: int, options: KernelOptions, on_done: Callable[[int, int], None]
) -> dict[str, Any]:  # Any: JSON values
    """Measure all cases of a model's shapes, and of one large matrix.

    Args:
        spec: Of the model.
        threads: Of the pool.
        options: What, and for how long.
        on_done: Called with how many cases are done, and how many there are.

    Raises:
        BenchError: A kernel's result is wrong, or there is no case of the name asked for.
        KernelUnavailable: The extension was not built.
    """
    native = extension()
    pool = native.Pool(threads)
    ceilings = Ceilings(native, pool, CEILING_SECONDS)

    def planned() -> Iterator[PlannedCase]:
        sizes = AttentionSizes(
            num_heads=spec.num_heads, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim
        )
        cases = chain(
            linear_cases(native, pool, linear_shapes(spec), options.footprint_bytes),
            attention_cases(native, pool, sizes, options.footprint_bytes),
        )
        return (case for case in cases if options.only in case.name)

    # Nothing is allocated by counting.
    total = sum(1 for _ in planned())
    if total == 0:
        raise BenchError(f"[bench] no case has {options.only!r} in its name")
    results: list[Result] = []
    for case in planned():
        results.append(run_case(case.make(), ceilings, options.seconds))
        on_done(len(results), total)
    return {
        "machine": machine_document(),
        "isa": native.isa(),
        "threads": threads,
        "ceilings": ceilings.rates,
        "cases": [dataclasses.asdict(result) for result in results],
    }


# --- linear layers


def linear_shapes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Return outputs and inputs of a model's linear layers, q/k/v and gate/up as one each, and of a large one."""
    heads = spec.num_heads + 2 * spec.num_kv_heads
    return {
        "qkv": (heads * spec.head_dim, spec.hidden_size),
        "o": (spec.hidden_size, spec.num_heads * spec.head_dim),
        "gate-up": (2 * spec.intermediate_size, spec.hidden_size),
        "down": (spec.hidden_size, spec.intermediate_size),
        "head": (spec.vocab_size, spec.hidden_size),
        "large": LARGE_SHAPE,
    }


class Weights:
    """One matrix, packed when it is first needed, and copies of it that a timed loop goes through."""

    def __init__(self, native: Native, pool: Pool, shape: tuple[int, int], kind: str) -> None:
        self.native, self.pool, self.shape, self.kind = native, pool, shape, kind

    @cached_property
    def packed(self) -> Any:  # noqa: ANN401  # of the extension
        """The packed matrix, of random values."""
        weights = np.random.default_rng(7).standard_normal(self.shape, dtype=np.float32)
        group, _ = WEIGHT_KINDS[self.kind]
        return self.native.PackedLinear(weights, self.kind, group, "none", self.pool)

    @cached_property
    def values(self) -> Array:
        """What it stands for, (N, K) float32."""
        return np.asarray(self.packed.unpack())

    @cached_property
    def sums(self) -> Array:
        """Sums of magnitudes, (N,) float64."""
        sums: Array = np.abs(self.values).sum(axis=1, dtype=np.float64)
        return sums

    def copies(self, footprint_bytes: int) -> list[Any]:  # Any: of the extension
        """Return as many as fill the footprint, at least one."""
        count = footprint_bytes // self.packed.nbytes
        group, _ = WEIGHT_KINDS[self.kind]
        return [self.packed] + [
            self.native.PackedLinear.from_data(
                *self.shape, self.kind, group, "none", self.packed.data().copy()
            )
            for _ in range(1, count)
        ]


def linear_cases(
    native: Native, pool: Pool, shapes: Mapping[str, tuple[int, int]], footprint_bytes: int
) -> Iterator[PlannedCase]:
    """Yield the linear layers: every kind of weights, every shape, every number of rows.

    Args:
        native: The extension.
        pool: Of the extension.
        shapes: Outputs and inputs by name.
        footprint_bytes: For few rows, copies of the weights fill it and are read in turn, as in a model of many layers.
    """
    for kind in WEIGHT_KINDS:
        for shape_name, shape in shapes.items():
            weights = Weights(native, pool, shape, kind)
            for num_rows in ROW_COUNTS:
                # Of a prompt, only the last row goes through the head.
                if shape_name == "head" and num_rows > MAX_HEAD_ROWS:
                    continue
                name = f"{kind} {shape_name} {shape[1]}->{shape[0]}, {num_rows} rows"
                footprint = footprint_bytes if num_rows <= MAX_MEMORY_BOUND_ROWS else 0
                yield PlannedCase(name, partial(_linear_case, name, weights, num_rows, footprint))


def _linear_case(name: str, weights: Weights, num_rows: int, footprint_bytes: int) -> Case:
    copies = weights.copies(footprint_bytes)
    num_outputs, num_inputs = weights.shape
    return Case(
        name=name,
        kernel="linear",
        num_bytes=weights.packed.nbytes + 4 * num_rows * (num_outputs + num_inputs),
        num_operations=2 * num_rows * num_outputs * num_inputs,
        ceiling=WEIGHT_KINDS[weights.kind][1],
        footprint_bytes=weights.packed.nbytes * len(copies),
        check=lambda: check_linear(weights, num_rows),
        time_s=lambda seconds: _time_linear(weights, copies, num_rows, seconds),
    )


def check_linear(weights: Weights, num_rows: int) -> None:
    """Compare a linear layer with float64 over the values that its packed weights stand for.

    Raises:
        BenchError: An output is further off than rounding the row to its codes explains.
    """
    num_outputs, num_inputs = weights.shape
    x = np.random.default_rng(num_rows).standard_normal((num_rows, num_inputs), dtype=np.float32)
    rows = np.unique(np.linspace(0, num_rows - 1, NUM_CHECKED_ROWS).astype(int))
    received = weights.native.linear(weights.pool, weights.packed, x)[rows]
    # Sums of a few thousand float32 products: far closer to float64 than the rounding that is allowed for below.
    expected = x[rows] @ weights.values.T
    largest = np.abs(x[rows]).max(axis=1)
    limit = weights.packed.activation_limit
    # Half a code of each input at most, and the order of float32 sums.
    share = largest * (0.51 / limit + 1e-5 if limit else 1e-5)
    allowed = np.outer(share, weights.sums)
    worst = float((np.abs(received - expected) / allowed).max())
    if not worst <= 1.0:
        raise BenchError(
            f"[bench] the {weights.kind} linear kernel is wrong at {num_rows} rows of {num_inputs}->{num_outputs}: "
            f"off by {worst:.3g} times what rounding explains; it is not timed"
        )


def _time_linear(weights: Weights, copies: Sequence[Any], num_rows: int, seconds: float) -> float:
    """Return the seconds of a call in the best round through all copies."""

    def time_round() -> float:
        return float(weights.native.time_linear(weights.pool, copies, num_rows, 1))

    num_rounds = math.ceil(seconds / (time_round() * len(copies)))
    return min(time_round() for _ in range(max(MIN_REPEATS, num_rounds)))


# --- attention


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionStep:
    """The arrays of one attention call, as the extension takes them."""

    sizes: AttentionSizes
    codec: str
    num_layers: int
    queries: Array
    """(T, H, D) float32."""
    arena: Array
    """(B, bytes) uint8."""
    keys: Array
    """(B, 2, K, P, D) float32: the keys, in the basis of the queries, and values that each layer stands for."""
    transforms: Any  # of the extension
    """What int4 and int3 blocks need; None for others."""
    query_starts: Array
    context_lens: Array
    table_starts: Array
    block_ids: Array

    def arguments(self) -> dict[str, Any]:  # Any: of the extension
        """Return what both functions of the extension take by name."""
        return {
            "codec": self.codec,
            "num_layers": self.num_layers,
            "num_kv_heads": self.sizes.num_kv_heads,
            "block_size": BLOCK_SIZE,
            "query_starts": self.query_starts,
            "context_lens": self.context_lens,
            "table_starts": self.table_starts,
            "block_ids": self.block_ids,
            "scale": self.sizes.head_dim**-0.5,
        } | ({} if self.transforms is None else {"transforms": self.transforms})


@dataclass(frozen=True, slots=True)
class StepKind:
    """What a step consists of."""

    codec: str
    """Of the blocks."""
    num_queries: Sequence[int]
    """Query rows of each sequence."""
    tables: Sequence[Sequence[int]]
    """Block ids of each sequence."""


def make_step(
    native: Native, sizes: AttentionSizes, kind: StepKind, num_layers: int
) -> AttentionStep:
    """Return a step of sequences that end with their queries and fill their blocks.

    Args:
        native: The extension, which encodes keys and values.
        sizes: Heads.
        kind: Sequences.
        num_layers: Layers of the arena, all of the same values; each timed call uses the next one.
    """
    codec, num_queries, tables = kind.codec, kind.num_queries, kind.tables
    random = np.random.default_rng(11)
    num_blocks = 1 + max(block for table in tables for block in table)
    transforms = None
    if codec in SPAN_CODEC_BITS:
        layer, keys = random_spans(codec, num_blocks, sizes, random)
        channels = (num_layers, sizes.num_kv_heads, sizes.head_dim)
        ones = np.ones(channels, np.float32)
        transforms = native.KvTransforms(np.zeros(channels, np.float32), ones, ones)
    else:
        layer, keys = random_rows(native, codec, num_blocks, sizes, random)
    arena = np.ascontiguousarray(np.broadcast_to(layer, (num_blocks, num_layers, layer.shape[-1])))
    total = sum(num_queries)
    queries = random.standard_normal((total, sizes.num_heads, sizes.head_dim), dtype=np.float32)
    return AttentionStep(
        sizes=sizes,
        codec=codec,
        num_layers=num_layers,
        queries=queries * np.float32(SCORE_SPREAD),
        arena=arena.reshape(num_blocks, -1),
        keys=keys,
        transforms=transforms,
        query_starts=np.concatenate([[0], np.cumsum(num_queries)]).astype(np.int32),
        context_lens=np.array([len(table) * BLOCK_SIZE for table in tables], dtype=np.int32),
        table_starts=np.concatenate([[0], np.cumsum([len(table) for table in tables])]).astype(
            np.int32
        ),
        block_ids=np.concatenate([np.asarray(table) for table in tables]).astype(np.int32),
    )


def random_rows(
    native: Native, codec: str, num_blocks: int, sizes: AttentionSizes, random: np.random.Generator
) -> tuple[Array, Array]:
    """Return blocks of one layer in a codec of rows, (B, 1, bytes), and what they stand for, (B, 2, K, P, D)."""
    shape = (num_blocks, 2, sizes.num_kv_heads, BLOCK_SIZE, sizes.head_dim)
    one = random.standard_normal(shape, dtype=np.float32)
    encoded = native.encode_kv(codec, one.reshape(-1, 1, sizes.head_dim))
    decoded = decode_kv(codec, encoded.reshape(-1, encoded.shape[-1]), sizes.head_dim)
    return encoded.reshape(num_blocks, 1, -1), decoded.reshape(shape)


def random_spans(
    codec: str, num_blocks: int, sizes: AttentionSizes, random: np.random.Generator
) -> tuple[Array, Array]:
    """Return the same for int4 or int3, keys turned: any codes, steps and scales that make keys and values about 1."""
    bits, head_dim = SPAN_CODEC_BITS[codec], sizes.head_dim
    outer = (num_blocks, sizes.num_kv_heads)
    levels = LEVELS[bits].astype(np.float32)
    half = (2**bits - 1) / 2

    def numbers(count: int, size: float) -> Array:
        return e5m3.nearest(size * 2.0 ** random.uniform(-0.5, 0.5, (*outer, count))).astype(
            np.uint8
        )

    steps = numbers(head_dim, math.sqrt(3) / (half + 1))
    zeros = np.full((*outer, head_dim), 1 - 2**bits, np.int8)
    scales = numbers(SPAN_TOKENS, 1 / float(np.sqrt(np.square(levels).mean())))
    size = packed_bytes(SPAN_TOKENS, head_dim, bits)
    key_bytes, value_bytes = random.integers(0, 256, (2, *outer, size), np.uint8)
    records = np.concatenate((steps, zeros.view(np.uint8), key_bytes, scales, value_bytes), axis=-1)
    key_codes = unpack(key_bytes, SPAN_TOKENS, head_dim, bits)
    value_codes = np.swapaxes(unpack(value_bytes, head_dim, SPAN_TOKENS, bits), -1, -2)
    keys = e5m3.VALUES[steps][..., None, :] * (key_codes - np.float32(half))
    values = e5m3.VALUES[scales][..., None] * levels[value_codes] @ rotation(head_dim).T
    return records.reshape(num_blocks, 1, -1), np.stack((keys, values), axis=1)


def decode_kv(codec: str, rows: Array, head_dim: int) -> Array:
    """Return the values of encoded rows: (N, bytes) uint8 to (N, D) float32."""
    if codec == "raw16":
        bits = rows.view(np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32)
    codes = rows[:, :head_dim].view(np.int8).astype(np.float32)
    scales = rows[:, head_dim:].copy().view(np.float16).astype(np.float32)
    return codes * np.repeat(scales, 64, axis=1)[:, :head_dim]


def check_attention(native: Native, pool: Pool, step: AttentionStep) -> None:
    """Compare attention with float64 on some of the step's rows.

    Raises:
        BenchError: A value is further off than the codec's arithmetic explains.
    """
    layer = step.num_layers - 1
    received = native.attention(pool, step.queries, step.arena, layer=layer, **step.arguments())
    num_rows = len(step.queries)
    worst = 0.0
    for row in np.unique(np.linspace(0, num_rows - 1, 4 * NUM_CHECKED_ROWS).astype(int)):
        expected = _attend(step, int(row))
        worst = max(worst, float(np.abs(received[row] - expected).max()))
    allowed = ATTENTION_TOLERANCE[step.codec] * float(np.abs(step.keys[:, 1]).max())
    if not worst <= allowed:
        raise BenchError(
            f"[bench] the attention kernel is wrong over {step.codec} blocks: off by {worst:.3g}, allowed are "
            f"{allowed:.3g}; it is not timed"
        )


def _attend(step: AttentionStep, row: int) -> Array:
    """Return the attention of one query row, (H, D) float64."""
    sequence = int(np.searchsorted(step.query_starts, row, side="right")) - 1
    from_end = int(step.query_starts[sequence + 1]) - row
    num_keys = int(step.context_lens[sequence]) - from_end + 1
    table = step.block_ids[step.table_starts[sequence] : step.table_starts[sequence + 1]]
    # (blocks, 2, K, P, D) to (2, K, positions, D)
    held = np.moveaxis(step.keys[table].astype(np.float64), 0, 2)
    held = held.reshape(2, step.sizes.num_kv_heads, -1, step.sizes.head_dim)[:, :, :num_keys]
    ratio = step.sizes.num_heads // step.sizes.num_kv_heads
    keys, values = (np.repeat(half, ratio, axis=0) for half in held)
    query = step.queries[row].astype(np.float64)
    scores = np.einsum("hd,hkd->hk", query, keys) * step.sizes.head_dim**-0.5
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    mean: Array = np.einsum("hk,hkd->hd", weights / weights.sum(axis=1, keepdims=True), values)
    return mean


def attention_cases(
    native: Native, pool: Pool, sizes: AttentionSizes, footprint_bytes: int
) -> Iterator[PlannedCase]:
    """Yield decode, prefill, and decode of 16 sequences that share all blocks but their last.

    Args:
        native: The extension.
        pool: Of the extension.
        sizes: Heads.
        footprint_bytes: For few rows, layers fill it and are read in turn.
    """
    num_blocks = CONTEXT // BLOCK_SIZE
    shared = range(num_blocks - 1)
    fanout = [[*shared, num_blocks - 1 + index] for index in range(FANOUT)]
    for codec in CODECS:
        for name, num_queries, tables in (
            (f"decode, {CONTEXT} keys", [1], [range(num_blocks)]),
            (f"decode, {LONG_CONTEXT} keys", [1], [range(LONG_CONTEXT // BLOCK_SIZE)]),
            (f"decode x{FANOUT}, {CONTEXT} shared keys", [1] * FANOUT, fanout),
            (f"prefill, {CONTEXT} rows", [CONTEXT], [range(num_blocks)]),
        ):
            kind = StepKind(codec, num_queries, tables)
            footprint = footprint_bytes if num_queries[0] == 1 else 0
            full_name = f"{codec} {name}"
            make = partial(_attention_case, full_name, native, pool, sizes, kind, footprint)
            yield PlannedCase(full_name, make)


def _attention_case(
    name: str, native: Native, pool: Pool, sizes: AttentionSizes, kind: StepKind, footprint: int
) -> Case:
    num_blocks = len({block for table in kind.tables for block in table})
    layer_bytes = num_blocks * sizes.num_kv_heads * _head_bytes(native, kind.codec, sizes.head_dim)
    step = make_step(native, sizes, kind, max(1, footprint // layer_bytes))
    # A row sees all keys before it, and itself.
    seen = sum(
        rows * len(table) * BLOCK_SIZE - rows * (rows - 1) // 2
        for rows, table in zip(kind.num_queries, kind.tables, strict=True)
    )
    return Case(
        name=name,
        kernel="attention",
        num_bytes=layer_bytes + 2 * step.queries.nbytes,
        num_operations=4 * seen * sizes.num_heads * sizes.head_dim,
        ceiling=CODECS[kind.codec],
        footprint_bytes=layer_bytes * step.num_layers,
        check=lambda: check_attention(native, pool, step),
        time_s=lambda seconds: _time_attention(native, pool, step, seconds),
    )


def _head_bytes(native: Native, codec: str, head_dim: int) -> int:
    """Return the bytes of K and V of a block in one layer and KV head."""
    if codec in SPAN_CODEC_BITS:
        return BLOCK_SIZE // SPAN_TOKENS * span_record_bytes(codec, head_dim)
    row = native.encode_kv(codec, np.ones((1, 1, head_dim), np.float32))
    return 2 * BLOCK_SIZE * int(row.shape[-1])


def _time_attention(native: Native, pool: Pool, step: AttentionStep, seconds: float) -> float:
    """Return the seconds of a call in the best round through all layers."""

    def time_rounds(count: int) -> Array:
        repetitions = count * step.num_layers
        times = native.time_attention(
            pool, step.queries, step.arena, repetitions=repetitions, **step.arguments()
        )
        rounds: Array = np.asarray(times).reshape(count, step.num_layers).mean(axis=1)
        return rounds

    round_s = float(time_rounds(1)[0]) * step.num_layers
    return float(time_rounds(max(MIN_REPEATS, math.ceil(seconds / round_s))).min())
