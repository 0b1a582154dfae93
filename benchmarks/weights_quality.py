"""What packed weights and KV codecs cost in quality: perplexity, KL divergence and top-1 agreement on a text.

Every variant scores the same windows of the text with the kernels that serve requests, in chunks of ``--chunk`` tokens
over a block arena. The reference is the torch plane in float32, with K and V in float32. The standard error is that of
the mean difference of the log-probabilities, over positions. Ends with one JSON line.

    python -m benchmarks.weights_quality --text FILE [--variants int8/raw16,int4/raw16,bf16/raw16] [--windows 8]
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvist import plan as planning
from kvist.kernels import native
from kvist.kernels.batch import AttentionBatch
from kvist.model import catalog
from kvist.model.loader import iterate_tensors, load_decoder
from kvist.model.native_decoder import NativeDecoder, StepSequence, pack_weights
from kvist.model.tokenizer import load_tokenizer
from kvist.spec import KVSpec
from kvist.storage.arena import BlockArena

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvist.spec import ModelSpec

BLOCK_SIZE = 64


def make_arena(spec: ModelSpec, codec: str, window: int) -> BlockArena:
    kv_spec = KVSpec(
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        block_size=BLOCK_SIZE,
        codec=codec,
    )
    return BlockArena(kv_spec, kv_spec.num_blocks_for(window))


def torch_scorer(
    path: Path, spec: ModelSpec, window: int
) -> Callable[[list[int], int], torch.Tensor]:
    decoder = load_decoder(path, spec, torch.float32)
    arena = make_arena(spec, "float32", window)

    def score(chunk: list[int], start: int) -> torch.Tensor:
        batch = AttentionBatch.from_sequences(
            starts=[start],
            num_tokens=[len(chunk)],
            block_tables=[list(range(arena.num_blocks))],
            block_size=BLOCK_SIZE,
        )
        with torch.inference_mode():
            return decoder.logits(decoder.forward(torch.tensor(chunk), batch, arena))

    return score


def native_scorer(
    path: Path, spec: ModelSpec, window: int, kind: str, codec: str
) -> Callable[[list[int], int], torch.Tensor]:
    pool = native.extension().Pool(planning.detect_hardware().cpus)
    decoder = NativeDecoder(spec, pack_weights(spec, iterate_tensors(path, spec), kind, pool), pool)
    arena = make_arena(spec, codec, window)

    def score(chunk: list[int], start: int) -> torch.Tensor:
        table = tuple(range(arena.num_blocks))
        scores = decoder.step([StepSequence(start, tuple(chunk), table, len(chunk))], arena)
        if scores.damaged_rows:
            raise SystemExit(f"rows {scores.damaged_rows[:5]} wrote K or V that is not finite")
        return torch.from_numpy(scores.logits[: len(chunk)])

    return score


class Totals:
    """Sums over positions of one variant."""

    def __init__(self) -> None:
        self.differences: list[torch.Tensor] = []
        self.nll = self.kl = self.seconds = 0.0
        self.agreed = self.positions = 0

    def add(self, reference: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor) -> None:
        """Count rows whose next tokens are ``targets``; ``reference`` holds log-probabilities."""
        logprobs = logits[: len(targets)].log_softmax(-1)
        nll = -logprobs.gather(1, targets[:, None]).squeeze(1)
        self.nll += nll.double().sum().item()
        self.differences.append(
            nll + reference[: len(targets)].gather(1, targets[:, None]).squeeze(1)
        )
        base = reference[: len(targets)]
        self.kl += (base.exp() * (base - logprobs)).sum(-1).double().sum().item()
        self.agreed += int((logprobs.argmax(-1) == base.argmax(-1)).sum())
        self.positions += len(targets)

    def summary(self, name: str, reference_nll: float) -> dict[str, object]:
        """Return the figures of the table; deltas are fractions."""
        difference = torch.cat(self.differences).double()
        return {
            "name": name,
            "perplexity": math.exp(self.nll / self.positions),
            "perplexity_delta": math.exp((self.nll - reference_nll) / self.positions) - 1.0,
            "standard_error": (difference.std() / math.sqrt(self.positions)).item(),
            "kl": self.kl / self.positions,
            "top1_agreement": self.agreed / self.positions,
            "tokens_per_s": self.positions / self.seconds,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--variants", default="bf16/raw16,int8/raw16,int4/raw16,int8/int8")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--window-tokens", type=int, default=2048)
    parser.add_argument("--chunk", type=int, default=256)
    options = parser.parse_args()
    path = catalog.resolve(options.model).path
    spec = planning.read_spec(path)
    token_ids = load_tokenizer(path).encode(options.text.read_text())
    needed = options.windows * options.window_tokens
    if len(token_ids) < needed:
        raise SystemExit(
            f"--text has {len(token_ids)} tokens, {needed} are needed; lower --windows"
        )
    reference = torch_scorer(path, spec, options.window_tokens)
    variants = {
        name: native_scorer(path, spec, options.window_tokens, *name.split("/"))
        for name in options.variants.split(",")
    }
    totals = {name: Totals() for name in ("float32", *variants)}
    for window in range(options.windows):
        tokens = list(token_ids[window * options.window_tokens :][: options.window_tokens])
        for start in range(0, len(tokens), options.chunk):
            chunk = tokens[start : start + options.chunk]
            targets = torch.tensor(tokens[start + 1 : start + 1 + len(chunk)])
            started = time.perf_counter()
            base = reference(chunk, start).log_softmax(-1)
            totals["float32"].seconds += time.perf_counter() - started
            totals["float32"].add(base, base, targets)
            for name, score in variants.items():
                started = time.perf_counter()
                logits = score(chunk, start)
                totals[name].seconds += time.perf_counter() - started
                totals[name].add(base, logits, targets)
        print(f"window {window + 1} of {options.windows}", flush=True)
    results = [total.summary(name, totals["float32"].nll) for name, total in totals.items()]
    print(
        f"{'variant':14} {'perplexity':>10} {'delta':>9} {'se':>8} {'KL':>9} {'top-1':>7} {'tok/s':>8}"
    )
    for result in results:
        print(
            f"{result['name']:14} {result['perplexity']:10.4f} {result['perplexity_delta']:+9.3%} "
            f"{result['standard_error']:8.3%} {result['kl']:9.6f} {result['top1_agreement']:7.2%} "
            f"{result['tokens_per_s']:8.0f}"
        )
    print(json.dumps({"model": options.model, "text": options.text.name, "variants": results}))


if __name__ == "__main__":
    main()
