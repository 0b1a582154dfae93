"""The real engine with memory for a few of the requests that clients send: makespan, goodput and TTFT of each schedule.

Requests have the lengths of the Azure conversation trace, scaled: the longest of those drawn (prompt and output)
becomes --max-context tokens, all others shrink by the same factor, and none below 8 prompt and 1 output tokens. Prompts
are stretches of a real book; a share of them begin with one of a few common stretches, as chats with a system prompt
do. A closed loop of clients sends them in one order, KV memory holds about --fit average requests, and every schedule
runs once a round, in an order that rotates. Ends with one JSON line.

    python -m benchmarks.under_pressure [--data ../shared/data] [--requests 200] [--max-context 1024] [--rounds 3]

`static` is the baseline: static batching in order of arrival, with the same memory.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import random
import statistics
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from benchmarks.control_plane import machine

from kvist import plan as planning
from kvist.config import EngineConfig
from kvist.engine.build import assemble, load_model, model_fingerprint
from kvist.engine.core import RequestFailure, RequestGroup
from kvist.errors import ConfigError
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


@dataclass(frozen=True)
class Job:
    """One request."""

    name: str
    prompt: tuple[TokenId, ...]
    num_output: int

    def num_blocks(self, block_size: int) -> int:
        """Return the blocks of its whole footprint."""
        return -(-max(len(self.prompt) + self.num_output - 1, len(self.prompt)) // block_size)


@dataclass
class Seen:
    """What a client saw of one request."""

    sent_ns: int
    first_ns: int = 0
    last_ns: int = 0
    num_tokens: int = 0
    num_cached: int = 0


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


def run_schedule(
    plan: EnginePlan,
    decoder: Decoder | NativeDecoder,
    tokenizer: Tokenizer,
    jobs: list[Job],
    clients: int,
) -> tuple[dict[str, Seen], float, dict[str, tuple[int, ...]], dict[str, int]]:
    """Serve the jobs once; return what clients saw, the makespan in s, the answers, and the engine's counters."""
    core = assemble(plan, decoder, tokenizer, "benchmark")
    waiting = deque(jobs)
    seen: dict[str, Seen] = {}
    answers: dict[str, list[int]] = {}
    num_open = 0
    start_ns = time.perf_counter_ns()
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
    makespan_s = (time.perf_counter_ns() - start_ns) / 1e9
    stats = core.stats()
    core.close()
    counters = {
        "steps": stats.scheduler.num_steps,
        "computed_tokens": stats.scheduler.num_scheduled_tokens,
        "recomputed_tokens": stats.scheduler.num_recomputed_tokens,
        "preemptions": stats.scheduler.num_preemptions,
        "evicted_blocks": stats.cache.num_evictions,
        "hit_tokens": stats.cache.num_hit_tokens,
    }
    return seen, makespan_s, {name: tuple(tokens) for name, tokens in answers.items()}, counters


def summarise(
    seen: dict[str, Seen], makespan_s: float, jobs: list[Job], slo: tuple[float, float]
) -> dict[str, object]:
    """Return the metrics of one run."""
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
    }


