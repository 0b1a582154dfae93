"""What is known of the prompts of each namespace, cached or not.

Responsible for a trie of token blocks that outlives the blocks of the cache, so that a miss can be told from a prompt
that was never seen. Knows no K and V, no leases and no block ids.

    entry      the tokens of one block below one parent; the last block of a sequence may be shorter
      cached     the prefix tree has it
      in flight  a live lease has it in its prompt and has not published it yet
      ghost      neither; it was computed once, and left the cache for a reason that the entry keeps

1. An entry is cached, in flight or a ghost, or it is gone: what was never computed is forgotten with its lease.
2. Children of an entry have distinct tokens and are sorted by them. Only whole blocks have children.
3. No ghost has a descendant that is cached or in flight.
4. There are at most ``max_ghosts`` ghosts. The one that left first goes first, and it is a leaf: blocks leave the cache
   and leases their blocks from the last one on, so in the order of leaving a child stands before its parent.

Tokens are compared, never identities, so what is found is exact whatever collides. A namespace has a root of its own.

Complexity: O(log children) comparisons of a block's tokens to find or add an entry, and a move of at most all siblings'
pointers; nothing is done for blocks that are hits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol, TypeVar

from kvist.cache.tree import common_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvist.cache.namespaces import Namespace
    from kvist.types import MissReason

DEFAULT_MAX_GHOSTS = 32768
"""About 0.5 kB each with 64 tokens: 16 MB for two million tokens of history."""

_tokens_of = attrgetter("tokens")


class HasTokens(Protocol):
    """An entry, or a node of the prefix tree."""

    @property
    def tokens(self) -> bytes:
        """Token ids, u32 little-endian."""
        ...


_Child = TypeVar("_Child", bound=HasTokens)


class Entry:
    """The tokens of one block below one parent. Changed by ``PromptMemory`` only."""

    __slots__ = (
        "children",
        "left_ns",
        "left_why",
        "num_cached",
        "num_in_flight",
        "parent",
        "tokens",
    )

    def __init__(self, parent: Entry | None, tokens: bytes) -> None:
        self.parent = parent
        """None: the root of a namespace."""
        self.tokens = tokens
        """Token ids, u32 little-endian; empty in a root."""
        self.children: list[Entry] = []
        """Sorted by their tokens."""
        self.num_cached = 0
        """Nodes of the prefix tree with these tokens; two partial ones may be equal for a while."""
        self.num_in_flight = 0
        """Live leases that have it in their prompt and have not published it."""
        self.left_why: MissReason | None = None
        """Why it left the cache; None: it did not, or is back, or was never there."""
        self.left_ns = 0
        """When it left, on the manager's clock."""

    @property
    def is_idle(self) -> bool:
        """Whether it is neither cached nor in flight."""
        return not (self.num_cached or self.num_in_flight)


class RootEntry(Entry):
    """The empty prefix of one namespace."""

    __slots__ = ("namespace",)

    def __init__(self, namespace: Namespace) -> None:
        super().__init__(None, b"")
        self.namespace = namespace


