"""Strategies: in which order cached blocks are given up.

Responsible for queues of evictable blocks and for what a strategy remembers of blocks that went. Knows no leases and
no memory limit; of the tree, a node's identity, its parent and how it was used. Whoever calls keeps two rules, and
every strategy the third, so that eviction needs no search and never leaves a child without its parent:

1. Blocks are appended, touched and abandoned deepest first, and an ancestor of a block that is appended is not queued.
2. A prefix is hit whenever what follows it is: ``num_hits`` never grows from a node to its children.
3. In the order of eviction a block stands before its ancestors.

Measured on public traces in docs/decisions/0001-eviction.md.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import chain
from typing import TYPE_CHECKING, Protocol, TypeAlias

from kvist.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from kvist.cache.block import Block
    from kvist.cache.tree import Node
    from kvist.types import BlockHash

MIN_PROTECTED, FIRST_PROTECTED, MAX_PROTECTED = 0.4, 0.5, 0.9
"""Share of the pool that blocks hit again may fill: at least, at first, at most (docs/decisions/0001-eviction.md)."""
MIN_CONTINUATIONS = 2
"""Continuations after which new blocks are protected at once. One would protect the first fork of a shared prompt too,
and costs 1 % of the ceiling on mooncake; two cost nothing and keep a live chat through a sweep."""


class EvictionStrategy(Protocol):
    """An order of evictable blocks. Every operation is O(1) amortised, iterating aside."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Block]:
        """Yield the blocks in the order in which they would go if nothing else happened. For checks."""
        ...

    def append(self, block: Block) -> None:
        """Queue a block whose last reference has gone."""
        ...

    def touch(self, block: Block) -> None:
        """Note that a queued block was looked up."""
        ...

    def remove(self, block: Block) -> None:
        """Take out a queued block: it is held again, or leaves the cache for another reason than room."""
        ...

    def evict(self) -> Block:
        """Take out the block that is to go, and remember what this strategy remembers. There must be one."""
        ...

    def abandon(self, blocks: Sequence[Block]) -> None:
        """Note that a whole queued chain, deepest first, was left for another continuation and never hit."""
        ...


StrategyFactory: TypeAlias = "Callable[[int], EvictionStrategy]"
"""Makes a strategy for a pool of so many blocks."""


class Lru:
    """The least recently used block first.

    OrderedDict is a doubly linked list in C; a plain dict would scan the gaps left at its front on every eviction.
    """

    __slots__ = ("_blocks",)

    def __init__(self, num_blocks: int) -> None:  # noqa: ARG002  # every strategy is made this way
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
        """Take out a queued block."""
        del self._blocks[block]

    def evict(self) -> Block:
        """Take out the least recently used block."""
        return self._blocks.popitem(last=False)[0]

    def abandon(self, blocks: Sequence[Block]) -> None:
        """Change nothing: the order of use is all that counts here."""


