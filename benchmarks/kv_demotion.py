"""How long steps wait for blocks that become smaller: 16 users of a prefix whose own blocks grow old in the same step.

A prefix is sent alone, then requests that begin with it and go on differently decode side by side. They are equally
long, so that they all leave a block behind in the same step, which is the worst that ageing does. The engine is the
one that serves, with its calibration. For every step that only decodes: how long the changes of memory before the
kernels took, which no token of the step can be earlier than. Ends with one JSON line.

    python -m benchmarks.kv_demotion [--kv-cache-dtype int4] [--users 16] [--output-tokens 260] [--limit plan]

--limit 0 carries every demotion out at once, N at most that many a step; ``plan`` is what the engine does.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import sys
from typing import TYPE_CHECKING, Any

from benchmarks.control_plane import machine

from kvist import plan as planning
from kvist.config import EngineConfig
from kvist.engine.build import assemble, load_model, model_fingerprint
from kvist.engine.core import RequestFailure, RequestGroup
from kvist.errors import ConfigError
from kvist.model import catalog
from kvist.model.tokenizer import load_tokenizer
from kvist.tune.start import transforms_at_start
from kvist.types import SamplingParams, TokenId

if TYPE_CHECKING:
    from kvist.engine.core import EngineCore

PREFIX_TOKENS = 640
OWN_TOKENS = 20


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--kv-cache-dtype", default="int4", help="as kvist serve --kv-cache-dtype")
    parser.add_argument("--memory-gib", type=float, default=1.0)
    parser.add_argument("--users", type=int, default=16)
    parser.add_argument("--output-tokens", type=int, default=260)
    parser.add_argument(
        "--limit", default="plan", help="demotions a step: plan, 0 (any) or a number"
    )
    parser.add_argument("--json", action="store_true", help="the text goes to stderr")
    arguments = parser.parse_args()
    try:
        limit = None if arguments.limit == "plan" else int(arguments.limit)
        core, plan = make_core(arguments, limit)
    except ValueError:
        parser.error(f"--limit must be plan or a number, received {arguments.limit!r}")
    except ConfigError as error:
        sys.exit(f"kv_demotion: {error}")
    row = measure(core, arguments.users, arguments.output_tokens, plan.vocab_size)
    core.close()
    row["max_demotions"] = plan.max_demotions
    print(
        f"{row['demoted_by_age']} demotions by age ({row['urgent']} beyond the limit of {plan.max_demotions or 'any'} "
        f"a step) in {row['steps']} steps that decode; of the {row['steps_that_waited']} that waited: median "
        f"{row['median_ms']:.2f} ms, longest {row['longest_ms']:.2f} ms; all steps together {row['sum_ms']:.0f} ms; "
        f"a step's kernels {row['forward_ms']:.1f} ms",
        file=sys.stderr if arguments.json else sys.stdout,
    )
    print(
        json.dumps(
            {"benchmark": "kv_demotion", **row, "plan": plan.one_line(), "machine": machine()}
        )
    )


def make_core(
    arguments: argparse.Namespace, limit: int | None
) -> tuple[EngineCore, planning.EnginePlan]:
    """Return the engine that ``kvist serve`` would run, without its thread, and its plan."""
    config = EngineConfig.from_options(
        model=arguments.model,
        kv_cache_dtype=arguments.kv_cache_dtype,
        memory_gib=arguments.memory_gib,
    )
    path = catalog.resolve(arguments.model).path
    spec = planning.read_spec(path)
    hardware = planning.detect_hardware()
    plan = planning.resolve(config, spec, hardware)
    if limit is not None:
        plan = dataclasses.replace(plan, max_demotions=limit)
    transforms = None
    if plan.transforms:
        transforms = transforms_at_start(
            plan.transforms, path, spec, hardware.available_bytes // 2, lambda *_: None
        )
    fingerprint = model_fingerprint(path, spec)
    decoder = load_model(plan, path, spec, fingerprint)
    return assemble(plan, decoder, load_tokenizer(path), fingerprint, transforms), plan


def measure(core: EngineCore, users: int, output_tokens: int, vocab_size: int) -> dict[str, Any]:
    """Return what steps that only decode waited for."""
    rng = random.Random(0)

    def tokens(count: int) -> tuple[TokenId, ...]:
        return tuple(TokenId(rng.randrange(1000, vocab_size)) for _ in range(count))

    def send(name: str, prompt: tuple[TokenId, ...], max_tokens: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        core.add(RequestGroup(request_id=name, prompt_token_ids=prompt, params=params))

    def step() -> None:
        for chunk in core.step():
            if isinstance(chunk, RequestFailure):
                raise chunk.error

    prefix = tokens(PREFIX_TOKENS)
    send("prefix", prefix, 1)
    while core.has_work:
        step()
    # Each has the shared blocks and one of its own as soon as it is admitted; from then on they decode in step.
    for index in range(users):
        send(f"user {index}", prefix + tokens(OWN_TOKENS), output_tokens)
    while core.has_work and core.stats().scheduler.num_waiting:
        step()
    waits_ms: list[float] = []
    forwards_ms: list[float] = []
    while core.has_work:
        before = core.stats().requests
        step()
        after = core.stats().requests
        waits_ms.append(1e3 * (after.memory_s.total - before.memory_s.total))
        forwards_ms.append(1e3 * (after.forward_s.total - before.forward_s.total))
    core.check_invariants()
    cache = core.stats().cache
    # A step without any takes microseconds to look.
    waited = [wait for wait in waits_ms if wait > 0.1]
    return {
        "steps": len(waits_ms),
        "steps_that_waited": len(waited),
        "median_ms": statistics.median(waited) if waited else 0.0,
        "longest_ms": max(waits_ms),
        "sum_ms": sum(waits_ms),
        "forward_ms": statistics.median(forwards_ms),
        "demoted_by_age": cache.num_demotions_by_age,
        "urgent": cache.num_urgent_demotions,
    }


if __name__ == "__main__":
    main()
