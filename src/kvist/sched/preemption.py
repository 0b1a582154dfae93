"""Who gives way when a running request needs a block and there is none.

Responsible for the choice of the victim. Knows neither queue nor budget, and changes nothing.

The cheapest victim is the one with the least recomputation for each block it frees. Blocks that others hold too stay
where they are: they cost nothing to find again and free nothing. Blocks that are reserved and not used yet are free
for the taking. What the victim computed by itself counts in full, although the cache may still have it when the
victim resumes: the blocks are taken for somebody else, so at least as many as are needed now will be gone.

Who can be chosen:
    1. Not the running request that arrived first. It is never preempted, so it ends.
    2. Not one that is more important (lower ``priority``) than the request that needs the block.
    3. Not one that has produced nothing since it was preempted last. So each preemption of a request but the first is
       paid for with a token, and there are no more of them than tokens: work that is thrown away is bounded.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvist.sched.request import Request


def choose_victim(
    requester: Request, running: Sequence[Request], block_size: int
) -> Request | None:
    """Return the request to preempt, maybe the requester itself; None: nobody can be, so the requester has to pause.

    A pause ends, since one of the others goes on without a new block: each was admitted with room for one token more
    than it had, and as long as it has not used that it is here because of rule 3; when it has, it can be chosen. If all
    others are more important, they end, and nobody new is admitted while somebody pauses.

    Args:
        requester: Runs, and needs a block.
        running: Every running request, in order of arrival.
        block_size: Tokens per block.

    Complexity: O(running requests and their blocks).
    """
    candidates = [
        request
        for request in running[1:]
        if request.priority >= requester.priority and request.has_progressed
    ]
    return min(candidates, key=lambda request: _cost(request, block_size), default=None)


def _cost(request: Request, block_size: int) -> tuple[float, int]:
    """Return tokens to recompute for the memory freed; of equal ones, the request that arrived last comes first."""
    lease = request.lease
    assert lease is not None, "every running request holds a lease"
    # In units of memory: blocks may have different sizes.
    num_freed, num_lost_tokens = lease.num_reserved_units, 0
    for index, block in enumerate(lease.blocks):
        if block.ref_count == 1:
            num_freed += block.size
            in_block = request.num_computed_tokens - index * block_size
            num_lost_tokens += max(0, min(block_size, in_block))
    # Freeing nothing by itself comes last, and is still a choice: two such leases may free what they share.
    cost = num_lost_tokens / num_freed if num_freed else math.inf
    return cost, -request.arrival_index
