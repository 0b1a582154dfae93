"""What monitoring costs: a decode step of a batch with its snapshot, and explaining a missed prompt. No model.

Times are CPU time of this process, so that what else the machine does is not in them. Prints a table in microseconds
and ends with one JSON line. To be read against the time of a step, which ``kvist_step_seconds`` tells of a server.

    python -m benchmarks.monitoring [--batch 16] [--repetitions 200]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import TYPE_CHECKING

from kvist.cache.hash import BlockHasher
from kvist.cache.manager import CacheManager
from kvist.cache.namespaces import Namespace
from kvist.engine.metrics import RequestMetrics
from kvist.sched.request import Request
from kvist.types import FinishReason, RequestId, SamplingParams, TokenId

if TYPE_CHECKING:
    from collections.abc import Callable

NAMESPACE = Namespace(model="benchmark")
BLOCK_SIZE = 64
NUM_CALLS = 20
"""Calls in one measurement: the clock of CPU time is coarse."""


def measured(call: Callable[[], object], repetitions: int) -> dict[str, float]:
    """Return the median and the deciles of one call, in microseconds."""
    samples = []
    for _ in range(repetitions):
        start = time.process_time_ns()
        for _ in range(NUM_CALLS):
            call()
        samples.append((time.process_time_ns() - start) / NUM_CALLS / 1000)
    deciles = statistics.quantiles(samples, n=10)
    return {
        "median_us": round(statistics.median(samples), 2),
        "p10_us": round(deciles[0], 2),
        "p90_us": round(deciles[-1], 2),
    }


def serve(manager: CacheManager, token_ids: list[int]) -> None:
    """Take one prompt through the cache."""
    chain = manager.new_chain(NAMESPACE, token_ids)
    lease = manager.admit(manager.lookup(chain, len(token_ids) - 1), chain, len(token_ids))
    assert lease is not None
    manager.extend(lease, len(token_ids))
    manager.commit(lease, chain, len(token_ids))
    manager.release(lease)


def admission(manager: CacheManager, token_ids: list[int]) -> Callable[[], None]:
    """Return a call that admits a prompt and gives it back uncomputed, so that each time is like the first."""
    chain = manager.new_chain(NAMESPACE, token_ids)
    chain.block_hash(chain.num_full_blocks - 1)

    def admit() -> None:
        lease = manager.admit(manager.lookup(chain, len(token_ids) - 1), chain, len(token_ids))
        assert lease is not None
        manager.release(lease)

    return admit


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repetitions", type=int, default=200, help=">= 5")
    arguments = parser.parse_args()
    metrics = RequestMetrics()
    request = Request(
        request_id=RequestId("r"),
        prompt_token_ids=(TokenId(1),),
        params=SamplingParams(),
        namespace=NAMESPACE,
        seed=0,
    )

    def step() -> None:
        for _ in range(arguments.batch):
            time.perf_counter_ns()
            metrics.next_token(30_000_000)
        metrics.step((0, 1_000_000, 29_000_000, 30_000_000), 2_000_000)
        metrics.stats()

    prompt = [(i * 7919) % 49152 for i in range(4096)]
    manager = CacheManager(num_blocks=512, block_size=BLOCK_SIZE, hasher=BlockHasher(bytes(32)))
    serve(manager, prompt)
    ghosts = CacheManager(num_blocks=65, block_size=BLOCK_SIZE, hasher=BlockHasher(bytes(32)))
    serve(ghosts, prompt)
    serve(ghosts, [token_id + 1 for token_id in prompt])
    unseen = [token_id ^ 1 for token_id in prompt]
    results = {
        "step": measured(step, arguments.repetitions),
        "finish": measured(
            lambda: metrics.finish(request, FinishReason.STOP, 0), arguments.repetitions
        ),
        "admit_hit": measured(admission(manager, prompt), arguments.repetitions),
        "admit_new": measured(admission(manager, unseen), arguments.repetitions),
        "admit_evicted": measured(admission(ghosts, prompt), arguments.repetitions),
    }
    print(f"{'':14}{'median':>10}{'p10':>10}{'p90':>10}")
    for name, row in results.items():
        print(f"{name:14}{row['median_us']:>10}{row['p10_us']:>10}{row['p90_us']:>10}")
    print(
        json.dumps(
            {
                "benchmark": "monitoring",
                "batch": arguments.batch,
                "num_prompt_tokens": len(prompt),
                "block_size": BLOCK_SIZE,
                "results": results,
            }
        )
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
