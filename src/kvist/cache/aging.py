"""When a block is made smaller: by age while requests run, and for room once nobody uses it.

Responsible for how old each block is to the leases that hold it, and for applying the precision rule. Changes sizes
through ``pool`` alone. Knows no tokens.

    windows of one lease, block size 4, recent:6=raw16, recent:14=int8, rest=int4

    blocks   [ 0 ][ 1 ][ 2 ][ 3 ][ 4 ][ 5 ]     22 tokens computed
             sink [rest][ int8  ][  raw16  ]    a block is in a window with its last token
                        14 tokens back
                                  6 tokens back

1. ``block.fresh[i]`` is the number of live leases that have the block within window i. Windows only move on, and an
   older window begins no later than a younger one.
2. A block held by leases is kept in the codec of the youngest window in which any of them has it. So two that disagree
   about a shared block's age get the better precision, and a block that was demoted is never restored.
3. Only full blocks are demoted: what is behind the last token of another one may be anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections import Counter

    from kvist.cache.block import Block
    from kvist.cache.lease import PrefixLease
    from kvist.cache.pool import BlockPool
    from kvist.precision import KVBudget


class Aging:
    """The ages of all blocks of a pool. Engine thread only.

    Args:
        pool: The blocks.
        budget: Its rule, and whether cached blocks are demoted for room.
        block_size: Tokens per block.
        num_pins_of: References to a block that are pins, which read nothing; read only.
    """

    __slots__ = (
        "_block_size",
        "_lengths",
        "_levels",
        "_num_pins_of",
        "_pool",
        "_sink_level",
    )

    def __init__(
        self, pool: BlockPool, budget: KVBudget, block_size: int, num_pins_of: Counter[Block]
    ) -> None:
        rule = budget.precision
        level_of = {codec: level for level, codec in enumerate(rule.codecs)}
        self._pool = pool
        self._num_pins_of = num_pins_of
        self._block_size = block_size
        self._lengths = tuple([num_tokens for num_tokens, _ in rule.windows])
        self._levels = (*[level_of[codec] for _, codec in rule.windows], level_of[rule.rest])
        self._sink_level = level_of[rule.sink]
        for block in pool.blocks:
            block.fresh = [0] * len(self._lengths)
            block.num_leases = block.index = 0
            block.owner = None

    def enter(self, lease: PrefixLease) -> int:
        """Take over the blocks that a lease begins with, its hits; return the blocks demoted. O(hits).

        Blocks that no other lease has become its own; those of another are nobody's own any more.
        """
        for index, block in enumerate(lease.blocks):
            block.num_leases += 1
            block.index = index
            block.owner = lease.ref if block.num_leases == 1 else None
        lease.windows = [0] * len(self._lengths)
        num_tokens = len(lease.blocks) * self._block_size
        for window, length in enumerate(self._lengths):
            first = max(0, num_tokens - length) // self._block_size
            for block in lease.blocks[first:]:
                block.fresh[window] += 1
            lease.windows[window] = first
        return sum([self._demote_if_old(block, index) for index, block in enumerate(lease.blocks)])

    def size_on_entry(self, block: Block, index: int, num_hits: int) -> int:
        """Return what a block that no lease has will take as a hit of one that begins with so many hits."""
        level = self._sink_level if index == 0 else self._levels[-1]
        if index:
            for window, length in enumerate(self._lengths):
                if index >= max(0, num_hits * self._block_size - length) // self._block_size:
                    level = self._levels[window]
                    break
        return min(block.size, self._pool.sizes[level])

    def add(self, lease: PrefixLease, block: Block) -> None:
        """Take over a block that a lease has been given, and is about to put into its table."""
        block.num_leases = 1
        block.index = len(lease.blocks)
        block.owner = lease.ref
        for window in range(len(self._lengths)):
            block.fresh[window] += 1

    def advance(self, lease: PrefixLease) -> int:
        """Bring the ages of a lease's blocks up to date with what it has computed; return the blocks demoted.

        Complexity: O(blocks that leave a window).
        """
        num_demoted = 0
        for window, length in enumerate(self._lengths):
            first = max(0, lease.num_computed_tokens - length) // self._block_size
            for index in range(lease.windows[window], first):
                block = lease.blocks[index]
                block.fresh[window] -= 1
                num_demoted += self._demote_if_old(block, index)
            lease.windows[window] = max(lease.windows[window], first)
        return num_demoted

    def leave(self, lease: PrefixLease) -> int:
        """Forget a lease that is about to give its blocks back; return the blocks demoted.

        Those are blocks that it alone kept recent and that others hold as old ones. What nobody else reads stays as it
        is, as long as there is room.
        """
        for window, first in enumerate(lease.windows):
            for block in lease.blocks[first:]:
                block.fresh[window] -= 1
        for block in lease.blocks:
            block.num_leases -= 1
            if block.owner is lease.ref:
                block.owner = None
        num_demoted = 0
        num_full = lease.num_computed_tokens // self._block_size
        for index in range(min(lease.windows, default=0), num_full):
            block = lease.blocks[index]
            if block.ref_count - self._num_pins_of[block] > 1:
                num_demoted += self._demote_if_old(block, index)
        return num_demoted

    def demote_coldest(self) -> bool:
        """Make the cached block smaller that was used least recently; return whether there was one to be made so."""
        block = self._pool.coldest_demotable()
        if block is None:
            return False
        assert block.node is not None
        self._pool.demote(block, self._pool.room_level_of(block.node))
        return True

    def _demote_if_old(self, block: Block, index: int) -> bool:
        level = self._sink_level if index == 0 else self._level_of(block)
        if level <= block.level:
            return False
        self._pool.demote(block, level)
        return True

    def _level_of(self, block: Block) -> int:
        for window, level in enumerate(self._levels[:-1]):
            if block.fresh[window]:
                return level
        return self._levels[-1]
