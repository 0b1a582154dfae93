"""Fit the prices of ``kvist replay``'s cost model on the real runner and model.

Times steps that only prefill and steps that only decode over a grid of sizes, fits the five prices of
``kvist.replay.cost`` by least squares of relative errors (none negative), and checks them on mixed steps that were not
fitted. Prints each step measured beside its price, and ends with one JSON line that ``kvist replay --cost-model`` takes
as a file.

    python -m benchmarks.cost_model [--model smollm2-135m] [--threads N] [--repetitions 5] [--max-context 1024]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from benchmarks.control_plane import machine

from kvist import plan as planning
from kvist.config import EngineConfig
from kvist.engine.build import load_model, make_runner, model_fingerprint
from kvist.model import catalog
from kvist.replay.cost import PS_PER_S, CostModel, StepPrices
from kvist.sched.output import SampleSpec, ScheduledSequence, StepPlan
from kvist.storage.arena import BlockArena
from kvist.types import BlockId, RequestId, SamplingParams, TokenId

if TYPE_CHECKING:
    from kvist.engine.core import Runner

BLOCK_SIZE = 64
WARM_UP = 2
PRICES = ("step_s", "prefill_token_s", "prefill_pair_s", "decode_token_s", "decode_attended_s")


@dataclass(frozen=True)
class Shape:
    """One step: pairs (start, tokens), one for each sequence."""

    sequences: tuple[tuple[int, int], ...]

    @property
    def name(self) -> str:
        """What the table calls it."""
        first = self.sequences[0]
        return f"{len(self.sequences)} x {first[1]} at {first[0]}" + (
            "" if len(set(self.sequences)) == 1 else f" + {self.sequences[-1]}"
        )

    def features(self) -> list[float]:
        """Return what each price is multiplied by."""
        prefills = [(s, n) for s, n in self.sequences if n > 1]
        decodes = [s for s, n in self.sequences if n == 1]
        return [
            1.0,
            sum(n for _, n in prefills),
            sum(n * s + n * (n + 1) / 2 for s, n in prefills),
            len(decodes),
            sum(s + 1 for s in decodes),
        ]


def grid(max_context: int) -> tuple[list[Shape], list[Shape]]:
    """Return the steps to fit and the mixed ones to check."""
    starts = [0, max_context // 4, max_context // 2]
    fitted = [Shape(((s, n),)) for n in (16, 64, 256, 512) for s in starts if s + n <= max_context]
    contexts = [32, max_context // 4, max_context - 1]
    fitted += [Shape(((c, 1),) * count) for count in (1, 4, 16) for c in contexts]
    checked = [
        Shape(((max_context // 4, 1),) * count + ((max_context // 2, n),))
        for count in (4, 16)
        for n in (64, 256)
        if max_context // 2 + n <= max_context
    ]
    return fitted, checked


def step_plan(shape: Shape, index: int) -> StepPlan:
    """Return a plan of that shape; every sequence has blocks of its own."""
    sequences = []
    next_block = 0
    params = SamplingParams(temperature=0.0)
    for number, (start, num_tokens) in enumerate(shape.sequences):
        num_blocks = -(-(start + num_tokens) // BLOCK_SIZE)
        table = tuple(BlockId(next_block + i) for i in range(num_blocks))
        next_block += num_blocks
        sequences.append(
            ScheduledSequence(
                request_id=RequestId(str(number)),
                start=start,
                token_ids=tuple(TokenId((7919 * i) % 40000) for i in range(num_tokens)),
                block_table=table,
                sample=SampleSpec(params=params, seed=0, output_index=0),
            )
        )
    return StepPlan(step_index=index, copies=(), sequences=tuple(sequences))


def measure(runner: Runner, shapes: list[Shape], repetitions: int) -> dict[Shape, list[float]]:
    """Return the seconds that each step took; shapes interleaved, warm-up left out."""
    seconds: dict[Shape, list[float]] = {shape: [] for shape in shapes}
    for repetition in range(-WARM_UP, repetitions):
        for index, shape in enumerate(shapes):
            plan = step_plan(shape, index)
            start_ns = time.perf_counter_ns()
            runner.run(plan)
            duration_s = (time.perf_counter_ns() - start_ns) / 1e9
            if repetition >= 0:
                seconds[shape].append(duration_s)
    return seconds


def fit(measured: dict[Shape, float]) -> CostModel:
    """Return the prices with the least sum of squared relative errors, none negative."""
    features = np.array([shape.features() for shape in measured])
    times = np.array(list(measured.values()))
    rows = features / times[:, None]
    scale = rows.max(axis=0)
    active = list(range(len(PRICES)))
    while True:
        prices, *_ = np.linalg.lstsq(
            rows[:, active] / scale[active], np.ones(len(times)), rcond=None
        )
        if prices.min() >= 0:
            break
        del active[int(prices.argmin())]
    values = dict.fromkeys(PRICES, 0.0)
    for index, price in zip(active, prices, strict=True):
        values[PRICES[index]] = float(f"{price / scale[index]:.4g}")
    values["step_s"] = max(values["step_s"], 1e-6)
    return CostModel(**values)


def price_s(model: CostModel, shape: Shape) -> float:
    """Return what the simulator would charge for a step."""
    prices = StepPrices(model)
    decodes = [s for s, n in shape.sequences if n == 1]
    total = prices.step + prices.decode(len(decodes), sum(decodes) + len(decodes))
    total += sum(prices.prefill(s, n) for s, n in shape.sequences if n > 1)
    return total / PS_PER_S


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--weights", default="auto", help="as kvist serve --weights")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--repetitions", type=int, default=5, help=">= 1")
    parser.add_argument(
        "--max-context", type=int, default=1024, help="longest context measured, >= 128"
    )
    arguments = parser.parse_args()
    resolved = catalog.resolve(arguments.model)
    spec = planning.read_spec(resolved.path)
    config = EngineConfig.from_options(
        model=arguments.model, weights=arguments.weights, threads=arguments.threads
    )
    hardware = planning.detect_hardware()
    plan = planning.resolve(config, spec, hardware)
    decoder = load_model(plan, resolved.path, spec, model_fingerprint(resolved.path, spec))
    fitted, checked = grid(arguments.max_context)
    num_blocks = max(
        sum(-(-(s + n) // BLOCK_SIZE) for s, n in shape.sequences) for shape in fitted + checked
    )
    runner = make_runner(decoder, BlockArena(planning.kv_spec_of(plan, spec), num_blocks))
    print(plan.one_line())
    seconds = measure(runner, fitted + checked, arguments.repetitions)
    medians = {shape: statistics.median(values) for shape, values in seconds.items()}
    model = fit({shape: medians[shape] for shape in fitted})
    errors = {}
    print(f"{'step':34}{'median ms':>12}{'min ms':>10}{'max ms':>10}{'price ms':>10}{'error':>9}")
    for shape, median in medians.items():
        errors[shape] = price_s(model, shape) / median - 1
        print(
            f"{shape.name:34}{1e3 * median:>12.2f}{1e3 * min(seconds[shape]):>10.2f}"
            f"{1e3 * max(seconds[shape]):>10.2f}{1e3 * price_s(model, shape):>10.2f}{errors[shape]:>9.1%}"
            + ("  not fitted" if shape in checked else "")
        )
    document = {
        "benchmark": "cost_model",
        "cost_model": asdict(model),
        "median_error_fitted": statistics.median(abs(errors[shape]) for shape in fitted),
        "worst_error_checked": max(abs(errors[shape]) for shape in checked),
        "repetitions": arguments.repetitions,
        "warm_up": WARM_UP,
        "plan": plan.one_line(),
        "machine": machine() | {"torch": torch.__version__},
    }
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
