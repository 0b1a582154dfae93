"""The prefix tree: which blocks hold the K and V of which tokens.

Responsible for finding blocks by the tokens of their whole prefix, exactly. Knows no leases, no memory limit and no
recency. A node stands for one block's tokens below one parent and points to the block that holds their K and V.

    root of a namespace
      full node        block_size tokens; found by identity, then compared; may have children
        full node
        open node      the computed head of the block that a live lease is writing; grows; a leaf
        partial node   a head left behind by a released lease; a leaf

Full nodes are shared by reference, the others (and full ones, for their first tokens) by copying.

1. Children of a node have distinct tokens as far as they are full; ``keys`` is sorted and parallel to ``ordered``.
2. Only full nodes have children. A root without children is dropped.
3. ``duplicates`` are private blocks with the node's content whose leases go on below it. They stand in for the node's
   block when that one's last reference goes, so a node with a held descendant is always held.
4. No partial node with ref count 0 is a prefix of a sibling (open ones included): the sibling serves it.

Longest common prefixes: among sorted byte strings, those sharing the longest prefix with a query stand next to its
place. So the best partially matching child takes O(log children) comparisons of at most 4 * block_size bytes each and
two prefix lengths, whatever the number of children; an index by first token would degrade where all children begin
alike, as chat templates make them do.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from typing import TYPE_CHECKING

from kvist.cache.block import Block
from kvist.cache.hash import TOKEN_BYTES
from kvist.types import BlockId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvist.cache.memory import Entry
    from kvist.cache.namespaces import Namespace
    from kvist.cache.survey import BlockColumns
    from kvist.types import BlockHash

_NO_BLOCK = BlockId(-1)
MAX_UNWANTED = 64
"""Children that a search passes over on either side of a query's place."""


class Node:
    """The tokens of one block below one parent. Changed by ``PrefixTree`` only, except where said."""

    __slots__ = (
        "block",
        "block_hash",
        "children",
        "duplicates",
        "entry",
        "has_expired",
        "is_open",
        "kept_until_ns",
        "keys",
        "namespace",
        "num_changes",
        "num_continuations",
        "num_hits",
        "number",
        "ordered",
        "parent",
        "seal",
        "tokens",
    )

    def __init__(
        self, namespace: Namespace, parent: Node | None, block: Block, tokens: bytes
    ) -> None:
        self.namespace = namespace
        self.number = 0
        """Its own, > 0, once it is in a tree."""
        self.parent = parent
        """None: this is a root."""
        self.block = block
        """Holds the K and V of the tokens; a root has one that is in no pool."""
        self.tokens = tokens
        """Token ids whose K and V are computed, u32 little-endian; not empty except in a root."""
        self.block_hash: BlockHash | None = None
        """Identity; full nodes only."""
        self.is_open = False
        """Whether a live lease is still writing the block."""
        self.children: dict[BlockHash, Node] = {}
        """Full children by identity."""
        self.keys: list[bytes] = []
        """Tokens of all children, full, open and partial, sorted as bytes."""
        self.ordered: list[Node] = []
        """The children in the order of ``keys``."""
        self.duplicates: dict[Block, None] = {}
        """Inv. 3, oldest first."""
        self.num_changes = 0
        """How often its children have changed: came, went, grew, or became full."""
        self.num_hits = 0
        """Leases that began with it, each of which began with its ancestors too. ``manager`` counts; a strategy may
        set it to 1 for a node that it knows from before."""
        self.num_continuations = 0
        """How many leases before the one that published it each went on where the one before had ended. ``manager``
        sets it."""
        self.kept_until_ns = 0
        """When its TTL ends; 0: it has none. ``manager`` sets it; an ancestor's is never earlier."""
        self.has_expired = False
        """Whether a TTL or a pin on it ended by its time and none has begun since. ``manager`` sets it."""
        self.entry: Entry | None = None
        """What ``memory`` keeps of the tokens; None in a root and in an open node. ``manager`` sets it."""
        self.seal: object | None = None
        """What the guard (``guard``) keeps of it; the guard sets it."""

    @property
    def is_partial(self) -> bool:
        """Whether it is a head left behind by a released lease."""
        return self.block_hash is None and not self.is_open and self.parent is not None

    @property
    def is_only_child(self) -> bool:
        """Whether nothing else continues what it continues; it is no root."""
        assert self.parent is not None
        return len(self.parent.ordered) == 1

    @property
    def is_end(self) -> bool:
        """Whether nothing that was ever hit follows it.

        What goes on from here continues its sequence or replaces the end of it; it shares no prefix with others.
        """
        return not self.ordered or (len(self.ordered) == 1 and not self.ordered[0].num_hits)

    def best_child(
        self, tokens: bytes, is_wanted: Callable[[Node], bool]
    ) -> tuple[Node, int] | None:
        """Return the wanted child with the longest common token prefix, and its length in tokens; None: no such child.

        Complexity: O(log children + children passed over) comparisons (module docstring). Of those it passes over
            MAX_UNWANTED on either side at most, and then finds none there.
        """
        place = bisect_left(self.keys, tokens)
        best = None
        best_len = 0
        # The farther from its place, the less a key has in common with the query.
        for indices in (
            range(place, min(place + MAX_UNWANTED, len(self.keys))),
            range(place - 1, max(place - 1 - MAX_UNWANTED, -1), -1),
        ):
            for index in indices:
                length = common_tokens(self.keys[index], tokens)
                if length <= best_len:
                    break
                if is_wanted(self.ordered[index]):
                    best, best_len = self.ordered[index], length
                    break
        return None if best is None else (best, best_len)


