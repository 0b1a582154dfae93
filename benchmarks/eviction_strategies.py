"""Strategies that were compared and not kept (docs/decisions/0001-eviction.md): S3-FIFO and ARC for a prefix tree.

Both keep the rules of ``kvist.cache.eviction``. A block leaves its queue while requests hold it, so neither can leave
a block in its place when it is hit, as the originals do.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvist.cache.block import Block
    from kvist.cache.tree import Node
    from kvist.types import BlockHash

MAX_FREQUENCY = 3


def _node(block: Block) -> Node:
    assert block.node is not None
    assert block.node.parent is not None
    return block.node


class S3Fifo:
    """A small queue for new blocks, a main one with second chances for those hit, ghosts of what left the small one.

    Source: Yang, Zhang, Qiu, Yue, Rashmi, FIFO queues are all you need for cache eviction (2023). There a block moves
    to main when it reaches the end of the small queue; here when it is queued again after a hit.
    """

    def __init__(self, num_blocks: int) -> None:
        self._small: OrderedDict[Block, None] = OrderedDict()
        # Chances left. A child never has more than its parent, so rounds keep children before parents.
        self._main: OrderedDict[Block, int] = OrderedDict()
        self._ghosts: OrderedDict[BlockHash, None] = OrderedDict()
        self._max_small = num_blocks // 10
        self._max_ghosts = num_blocks

    def __len__(self) -> int:
        return len(self._small) + len(self._main)

    def __iter__(self) -> Iterator[Block]:
        in_rounds = sorted(self._main, key=self._main.__getitem__)
        return chain(self._small, in_rounds)

    def append(self, block: Block) -> None:
        """Queue a block whose last reference has gone."""
        node = _node(block)
        if node.block_hash is not None and node.block_hash in self._ghosts:
            del self._ghosts[node.block_hash]
            node.num_hits = max(node.num_hits, 1)
        parent = _node(block).parent
        assert parent is not None
        parent.num_hits = max(parent.num_hits, node.num_hits)
        if node.num_hits:
            self._main[block] = min(node.num_hits, MAX_FREQUENCY)
        else:
            self._small[block] = None

    def touch(self, block: Block) -> None:
        """Change nothing: order of insertion is what counts, and a hit is noted when the block is queued again."""

    def remove(self, block: Block) -> None:
        """Take out a queued block."""
        if block in self._small:
            del self._small[block]
        else:
            del self._main[block]

    def evict(self) -> Block:
        """Take out the block that is to go."""
        # A block of main never goes while the small queue has blocks: these may stand below it.
        if self._small:
            block = self._small.popitem(last=False)[0]
            block_hash = _node(block).block_hash
            if block_hash is not None:
                self._ghosts[block_hash] = None
                if len(self._ghosts) > self._max_ghosts:
                    self._ghosts.popitem(last=False)
            return block
        while True:
            block, chances = self._main.popitem(last=False)
            if chances == 0:
                return block
            self._main[block] = chances - 1

    def abandon(self, blocks: Sequence[Block]) -> None:
        """Change nothing."""


class Arc:
    """Blocks never hit and blocks hit, in two recency queues whose balance follows two lists of ghosts.

    Source: Megiddo, Modha, ARC: a self-tuning, low overhead replacement cache (2003). Here a hit block is not evicted
    while it has children, which are never hit and then go first.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._recent: OrderedDict[Block, None] = OrderedDict()
        self._frequent: OrderedDict[Block, None] = OrderedDict()
        self._ghosts_recent: OrderedDict[BlockHash, None] = OrderedDict()
        self._ghosts_frequent: OrderedDict[BlockHash, None] = OrderedDict()
        self._target_recent = 0.0

    def __len__(self) -> int:
        return len(self._recent) + len(self._frequent)

    def __iter__(self) -> Iterator[Block]:
        return chain(self._recent, self._frequent)

    def append(self, block: Block) -> None:
        """Queue a block whose last reference has gone."""
        node = _node(block)
        recent, frequent = self._ghosts_recent, self._ghosts_frequent
        if node.block_hash in recent:
            step = max(1.0, len(frequent) / len(recent))
            self._target_recent = min(self._target_recent + step, float(self._num_blocks))
            del recent[node.block_hash]
            node.num_hits = max(node.num_hits, 1)
        elif node.block_hash in frequent:
            step = max(1.0, len(recent) / len(frequent))
            self._target_recent = max(self._target_recent - step, 0.0)
            del frequent[node.block_hash]
            node.num_hits = max(node.num_hits, 1)
        if node.num_hits:
            assert node.parent is not None
            node.parent.num_hits = max(node.parent.num_hits, 1)
            self._frequent[block] = None
        else:
            self._recent[block] = None

    def touch(self, block: Block) -> None:
        """Make a queued block the newest one of its queue."""
        (self._frequent if block in self._frequent else self._recent).move_to_end(block)

    def remove(self, block: Block) -> None:
        """Take out a queued block."""
        del (self._frequent if block in self._frequent else self._recent)[block]

    def evict(self) -> Block:
        """Take out the block that is to go."""
        is_recent = bool(self._recent)
        if is_recent and self._frequent and len(self._recent) <= self._target_recent:
            is_recent = bool(_node(next(iter(self._frequent))).ordered)
        queue, ghosts = (
            (self._recent, self._ghosts_recent)
            if is_recent
            else (self._frequent, self._ghosts_frequent)
        )
        block = queue.popitem(last=False)[0]
        block_hash = _node(block).block_hash
        if block_hash is not None:
            ghosts[block_hash] = None
            if len(ghosts) > self._num_blocks:
                ghosts.popitem(last=False)
        return block

    def abandon(self, blocks: Sequence[Block]) -> None:
        """Change nothing."""
