"""Hit share of each eviction strategy on public traces and beside a sweep, through the real CacheManager; no model.

Requests are served one after the other: lookup, admit, extend, commit, release. One cache block stands for one block id
of the trace, whose only token is the id; ids stand for prefixes, so nothing is lost by that. A prompt whose blocks are
all cached is a full hit (no token is kept back to be computed). Hit share: tokens of the leading cached blocks over all
prompt tokens, from an empty cache on. The ceiling is ``kvist.replay.belady``.

The sweep: 16 chats of 10 turns, four to a system prompt, in turns, in twice the memory that they need. 500 one-off
prompts of 40 blocks come at once after each chat's fifth turn, or in equal parts after every turn but the first two of
each chat. Beside the chats' hit share stands what it is of their share without the sweep.

Prints a table and ends with one JSON line.

    python -m benchmarks.eviction --data DIR [--workloads mooncake,sessions,sweep] [--strategies default,lru,...]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

try:
    from benchmarks.eviction_strategies import Arc, S3Fifo
except ModuleNotFoundError:  # started by its path
    from eviction_strategies import Arc, S3Fifo

from kvist.cache.eviction import STRATEGIES
from kvist.cache.hash import BlockHasher
from kvist.cache.manager import CacheManager
from kvist.cache.namespaces import Namespace
from kvist.replay.belady import belady
from kvist.replay.traces import TraceRequest, read_trace
from kvist.types import BlockHash

if TYPE_CHECKING:
    from collections.abc import Sequence

COMPARED = {**STRATEGIES, "s3fifo": S3Fifo, "arc": Arc}
TRACES = {
    "mooncake": ("mooncake_conversation.jsonl", "mooncake", None, 0.1),
    "sessions": ("claude_code_sessions_rle.jsonl.gz", "sessions", 50, 0.2),
}
"""File, format, sessions and memory as a fraction of the distinct blocks."""
NUM_CHATS = 16
NUM_TURNS = 10
NUM_SYSTEM_BLOCKS = 32
NUM_TURN_BLOCKS = 6
NUM_SWEEP = 500
NUM_SWEEP_BLOCKS = 40
NAMESPACE = Namespace(model="benchmark")


class IdHasher(BlockHasher):
    """Takes an id for its own identity: it stands for the block and its prefix already."""

    def child(self, parent: BlockHash, tokens: bytes) -> BlockHash:  # noqa: ARG002  # the id says it all
        """Return the bytes of the id."""
        return BlockHash(tokens)


def make_manager(num_blocks: int, strategy: str) -> CacheManager:
    return CacheManager(
        num_blocks=num_blocks,
        block_size=1,
        hasher=IdHasher(bytes(32)),
        eviction=COMPARED[strategy],
    )


def serve(manager: CacheManager, block_ids: Sequence[int]) -> int:
    """Take a prompt through the cache; return the leading blocks that were cached."""
    num_blocks = len(block_ids)
    chain = manager.new_chain(NAMESPACE, block_ids)
    lease = manager.admit(manager.lookup(chain, num_blocks), chain, num_blocks)
    assert lease is not None
    num_hit = lease.num_computed_tokens
    manager.extend(lease, num_blocks)
    manager.commit(lease, chain, num_blocks)
    manager.release(lease)
    return num_hit


def run_trace(requests: Sequence[TraceRequest], num_blocks: int, strategy: str) -> dict[str, float]:
    manager = make_manager(num_blocks, strategy)
    start = time.perf_counter()
    num_hit_tokens = 0
    served = [request for request in requests if 0 < request.num_blocks <= num_blocks]
    for request in served:
        num_hit_tokens += request.num_block_tokens(serve(manager, request.block_ids))
    manager.check_invariants()
    stats = manager.stats()
    return {
        "hit_share": num_hit_tokens / sum([request.num_input_tokens for request in served]),
        "num_evictions": stats.num_evictions,
        "wall_s": round(time.perf_counter() - start, 1),
    }


def num_distinct_blocks(requests: Sequence[TraceRequest]) -> int:
    return len({block_id for request in requests for block_id in request.block_ids})


def sweep(num_blocks: int, strategy: str, mode: str) -> float:
    """Return the chats' hit share; mode: none, at_once or between."""
    manager = make_manager(num_blocks, strategy)
    next_id = 0

    def fresh(count: int) -> list[int]:
        nonlocal next_id
        next_id += count
        return list(range(next_id - count, next_id))

    systems = [fresh(NUM_SYSTEM_BLOCKS) for _ in range(4)]
    chats = [[*systems[chat % 4], *fresh(NUM_TURN_BLOCKS)] for chat in range(NUM_CHATS)]
    num_hit = num_all = 0
    for turn in range(NUM_TURNS):
        for chat in chats:
            num_hit += serve(manager, chat)
            num_all += len(chat)
            chat.extend(fresh(NUM_TURN_BLOCKS))
            if mode == "between" and turn > 1:
                for _ in range(NUM_SWEEP // (NUM_CHATS * (NUM_TURNS - 2))):
                    serve(manager, fresh(NUM_SWEEP_BLOCKS))
        if mode == "at_once" and turn == NUM_TURNS // 2 - 1:
            for _ in range(NUM_SWEEP):
                serve(manager, fresh(NUM_SWEEP_BLOCKS))
    manager.check_invariants()
    return num_hit / num_all


def num_chat_blocks() -> int:
    """Return the blocks of all chats at their end."""
    return 4 * NUM_SYSTEM_BLOCKS + NUM_CHATS * NUM_TURNS * NUM_TURN_BLOCKS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, help="folder of the traces")
    parser.add_argument("--workloads", default="mooncake,sessions,sweep")
    parser.add_argument("--strategies", default=",".join(COMPARED))
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = []
    for workload in arguments.workloads.split(","):
        if workload == "sweep":
            num_blocks = 2 * num_chat_blocks()
            for strategy in arguments.strategies.split(","):
                quiet = sweep(num_blocks, strategy, "none")
                for mode in ("at_once", "between"):
                    share = sweep(num_blocks, strategy, mode)
                    rows.append(
                        {
                            "workload": f"sweep {mode}",
                            "num_blocks": num_blocks,
                            "strategy": strategy,
                            "hit_share": share,
                            "of_ceiling": share / quiet,
                        }
                    )
            continue
        file, format_name, max_sessions, fraction = TRACES[workload]
        path = arguments.data / file
        requests = list(read_trace(path, format_name, max_sessions=max_sessions))
        num_blocks = int(fraction * num_distinct_blocks(requests))
        ceiling = belady(requests, num_blocks)
        results = {"belady": {"hit_share": ceiling.hit_share}} | {
            strategy: run_trace(requests, num_blocks, strategy)
            for strategy in arguments.strategies.split(",")
        }
        rows += [
            {
                "workload": workload,
                "num_blocks": num_blocks,
                "strategy": strategy,
                **result,
                "of_ceiling": result["hit_share"] / ceiling.hit_share,
            }
            for strategy, result in results.items()
        ]
    print(f"{'workload':16}{'blocks':>8}  {'strategy':12}{'hit share':>10}{'of ceiling':>12}")
    for row in rows:
        print(
            f"{row['workload']:16}{row['num_blocks']:>8}  {row['strategy']:12}"
            f"{row['hit_share']:>10.4f}{row['of_ceiling']:>12.3f}"
        )
    print(json.dumps({"benchmark": "eviction", "runs": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
