"""Decode at a long context: how much faster a step is where K and V take fewer bits.

Sequences with nothing in common, each with a full context of K and V (random numbers: nothing depends on them), decode
one token in each step through the native model, which is a step of the engine without its Python. Settings take turns,
step by step, so that all see the same noise. For each: tokens a second, the ratio to raw16, what a step reads and
how much of the machine's read bandwidth that is. Ends with one JSON line.

    python -m benchmarks.kv_decode [--context 8192] [--batch 8] [--rounds 15] [--settings raw16,int8,int4,int3,mixed]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from benchmarks.control_plane import machine
from benchmarks.native_model import load_native

from kvist.codecs.transforms import uncalibrated
from kvist.errors import KernelUnavailable
from kvist.kernels import native
from kvist.model.native_decoder import NativeDecoder, StepSequence
from kvist.precision import LADDER, PRESETS, KVPrecision
from kvist.spec import KVSpec
from kvist.storage.slabs import SlabArena
from kvist.types import BlockId, MemoryOp

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK_SIZE = 64
SPARE = 1.25
"""Memory of an arena, as a share of its blocks: slabs are never quite full."""
CEILING_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Full contexts in one arena, ready to decode."""

    name: str
    arena: SlabArena
    sequences: list[StepSequence]
    kv_bytes: int
    """Of all blocks."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--weights", default="auto", help="as kvist serve --weights")
    parser.add_argument(
        "--context", type=int, default=8192, help="tokens of each sequence, a multiple of 64"
    )
    parser.add_argument("--batch", type=int, default=8, help="sequences")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each setting, interleaved")
    parser.add_argument("--settings", default="raw16,int8,int4,int3,mixed")
    parser.add_argument("--json", action="store_true", help="the table goes to stderr")
    arguments = parser.parse_args()
    names = arguments.settings.split(",")
    if arguments.context % BLOCK_SIZE or arguments.context < 2 * BLOCK_SIZE:
        parser.error(f"--context must be a multiple of {BLOCK_SIZE}, at least {2 * BLOCK_SIZE}")
    if unknown := sorted(set(names) - {*LADDER, *PRESETS}):
        known = ", ".join(dict.fromkeys((*LADDER, *PRESETS)))
        parser.error(f"--settings must be of {known}, received {unknown[0]!r}")
    try:
        _, plan, decoder = load_native(arguments.model, arguments.weights)
    except KernelUnavailable as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    settings = [setting(name, decoder, arguments.context, arguments.batch) for name in names]
    step_s: dict[str, list[float]] = {name: [] for name in names}
    attention_s: dict[str, list[float]] = {name: [] for name in names}
    for index in range(arguments.rounds + 1):
        for each in settings:
            before = decoder.phase_seconds()["attention"]
            started = time.perf_counter()
            decoder.step(each.sequences, each.arena)
            seconds = time.perf_counter() - started
            if index:  # the first one touches everything for the first time
                step_s[each.name].append(seconds)
                attention_s[each.name].append(decoder.phase_seconds()["attention"] - before)
    bandwidth = native.extension().measure_ceiling(decoder.pool, "read", 1 << 29, CEILING_SECONDS)
    rows = {
        each.name: figures(each, step_s, attention_s, decoder.num_bytes, bandwidth)
        for each in settings
    }
    report(rows, bandwidth, sys.stderr if arguments.json else sys.stdout)
    document = {
        "benchmark": "kv_decode",
        "context": arguments.context,
        "batch": arguments.batch,
        "rounds": arguments.rounds,
        "read_gb_per_s": bandwidth / 1e9,
        "settings": rows,
        "plan": plan.one_line(),
        "machine": machine(),
    }
    print(json.dumps(document))
    return 0


def setting(name: str, decoder: NativeDecoder, context: int, batch: int) -> Setting:
    """Return sequences of ``context`` tokens whose last one is to be computed, in blocks of the setting's codecs."""
    spec = decoder.spec
    num_blocks = context // BLOCK_SIZE
    codecs = codecs_by_block(name, num_blocks)
    kv_spec = KVSpec(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=BLOCK_SIZE,
        codec=LADDER[0],
    )
    random = np.random.default_rng(0)
    values = random.standard_normal(kv_spec.block_bytes // 2, np.float32)
    raw: NDArray[np.uint8] = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    used = [codec for codec in LADDER if codec in {LADDER[0], *codecs}]
    sizes = {codec: replace(kv_spec, codec=codec).block_bytes for codec in used}
    kv_bytes = batch * sum(sizes[codec] for codec in codecs)
    num_bytes = int(SPARE * kv_bytes) + 64 * sizes[LADDER[0]]
    transforms = uncalibrated(spec.num_layers, spec.num_kv_heads, spec.head_dim)
    arena = SlabArena(kv_spec, used, num_bytes, decoder.pool, transforms)
    sequences = []
    for index in range(batch):
        table = tuple(BlockId(index * num_blocks + block) for block in range(num_blocks))
        for block_id, codec in zip(table, codecs, strict=True):
            arena.apply([MemoryOp("allocate", block_id, LADDER[0])])
            arena.block(block_id)[:] = raw
            if codec != LADDER[0]:
                arena.apply([MemoryOp("demote", block_id, codec)])
        sequences.append(StepSequence(context - 1, (1000 + index,), table, 1))
    return Setting(name=name, arena=arena, sequences=sequences, kv_bytes=kv_bytes)


def codecs_by_block(name: str, num_blocks: int) -> list[str]:
    """Return the codec of each block of a sequence, by its age; the last one is being written."""
    if name == LADDER[0]:
        return [name] * num_blocks
    rule = KVPrecision.parse(PRESETS.get(name) or f"recent:1=raw16,rest={name}")
    codecs = []
    for block in range(num_blocks):
        age = (num_blocks - 1 - block) * BLOCK_SIZE
        recent = next((codec for length, codec in rule.windows if age < length), rule.rest)
        codecs.append(rule.sink if block == 0 else recent)
    return codecs


def figures(
    each: Setting,
    step_s: dict[str, list[float]],
    attention_s: dict[str, list[float]],
    weight_bytes: int,
    bandwidth: float,
) -> dict[str, float]:
    """Return what the table shows of a setting."""
    seconds = statistics.median(step_s[each.name])
    rates = [len(each.sequences) / step for step in step_s[each.name]]
    attention = statistics.median(attention_s[each.name])
    ratios = [
        raw / own for raw, own in zip(step_s.get(LADDER[0], []), step_s[each.name], strict=False)
    ]
    read = each.kv_bytes + weight_bytes
    return {
        "tokens_per_s": statistics.median(rates),
        "tokens_per_s_min": min(rates),
        "tokens_per_s_max": max(rates),
        "ratio_to_raw16": statistics.median(ratios) if ratios else float("nan"),
        "kv_mb": each.kv_bytes / 1e6,
        "step_ms": 1e3 * seconds,
        "attention_ms": 1e3 * attention,
        "attention_share_of_bandwidth": each.kv_bytes / attention / bandwidth,
        "step_share_of_bandwidth": read / seconds / bandwidth,
    }


def report(rows: dict[str, dict[str, float]], bandwidth: float, out: object) -> None:
    """Print the table."""
    heading = (
        "",
        "tokens/s",
        "least-greatest",
        "x raw16",
        "KV MB",
        "step ms",
        "attention ms",
        "of bandwidth",
    )
    widths = (8, 9, 15, 8, 8, 8, 13, 13)
    print(f"reads of memory: {bandwidth / 1e9:.1f} GB/s", file=out)  # type: ignore[call-overload]
    print(*(f"{text:>{width}}" for text, width in zip(heading, widths, strict=True)), file=out)  # type: ignore[call-overload]
    for name, row in rows.items():
        cells = (
            name,
            f"{row['tokens_per_s']:.1f}",
            f"{row['tokens_per_s_min']:.1f}-{row['tokens_per_s_max']:.1f}",
            f"{row['ratio_to_raw16']:.2f}",
            f"{row['kv_mb']:.0f}",
            f"{row['step_ms']:.1f}",
            f"{row['attention_ms']:.1f}",
            f"{row['attention_share_of_bandwidth']:.0%}",
        )
        print(*(f"{text:>{width}}" for text, width in zip(cells, widths, strict=True)), file=out)  # type: ignore[call-overload]


if __name__ == "__main__":
    sys.exit(main())
