"""All blocks, and which of three sets each is in.

Responsible for reference counts, the free blocks, the evictable ones in their partitions, and the number of blocks
promised to leases. The only module that changes a reference count. Knows no tokens.

1. Every block is in exactly one set: free (holds nothing), evictable (published, ref count 0), held (ref count > 0).
2. ``num_available = free + evictable - reserved >= 0``: a reserved block can always be allocated.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from kvist.cache.block import Block
from kvist.cache.eviction import Lru
from kvist.cache.partition import Partitions
from kvist.types import BlockId

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvist.cache.eviction import StrategyFactory


class BlockPool:
    """The blocks of one arena. Engine thread only; every operation is O(1), amortised where a strategy is asked.

    Args:
        num_blocks: Blocks in the arena.
        make_strategy: Makes the strategy of each partition.
        shares: Fraction of the pool by tenant (``partition``).
    """

    __slots__ = ("_free", "_is_single", "blocks", "num_evictable", "num_reserved", "partitions")

    def __init__(
        self,
        num_blocks: int,
        make_strategy: StrategyFactory = Lru,
        shares: Mapping[str, float] | None = None,
    ) -> None:
        self.partitions = Partitions(make_strategy, num_blocks, shares or {})
        self._is_single = self.partitions.is_single
        self.blocks: Sequence[Block] = tuple(Block(BlockId(i)) for i in range(num_blocks))
        # A stack: only its end is ever touched, and the block freed last is the one most likely still in the caches.
        self._free = list(reversed(self.blocks))
        self.num_evictable = 0
        """Cached blocks without references."""
        self.num_reserved = 0
        """Blocks promised to leases and not allocated yet."""

    @property
    def free_blocks(self) -> Sequence[Block]:
        """The free blocks, next to be allocated last."""
        return self._free

    @property
    def evictable(self) -> Sequence[Block]:
        """The evictable blocks, those of a tree in the order they would go. O(blocks), for checks and resets."""
        return list(chain.from_iterable(self.partitions))

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Blocks that can be promised to someone."""
        return len(self._free) + self.num_evictable - self.num_reserved

    def allocate(self, tenant: str) -> Block:
        """Take a free block and hold it. There must be one."""
        block = self._free.pop()
        block.ref_count = 1
        partition = block.partition = self.partitions.of(tenant)
        partition.num_used += 1
        if not self._is_single:
            self.partitions.rank(block.partition)
        return block

    def hold(self, block: Block) -> None:
        """Add a reference to an evictable or held block."""
        if block.ref_count == 0:
            self.withdraw(block)
        block.ref_count += 1

    def unhold(self, block: Block) -> bool:
        """Take a reference away.

        Returns:
            Whether it was the last one; the caller then calls ``keep`` or ``free``.
        """
        block.ref_count -= 1
        return block.ref_count == 0

    def keep(self, block: Block) -> None:
        """Make a published block whose last reference has gone evictable."""
        assert block.node is not None
        if block.node.kept_until_ns:
            block.partition.retained[block] = None
        else:
            block.partition.strategy.append(block)
        self.num_evictable += 1
        if not self._is_single:
            self.partitions.rank(block.partition)

    def touch(self, block: Block) -> None:
        """Note that an evictable block was looked up."""
        retained = block.partition.retained
        if retained and block in retained:
            retained.move_to_end(block)
        else:
            block.partition.strategy.touch(block)

    def withdraw(self, block: Block) -> None:
        """Take an evictable block out of its queue; the caller holds it, keeps it again or frees it."""
        partition = block.partition
        if partition.retained and block in partition.retained:
            del partition.retained[block]
        else:
            partition.strategy.remove(block)
        self.num_evictable -= 1
        if not self._is_single:
            self.partitions.rank(block.partition)

    def evict(self) -> Block:
        """Take out of its queue the block that is to go; the caller frees it. There must be one."""
        block = self.partitions.next_to_evict_from().evict()
        self.num_evictable -= 1
        if not self._is_single:
            self.partitions.rank(block.partition)
        return block

    def free(self, block: Block) -> None:
        """Make a block with no reference, and out of the queue, free."""
        self._free.append(block)
        block.partition.num_used -= 1
        if not self._is_single:
            self.partitions.rank(block.partition)
