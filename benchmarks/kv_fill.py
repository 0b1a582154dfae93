"""How many tokens the same KV memory holds in each codec, found by filling it through the running engine.

Long prompts that nobody repeats are sent one by one until cached blocks are evicted, and a few more after that; what
the cache then holds is counted, prompt by prompt. Beside it, how many requests of a quarter of that length run at once
when more are sent than fit. The scheduler, the cache and the arena are the real ones; blocks are encoded, demoted and
evicted as ever. Without --compute the model is left out: nobody looks at K and V here, and a prompt of 8,000 tokens
takes a CPU half a minute; with it, requests at once are not counted. Ends with one JSON line.

    python -m benchmarks.kv_fill [--memory-gib 1] [--prompt-tokens 8100] [--codecs raw16,int8,int4,int3,mixed]
                                 [--compute]

The ratio is that of tokens to those of the first codec; the bits are those of the whole memory for each value held.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
from benchmarks.control_plane import machine

from kvist import plan as planning
from kvist.cli.plan import find_spec
from kvist.codecs.transforms import uncalibrated
from kvist.config import EngineConfig
from kvist.engine.build import assemble, load_model, model_fingerprint
from kvist.engine.core import RequestFailure, RequestGroup
from kvist.errors import ConfigError
from kvist.kernels import native
from kvist.model import catalog
from kvist.model.native_decoder import NativeDecoder, StepScores
from kvist.storage.slabs import SlabArena
from kvist.types import SamplingParams, TokenId

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvist.engine.core import EngineCore
    from kvist.model.native_decoder import StepSequence
    from kvist.spec import ModelSpec
    from kvist.storage.arena import BlockArena

NUM_OUTPUT = 2
"""Tokens asked for: the second one is computed, so that the prompt's last block is as old as any other."""
NUM_MORE = 5
"""Prompts sent once the memory is full, after each of which its tokens are counted."""