def main() -> int:  # noqa: PLR0915  # the order of a benchmark, top to bottom
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--weights", default="auto", help="as kvist serve --weights")
    parser.add_argument("--requests", type=int, default=200, help=">= 2")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument(
        "--fit", type=float, default=8.0, help="average requests that KV memory holds"
    )
    parser.add_argument(
        "--max-context", type=int, default=1024, help="tokens of the longest request"
    )
    parser.add_argument("--max-batch-tokens", type=int, default=256)
    parser.add_argument("--block-size", type=int, default=32)
    parser.add_argument("--schedules", default="static,fcfs,shortest,prefix,fair")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slo-ttft-s", type=float, default=20.0)
    parser.add_argument("--slo-itl-s", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args()
    schedules = arguments.schedules.split(",")
    unknown = [name for name in schedules if name not in POLICIES]
    if unknown:
        raise ConfigError(
            f"[benchmark] --schedules must be among {', '.join(POLICIES)}, received {unknown}"
        )
    rng = random.Random(arguments.seed)
    lengths, factor = draw_lengths(
        arguments.data / "traces" / "azure_2023_conv.csv",
        arguments.requests,
        arguments.max_context,
        rng,
    )
    resolved = catalog.resolve(arguments.model)
    spec = planning.read_spec(resolved.path)
    tokenizer = load_tokenizer(resolved.path)
    text = (arguments.data / "text" / "pride_and_prejudice.txt").read_text(encoding="utf-8")
    book = tokenizer.encode(text, add_special_tokens=False)
    jobs = make_jobs(lengths, book, arguments.block_size, rng)
    footprints = [job.num_blocks(arguments.block_size) for job in jobs]
    num_blocks = max(*footprints, int(arguments.fit * statistics.mean(footprints)))
    config = EngineConfig.from_options(
        model=arguments.model, block_size=arguments.block_size, max_batch_tokens=arguments.max_batch_tokens,
        threads=arguments.threads, weights=arguments.weights,
    )  # fmt: skip
    plan = planning.resolve(config, spec, planning.detect_hardware())
    plan = dataclasses.replace(
        plan,
        num_blocks=num_blocks,
        kv_bytes=num_blocks * planning.kv_spec_of(plan, spec).block_bytes,
        max_context_len=min(plan.max_context_len, num_blocks * arguments.block_size),
    )
    decoder = load_model(plan, resolved.path, spec, model_fingerprint(resolved.path, spec))
    print(plan.one_line())
    print(
        f"{len(jobs)} requests, lengths x {factor:.3f}: prompts {sum(len(j.prompt) for j in jobs)} tokens, outputs "
        f"{sum(j.num_output for j in jobs)}; {num_blocks} blocks hold {num_blocks / statistics.mean(footprints):.1f} "
        f"average requests; {arguments.clients} clients"
    )
    slo = (arguments.slo_ttft_s, arguments.slo_itl_s)
    runs: dict[str, list[dict[str, object]]] = {name: [] for name in schedules}
    first_answers: dict[str, tuple[int, ...]] | None = None
    num_different = 0
    for round_index in range(arguments.rounds):
        turn = round_index % len(schedules)
        for name in schedules[turn:] + schedules[:turn]:
            schedule_plan = dataclasses.replace(plan, schedule=name)
            seen, makespan_s, answers, counters = run_schedule(
                schedule_plan, decoder, tokenizer, jobs, arguments.clients
            )
            if first_answers is None:
                first_answers = answers
            # Batches of other shapes may round differently, and a tie then goes the other way; reported, not hidden.
            num_different += sum(answers[job.name] != first_answers[job.name] for job in jobs)
            assert all(len(answers[job.name]) == job.num_output for job in jobs)
            run = summarise(seen, makespan_s, jobs, slo) | counters
            runs[name].append(run)
            print(
                f"round {round_index} {name:9} makespan {makespan_s:7.1f} s, goodput {run['goodput_rps']:.3f}/s, "
                f"TTFT p95 all {run['ttft_s']['p95']:6.1f} short {run['ttft_short_s']['p95']:6.1f} "
                f"long {run['ttft_long_s']['p95']:6.1f} s, hits {run['hit_share']:.1%}, "
                f"computed {run['computed_tokens']}, preempted {run['preemptions']}",
                flush=True,
            )
    document = {
        "benchmark": "under_pressure",
        "seed": arguments.seed,
        "requests": len(jobs),
        "clients": arguments.clients,
        "scale": factor,
        "num_blocks": num_blocks,
        "block_size": arguments.block_size,
        "slo": {"ttft_s": slo[0], "itl_s": slo[1]},
        "different_answers": num_different,
        "median_makespan_s": {
            name: statistics.median([run["makespan_s"] for run in runs[name]]) for name in schedules
        },
        "runs": runs,
        "plan": plan.one_line(),
        "machine": machine() | {"torch": torch.__version__},
    }
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