class SegmentedLru:
    """Blocks that were hit outlive those that were not, however many of these pass through.

        goes first  [ abandoned | probation: never hit, or demoted )[ protected: hit )  goes last
                                             ^ demoted, oldest first ^ at most max_protected

    A block is protected once a request has hit it; from its first use when it continues a sequence that was continued
    before, as the third turn of a chat does; or when it comes back while its identity is still among the ghosts, since
    what was evicted not long ago was no one-off. When protected overflows, its least recently used blocks get another
    life as the newest of probation. A sweep of one-off prompts passes through probation only.

    Ghosts also move the border, one block a time: one that was never hit says that probation is too short, one that was
    hit says that protected is. Each kind has its own list, as long as the pool, so that a sweep fills only one.

    A chain that was never hit and has been left for another continuation goes first: an edited message, a regenerated
    answer, a tail that the next turn wrote differently.

    Source: Karedla, Love, Wherry, Caching strategies to improve disk system performance (1994), for the segments;
    Megiddo, Modha, ARC (2003), for ghosts that move the border. The rules for continuations and abandoned chains are
    ours.
    """

    __slots__ = (
        "_ghosts_hit",
        "_ghosts_new",
        "_num_blocks",
        "_probation",
        "_protected",
        "max_protected",
    )

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._probation: OrderedDict[Block, None] = OrderedDict()
        self._protected: OrderedDict[Block, None] = OrderedDict()
        self._ghosts_new: OrderedDict[BlockHash, None] = OrderedDict()
        self._ghosts_hit: OrderedDict[BlockHash, None] = OrderedDict()
        self.max_protected = int(num_blocks * FIRST_PROTECTED)
        """Blocks that protected may have now."""

    def __len__(self) -> int:
        return len(self._probation) + len(self._protected)

    def __iter__(self) -> Iterator[Block]:
        return chain(self._probation, self._protected)

    @property
    def num_ghosts(self) -> int:
        """Identities remembered of blocks that went."""
        return len(self._ghosts_new) + len(self._ghosts_hit)

    def append(self, block: Block) -> None:
        """Add a block as the newest one of its segment."""
        node = block.node
        assert node is not None
        assert node.parent is not None
        if node.block_hash in self._ghosts_new or node.block_hash in self._ghosts_hit:
            self._welcome_back(node)
        if not node.num_hits and node.num_continuations < MIN_CONTINUATIONS:
            self._probation[block] = None
            return
        # The parent's ghost may be gone by now; it must not go before its child (inv. 2).
        node.parent.num_hits = node.parent.num_hits or 1
        self._protected[block] = None
        while len(self._protected) > self.max_protected:
            self._probation[self._protected.popitem(last=False)[0]] = None

    def touch(self, block: Block) -> None:
        """Make a queued block the newest one of its segment."""
        (self._protected if block in self._protected else self._probation).move_to_end(block)

    def remove(self, block: Block) -> None:
        """Take out a queued block."""
        del (self._protected if block in self._protected else self._probation)[block]

    def evict(self) -> Block:
        """Take out the oldest block of probation, or of protected when that is all there is."""
        block = (self._probation or self._protected).popitem(last=False)[0]
        node = block.node
        assert node is not None
        if node.block_hash is not None:
            ghosts = self._ghosts_hit if node.num_hits else self._ghosts_new
            ghosts[node.block_hash] = None
            if len(ghosts) > self._num_blocks:
                ghosts.popitem(last=False)
        return block

    def abandon(self, blocks: Sequence[Block]) -> None:
        """Move a chain to the front of probation, deepest block first."""
        for block in reversed(blocks):
            self.remove(block)
            self._probation[block] = None
            self._probation.move_to_end(block, last=False)

    def _welcome_back(self, node: Node) -> None:
        """Take a node that came back from the ghosts, and move the border by what that says."""
        block_hash = node.block_hash
        assert block_hash is not None
        if block_hash in self._ghosts_new:
            del self._ghosts_new[block_hash]
            self.max_protected = max(self.max_protected - 1, int(self._num_blocks * MIN_PROTECTED))
        else:
            del self._ghosts_hit[block_hash]
            self.max_protected = min(self.max_protected + 1, int(self._num_blocks * MAX_PROTECTED))
        node.num_hits = node.num_hits or 1


STRATEGIES: Mapping[str, StrategyFactory] = {"default": SegmentedLru, "lru": Lru}
"""Strategies by the name that a user gives."""


def strategy_factory(eviction: str | StrategyFactory) -> StrategyFactory:
    """Return what makes the strategy of a name; what is no name is returned as it is.

    Raises:
        ConfigError: The name is unknown.
    """
    if not isinstance(eviction, str):
        return eviction
    if eviction not in STRATEGIES:
        raise ConfigError(
            f"[cache] unknown eviction strategy {eviction!r}; known: {', '.join(STRATEGIES)}"
        )
    return STRATEGIES[eviction]
