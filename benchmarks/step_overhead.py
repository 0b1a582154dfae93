"""What a decode step costs outside the kernels: scheduling, flattening, sampling, text.

One stream, or several, decode greedily through the engine's core, in the thread that steps it. The time of a step less
the time the native model spent in its phases is the overhead: everything that is not a kernel. Ends with one JSON line.

    python -m benchmarks.step_overhead [--streams 1] [--context 512] [--steps 300]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

from benchmarks.control_plane import machine
from benchmarks.native_model import load_native

from kvist.engine.build import assemble
from kvist.engine.core import RequestGroup
from kvist.errors import KernelUnavailable
from kvist.model.tokenizer import load_tokenizer
from kvist.types import SamplingParams, TokenId


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--weights", default="auto", help="as kvist serve --weights")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--context", type=int, default=512, help="prompt tokens of each stream")
    parser.add_argument("--steps", type=int, default=300, help="decode steps measured")
    arguments = parser.parse_args()
    try:
        path, plan, decoder = load_native(arguments.model, arguments.weights)
    except KernelUnavailable as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    core = assemble(plan, decoder, load_tokenizer(path), "benchmark")
    warm_up = 20
    params = SamplingParams(
        temperature=0, max_tokens=arguments.steps + warm_up + 2, ignore_eos=True
    )
    for stream in range(arguments.streams):
        prompt = tuple(TokenId(1000 + (i + 31 * stream) % 20000) for i in range(arguments.context))
        core.add(
            RequestGroup(request_id=f"stream-{stream}", prompt_token_ids=prompt, params=params)
        )
    # Until every stream decodes.
    while sum(len(chunk.token_ids) for chunk in core.step()) < arguments.streams:
        pass
    total_us: list[float] = []
    outside_us: list[float] = []
    for step in range(arguments.steps + warm_up):
        kernels = sum(decoder.phase_seconds().values())
        started = time.perf_counter()
        core.step()
        seconds = time.perf_counter() - started
        if step >= warm_up:
            total_us.append(1e6 * seconds)
            outside_us.append(1e6 * (seconds - sum(decoder.phase_seconds().values()) + kernels))
    core.close()
    figures = {"step_us": summary(total_us), "outside_kernels_us": summary(outside_us)}
    for name, values in figures.items():
        print(f"{name:20} " + "  ".join(f"{key} {value:8.1f}" for key, value in values.items()))
    document = {
        "benchmark": "step_overhead",
        "streams": arguments.streams,
        "context": arguments.context,
        "steps": arguments.steps,
        **figures,
        "plan": plan.one_line(),
        "machine": machine(),
    }
    print(json.dumps(document))
    return 0


def summary(values: list[float]) -> dict[str, float]:
    """Return median, 10th and 90th percentile."""
    deciles = statistics.quantiles(values, n=10)
    return {"median": statistics.median(values), "p10": deciles[0], "p90": deciles[-1]}


if __name__ == "__main__":
    sys.exit(main())
