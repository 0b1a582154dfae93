"""Taking a part of the prefix tree away, whoever holds it.

Responsible for what becomes of nodes, blocks, leases and memory when content must not be offered any more: because it
is wrong, or because somebody asked. Eviction is another thing: it takes leaves that nobody holds.

1. Nothing below a node that goes stays: what follows was computed from it.
2. A block that somebody holds lives until its last holder lets go, and is nobody else's from now on. Running requests
   read what they read before.
3. A lease whose path goes publishes nothing more: what it computes continues a prefix that is not in the tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from kvist.cache.lease import PrefixLease
    from kvist.cache.memory import PromptMemory
    from kvist.cache.pool import BlockPool
    from kvist.cache.tree import Node, PrefixTree
    from kvist.types import MissReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Invalidation:
    """What was taken away."""

    num_dropped: int
    """Blocks that are free now."""
    num_detached: int
    """Blocks that somebody still holds; they become free when the last one lets go."""
    leases: tuple[PrefixLease, ...] = ()
    """Live leases that hold content which was taken away, or copied some of it."""


def subtrees(roots: Iterable[Node]) -> list[Node]:
    """Return nodes with all their descendants, each once, parents before children.

    Complexity: O(nodes returned + roots * depth).
    """
    given = set(roots)
    stack = [node for node in given if not _is_below(node, given)]
    found: list[Node] = []
    while stack:
        node = stack.pop()
        found.append(node)
        stack.extend(node.ordered)
    return found


def _is_below(node: Node, others: Collection[Node]) -> bool:
    parent = node.parent
    while parent is not None:
        if parent in others:
            return True
        parent = parent.parent
    return False


def detach(
    nodes: list[Node], tree: PrefixTree, pool: BlockPool, memory: PromptMemory, why: MissReason
) -> tuple[int, int]:
    """Take whole subtrees out of the tree; return how many of their blocks are free now, and how many are still held.

    Args:
        nodes: Every node of the subtrees, parents before children. No lease may publish below them any more.
        tree: Where they are.
        pool: Takes the blocks that nobody holds.
        memory: Told that they left.
        why: The reason it keeps for those who miss them.

    Complexity: O(nodes), with a search among siblings for each (``tree``).
    """
    num_dropped = 0
    for node in reversed(nodes):
        for duplicate in list(node.duplicates):
            tree.remove_duplicate(duplicate)
        if node.entry is not None:
            if node.entry.num_cached > 1:  # two partial nodes may be equal for a while
                memory.supersede(node.entry)
            else:
                memory.leave(node.entry, why)
        block = node.block
        if block.ref_count == 0:
            pool.withdraw(block)
            tree.remove(node)
            pool.free(block)
            num_dropped += 1
        else:
            tree.remove(node)
    return num_dropped, len(nodes) - num_dropped