class PromptMemory:
    """The tries of all namespaces. Engine thread only.

    Args:
        max_ghosts: Entries kept of blocks that left the cache, >= 0.
        clock_ns: Monotonic clock in nanoseconds.
    """

    __slots__ = ("_clock_ns", "_tenants", "ghosts", "max_ghosts")

    def __init__(self, max_ghosts: int, clock_ns: Callable[[], int]) -> None:
        self.max_ghosts = max_ghosts
        self._clock_ns = clock_ns
        self._tenants: dict[str, dict[Namespace, RootEntry]] = {}
        self.ghosts: OrderedDict[Entry, None] = OrderedDict()
        """Inv. 4, first to go first."""

    # --- reading

    def find_root(self, namespace: Namespace) -> Entry | None:
        """Return the root of a namespace, None when nothing of it is known."""
        return self._tenants.get(namespace.tenant, {}).get(namespace)

    def other_roots(self, namespace: Namespace) -> Iterator[tuple[Namespace, Entry]]:
        """Yield the other namespaces of the same tenant that something is known of."""
        for other, root in self._tenants.get(namespace.tenant, {}).items():
            if other != namespace:
                yield other, root

    def has_other_tenants(self, tenant: str) -> bool:
        """Return whether anything is known of anybody else. Says nothing of what."""
        return len(self._tenants) > (tenant in self._tenants)

    def entries(self) -> Iterator[tuple[Namespace, Entry]]:
        """Yield every entry except roots, parents first. For checks: O(entries)."""
        for roots in self._tenants.values():
            for namespace, root in roots.items():
                stack = list(root.children)
                while stack:
                    entry = stack.pop()
                    stack.extend(entry.children)
                    yield namespace, entry

    def seconds_since(self, time_ns: int) -> float:
        """Return how long ago a time was."""
        return (self._clock_ns() - time_ns) / 1e9

    # --- changing

    def root(self, namespace: Namespace) -> Entry:
        """Return the root of a namespace, made when there is none."""
        roots = self._tenants.setdefault(namespace.tenant, {})
        root = roots.get(namespace)
        if root is None:
            root = roots[namespace] = RootEntry(namespace)
        return root

    def drop_empty_root(self, namespace: Namespace) -> None:
        """Forget a namespace of which nothing came to be known."""
        root = self.find_root(namespace)
        if root is not None and not root.children:
            self._forget_root(namespace)

    def begin(self, parent: Entry, blocks: Sequence[bytes]) -> Sequence[Entry]:
        """Note that a lease is going to compute a run of blocks; ``end`` or ``fulfil`` each.

        Raises:
            MemoryError: There is none for all of them; nothing is noted.
        """
        entries: list[Entry] = []
        try:
            for tokens in blocks:
                if parent.children:
                    entry = self._child(parent, tokens)
                    self.ghosts.pop(entry, None)
                else:
                    entry = Entry(parent, tokens)
                    parent.children.append(entry)
                entry.num_in_flight += 1
                entries.append(entry)
                parent = entry
        except MemoryError:
            while entries:
                self.end(entries.pop())
            raise
        return entries

    def fulfil(self, entry: Entry) -> None:
        """Do ``end`` and ``publish`` for an entry at once, without a search."""
        entry.num_in_flight -= 1
        entry.num_cached += 1
        entry.left_why = None

    def end(self, entry: Entry) -> None:
        """Undo one block of ``begin``. Of several blocks of a lease the last one goes first (inv. 4)."""
        entry.num_in_flight -= 1
        if not (entry.num_in_flight or entry.num_cached):
            if entry.left_why is None:
                self._remove(entry)
            else:
                self._add_ghost(entry)

    def publish(self, parent: Entry, tokens: bytes) -> Entry:
        """Note that the prefix tree has got a block."""
        entry = self._child(parent, tokens)
        entry.num_cached += 1
        entry.left_why = None
        self.ghosts.pop(entry, None)
        return entry

    def leave(self, entry: Entry, why: MissReason) -> None:
        """Note that a block left the prefix tree, and why. It was the only one there with these tokens."""
        entry.num_cached -= 1
        entry.left_why = why
        entry.left_ns = self._clock_ns()
        if not (entry.num_in_flight or entry.num_cached):
            self._add_ghost(entry)

    def supersede(self, entry: Entry) -> None:
        """Note that a partial block left the prefix tree because a sibling there begins with its tokens."""
        entry.num_cached -= 1
        if entry.is_idle:
            self._remove(entry)

    def _child(self, parent: Entry, tokens: bytes) -> Entry:
        children = parent.children
        place = bisect_left(children, tokens, key=_tokens_of)
        if place < len(children) and children[place].tokens == tokens:
            return children[place]
        entry = Entry(parent, tokens)
        children.insert(place, entry)
        return entry

    def _add_ghost(self, entry: Entry) -> None:
        if not self.max_ghosts:
            self._remove(entry)
            return
        self.ghosts[entry] = None
        if len(self.ghosts) > self.max_ghosts:
            self._remove(self.ghosts.popitem(last=False)[0])

    def _remove(self, entry: Entry) -> None:
        """Forget an entry without children."""
        parent = entry.parent
        assert parent is not None
        assert not entry.children
        children = parent.children
        if len(children) > 1:
            del children[bisect_left(children, entry.tokens, key=_tokens_of)]
            return
        children.clear()
        if isinstance(parent, RootEntry):
            self._forget_root(parent.namespace)

    def _forget_root(self, namespace: Namespace) -> None:
        roots = self._tenants[namespace.tenant]
        del roots[namespace]
        if not roots:
            del self._tenants[namespace.tenant]


def nearest(children: Sequence[_Child], tokens: bytes) -> Iterator[tuple[_Child, int]]:
    """Yield the neighbours of some tokens among sorted children, with the length of the prefix they share.

    No child shares more. When one shares as much and goes on, so does one of those that are yielded.
    """
    place = bisect_left(children, tokens, key=_tokens_of)
    for child in children[max(place - 1, 0) : place + 1]:
        yield child, common_tokens(child.tokens, tokens)
