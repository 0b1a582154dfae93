"""What one request holds of the cache, and what a lookup found for it.

Responsible for the two values that the scheduler handles. Both are changed, if at all, by ``CacheManager`` only.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvist.cache.block import Block
    from kvist.cache.memory import Entry
    from kvist.cache.tree import Node
    from kvist.types import BlockCopy, BlockId, MissReport

_logger = logging.getLogger(__name__)


class PartialCopy(NamedTuple):
    """The head of a block that a request can copy."""

    source: BlockId
    """Block to copy from."""
    num_tokens: int
    """Leading positions that match, [1, block_size]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMatch:
    """What the cache holds of one sequence at one moment. Holds nothing itself: only ``admit`` does."""

    block_ids: tuple[BlockId, ...]
    """Full blocks to share, in order."""
    copy: PartialCopy | None
    """The block after them, when its head matches."""
    num_hit_tokens: int
    """Tokens of both; at most max_hit_len."""
    pending: bool
    """Whether a live lease is computing the next block, or an identical tail, right now: waiting beats computing."""
    max_hit_len: int
    """The limit that was given."""
    num_verification_failures: int
    """Identities that matched while the tokens did not; each ended the match."""
    nodes: tuple[Node, ...] = field(repr=False)
    """Tree nodes of block_ids; the manager's."""
    source: Node | None = field(repr=False)
    """Tree node of copy; the manager's."""
    tip: Node | None = field(repr=False)
    """Where the search ended: the last of nodes, or the namespace's root; None: the cache holds nothing of it."""
    num_tip_changes: int = field(repr=False)
    """``Node.num_changes`` of tip at that moment."""
    num_replacements: int = field(repr=False)
    """``PrefixTree.num_replacements`` at that moment."""
    next_key: bytes = field(repr=False, compare=False)
    """What the block after the last of nodes is known by while in flight; empty: nothing more is wanted."""
    num_tokens: int = field(repr=False, compare=False)
    """Tokens of the sequence at that moment."""


class PrefixLease:
    """The blocks of one running request.

    Made by ``CacheManager.admit``, given back by ``CacheManager.release``, which is the only way back; one that is
    garbage-collected unreleased leaks its blocks, logs an error and emits a ResourceWarning (an error in tests). Read
    by the scheduler, changed by the manager only, on the engine thread.

        positions  0 ...................... num_computed_tokens ........ len(block_table) * block_size
        blocks     [ hits, shared )[ sealed, own )[ open, own )[ allocated, nothing computed )
                   0         num_shared         num_sealed                          len(block_table)
    """

    __slots__ = (
        "__weakref__",
        "block_table",
        "blocks",
        "can_publish",
        "chunk",
        "copy_source",
        "in_flight",
        "is_released",
        "miss",
        "num_computed_tokens",
        "num_continuations",
        "num_footprint_blocks",
        "num_reserved_units",
        "num_sealed",
        "num_shared",
        "open_node",
        "pending",
        "pending_copy",
        "ref",
        "reused_tokens",
        "tenant",
        "tip",
        "windows",
    )

    def __init__(self, *, can_publish: bool, tenant: str = "") -> None:
        self.block_table: list[BlockId] = []
        """Blocks of the sequence in order; append-only."""
        self.num_shared = 0
        """Leading blocks that were hits."""
        self.num_computed_tokens = 0
        """Positions whose K and V are in the blocks (those of pending_copy once it has run)."""
        self.is_released = False
        self.pending_copy: BlockCopy | None = None
        """To be put into the first plan that schedules the request; gone after the first commit.

        Its source is held until then, or until release: a lease released while a plan is being made must take its copy
        out of that plan, since the source may be allocated again by the same plan.
        """

        self.miss: MissReport | None = None
        """Why less than could have been was hit; None: nothing is missing."""
        self.reused_tokens: Mapping[str, int] = {}
        """Hit tokens by the codec that they were in; empty where all blocks have one codec."""

        # What follows is the manager's bookkeeping.
        self.blocks: list[Block] = []
        """The records of block_table."""
        self.num_footprint_blocks = 0
        """Blocks that it may come to have without asking whether there is memory for them."""
        self.num_reserved_units = 0
        """Units of memory promised to it (``promises``)."""
        self.chunk = 1
        """Positions that it computes between two commits at most, from now on; counts where codecs depend on age."""
        self.ref = weakref.ref(self)
        """What blocks know it by: they must not keep it alive."""
        self.copy_source: Block | None = None
        """Held until the copy out of it has run."""
        self.can_publish = can_publish
        """False without a prefix cache, and after an identity collided with other tokens."""
        self.tenant = tenant
        """Whose share its blocks count in."""
        self.num_continuations = 0
        """See ``Node``; of the nodes that it publishes."""
        self.num_sealed = 0
        """Leading full blocks that are in the tree, as a node's block or as a duplicate of it."""
        self.tip: Node | None = None
        """Node of block num_sealed - 1; None: the root."""
        self.open_node: Node | None = None
        """Computed head of block num_sealed, when there is one and can_publish."""
        self.pending: deque[tuple[int, bytes]] = deque()
        """Identities it is computing, in order: (position after the last token, key)."""
        self.windows: list[int] = []
        """For each window of the precision rule, the first block within it."""
        self.in_flight: deque[Entry] = deque()
        """What ``memory`` keeps of the blocks num_sealed and up that were known at admission."""

    @property
    def num_reserved_blocks(self) -> int:
        """Blocks promised and not allocated yet."""
        return max(0, self.num_footprint_blocks - len(self.blocks)) if not self.is_released else 0

    def __repr__(self) -> str:
        state = "released" if self.is_released else "live"
        return (
            f"PrefixLease({state}, block_table={self.block_table}, num_shared={self.num_shared}, "
            f"num_computed_tokens={self.num_computed_tokens}, num_reserved_blocks={self.num_reserved_blocks})"
        )

    def __del__(self) -> None:
        # Giving the blocks back here would be wrong: any thread may run this, and a running step may still use them.
        if not self.is_released:
            _logger.error(
                "[cache] a lease was dropped without release; its %d blocks are lost",
                len(self.block_table),
            )
            message = f"[cache] {self!r} was dropped without CacheManager.release"
            warnings.warn(message, ResourceWarning, stacklevel=2, source=self)
