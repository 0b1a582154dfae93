"""What memory is promised to the leases that run, so that none of them ever waits for it.

Responsible for how much that is. Knows no tokens, and which lease gets what is ``manager``'s affair.

1. A lease is promised what its footprint may come to need beside what its blocks take now (``need``). Where all blocks
   have one size, that is the blocks to come.
2. What is promised and what is held never exceed the memory (``pool``, inv. 3), and this law survives what a lease does
   within its footprint: an allocation turns promise into size; a block that gets smaller gives back at least as much as
   the promise grows by.
3. A block that others hold as well may stay as it is for their sake, so only its owner, the one lease that has it,
   counts on it becoming smaller (``Block.owner``). A second lease that takes it pays for the difference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvist.cache.footprint import AgeProfiles

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvist.cache.aging import Aging
    from kvist.cache.block import Block
    from kvist.cache.footprint import AgeProfile
    from kvist.cache.lease import PrefixLease
    from kvist.cache.pool import BlockPool
    from kvist.precision import KVBudget


class Promises:
    """The promises of a pool whose blocks have one size. Engine thread only."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def max_blocks(self, num_units: int) -> int:
        """Return how many blocks a lease alone may come to have in so much memory."""
        return num_units // self._pool.sizes[0]

    def cost(self, hits: Sequence[Block], num_blocks: int, num_left: int) -> int:  # noqa: ARG002
        """Return what a lease takes of what can be promised, if it is admitted now.

        Args:
            hits: The blocks that it begins with.
            num_blocks: Those that it may come to have.
            num_left: Positions that it has to compute before the first token, >= 1.
        """
        num_taken = sum([block.size for block in hits if block.ref_count == 0])
        return num_taken + (num_blocks - len(hits)) * self._pool.sizes[0]

    def need(self, lease: PrefixLease) -> int:
        """Return what a lease is to be promised beside what it has."""
        return (lease.num_footprint_blocks - len(lease.blocks)) * self._pool.sizes[0]

    def missing(self, lease: PrefixLease, num_new: int) -> int:
        """Return what is to be promised in addition if a lease gets so many blocks more, in advance of them."""
        num_blocks = len(lease.blocks) + num_new
        return max(0, num_blocks - lease.num_footprint_blocks) * self._pool.sizes[0]

    def renew(self, lease: PrefixLease) -> None:
        """Bring a lease's promise up to date with what it has."""
        self._promise(lease, self.need(lease))

    def end(self, lease: PrefixLease) -> None:
        """Take the promise of a lease back that is released."""
        self._promise(lease, 0)

    def add(self, lease: PrefixLease, num_units: int) -> None:
        """Promise so much more to a lease. It must be available."""
        self._promise(lease, lease.num_reserved_units + num_units)

    def _promise(self, lease: PrefixLease, num_units: int) -> None:
        self._pool.num_reserved_units += num_units - lease.num_reserved_units
        lease.num_reserved_units = num_units


class AgingPromises(Promises):
    """The promises of a pool whose blocks become smaller with age.

    Args:
        pool: The blocks.
        budget: Its rule and sizes.
        block_size: Tokens per block.
        aging: Says what becomes of a block that a lease begins with.
    """

    def __init__(self, pool: BlockPool, budget: KVBudget, block_size: int, aging: Aging) -> None:
        super().__init__(pool)
        self._profiles = AgeProfiles(budget, block_size)
        self._aging = aging

    def max_blocks(self, num_units: int) -> int:
        """See ``Promises``."""
        return self._profiles.of(self._profiles.max_chunk).max_blocks(num_units)

    def cost(self, hits: Sequence[Block], num_blocks: int, num_left: int) -> int:
        """See ``Promises``. What owners lose is in it. O(hits)."""
        num_taken = 0
        own = []
        for index, block in enumerate(hits):
            if block.num_leases == 0:
                size = self._aging.size_on_entry(block, index, len(hits))
                own.append((index, size))
                num_taken += size if block.ref_count == 0 else 0
            elif (owner := owner_of(block)) is not None:
                later = self._profile(owner).later_size(block.index, owner.num_footprint_blocks)
                num_taken += max(0, block.size - later)
        return num_taken + self._profiles.of(num_left).growth(len(hits), num_blocks, own)

    def need(self, lease: PrefixLease) -> int:
        """See ``Promises``. O(blocks within the longest window)."""
        return self._profile(lease).growth(
            len(lease.blocks), lease.num_footprint_blocks, self._own(lease)
        )

    def missing(self, lease: PrefixLease, num_new: int) -> int:
        """See ``Promises``. O(blocks within the longest window)."""
        num_blocks, size = len(lease.blocks), self._pool.sizes[0]
        own = [*self._own(lease), *((num_blocks + i, size) for i in range(num_new))]
        num_blocks += num_new
        need = self._profile(lease).growth(
            num_blocks, max(num_blocks, lease.num_footprint_blocks), own
        )
        return num_new * size + need - lease.num_reserved_units

    def _profile(self, lease: PrefixLease) -> AgeProfile:
        return self._profiles.of(lease.chunk)

    def _own(self, lease: PrefixLease) -> Iterable[tuple[int, int]]:
        # Older ones are as small as they get.
        for index in range(lease.windows[-1], len(lease.blocks)):
            block = lease.blocks[index]
            if block.owner is lease.ref:
                yield index, block.size


def owner_of(block: Block) -> PrefixLease | None:
    """Return the lease that counts on a block becoming smaller."""
    return None if block.owner is None else block.owner()
