"""What users ask to be kept, and for how long.

Responsible for the records of pins and TTLs, and for telling which of them are over. Changes no block: the manager
does.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvist.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvist.cache.block import Block
    from kvist.cache.tree import Node

_NS_PER_S = 1_000_000_000
MIN_SWEEP = 64
"""Entries that are never looked through for dead ones."""


class Pin:
    """Blocks held for a user. Made by ``CacheManager.pin``, given back by ``unpin`` or by the end of its TTL."""

    __slots__ = ("blocks", "deadline_ns", "is_released", "num_tokens")

    def __init__(self, blocks: list[Block], *, num_tokens: int, deadline_ns: int | None) -> None:
        self.blocks = blocks
        """The blocks of the prefix in order; the manager's."""
        self.num_tokens = num_tokens
        """Length of the prefix, whole blocks."""
        self.deadline_ns = deadline_ns
        """When it ends, on the manager's clock; None: when it is given back."""
        self.is_released = False

    def __repr__(self) -> str:
        state = "released" if self.is_released else "live"
        return f"Pin({state}, {len(self.blocks)} blocks, deadline_ns={self.deadline_ns})"


@dataclass(frozen=True, slots=True)
class Retention:
    """A TTL on published blocks."""

    nodes: Sequence[tuple[int, Node]]
    """Those of the prefix, from the first on, each with its depth."""

    def rest(self, deadline_ns: int) -> Retention:
        """Return what of it still ends then: neither evicted since, nor retained for longer."""
        return Retention(
            [
                (depth, node)
                for depth, node in self.nodes
                if node.block.node is node and node.kept_until_ns == deadline_ns
            ]
        )


class Deadlines:
    """Pins and TTLs by the time of their end.

    Args:
        clock_ns: Monotonic clock, in nanoseconds.
    """

    __slots__ = ("_clock_ns", "_max_entries", "_num_added", "entries")

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self._clock_ns = clock_ns
        # The number decides between equal times, so that entries are never compared.
        self.entries: list[tuple[int, int, Pin | Retention]] = []
        """A heap: time of the end, number, what ends."""
        self._num_added = 0
        self._max_entries = MIN_SWEEP

    def now_ns(self) -> int:
        """Return the time."""
        return self._clock_ns()

    def after(self, ttl_s: float) -> int:
        """Return the time in ``ttl_s`` seconds, in nanoseconds.

        Raises:
            ConfigError: ttl_s is not a positive number.
        """
        if not 0.0 < ttl_s < math.inf:
            raise ConfigError(
                f"[cache] ttl_s must be a positive number of seconds, received {ttl_s}"
            )
        return self._clock_ns() + round(ttl_s * _NS_PER_S)

    def add(self, deadline_ns: int, entry: Pin | Retention) -> None:
        """Note when something ends. Amortised O(log entries + nodes of the entry).

        Entries that no longer end anything are swept out when they may be half of all, or requests that each keep their
        prompt for a day would fill the memory with what was evicted long ago.
        """
        self._num_added += 1
        heapq.heappush(self.entries, (deadline_ns, self._num_added, entry))
        if len(self.entries) > self._max_entries:
            self._sweep()
            self._max_entries = max(MIN_SWEEP, 2 * len(self.entries))

    def _sweep(self) -> None:
        kept: list[tuple[int, int, Pin | Retention]] = []
        for deadline_ns, number, entry in self.entries:
            rest = entry if isinstance(entry, Pin) else entry.rest(deadline_ns)
            if not rest.is_released if isinstance(rest, Pin) else rest.nodes:
                kept.append((deadline_ns, number, rest))
        heapq.heapify(kept)
        self.entries = kept

    def due(self, now_ns: int) -> Iterator[Pin | Retention]:
        """Take out and yield what is over, earliest first. O(log entries) each."""
        while self.entries and self.entries[0][0] <= now_ns:
            yield heapq.heappop(self.entries)[2]
