"""Time block attention beside the bytes and FLOPs that bound it.

Measures one layer of SmolLM2-135M's shape (9 query heads, 3 KV heads, 64 dimensions, blocks of 64, raw16) through
``dispatch.attention``: prefill chunks over a cached past, decode of one and of many sequences, with and without
a shared prefix. Every case is checked against the reference first; alternatives run interleaved with the
implementation. The blocks of consecutive calls are those of consecutive layers, as in a model, so K and V come from
memory and not from the cache. Prints a table, then one JSON line.

    python -m benchmarks.attention [--repeats N] [--case NAME] [--threads N] [--cpu-time]

On a machine with other work on it, ``--threads 1 --cpu-time`` counts this process's own time only.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvist.kernels import dispatch, parts, torch_sdpa
from kvist.kernels.batch import AttentionBatch
from kvist.spec import KVSpec
from kvist.storage.arena import BlockArena

if TYPE_CHECKING:
    from collections.abc import Callable

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_LAYERS = 9, 3, 64, 64, 12
SCALE = HEAD_DIM**-0.5
MAX_GATHERED = torch_sdpa.GATHERED_BYTES // (8 * NUM_KV_HEADS * HEAD_DIM)
_clock = time.process_time_ns if "--cpu-time" in sys.argv else time.perf_counter_ns
TOLERANCE = 2e-6

# name: ((positions before the step, tokens in it) per sequence, leading blocks that all share)
CASES: dict[str, tuple[list[tuple[int, int]], int]] = {
    "prefill 512, nothing cached": ([(0, 512)], 0),
    "prefill 512 after 2,048": ([(2048, 512)], 0),
    "prefill 512 after 6,000": ([(6000, 512)], 0),
    "question of 24 after 6,000": ([(6000, 24)], 0),
    "8 questions of 24, shared 6,000": ([(6000, 24)] * 8, 93),
    "decode 1 at 6,000": ([(6000, 1)], 0),
    "decode 1 at 300": ([(300, 1)], 0),
    "decode 16 at 300": ([(260 + 5 * i, 1) for i in range(16)], 0),
    "decode 8 at 4,096 each": ([(4096 + 5 * i, 1) for i in range(8)], 0),
    "decode 8, shared 4,096": ([(4100 + 5 * i, 1) for i in range(8)], 64),
    "decode 16, shared 4,096": ([(4100 + 5 * i, 1) for i in range(16)], 64),
    "decode 64, shared 4,096": ([(4100 + 5 * i, 1) for i in range(64)], 64),
    "decode 15 and prefill 497": ([(300 + i, 1) for i in range(15)] + [(1024, 497)], 0),
}


def make_batch(lengths: list[tuple[int, int]], num_shared: int) -> tuple[AttentionBatch, int]:
    """Return a batch over shuffled blocks, and how many blocks it uses."""
    counts = [-(-(start + count) // BLOCK_SIZE) for start, count in lengths]
    ids = iter(np.random.default_rng(1).permutation(sum(counts)).tolist())
    tables = [[next(ids) for _ in range(count)] for count in counts]
    tables = [tables[0][:num_shared] + table[num_shared:] for table in tables]
    batch = AttentionBatch.from_sequences(
        starts=[start for start, _ in lengths],
        num_tokens=[count for _, count in lengths],
        block_tables=tables,
        block_size=BLOCK_SIZE,
    )
    return batch, sum(counts)


def theory(batch: AttentionBatch, num_shared: int) -> tuple[int, int]:
    """Return the bytes of K and V read, shared blocks once, and the FLOPs of visible query-key pairs."""
    shared = num_shared * BLOCK_SIZE
    num_positions = shared + sum(length - shared for length in batch.context_lens)
    num_pairs = sum(
        count * (length - count) + count * (count + 1) // 2
        for length, count in zip(
            batch.context_lens, np.diff(batch.query_starts).tolist(), strict=True
        )
    )
    return num_positions * 2 * NUM_KV_HEADS * HEAD_DIM * 2, num_pairs * NUM_HEADS * HEAD_DIM * 4


def masked_sdpa(q: torch.Tensor, kv: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
    """Return attention by one masked SDPA per sequence: the simple alternative."""
    outputs = []
    for index, context_len in enumerate(batch.context_lens):
        rows = slice(batch.query_starts[index], batch.query_starts[index + 1])
        blocks = kv.index_select(0, batch.block_tables[index]).permute(1, 2, 0, 3, 4)
        widened = torch.empty(blocks.shape).copy_(blocks).flatten(2, 3)[:, None, :, :context_len]
        mask = batch.positions[rows, None] >= torch.arange(context_len)
        output = torch.nn.functional.scaled_dot_product_attention(
            q[None, rows].transpose(1, 2),
            *widened,
            attn_mask=None if len(mask) == 1 else mask,
            scale=SCALE,
            enable_gqa=True,
        )
        outputs.append(output[0].transpose(0, 1))
    return torch.cat(outputs)


def parts_of(q: torch.Tensor, kv: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
    """Return attention as the engine computes it."""
    return dispatch.attention(q, kv, batch, scale=SCALE)


def peaks() -> tuple[float, float]:
    """Return this machine's float32 GEMM FLOP/s and read bytes/s now."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    memory = torch.randn(64 * 2**20)
    flops = 2 * 1024**3 / min(timed(lambda: a @ b) for _ in range(7))
    return flops, memory.nbytes / min(timed(memory.sum) for _ in range(5))


