"""The most that any eviction can keep of a trace: Belady's clairvoyant choice, in a prefix cache.

Responsible for one number per trace and memory. Knows no strategy, no tokens and no time but the order of arrival.

What is computed. Requests are served one after the other. Each hits the longest leading run of its blocks that is
cached, then has all its blocks in memory at once; room is made by evicting, from what the request does not use, the
leaf whose next use is farthest. A block's next use is the next request whose prompt contains it.

Why it is the ceiling. An id stands for a block and its whole prefix, so whoever uses a block uses its ancestors in the
same request: no ancestor's next use is later than its descendant's. Evicting the farthest next use, the deeper block of
equal ones first, therefore takes leaves only, what is cached is always closed under prefixes, and every cached block of
a prompt is part of its leading run. So this is Belady's rule for a plain cache of blocks (farthest next use, each
request a batch that must be in memory together), which no other choice beats in block hits, and the tree costs nothing:
in blocks the result is the exact optimum, not only a bound. Requests that overlap in time only hold more memory.

In tokens it is the same but for prompts whose last block is shorter than the others: the optimum counts that block as
one, so its share of tokens can be off by what those blocks differ. They are hit by repeated whole prompts alone.

Blocks with the same present and next use are used together, so they are kept as one entry: a count that shrinks from
its deep end. The work is O(requests x runs x log entries) beside one pass over the ids.

Source: Belady, A study of replacement algorithms for a virtual-storage computer (1966).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvist.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvist.replay.traces import TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """What a clairvoyant cache hits of a trace."""

    num_requests: int
    """Requests served."""
    num_refused: int
    """Requests with more blocks than the memory, in none of the other counts."""
    num_blocks: int
    """Blocks of the prompts."""
    num_hit_blocks: int
    """Subset of num_blocks: hit."""
    num_input_tokens: int
    """Tokens of the prompts, those after the last block id included."""
    num_hit_tokens: int
    """Subset of num_input_tokens: in blocks that were hit."""

    @property
    def hit_share(self) -> float:
        """Hit tokens per prompt token, in [0, 1]; 0 for no tokens."""
        return self.num_hit_tokens / self.num_input_tokens if self.num_input_tokens else 0.0


@dataclass(slots=True)
class _Entry:
    """Blocks of one prompt with the same next use."""

    num_blocks: int
    """Those still cached; the deepest go first."""


def belady(requests: Sequence[TraceRequest], num_blocks: int) -> Ceiling:
    """Return the ceiling of a trace for a memory of ``num_blocks`` blocks of the trace's size.

    Args:
        requests: In the order of arrival; ids stand for blocks with their prefixes.
        num_blocks: Memory, >= 1; at least one request must not need more.

    Raises:
        TraceError: An id follows different ids in different prompts, so it does not stand for a prefix.
    """
    served = [request for request in requests if request.num_blocks <= num_blocks]
    uses = _next_uses(served)
    # Entries by the request that uses them next, and the farthest of all first.
    due: dict[int, list[_Entry]] = {}
    farthest: list[tuple[int, int, _Entry]] = []
    num_cached = num_hit_blocks = num_hit_tokens = num_pushed = 0
    for index, request in enumerate(served):
        num_hit = 0
        for entry in due.pop(index, ()):
            num_hit += entry.num_blocks
            entry.num_blocks = 0
        num_hit_blocks += num_hit
        num_hit_tokens += request.num_block_tokens(num_hit)
        num_cached += request.num_blocks - num_hit
        while num_cached > num_blocks:
            entry = farthest[0][2]
            num_evicted = min(entry.num_blocks, num_cached - num_blocks)
            entry.num_blocks -= num_evicted
            num_cached -= num_evicted
            if entry.num_blocks == 0:
                heapq.heappop(farthest)
        for next_use, count in uses[index]:
            entry = _Entry(count)
            num_pushed += 1
            # Of equal next uses any entry may shrink: which of their blocks are meant, the deepest, changes no count.
            heapq.heappush(farthest, (-next_use, -num_pushed, entry))
            due.setdefault(next_use, []).append(entry)
    return Ceiling(
        num_requests=len(served),
        num_refused=len(requests) - len(served),
        num_blocks=sum([request.num_blocks for request in served]),
        num_hit_blocks=num_hit_blocks,
        num_input_tokens=sum([request.num_input_tokens for request in served]),
        num_hit_tokens=num_hit_tokens,
    )


def _next_uses(requests: Sequence[TraceRequest]) -> list[list[tuple[int, int]]]:
    """Return, for each request, the next uses of its blocks from the first on, as (request, number of blocks).

    A block that is never used again has the number of requests as its next use.
    """
    num_ids = max([run.stop for request in requests for run in request.block_runs], default=0)
    next_use = np.full(num_ids, len(requests), dtype=np.int64)
    parent = np.full(num_ids, -2, dtype=np.int64)
    uses: list[list[tuple[int, int]]] = []
    for index in range(len(requests) - 1, -1, -1):
        ids = np.array(requests[index].block_ids, dtype=np.int64)
        before = np.concatenate(([-1], ids[:-1])) if len(ids) else ids
        if ((parent[ids] != -2) & (parent[ids] != before)).any():
            raise TraceError(f"[replay] a block id of request {index} follows different prefixes")
        parent[ids] = before
        following = next_use[ids]
        next_use[ids] = index
        starts = np.flatnonzero(np.diff(following, prepend=-1))
        counts = np.diff(starts, append=len(ids))
        uses.append(list(zip(following[starts].tolist(), counts.tolist(), strict=True)))
    return uses[::-1]
