"""Which block identities live leases are about to compute.

Responsible for same-step sharing: a request whose next block is in flight had better wait for it. Knows no blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvist.cache.hash import TokenChain


def pending_key(chain: TokenChain, index: int) -> bytes:
    """Return what block ``index`` of a chain is known by while in flight.

    A full block: its identity. The last, partial one: its parent's identity and its tokens, so only an identical tail
    has the same key; it is longer than an identity, so the two kinds cannot meet.
    """
    if index < chain.num_full_blocks:
        return chain.block_hash(index)
    return chain.parent_hash(index) + chain.block_tokens(index)


class PendingIdentities:
    """Counts the live leases that are computing each identity. Every operation is O(1) for each identity."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[bytes, int] = {}

    def __contains__(self, key: bytes) -> bool:
        return key in self._counts

    @property
    def counts(self) -> Mapping[bytes, int]:
        """Leases per key, for checks."""
        return self._counts

    def add(self, keys: Iterable[bytes]) -> None:
        """Note that one more lease computes these identities."""
        counts = self._counts
        for key in keys:
            counts[key] = counts.get(key, 0) + 1

    def remove(self, key: bytes) -> None:
        """Note that one of them has computed it or given up."""
        count = self._counts[key] - 1
        if count:
            self._counts[key] = count
        else:
            del self._counts[key]