def timed(call: Callable[[], object]) -> float:
    """Return the seconds of one call."""
    start = _clock()
    call()
    return (_clock() - start) / 1e9


def measure(name: str, repeats: int) -> dict[str, object]:
    """Return the times of one case, per layer, after checking it against the reference."""
    lengths, num_shared = CASES[name]
    batch, num_blocks = make_batch(lengths, num_shared)
    spec = KVSpec(
        num_layers=NUM_LAYERS,
        num_kv_heads=NUM_KV_HEADS,
        head_dim=HEAD_DIM,
        block_size=BLOCK_SIZE,
    )
    arena = BlockArena(spec, num_blocks)
    for layer in range(NUM_LAYERS):
        arena.layer(layer).normal_()
    q = torch.randn(batch.num_tokens, NUM_HEADS, HEAD_DIM)
    with dispatch.forced("reference"):
        expected = parts_of(q, arena.layer(0), batch)
    cut_s = timed(lambda: parts.cut(batch, None, MAX_GATHERED))
    alternatives = {"parts": parts_of, "one masked SDPA a sequence": masked_sdpa}
    times: dict[str, list[float]] = {label: [] for label in alternatives}
    before = dispatch.num_calls("attention", "torch")
    for label, run in alternatives.items():
        error = (run(q, arena.layer(0), batch) - expected).abs().max().item()
        if error > TOLERANCE:
            sys.exit(f"{name}: {label} is off by {error}")
    for _ in range(repeats):
        for label, run in alternatives.items():
            for layer in range(NUM_LAYERS):
                times[label].append(
                    timed(lambda run=run, layer=layer: run(q, arena.layer(layer), batch))
                )
    if dispatch.num_calls("attention", "torch") != before + 1 + repeats * NUM_LAYERS:
        sys.exit(f"{name}: the implementation under test did not run")
    num_bytes, flops = theory(batch, num_shared)
    return {
        "case": name,
        "num_bytes": num_bytes,
        "flops": flops,
        "num_parts": len(parts.cut(batch, None, MAX_GATHERED)),
        "cut_s": cut_s,
        "times_s": {
            label: dict(zip(("p10", "median", "p90"), quantiles(values), strict=True))
            for label, values in times.items()
        },
    }


def quantiles(values: list[float]) -> tuple[float, float, float]:
    """Return the 10th, 50th and 90th percentile."""
    tenths = statistics.quantiles(values, n=10)
    return tenths[0], statistics.median(values), tenths[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--cpu-time", action="store_true", help="CPU time instead of wall time")
    options = parser.parse_args()
    num_threads = options.threads
    torch.set_num_threads(num_threads)
    torch.manual_seed(0)
    with torch.inference_mode():
        peak_flops, peak_bytes = peaks()
        print(
            f"peaks here: {peak_flops / 1e9:.0f} GFLOP/s float32 GEMM, {peak_bytes / 1e9:.1f} GB/s read"
        )
        print(
            f"{'one layer':34}{'bound':>9}{'parts':>9}{'of bound':>9}{'masked SDPA':>13}{'ratio':>7}  (ms, median)"
        )
        results = []
        for name in CASES:
            if options.case not in name:
                continue
            result = measure(name, options.repeats)
            bound = max(result["num_bytes"] / peak_bytes, result["flops"] / peak_flops)
            ours, simple = (entry["median"] for entry in result["times_s"].values())
            print(
                f"{name:34}{bound * 1e3:9.3f}{ours * 1e3:9.3f}{bound / ours:9.0%}"
                f"{simple * 1e3:13.3f}{simple / ours:7.2f}"
            )
            results.append({**result, "bound_s": bound, "bound_fraction": bound / ours})
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    machine = {
        "cpu": platform.processor() or platform.machine(),
        "threads": num_threads,
        "torch": torch.__version__,
        "commit": commit.stdout.strip(),
        "peak_flops": peak_flops,
        "peak_bytes_per_s": peak_bytes,
        "repeats": options.repeats * NUM_LAYERS,
        "clock": "cpu" if options.cpu_time else "wall",
    }
    print(json.dumps({"benchmark": "attention", **machine, "results": results}))


if __name__ == "__main__":
    main()