class PrefixTree:
    """One tree per namespace. Engine thread only.

    Args:
        columns: Kept up to date with what stands in the tree.
    """

    __slots__ = ("_numbers", "columns", "num_replacements", "roots")

    def __init__(self, columns: BlockColumns) -> None:
        self.columns = columns
        """What is in the tree, by block."""
        self._numbers = itertools.count(1)
        self.roots: dict[Namespace, Node] = {}
        """Keyed by the namespace itself, so no collision can join two of them."""
        self.num_replacements = 0
        """How often a node has changed its block."""

    def root(self, namespace: Namespace) -> Node:
        """Return the root of a namespace, made when there is none."""
        root = self.roots.get(namespace)
        if root is None:
            root = self.roots[namespace] = Node(namespace, None, Block(_NO_BLOCK), b"")
            root.number = next(self._numbers)
        return root

    def drop_empty_root(self, namespace: Namespace) -> None:
        """Drop the root of a namespace if nothing came to stand below it (inv. 2)."""
        root = self.roots.get(namespace)
        if root is not None and not root.keys:
            del self.roots[namespace]

    def open(self, parent: Node, block: Block, tokens: bytes) -> Node:
        """Add the computed head of the block that a lease is writing."""
        node = Node(parent.namespace, parent, block, tokens)
        node.is_open = True
        block.node = node
        self._insert(node)
        node.number = next(self._numbers)
        self.columns.enter(node, parent)
        return node

    def grow(self, node: Node, tokens: bytes) -> None:
        """Extend the computed head of an open node.

        Complexity: O(log siblings) comparisons and a move of at most all siblings' pointers.
        """
        assert node.parent is not None
        if len(node.parent.ordered) == 1:
            node.parent.keys[0] = tokens
            node.parent.num_changes += 1
            node.tokens = tokens
        else:
            self._detach(node)
            node.tokens = tokens
            self._insert(node)
        self.columns.grow(node)

    def add(self, parent: Node, block: Block, tokens: bytes, block_hash: BlockHash) -> Node:
        """Add a full node for a block that nobody has offered the head of. No sibling may have the identity."""
        node = Node(parent.namespace, parent, block, tokens)
        block.node = node
        if parent.keys:
            self._insert(node)
        else:
            parent.keys.append(tokens)
            parent.ordered.append(node)
            parent.num_changes += 1
        node.block_hash = block_hash
        parent.children[block_hash] = node
        node.number = next(self._numbers)
        self.columns.enter(node, parent)
        return node

    def publish(self, node: Node, block_hash: BlockHash) -> None:
        """Turn an open node with all its tokens into a full one. No sibling may have the identity."""
        assert node.parent is not None
        node.is_open = False
        node.block_hash = block_hash
        node.parent.children[block_hash] = node
        node.parent.num_changes += 1

    def seal(self, node: Node) -> None:
        """Turn an open node into a partial one: nobody writes the block any more."""
        node.is_open = False

    def add_duplicate(self, node: Node, block: Block) -> None:
        """Note a private block with a node's content, ready to stand in (inv. 3)."""
        node.duplicates[block] = None
        block.duplicate_of = node

    def remove_duplicate(self, block: Block) -> None:
        """Forget that a block duplicates a node, if it does."""
        if block.duplicate_of is not None:
            del block.duplicate_of.duplicates[block]
            block.duplicate_of = None

    def replace(self, node: Node, block: Block) -> None:
        """Let another block with the same content, a duplicate or not noted yet, stand for a node."""
        self.remove_duplicate(block)
        self.columns.move(node.block, block)
        node.block.node = None
        node.block = block
        block.node = node
        self.num_replacements += 1

    def remove(self, node: Node) -> None:
        """Take a node without children out of the tree, and its root when that was the last one.

        Complexity: O(log siblings) comparisons and a move of at most all siblings' pointers.
        """
        parent = node.parent
        assert parent is not None
        assert not node.keys
        keys = parent.keys
        if len(keys) > 1:
            self._detach(node)
        else:
            keys.clear()
            parent.ordered.clear()
            parent.num_changes += 1
        if node.block_hash is not None:
            del parent.children[node.block_hash]
        node.block.node = None
        self.columns.leave(node.block)
        if not keys and parent.parent is None:
            del self.roots[parent.namespace]

    def superseded_by(self, node: Node) -> Node | None:
        """Return the unreferenced partial sibling whose tokens ``node`` begins with, if there is one.

        At most one exists, and it stands right before ``node``: whatever stands between a prefix and its extension
        begins with the prefix too, and would have superseded it already (inv. 4).
        """
        assert node.parent is not None
        if len(node.parent.ordered) == 1:
            return None
        index = _index(node) - 1
        if index < 0:
            return None
        sibling = node.parent.ordered[index]
        if (
            sibling.is_partial
            and sibling.block.ref_count == 0
            and node.tokens.startswith(sibling.tokens)
        ):
            return sibling
        return None

    def never_hit_chain(self, node: Node) -> list[Node] | None:
        """Return a node and all its descendants, deepest first; None when one was hit or has siblings.

        Complexity: O(nodes returned).
        """
        nodes = [node]
        while not node.num_hits and len(node.ordered) == 1:
            node = node.ordered[0]
            nodes.append(node)
        return None if node.num_hits or node.ordered else nodes[::-1]

    def is_covered(self, node: Node) -> bool:
        """Return whether a sibling begins with the tokens of ``node``."""
        assert node.parent is not None
        keys = node.parent.keys
        if len(keys) == 1:
            return False
        # Equal keys may stand on either side; longer ones stand right after the last equal one.
        place = bisect_left(keys, node.tokens)
        return place + 1 < len(keys) and keys[place + 1].startswith(node.tokens)

    def nodes(self) -> Iterator[Node]:
        """Yield every node except roots, parents first. For checks and dumps: O(nodes)."""
        stack = list(self.roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.ordered)
            if node.parent is not None:
                yield node

    def _insert(self, node: Node) -> None:
        assert node.parent is not None
        # Right of equal keys, so that whatever the node supersedes stands before it.
        parent = node.parent
        keys = parent.keys
        place = bisect_right(keys, node.tokens) if keys else 0
        keys.insert(place, node.tokens)
        parent.ordered.insert(place, node)
        parent.num_changes += 1

    def _detach(self, node: Node) -> None:
        assert node.parent is not None
        parent = node.parent
        place = _index(node) if len(parent.ordered) > 1 else 0
        del parent.keys[place]
        del parent.ordered[place]
        parent.num_changes += 1


def _index(node: Node) -> int:
    """Return where a node stands among its siblings. O(log siblings + siblings with equal tokens)."""
    assert node.parent is not None
    place = bisect_left(node.parent.keys, node.tokens)
    while node.parent.ordered[place] is not node:
        place += 1
    return place


def common_tokens(left: bytes, right: bytes) -> int:
    """Return how many leading token ids two runs of u32 little-endian share. O(bytes), no Python loop."""
    # Most often nothing is shared.
    if left[:TOKEN_BYTES] != right[:TOKEN_BYTES]:
        return 0
    num_bytes = min(len(left), len(right))
    # The lowest set bit of the difference is in the first byte that differs.
    difference = int.from_bytes(left[:num_bytes], "little") ^ int.from_bytes(
        right[:num_bytes], "little"
    )
    if difference == 0:
        return num_bytes // TOKEN_BYTES
    return ((difference & -difference).bit_length() - 1) // (8 * TOKEN_BYTES)
