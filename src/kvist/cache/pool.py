"""All blocks, and which of three sets each is in.

Responsible for reference counts, the free blocks, the queue of evictable ones, and the number of blocks promised to
leases. The only module that changes a reference count. Knows no tokens.

1. Every block is in exactly one set: free (holds nothing), evictable (published, ref count 0), held (ref count > 0).
2. ``num_available = free + evictable - reserved >= 0``: a reserved block can always be allocated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvist.cache.block import Block
from kvist.cache.eviction import LruQueue
from kvist.types import BlockId

if TYPE_CHECKING:
    from collections.abc import Sequence


class BlockPool:
    """The blocks of one arena. Engine thread only; every operation is O(1)."""

    __slots__ = ("_free", "blocks", "evictable", "num_reserved")

    def __init__(self, num_blocks: int) -> None:
        self.blocks: Sequence[Block] = tuple(Block(BlockId(i)) for i in range(num_blocks))
        # A stack: only its end is ever touched, and the block freed last is the one most likely still in the caches.
        self._free = list(reversed(self.blocks))
        self.evictable = LruQueue()
        self.num_reserved = 0
        """Blocks promised to leases and not allocated yet."""

    @property
    def free_blocks(self) -> Sequence[Block]:
        """The free blocks, next to be allocated last."""
        return self._free

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Blocks that can be promised to someone."""
        return len(self._free) + len(self.evictable) - self.num_reserved

    def allocate(self) -> Block:
        """Take a free block and hold it. There must be one."""
        block = self._free.pop()
        block.ref_count = 1
        return block

    def hold(self, block: Block) -> None:
        """Add a reference to an evictable or held block."""
        if block.ref_count == 0:
            self.evictable.remove(block)
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
        self.evictable.append(block)

    def free(self, block: Block) -> None:
        """Make a block with no reference, and out of the queue, free."""
        self._free.append(block)
