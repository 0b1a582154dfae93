"""What a KV cache is worth: the same request with --kv-cache on and off, real SmolLM2, end to end through the engine.

With the cache every position is computed once: prompt + output - 1. Without it each token recomputes the whole sequence
before it: the sum of prompt + i over the output. Both run the same engine, kernels and weights; only the plan differs.
Runs are interleaved (on, off, on, on, ...); a run without the cache takes minutes. Prints a table, the ratio of the
medians, and ends with one JSON line.

    python -m benchmarks.kv_cache_on_off [--prompt-tokens 256] [--output-tokens 256] [--runs-on 5] [--runs-off 1]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

from kvist.engine.api import Engine

TEXT = (
    "A small museum by the harbour keeps the tools of the rope makers: the long spinning walk, the tarred hooks, the "
    "sledge that held the strands tight while they shortened in the twist. "
)
MIN_RATIO = 10.0
"""What keeping K and V must be worth, at least."""


@dataclasses.dataclass(frozen=True)
class Run:
    """One request from submission to its last token."""

    seconds: float
    num_computed: int
    token_ids: tuple[int, ...]


def run_once(engine: Engine, prompt: list[int], num_output: int, expected_computed: int) -> Run:
    """Generate greedily and check that the path under test is the one that ran."""
    start_ns = time.perf_counter_ns()
    result = engine.generate(prompt, temperature=0, max_tokens=num_output, ignore_eos=True)[0]
    seconds = (time.perf_counter_ns() - start_ns) / 1e9
    if result.usage.num_computed_tokens != expected_computed:
        raise SystemExit(
            f"expected {expected_computed} computed positions, received {result.usage.num_computed_tokens}"
        )
    return Run(seconds, result.usage.num_computed_tokens, result.token_ids)


def machine() -> dict[str, object]:
    """Describe where this runs."""
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text().splitlines() if cpu_info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if "model name" in line]
    git = subprocess.run(
        ("git", "rev-parse", "--short", "HEAD"), capture_output=True, text=True, check=False
    )
    return {
        "cpu": names[0] if names else platform.processor(),
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": version("torch"),
        "commit": git.stdout.strip() or None,
    }


def summarise(runs: list[Run]) -> dict[str, object]:
    """Return n, median and range in seconds."""
    seconds = [run.seconds for run in runs]
    return {
        "n": len(runs),
        "median_s": round(statistics.median(seconds), 3),
        "min_s": round(min(seconds), 3),
        "max_s": round(max(seconds), 3),
        "num_computed_tokens": runs[0].num_computed,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompt-tokens", type=int, default=256, help=">= 1")
    parser.add_argument("--output-tokens", type=int, default=256, help=">= 2")
    parser.add_argument("--runs-on", type=int, default=5, help=">= 1")
    parser.add_argument("--runs-off", type=int, default=1, help=">= 1, at most --runs-on")
    arguments = parser.parse_args()
    num_prompt, num_output = arguments.prompt_tokens, arguments.output_tokens
    computed_on = num_prompt + num_output - 1
    computed_off = sum(num_prompt + index for index in range(num_output))
    print(
        f"positions to compute: on {computed_on}, off {computed_off} ({computed_off / computed_on:.0f} times)"
    )

    # No prefix cache on either side, or the second run would not compute its prompt.
    options = {"memory_gib": 0.25, "max_context": num_prompt + num_output, "prefix_cache": "off"}
    runs_on: list[Run] = []
    runs_off: list[Run] = []
    with (
        Engine.from_pretrained(arguments.model, kv_cache="on", **options) as on,
        Engine.from_pretrained(arguments.model, kv_cache="off", **options) as off,
    ):
        text = TEXT * (num_prompt // 16 + 1)
        prompt = on.encode(text)[:num_prompt]
        for engine in (on, off):  # first calls are slower, and are not counted
            engine.generate(prompt[:8], temperature=0, max_tokens=2, ignore_eos=True)
        for index in range(arguments.runs_on):
            runs_on.append(run_once(on, prompt, num_output, computed_on))
            if index < arguments.runs_off:
                runs_off.append(run_once(off, prompt, num_output, computed_off))
        plans = {"on": on.plan.one_line(), "off": off.plan.one_line()}

    results = {"on": summarise(runs_on), "off": summarise(runs_off)}
    ratio = statistics.median(r.seconds for r in runs_off) / statistics.median(
        r.seconds for r in runs_on
    )
    equal = [a == b for a, b in zip(runs_on[0].token_ids, runs_off[0].token_ids, strict=True)]
    # The first tokens always agree. Later ones may part in bfloat16 KV, where matrix shapes change the last bit.
    num_equal = equal.index(False) if False in equal else len(equal)
    for name, row in results.items():
        print(f"kv cache {name:4}{row}")
    print(f"ratio {ratio:.1f} (at least {MIN_RATIO:g} expected); first {num_equal} tokens equal")
    print(
        json.dumps(
            {
                "benchmark": "kv_cache_on_off",
                "num_prompt_tokens": num_prompt,
                "num_output_tokens": num_output,
                "ratio": round(ratio, 2),
                "min_ratio": MIN_RATIO,
                "num_equal_tokens": num_equal,
                "results": results,
                "plans": plans,
                "machine": machine(),
            }
        )
    )
    return 0 if ratio >= MIN_RATIO else 1


if __name__ == "__main__":
    sys.exit(main())