class NoDecoder(NativeDecoder):
    """Computes nothing: K and V are 0."""

    def __init__(self, spec: ModelSpec, pool: Any) -> None:  # noqa: ANN401  # native.Pool
        self.spec = spec
        self.pool = pool
        self.reduction = None

    def step(
        self,
        sequences: list[StepSequence],
        arena: BlockArena | SlabArena,
        meanwhile: Callable[[], None] | None = None,
    ) -> StepScores:
        """See ``NativeDecoder``."""
        if meanwhile is not None:
            meanwhile()
        if isinstance(arena, SlabArena):
            # What a block held before may be no numbers in the codec that it is written in.
            size = arena.kv_spec.block_size
            for sequence in sequences:
                first = -(-sequence.start // size)
                last = (sequence.start + len(sequence.token_ids) - 1) // size
                for block_id in sequence.block_table[first : last + 1]:
                    arena.block(block_id)[:] = 0
        count = sum(sequence.num_logits for sequence in sequences)
        logits = np.zeros((max(count, 1), self.spec.vocab_size), np.float32)
        return StepScores(
            logits=logits, best_logits=[0.0] * count, best_ids=[0] * count, damaged_rows=[]
        )


class NoTokenizer:
    """Nobody reads the text here."""

    eos_token_ids = ()
    strips_leading_space = False

    def __init__(self, spec: ModelSpec) -> None:
        self.vocab_size = spec.vocab_size

    def token_bytes(self, token_id: int) -> bytes:  # noqa: ARG002
        """Return nothing."""
        return b""

    def is_special(self, token_id: int) -> bool:  # noqa: ARG002
        """Return that none is."""
        return False


def make_core(
    config: EngineConfig, spec: ModelSpec, *, is_computing: bool
) -> tuple[EngineCore, planning.EnginePlan]:
    """Return an engine without thread, and its plan."""
    plan = planning.resolve(config, spec, planning.detect_hardware())
    transforms = uncalibrated(spec.num_layers, spec.num_kv_heads, spec.head_dim)
    decoder: Any = NoDecoder(spec, native.extension().Pool(plan.threads))
    fingerprint = "nothing"
    if is_computing:
        path = catalog.resolve(config.model.model).path
        fingerprint = model_fingerprint(path, spec)
        decoder = load_model(plan, path, spec, fingerprint)
    tokenizer: Any = NoTokenizer(spec)
    core = assemble(plan, decoder, tokenizer, fingerprint, transforms if plan.transforms else None)
    return core, plan


def run_until_idle(core: EngineCore) -> int:
    """Step until nothing is left to do; return how many sequences ran at once at most."""
    most = 0
    while core.has_work:
        for chunk in core.step():
            if isinstance(chunk, RequestFailure):
                raise chunk.error
        most = max(most, core.stats().scheduler.num_running)
    return most


def tokens_held(core: EngineCore) -> int:
    """Return the tokens that have K and V in the cache."""
    survey = core.survey()
    return sum(
        count for number, count in zip(survey.numbers, survey.num_tokens, strict=True) if number
    )


def fill(core: EngineCore, num_prompt: int, rng: random.Random, num_at_once: int) -> dict[str, Any]:
    """Fill the engine's memory; return what it holds, and how many requests out of ``num_at_once`` ran at once."""
    num_sent = 0

    def send(num_prompt: int, num_output: int) -> None:
        nonlocal num_sent
        num_sent += 1
        # No two begin alike.
        tokens = [rng.randrange(3, 1000) for _ in range(num_prompt)]
        params = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)
        core.add(
            RequestGroup(
                request_id=str(num_sent),
                prompt_token_ids=tuple(map(TokenId, tokens)),
                params=params,
            )
        )

    counts: list[int] = []
    while len(counts) < NUM_MORE:
        send(num_prompt, NUM_OUTPUT)
        run_until_idle(core)
        if core.stats().cache.num_evictions:
            counts.append(tokens_held(core))
    core.check_invariants()
    cache = core.stats().cache
    num_prompts = num_sent
    for _ in range(num_at_once):
        # Long enough outputs for all of them to be under way at the same time.
        send(num_prompt // 4, num_prompt // 4)
    most = run_until_idle(core)
    core.check_invariants()
    return {
        "tokens": int(statistics.mean(counts)),
        "tokens_least": min(counts),
        "prompts": num_prompts,
        "demoted_by_age": cache.num_demotions_by_age,
        "demoted_for_room": cache.num_demotions_for_room,
        "evicted": cache.num_evictions,
        "bytes_by_codec": dict(cache.bytes_by_codec),
        "running_at_once": most,
        "preemptions": core.stats().scheduler.num_preemptions,
    }


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what each codec holds."""
    spec = find_spec(arguments.model)
    rows: list[dict[str, Any]] = []
    for codec in arguments.codecs.split(","):
        config = EngineConfig.from_options(
            model=arguments.model,
            kv_cache_dtype=codec,
            memory_gib=arguments.memory_gib,
            threads=1,
        )
        core, plan = make_core(config, spec, is_computing=arguments.compute)
        row = {
            "codec": codec,
            **fill(
                core,
                arguments.prompt_tokens,
                random.Random(arguments.seed),
                0 if arguments.compute else 60,
            ),
        }
        row["kv_bytes"] = plan.kv_bytes
        row["bits"] = (
            8.0 * arguments.memory_gib * 2**30
            / (row["tokens"] * 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim)
        )  # fmt: skip
        row["ratio"] = row["tokens"] / rows[0]["tokens"] if rows else 1.0
        rows.append(row)
        print(
            f"{codec:>6}: {row['tokens']:>8,} tokens, {row['ratio']:.2f} x; {row['bits']:.2f} bits of the memory for "
            f"each value; {row['running_at_once']} requests at once",
            flush=True,
        )
        core.close()
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--memory-gib", type=float, default=1.0)
    parser.add_argument("--prompt-tokens", type=int, default=8100)
    parser.add_argument("--codecs", default="raw16,int8,int4,int3,mixed")
    parser.add_argument("--compute", action="store_true", help="run the model too")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    try:
        rows = measure(arguments)
    except ConfigError as error:
        sys.exit(f"kv_fill: {error}")
    document = {"benchmark": "kv_fill", "machine": machine(), **vars(arguments), "codecs": rows}
    print(json.dumps(document))


if __name__ == "__main__":
    main()
