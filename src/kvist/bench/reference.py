"""What may follow each prompt, by a reference: transformers in float32, computed once and kept.

Responsible for what the outputs of the peers are compared with. Runs as a driver process of this interpreter.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvist.bench.peers import DriverPeer, DriverSettings
from kvist.bench.weights import identity, replacing
from kvist.bench.work import CHECKED_TOKENS, NUM_CANDIDATES
from kvist.envvars import bench_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvist.bench.check import Candidates


def reference_settings(weights: Path, threads: int, max_context: int) -> DriverSettings:
    """Return how the reference is started."""
    return DriverSettings(
        name="the reference (transformers)",
        family="transformers",
        driver="transformers",
        python=sys.executable,
        settings={"weights": str(weights), "threads": threads, "max_context": max_context},
    )


def reference_candidates(
    settings: DriverSettings,
    prompts: Sequence[list[int]],
    on_computed: Callable[[int, int], None],
) -> dict[tuple[int, ...], Candidates]:
    """Return what may follow each prompt.

    Args:
        settings: From ``reference_settings``.
        prompts: All that are compared; those with a common beginning next to each other share its computation.
        on_computed: Called with how many are done, and how many there are.
    """
    weights = Path(settings.settings["weights"])
    facts = [identity(weights), CHECKED_TOKENS, NUM_CANDIDATES, *prompts]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    path = bench_folder() / f"reference-{key}.json"
    if not path.exists():
        found: list[Candidates] = []
        with DriverPeer(settings) as peer:
            for prompt in prompts:
                found.append(peer.rank(prompt, CHECKED_TOKENS, NUM_CANDIDATES))
                on_computed(len(found), len(prompts))
        with replacing(path) as incoming:
            incoming.write_text(json.dumps(found), encoding="utf-8")
    kept = json.loads(path.read_text(encoding="utf-8"))
    return {tuple(prompt): ids for prompt, ids in zip(prompts, kept, strict=True)}
