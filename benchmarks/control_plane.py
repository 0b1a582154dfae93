"""Control-plane cost of one fully cached prompt: chain, lookup, admit, extend, commit, release. No model, no tensors.

Each repetition is a new request with the same prompt as one served before, so everything but its last token is a hit.
The ceiling is what no implementation of keyed identities can avoid: packing the token ids and hashing each block once.
Prints a table in microseconds and ends with one JSON line.

    python -m benchmarks.control_plane [--tokens 4096] [--block-size 64] [--repetitions 2000]
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
from array import array
from importlib.metadata import version
from pathlib import Path

from blake3 import blake3

from kvist.cache.hash import BlockHasher
from kvist.cache.manager import CacheManager
from kvist.cache.namespaces import Namespace

PHASES = ("chain", "hash", "lookup", "admit", "extend", "commit", "release")
WARM_UP = 50
LIMIT_US = 1000.0
"""What the whole may take."""


def serve_once(
    manager: CacheManager, namespace: Namespace, token_ids: list[int]
) -> tuple[list[int], int]:
    """Take one request through the cache; return the clock before and after each phase, and the tokens hit."""
    num_tokens = len(token_ids)
    clock = time.perf_counter_ns
    stamps = [clock()]
    chain = manager.new_chain(namespace, token_ids)
    stamps.append(clock())
    if chain.num_full_blocks:
        chain.block_hash(chain.num_full_blocks - 1)
    stamps.append(clock())
    match = manager.lookup(chain, num_tokens - 1)
    stamps.append(clock())
    lease = manager.admit(match, chain, num_tokens + 1)
    stamps.append(clock())
    assert lease is not None
    num_hit_tokens = lease.num_computed_tokens
    manager.extend(lease, num_tokens)
    stamps.append(clock())
    manager.commit(lease, chain, num_tokens)
    stamps.append(clock())
    manager.release(lease)
    stamps.append(clock())
    return stamps, num_hit_tokens


def ceiling_once(token_ids: list[int], block_size: int) -> int:
    """Return the nanoseconds to pack the ids and to hash each block once."""
    width = 4 * block_size
    key = bytes(32)
    start = time.perf_counter_ns()
    packed = array("I", token_ids).tobytes()
    parent = bytes(32)
    for offset in range(0, len(packed), width):
        parent = blake3(parent + packed[offset : offset + width], key=key).digest()
    return time.perf_counter_ns() - start


def summarise(samples_ns: list[int]) -> dict[str, float]:
    """Return n, median, p10 and p90 in microseconds."""
    deciles = statistics.quantiles(samples_ns, n=10)
    return {
        "n": len(samples_ns),
        "median_us": round(statistics.median(samples_ns) / 1000, 2),
        "p10_us": round(deciles[0] / 1000, 2),
        "p90_us": round(deciles[-1] / 1000, 2),
    }


def machine() -> dict[str, object]:
    """Describe where this runs."""
    cpu_info = Path("/proc/cpuinfo")
    names = (
        [
            line.split(":")[1].strip()
            for line in cpu_info.read_text().splitlines()
            if "model name" in line
        ]
        if cpu_info.exists()
        else []
    )
    git = subprocess.run(
        ("git", "rev-parse", "--short", "HEAD"), capture_output=True, text=True, check=False
    )
    return {
        "cpu": names[0] if names else platform.processor(),
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "blake3": version("blake3"),
        "commit": git.stdout.strip() or None,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=4096, help="prompt length, >= 2")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--repetitions", type=int, default=2000, help=">= 5")
    arguments = parser.parse_args()
    token_ids = [(i * 7919) % 49152 for i in range(arguments.tokens)]
    namespace = Namespace(model="benchmark")
    manager = CacheManager(
        num_blocks=4 * (arguments.tokens // arguments.block_size + 2),
        block_size=arguments.block_size,
        hasher=BlockHasher(bytes(32)),
    )
    serve_once(manager, namespace, token_ids)
    samples: dict[str, list[int]] = {name: [] for name in (*PHASES, "all", "ceiling")}
    for repetition in range(-WARM_UP, arguments.repetitions):
        stamps, num_hit_tokens = serve_once(manager, namespace, token_ids)
        if num_hit_tokens != arguments.tokens - 1:
            print(f"expected {arguments.tokens - 1} hit tokens, received {num_hit_tokens}")
            return 1
        ceiling_ns = ceiling_once(token_ids, arguments.block_size)
        if repetition < 0:
            continue
        for name, start, end in zip(PHASES, stamps[:-1], stamps[1:], strict=True):
            samples[name].append(end - start)
        samples["all"].append(stamps[-1] - stamps[0])
        samples["ceiling"].append(ceiling_ns)
    manager.check_invariants()
    results = {name: summarise(values) for name, values in samples.items()}
    print(f"{arguments.tokens} tokens, all hits, block size {arguments.block_size}, us:")
    print(f"{'':10}{'n':>8}{'median':>10}{'p10':>10}{'p90':>10}")
    for name, row in results.items():
        print(f"{name:10}{row['n']:>8}{row['median_us']:>10}{row['p10_us']:>10}{row['p90_us']:>10}")
    is_within = results["all"]["median_us"] <= LIMIT_US
    print(
        json.dumps(
            {
                "benchmark": "control_plane",
                "num_tokens": arguments.tokens,
                "block_size": arguments.block_size,
                "num_hit_tokens": arguments.tokens - 1,
                "limit_us": LIMIT_US,
                "is_within_limit": is_within,
                "warm_up": WARM_UP,
                "results": results,
                "machine": machine(),
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
