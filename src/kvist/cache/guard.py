"""What somebody who watches over blocks is told, and what they may forbid.

Responsible for the protocol by which the manager speaks to a guard that can read the blocks' bytes, which the cache
itself cannot. Knows no tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvist.cache.tree import Node


class BlockGuard(Protocol):
    """Looks at blocks when their content is final, and again before somebody relies on it. Engine thread only."""

    def seal(self, node: Node) -> None:
        """Take note that all tokens of a node are in its block, and that nobody writes to them from now on.

        Called again when another block with the same content takes the node over. The block was written by then.
        """
        ...

    def may_copy(self, node: Node) -> bool:
        """Return whether the head of a node may be copied at all; False: it is computed instead."""
        ...

    def find_damaged(self, nodes: Sequence[Node], copied: Node | None) -> list[Node]:
        """Return those of some nodes, about to be reused by an admission, whose blocks must not be.

        Args:
            nodes: The full blocks of a prefix, in order.
            copied: The one whose head is to be copied, if any.
        """
        ...
