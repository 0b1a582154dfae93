"""The record of one block of KV memory.

Responsible for nothing but the fields. ``pool`` alone changes the reference count, ``tree`` alone changes the node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import weakref

    from kvist.cache.lease import PrefixLease
    from kvist.cache.partition import Partition
    from kvist.cache.tree import Node
    from kvist.types import BlockId


class Block:
    """One block of the pool, from start to end of the engine; compared and hashed by identity."""

    __slots__ = (
        "block_id",
        "duplicate_of",
        "fresh",
        "index",
        "level",
        "node",
        "num_leases",
        "owner",
        "partition",
        "ref_count",
        "size",
    )

    partition: Partition
    """Where it counts since it was last allocated, and where it is queued when evictable; unset before."""

    size: int
    """What it takes of the pool's capacity since it was last allocated; unset before."""
    level: int
    """Its codec, as an index into the pool's sizes; set with ``size``."""
    fresh: list[int]
    """For each window of the precision rule, the leases that have it within that window; unset where no rule is, as
    are the next three."""
    num_leases: int
    """Leases that have it in their table."""
    owner: weakref.ref[PrefixLease] | None
    """The one that has it and counts on it becoming smaller (``promises``); None: nobody does."""
    index: int
    """Its place in the sequence of those that have it, or had it last."""

    def __init__(self, block_id: BlockId) -> None:
        self.block_id = block_id
        self.ref_count = 0
        """Leases with the block in their table, plus pending copies out of it, plus pins."""
        self.node: Node | None = None
        """The node it stands for in the prefix tree; None: free, or private to one lease."""
        self.duplicate_of: Node | None = None
        """The node whose content it has too; only while private."""

    def __repr__(self) -> str:
        return f"Block({self.block_id}, ref_count={self.ref_count})"
