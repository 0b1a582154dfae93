"""What every block holds, in columns that can be copied in one piece.

Responsible for numbers of published blocks that are kept up to date as they change, so that a picture of the whole
cache costs a copy of memory and no walk over the tree. Knows neither who looks at it nor what for. ``tree`` writes when
a node comes, grows, moves or goes, ``manager`` when it is used. Engine thread only; a copy is anybody's.

1. Entry ``block_id`` of each column describes the node that the block stands for; ``numbers`` is 0 where there is none,
   and the rest means nothing there.
2. A node keeps its number for life, whatever block holds it, and no number is given twice.
"""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvist.cache.hash import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvist.cache.block import Block
    from kvist.cache.namespaces import Namespace
    from kvist.cache.tree import Node


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSurvey:
    """The blocks at one moment. Sequences are by block id; where ``numbers`` is 0, nothing is published."""

    taken_ns: int
    """When, on the cache's clock."""
    ref_counts: Sequence[int]
    """Leases and pins that hold the block."""
    pinned: frozenset[int]
    """Ids of the blocks that pins hold."""
    namespaces: Mapping[int, Namespace]
    """Those that have anything published, by the number of their root."""
    numbers: array[int]
    """Of the node that the block stands for."""
    parents: array[int]
    """Number of the node before it: another block's, or a root's."""
    num_tokens: array[int]
    """Tokens whose K and V it holds."""
    tokens: Sequence[bytes]
    """Their ids, u32 little-endian."""
    num_hits: array[int]
    """Leases that began with it, those of the same client call aside."""
    computed_ns: array[int]
    """When its first tokens were published, on the cache's clock."""
    used_ns: array[int]
    """When that was, or when a lease last began with it or copied from it."""


class BlockColumns:
    """The columns of one pool.

    Args:
        num_blocks: Blocks in the pool, whose ids are in [0, num_blocks).
        clock_ns: Monotonic clock in nanoseconds.
    """

    __slots__ = (
        "_clock_ns",
        "computed_ns",
        "num_hits",
        "num_tokens",
        "numbers",
        "parents",
        "tokens",
        "used_ns",
    )

    def __init__(self, num_blocks: int, clock_ns: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock_ns = clock_ns
        zeros = bytes(8 * num_blocks)
        self.numbers = array("q", zeros)
        self.parents = array("q", zeros)
        self.num_tokens = array("i", bytes(4 * num_blocks))
        self.tokens = [b""] * num_blocks
        self.num_hits = array("q", zeros)
        self.computed_ns = array("q", zeros)
        self.used_ns = array("q", zeros)

    def enter(self, node: Node, parent: Node) -> None:
        """Describe a node that has just come."""
        block_id = node.block.block_id
        self.numbers[block_id] = node.number
        self.parents[block_id] = parent.number
        self.num_tokens[block_id] = len(node.tokens) // TOKEN_BYTES
        self.tokens[block_id] = node.tokens
        self.num_hits[block_id] = 0
        self.computed_ns[block_id] = self.used_ns[block_id] = self._clock_ns()

    def grow(self, node: Node) -> None:
        """Note that a node has got more tokens."""
        block_id = node.block.block_id
        self.num_tokens[block_id] = len(node.tokens) // TOKEN_BYTES
        self.tokens[block_id] = node.tokens

    def move(self, source: Block, target: Block) -> None:
        """Let another block stand for a node."""
        for column in (
            self.numbers,
            self.parents,
            self.num_tokens,
            self.num_hits,
            self.computed_ns,
            self.used_ns,
        ):
            column[target.block_id] = column[source.block_id]
        self.tokens[target.block_id] = self.tokens[source.block_id]
        self.leave(source)

    def leave(self, block: Block) -> None:
        """Note that a block stands for nothing any more."""
        self.numbers[block.block_id] = 0
        self.tokens[block.block_id] = b""

    def survey(
        self,
        blocks: Sequence[Block],
        roots: Mapping[Namespace, Node],
        pinned: Mapping[Block, int],
        now_ns: int,
    ) -> CacheSurvey:
        """Return a copy of everything.

        Args:
            blocks: All of the pool, in the order of their ids.
            roots: The tree's.
            pinned: The blocks that pins hold.
            now_ns: The time.

        Complexity: O(blocks), nearly all of it in copies of whole columns.
        """
        return CacheSurvey(
            taken_ns=now_ns,
            ref_counts=[block.ref_count for block in blocks],
            pinned=frozenset([int(block.block_id) for block in pinned]),
            namespaces={root.number: namespace for namespace, root in roots.items()},
            numbers=self.numbers[:],
            parents=self.parents[:],
            num_tokens=self.num_tokens[:],
            tokens=self.tokens[:],
            num_hits=self.num_hits[:],
            computed_ns=self.computed_ns[:],
            used_ns=self.used_ns[:],
        )
