"""The order in which cached blocks are given up.

Responsible for the queue of evictable blocks. Knows neither tree nor leases; relies on its caller for one rule:

1. Blocks are appended (and touched) deepest first, so a block always stands before its ancestors. The oldest block is
   therefore a leaf, and eviction needs no search.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvist.cache.block import Block


class LruQueue:
    """Evictable blocks, least recently used first. Every operation is O(1).

    OrderedDict is a doubly linked list in C; a plain dict would scan the gaps left at its front on every eviction.
    """

    __slots__ = ("_blocks",)

    def __init__(self) -> None:
        self._blocks: OrderedDict[Block, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks)

    def append(self, block: Block) -> None:
        """Add a block as the most recently used one."""
        self._blocks[block] = None

    def touch(self, block: Block) -> None:
        """Make a queued block the most recently used one."""
        self._blocks.move_to_end(block)

    def remove(self, block: Block) -> None:
        """Take a block out, because it is held again or dropped."""
        del self._blocks[block]

    def oldest(self) -> Block:
        """Return the least recently used block. The queue must not be empty."""
        return next(iter(self._blocks))
