"""The evictable blocks of one tenant, or of everybody.

Responsible for what stands above the strategy: blocks kept by a TTL go after all others, and a tenant over its share
goes before the others. Knows no leases, no clock and no tokens.

1. A block belongs to one partition from allocation to being freed; a tree's blocks all belong to the same one.
2. An evictable block stands among the retained ones while its node has a TTL that has not been ended, else in the
   strategy. Ancestors have no shorter TTL, so a block still goes before its ancestors.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import chain
from typing import TYPE_CHECKING

from kvist.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvist.cache.block import Block
    from kvist.cache.eviction import EvictionStrategy, StrategyFactory


class Partition:
    """Queues of one tenant's evictable blocks. ``BlockPool`` alone changes it; every operation is O(1) amortised."""

    __slots__ = ("num_share", "num_used", "rank", "retained", "strategy")

    def __init__(self, strategy: EvictionStrategy, num_share: float) -> None:
        self.strategy = strategy
        self.retained: OrderedDict[Block, None] = OrderedDict()
        """Evictable blocks with a TTL, least recently used first."""
        self.num_share = num_share
        """What its blocks may take of the capacity before it is evicted from first."""
        self.num_used = 0
        """What its blocks take of the capacity, held ones included."""
        self.rank = 0
        """0: nothing to evict; 1: within its share; 2: over it."""

    def __len__(self) -> int:
        return len(self.strategy) + len(self.retained)

    def __iter__(self) -> Iterator[Block]:
        return chain(self.strategy, self.retained)

    def evict(self) -> Block:
        """Take out the block that is to go. There must be one."""
        if not self.retained or len(self.strategy):
            return self.strategy.evict()
        return self.retained.popitem(last=False)[0]


class Partitions:
    """All partitions, and whose turn it is.

    Args:
        make_strategy: Makes each partition's strategy.
        num_blocks: Blocks that the pool can have at once.
        capacity: What all of them may take.
        shares: Fraction of the capacity by tenant; tenants that are not in it have what is left together.

    Raises:
        ConfigError: A share is not positive, or they exceed 1 in all.
    """

    __slots__ = ("_by_rank", "_named", "_rest", "is_single")

    def __init__(
        self,
        make_strategy: StrategyFactory,
        num_blocks: int,
        capacity: int,
        shares: Mapping[str, float],
    ) -> None:
        # Shares are written in decimal: three of 0.1 and one of 0.7 make a little more than 1.
        if not all(share > 0.0 for share in shares.values()) or sum(shares.values()) > 1.0 + 1e-9:
            raise ConfigError(
                f"[cache] shares must be above 0 and 1 at most in all, received {dict(shares)}"
            )
        self._named = {
            tenant: Partition(make_strategy(num_blocks), share * capacity)
            for tenant, share in shares.items()
        }
        num_left = capacity - sum([part.num_share for part in self._named.values()])
        self._rest = Partition(make_strategy(num_blocks), num_left)
        self.is_single = not self._named
        """Whether everybody has one partition, so that nothing need be ranked."""
        self._by_rank: Sequence[OrderedDict[Partition, None]] = tuple(
            OrderedDict() for _ in range(3)
        )

    def __iter__(self) -> Iterator[Partition]:
        yield from self._named.values()
        yield self._rest

    def of(self, tenant: str) -> Partition:
        """Return the partition that a tenant's blocks belong to."""
        return self._named.get(tenant, self._rest)

    def rank(self, partition: Partition) -> None:
        """File a partition again after its blocks have changed."""
        rank = self.rank_of(partition)
        if rank != partition.rank:
            self._by_rank[partition.rank].pop(partition, None)
            self._by_rank[rank][partition] = None
            partition.rank = rank

    def rank_of(self, partition: Partition) -> int:
        """Return the rank that a partition's blocks give it."""
        if not len(partition):
            return 0
        return 2 if partition.num_used > partition.num_share else 1

    def next_to_evict_from(self) -> Partition:
        """Return one that is over its share, in turn, else one that has anything to evict."""
        if self.is_single:
            return self._rest
        candidates = self._by_rank[2] or self._by_rank[1]
        partition = next(iter(candidates))
        candidates.move_to_end(partition)
        return partition
