"""How memory is cut into slabs when blocks have several codecs, and how much of it may be filled.

Responsible for arithmetic alone, so that a plan can be made without allocating anything. Knows codecs as sizes only.

Memory is slabs of one size. A slab holds cells, each one block, of one codec; an empty slab may change its codec. What
then keeps memory from being used:

    remainders     the end of a slab that fits no further cell
    half-empty     in the worst case one slab of each codec has a single block: the others cannot have that slab

A block counts with its share of a slab, ``cell_bytes``: the S bytes of a slab over the m cells that it has of that
codec. So remainders are paid for by those who cause them, and the budget is the most that blocks may come to in this
measure so that every block finds a cell, however blocks come, go and change their codec, as long as blocks may be moved
between slabs of the same codec (compaction). k blocks need ceil(k / m) slabs, at most k / m + 1 - 1 / m. So n slabs are
enough for C codecs as long as all blocks come to less than

    (n + 1) * S - sum(S - S / m) = (n + 1 - C) * S + sum(S / m)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvist.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_SLAB_BLOCKS = 16
"""Blocks of the largest codec in a slab at most: cells would fit larger ones better, but more stays half-empty."""

MAX_SLAB_BYTES = 32 * 1024 * 1024
"""Of a slab at most, unless a block is larger: compaction moves up to a slab between two steps, here in some
milliseconds."""

MAX_WASTE = 0.05
"""Share of the memory that is to be lost at most in the worst case, where slabs of some size can do that."""
MAIN_WEIGHT = 0.7
"""What the smallest codec counts for among the others when slabs are chosen: most blocks come to be in it."""

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabLayout:
    """Slabs of one piece of memory."""

    slab_bytes: int
    """A multiple of 64: cells start at cache lines where the sizes of blocks allow it."""
    num_slabs: int
    cells: Mapping[str, int]
    """Blocks that a slab holds, by codec."""
    cell_bytes: Mapping[str, int]
    """What a block counts with, by codec: its share of a slab."""
    budget_bytes: int
    """What blocks of all codecs together may come to, each with ``cell_bytes``."""
    worst_waste: float
    """Share of the memory that is lost at most, whatever blocks there are."""
    usual_waste: float
    """Share that is lost when most blocks are in the smallest codec."""

    @property
    def num_bytes(self) -> int:
        """Memory that the slabs take."""
        return self.slab_bytes * self.num_slabs


def slab_layout(block_bytes: Mapping[str, int], num_bytes: int) -> SlabLayout:
    """Return the slabs that waste least.

    Those of ``MAX_WASTE`` in the worst case go before all others, and of them those that usually waste least.

    Args:
        block_bytes: Bytes of a block by codec; at least one codec.
        num_bytes: Memory to use.

    Raises:
        ConfigError: Not even one slab fits into the memory.

    Complexity: O(blocks of the smallest codec in the largest slab).
    """
    largest = max(block_bytes.values())
    limit = max(largest, min(MAX_SLAB_BLOCKS * largest, MAX_SLAB_BYTES))
    sizes = {
        -(-count * size // _ALIGNMENT) * _ALIGNMENT
        for size in block_bytes.values()
        for count in range(-(-largest // size), limit // size + 1)
    }
    layouts = [_cut(block_bytes, num_bytes, size) for size in sorted(sizes)]
    best = min(
        layouts,
        key=lambda layout: (max(layout.worst_waste, MAX_WASTE), layout.usual_waste),
    )
    if best.budget_bytes < max(best.cell_bytes.values()):
        raise ConfigError(
            f"[storage] expected memory for a slab of blocks of {' or '.join(block_bytes)}, {min(sizes):,} bytes, "
            f"received {num_bytes:,}; raise --memory-gib"
        )
    return best


def _cut(block_bytes: Mapping[str, int], num_bytes: int, slab_bytes: int) -> SlabLayout:
    num_slabs = num_bytes // slab_bytes
    cells = {codec: slab_bytes // size for codec, size in block_bytes.items()}
    shares = sum(slab_bytes // count for count in cells.values())
    budget = (num_slabs + 1 - len(cells)) * slab_bytes + shares - 1
    budget = max(0, min(budget, num_slabs * slab_bytes))
    fills = {codec: cells[codec] * size / slab_bytes for codec, size in block_bytes.items()}
    main = min(block_bytes, key=lambda codec: block_bytes[codec])
    rest = [fill for codec, fill in fills.items() if codec != main] or [fills[main]]
    usual = MAIN_WEIGHT * fills[main] + (1 - MAIN_WEIGHT) * sum(rest) / len(rest)
    share = budget / num_bytes if num_bytes else 0.0
    return SlabLayout(
        slab_bytes=slab_bytes,
        num_slabs=num_slabs,
        cells=cells,
        cell_bytes={codec: -(-slab_bytes // count) for codec, count in cells.items()},
        budget_bytes=budget,
        worst_waste=1 - share * min(fills.values()),
        usual_waste=1 - share * usual,
    )
