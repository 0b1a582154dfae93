"""The real engine with memory for a few of the requests that clients send: makespan, goodput and TTFT of each schedule.

Requests have the lengths of the Azure conversation trace, scaled: the longest of those drawn (prompt and output)
becomes --max-context tokens, all others shrink by the same factor, and none below 8 prompt and 1 output tokens. Prompts
are stretches of a real book; a share of them begin with one of a few common stretches, as chats with a system prompt
do. A closed loop of clients sends them in one order, KV memory holds about --fit average requests, and every schedule
runs once a round, in an order that rotates. There is a round for each of --seeds, which say what it draws: how many
requests are of nearly equal length differs much, so that one round says little.

    python -m benchmarks.under_pressure [--schedules static,fcfs,shortest,prefix] [--seeds 0,1,2] [--json]
    python -m benchmarks.under_pressure --requests 24 --clients 8 --fit 3 --max-context 256   # a smoke run

Progress goes to stderr, a line for each run to stdout as soon as it has ended. With --json, stdout has JSON only: one
line for each run, and one for everything at the end, or when the benchmark is interrupted. A round of four schedules
computes about 175,000 positions at the defaults.

`static` is the baseline: static batching in order of arrival, with the same memory. What is asked of the others: 20 %
less time or 20 % more goodput than `static`; and of `shortest`, that the short requests, those with a prompt no longer
than the median, have a TTFT at the 95th percentile of a third of what they have under `fcfs`.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import random
import signal
import statistics
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from benchmarks.control_plane import machine

from kvist import plan as planning
from kvist.config import EngineConfig
from kvist.engine.build import assemble, load_model, model_fingerprint
from kvist.engine.core import RequestFailure, RequestGroup
from kvist.model import catalog
from kvist.model.tokenizer import load_tokenizer
from kvist.replay.metrics import jain_index, percentiles
from kvist.sched.policy import POLICIES
from kvist.types import SamplingParams, TokenId

if TYPE_CHECKING:
    from kvist.model.decoder import Decoder
    from kvist.model.native_decoder import NativeDecoder
    from kvist.model.tokenizer import Tokenizer
    from kvist.plan import EnginePlan

MIN_PROMPT = 8
NUM_COMMON = 4
"""Different common beginnings."""
SHARED_FRACTION = 0.4
"""Requests that begin with one of them."""
PROGRESS_EVERY_S = 5.0
OTHER_SLO_TTFT_S = (2.5, 5.0, 10.0, 20.0, 40.0)
"""The share of requests with a first token within each is reported too: no verdict should hang on one limit."""


@dataclass(frozen=True)
class Job:
    """One request."""

    name: str
    prompt: tuple[TokenId, ...]
    num_output: int

    def num_blocks(self, block_size: int) -> int:
        """Return the blocks of its whole footprint."""
        return -(-max(len(self.prompt) + self.num_output - 1, len(self.prompt)) // block_size)


@dataclass(frozen=True)
class Engine:
    """What all runs have in common."""

    plan: EnginePlan
    decoder: Decoder | NativeDecoder
    tokenizer: Tokenizer
    block_bytes: int


@dataclass
class Seen:
    """What a client saw of one request."""

    sent_ns: int
    first_ns: int = 0
    last_ns: int = 0
    num_tokens: int = 0
    num_cached: int = 0


@dataclass(frozen=True)
class Served:
    """One run."""

    seen: dict[str, Seen]
    makespan_s: float
    answers: dict[str, tuple[int, ...]]
    counters: dict[str, int]
    """The engine's."""


def draw_lengths(
    path: Path, count: int, max_context: int, rng: random.Random
) -> tuple[list[tuple[int, int]], float]:
    """Return scaled (prompt, output) lengths drawn from the trace, and the factor."""
    with path.open(newline="") as file:
        rows = [
            (int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file)
        ]
    drawn = rng.sample([row for row in rows if min(row) > 0], count)
    factor = min(1.0, max_context / max(map(sum, drawn)))
    scaled = [
        (max(MIN_PROMPT, int(prompt * factor)), max(1, int(output * factor)))
        for prompt, output in drawn
    ]
    return [(min(p, max_context - o), o) for p, o in scaled], factor


def make_jobs(
    lengths: list[tuple[int, int]], book: list[int], block_size: int, rng: random.Random
) -> list[Job]:
    """Return the requests; prompts are stretches of the book, some behind a common stretch of half their length."""
    longest = max(prompt for prompt, _ in lengths)
    commons = [rng.randrange(len(book) - longest) for _ in range(NUM_COMMON)]
    jobs = []
    for number, (num_prompt, num_output) in enumerate(lengths):
        num_shared = 0
        if rng.random() < SHARED_FRACTION:
            num_shared = max(num_prompt // 2, min(num_prompt - 1, block_size))
        common, own = rng.choice(commons), rng.randrange(len(book) - longest)
        tokens = book[common : common + num_shared] + book[own : own + num_prompt - num_shared]
        jobs.append(Job(str(number), tuple(map(TokenId, tokens)), num_output))
    return jobs


def run_schedule(engine: Engine, schedule: str, jobs: list[Job], clients: int) -> Served:
    """Serve the jobs once, from an empty cache."""
    plan = dataclasses.replace(engine.plan, schedule=schedule)
    core = assemble(plan, engine.decoder, engine.tokenizer, "benchmark")
    waiting = deque(jobs)
    seen: dict[str, Seen] = {}
    answers: dict[str, list[int]] = {}
    num_open = 0
    start_ns = told_ns = time.perf_counter_ns()
    while waiting or num_open:
        while waiting and num_open < clients:
            job = waiting.popleft()
            params = SamplingParams(max_tokens=job.num_output, temperature=0.0, ignore_eos=True)
            seen[job.name] = Seen(sent_ns=time.perf_counter_ns())
            answers[job.name] = []
            core.add(RequestGroup(request_id=job.name, prompt_token_ids=job.prompt, params=params))
            num_open += 1
        for chunk in core.step():
            if isinstance(chunk, RequestFailure):
                raise chunk.error
            now_ns = time.perf_counter_ns()
            record = seen[chunk.request_id]
            if chunk.token_ids and record.first_ns == 0:
                record.first_ns = now_ns
            record.num_tokens += len(chunk.token_ids)
            answers[chunk.request_id] += chunk.token_ids
            if chunk.finish_reason is not None:
                record.last_ns = now_ns
                assert chunk.usage is not None
                record.num_cached = chunk.usage.num_cached_tokens
                num_open -= 1
        now_ns = time.perf_counter_ns()
        if now_ns - told_ns > PROGRESS_EVERY_S * 1e9:
            told_ns = now_ns
            num_done = len(jobs) - len(waiting) - num_open
            tell(f"{schedule}: {num_done} of {len(jobs)} after {(now_ns - start_ns) / 1e9:.0f} s")
    makespan_s = (time.perf_counter_ns() - start_ns) / 1e9
    stats = core.stats()
    core.close()
    return Served(
        seen,
        makespan_s,
        {name: tuple(tokens) for name, tokens in answers.items()},
        {
            "steps": stats.scheduler.num_steps,
            "computed_tokens": stats.scheduler.num_scheduled_tokens,
            "recomputed_tokens": stats.scheduler.num_recomputed_tokens,
            "preemptions": stats.scheduler.num_preemptions,
            "evicted_blocks": stats.cache.num_evictions,
            "hit_tokens": stats.cache.num_hit_tokens,
        },
    )


def tell(message: str) -> None:
    """Say how far the benchmark is."""
    print(message, file=sys.stderr, flush=True)


def summarise(served: Served, jobs: list[Job], slo: tuple[float, float]) -> dict[str, Any]:
    """Return the metrics of one run; Any: JSON values."""
    seen, makespan_s = served.seen, served.makespan_s
    by_name = {job.name: job for job in jobs}
    lengths = sorted(len(job.prompt) for job in jobs)
    median, p90 = lengths[len(lengths) // 2], lengths[len(lengths) * 9 // 10]
    ttft = {name: (record.first_ns - record.sent_ns) / 1e9 for name, record in seen.items()}
    e2e = {name: (record.last_ns - record.sent_ns) / 1e9 for name, record in seen.items()}
    tpot = {
        name: (record.last_ns - record.first_ns) / 1e9 / (record.num_tokens - 1)
        for name, record in seen.items()
        if record.num_tokens > 1
    }
    num_good = sum(ttft[name] <= slo[0] and tpot.get(name, 0.0) <= slo[1] for name in seen)
    return {
        "makespan_s": makespan_s,
        "goodput_rps": num_good / makespan_s,
        "slo_share": num_good / len(seen),
        "share_within_ttft_s": {
            str(limit): sum(value <= limit for value in ttft.values()) / len(seen)
            for limit in OTHER_SLO_TTFT_S
        },
        "output_tokens_per_s": sum(record.num_tokens for record in seen.values()) / makespan_s,
        "ttft_s": percentiles(list(ttft.values())),
        "ttft_short_s": percentiles([ttft[n] for n in seen if len(by_name[n].prompt) <= median]),
        "ttft_long_s": percentiles([ttft[n] for n in seen if len(by_name[n].prompt) >= p90]),
        "tpot_s": percentiles(list(tpot.values())),
        "e2e_s": percentiles(list(e2e.values())),
        "hit_share": sum(r.num_cached for r in seen.values())
        / sum(len(job.prompt) for job in jobs),
        "jain_fairness": jain_index(
            [(len(by_name[n].prompt) + by_name[n].num_output) / e2e[n] for n in seen]
        ),
    } | served.counters


def verdict(runs: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return what each schedule has as a share of what another one has in the same round: by round, and the median."""
    by_round = {name: {run["round"]: run for run in done} for name, done in runs.items()}

    def share(name: str, other: str, *keys: str) -> dict[str, Any] | None:
        values = {}
        for number, run in by_round[name].items():
            mine: Any = run  # Any: JSON values
            others: Any = by_round.get(other, {}).get(number)
            if others is None:
                continue
            for key in keys:
                mine, others = mine[key], others[key]
            if others:
                values[number] = mine / others
        if not values:
            return None
        return {"median": statistics.median(values.values()), "by_round": values}

    ratios = {
        name: {
            "makespan_of_static": share(name, "static", "makespan_s"),
            "goodput_of_static": share(name, "static", "goodput_rps"),
            "short_ttft_p95_of_fcfs": share(name, "fcfs", "ttft_short_s", "p95"),
        }
        for name in runs
    }
    return {
        name: {key: value for key, value in values.items() if value is not None}
        for name, values in ratios.items()
        if any(value is not None for value in values.values())
    }


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--weights", default="auto", help="as kvist serve --weights")
    parser.add_argument("--requests", type=int, default=200, help=">= 2")
    parser.add_argument("--clients", type=int, default=32, help=">= 1")
    parser.add_argument(
        "--fit", type=float, default=8.0, help="average requests that KV memory holds"
    )
    parser.add_argument(
        "--max-context", type=int, default=768, help="tokens of the longest request"
    )
    parser.add_argument("--max-batch-tokens", type=int, default=256)
    parser.add_argument("--max-overtakes", type=int, default=None, help="default: the engine's")
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--schedules", default="static,fcfs,shortest,prefix")
    parser.add_argument(
        "--seeds",
        type=lambda text: [int(seed) for seed in text.split(",")],
        default=[0],
        help="which requests each round draws, as in 0,1,2",
    )
    parser.add_argument(
        "--slo-ttft-s", type=float, default=10.0, help="goodput: first token within"
    )
    parser.add_argument(
        "--slo-itl-s", type=float, default=1.0, help="and a mean gap between tokens"
    )
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", action="store_true", help="print JSON lines instead of text")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.schedules.split(",") if name not in POLICIES]
    if unknown:
        parser.error(f"--schedules must be among {', '.join(POLICIES)}, received {unknown}")
    for name, least in (
        ("requests", 2),
        ("clients", 1),
        ("max_context", MIN_PROMPT + 1),
    ):
        if getattr(arguments, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be >= {least}")
    return arguments


def load(arguments: argparse.Namespace) -> tuple[Engine, list[int]]:
    """Return the model, with a plan whose memory is not sized yet, and the book's token ids."""
    resolved = catalog.resolve(arguments.model)
    spec = planning.read_spec(resolved.path)
    tokenizer = load_tokenizer(resolved.path)
    text = (arguments.data / "text" / "pride_and_prejudice.txt").read_text(encoding="utf-8")
    options = {} if arguments.max_overtakes is None else {"max_overtakes": arguments.max_overtakes}
    config = EngineConfig.from_options(
        model=arguments.model, block_size=arguments.block_size, max_batch_tokens=arguments.max_batch_tokens,
        threads=arguments.threads, weights=arguments.weights, **options,
    )  # fmt: skip
    plan = planning.resolve(config, spec, planning.detect_hardware())
    decoder = load_model(plan, resolved.path, spec, model_fingerprint(resolved.path, spec))
    engine = Engine(plan, decoder, tokenizer, planning.kv_spec_of(plan, spec).block_bytes)
    return engine, tokenizer.encode(text, add_special_tokens=False)


def draw(
    arguments: argparse.Namespace, seed: int, engine: Engine, book: list[int]
) -> tuple[Engine, list[Job], dict[str, Any]]:
    """Draw the requests of a round; return them, the engine with memory for some, and what to report of both."""
    rng = random.Random(seed)
    lengths, factor = draw_lengths(
        arguments.data / "traces" / "azure_2023_conv.csv",
        arguments.requests,
        arguments.max_context,
        rng,
    )
    jobs = make_jobs(lengths, book, arguments.block_size, rng)
    footprints = [job.num_blocks(arguments.block_size) for job in jobs]
    num_blocks = max(*footprints, int(arguments.fit * statistics.mean(footprints)))
    plan = dataclasses.replace(
        engine.plan,
        num_blocks=num_blocks,
        kv_bytes=num_blocks * engine.block_bytes,
        max_context_len=min(engine.plan.max_context_len, num_blocks * arguments.block_size),
    )
    about = {
        "seed": seed,
        "scale": factor,
        "prompt_tokens": sum(len(job.prompt) for job in jobs),
        "output_tokens": sum(job.num_output for job in jobs),
        "num_blocks": num_blocks,
        "fit": num_blocks / statistics.mean(footprints),
    }
    tell(", ".join(f"{key} {value}" for key, value in about.items()))
    return dataclasses.replace(engine, plan=plan), jobs, about


def main() -> int:
    arguments = parse()
    # A run that is told to stop says what it has found, as one that is interrupted by hand does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    loaded, book = load(arguments)
    tell(loaded.plan.one_line())
    schedules = arguments.schedules.split(",")
    slo = (arguments.slo_ttft_s, arguments.slo_itl_s)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in schedules}
    draws: list[dict[str, Any]] = []
    is_complete = False
    try:
        for round_index, seed in enumerate(arguments.seeds):
            engine, jobs, about = draw(arguments, seed, loaded, book)
            draws.append(about | {"different_answers": 0})
            first_answers: dict[str, tuple[int, ...]] = {}
            turn = round_index % len(schedules)
            for name in schedules[turn:] + schedules[:turn]:
                served = run_schedule(engine, name, jobs, arguments.clients)
                answers = served.answers
                first_answers = first_answers or answers
                # Batches of other shapes may round differently, and a tie then goes the other way; it is reported.
                num_different = sum(answers[job.name] != first_answers[job.name] for job in jobs)
                draws[-1]["different_answers"] += num_different
                assert all(len(answers[job.name]) == job.num_output for job in jobs)
                run = {"schedule": name, "round": round_index} | summarise(served, jobs, slo)
                runs[name].append(run)
                show(run, as_json=arguments.json)
        is_complete = True
    except KeyboardInterrupt:
        tell("interrupted; what has ended is reported")
    ratios = verdict(runs)
    for name, values in ratios.items():
        for key, value in values.items():
            by_round = ", ".join(f"{share:.3f}" for share in value["by_round"].values())
            tell(f"{name}: {key} {value['median']:.3f}, by round {by_round}")
    if arguments.json:
        document = {
            "benchmark": "under_pressure",
            "is_complete": is_complete,
            "requests": arguments.requests,
            "clients": arguments.clients,
            "max_context": arguments.max_context,
            "block_size": arguments.block_size,
            "slo": {"ttft_s": slo[0], "itl_s": slo[1]},
            "ratios": ratios,
            "draws": draws,
            "runs": runs,
            "plan": loaded.plan.one_line(),
            "machine": machine() | {"torch": torch.__version__},
        }
        print(json.dumps(document), flush=True)
    return 0 if is_complete else 130


def show(run: dict[str, Any], *, as_json: bool) -> None:
    """Print what one run has found."""
    if as_json:
        print(json.dumps(run), flush=True)
        return
    print(
        f"round {run['round']} {run['schedule']:9} makespan {run['makespan_s']:7.1f} s, "
        f"goodput {run['goodput_rps']:.3f}/s, TTFT p95 all {run['ttft_s']['p95']:6.1f} "
        f"short {run['ttft_short_s']['p95']:6.1f} long {run['ttft_long_s']['p95']:6.1f} s, "
        f"hits {run['hit_share']:.1%}, computed {run['computed_tokens']}, preempted {run['preemptions']}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
