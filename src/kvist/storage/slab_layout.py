"""How memory is cut into slabs when blocks have several codecs, and how much of it may be filled.

Responsible for arithmetic alone, so that a plan can be made without allocating anything. Knows codecs as sizes only.

Memory is slabs of one size. A slab holds cells, each one block, of one codec; an empty slab may change its codec. What
then keeps memory from being used:

    remainders     the end of a slab that fits no further cell
    half-empty     in the worst case one slab of each codec has a single block: the others cannot have that slab

The budget is the most that whoever allocates blocks may fill so that every block finds a cell, however blocks come, go
and change their codec, as long as blocks may be moved between slabs of the same codec (compaction). Let a slab hold m
cells of b bytes, of each of C codecs, and f be the least that a full slab holds, min(m * b). A slab that is needed
holds f or more, but for one of each codec, which may hold a single block. So n + 1 slabs are needed by this many bytes
at least, and the budget is one less (and not more than the slabs have):

    sum(min(b, f)) + (n + 1 - C) * f
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

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabLayout:
    """Slabs of one piece of memory."""

    slab_bytes: int
    """A multiple of 64: cells start at cache lines where the sizes of blocks allow it."""
    num_slabs: int
    cells: Mapping[str, int]
    """Blocks that a slab holds, by codec."""
    budget_bytes: int
    """Bytes of blocks, of all codecs together, that may be allocated."""

    @property
    def num_bytes(self) -> int:
        """Memory that the slabs take."""
        return self.slab_bytes * self.num_slabs


def slab_layout(block_bytes: Mapping[str, int], num_bytes: int) -> SlabLayout:
    """Return the slabs that give blocks the largest budget; of several such sizes the smallest.

    Args:
        block_bytes: Bytes of a block by codec; at least one codec.
        num_bytes: Memory to use.

    Raises:
        ConfigError: A slab for each codec does not fit into the memory.

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
    best = max(layouts, key=lambda layout: layout.budget_bytes)
    if best.budget_bytes < largest:
        needed = min(size * len(block_bytes) for size in sizes)
        raise ConfigError(
            f"[storage] expected memory for a slab of each of {len(block_bytes)} codecs, {needed:,} bytes, received "
            f"{num_bytes:,}; raise --memory-gib"
        )
    return best


def _cut(block_bytes: Mapping[str, int], num_bytes: int, slab_bytes: int) -> SlabLayout:
    num_slabs = num_bytes // slab_bytes
    cells = {codec: slab_bytes // size for codec, size in block_bytes.items()}
    num_full = num_slabs + 1 - len(block_bytes)
    budget = 0
    if num_full >= 1:
        least_filled = min(cells[codec] * size for codec, size in block_bytes.items())
        first_blocks = sum(min(size, least_filled) for size in block_bytes.values())
        budget = first_blocks + num_full * least_filled - 1
        budget = min(budget, num_slabs * slab_bytes)
    return SlabLayout(slab_bytes=slab_bytes, num_slabs=num_slabs, cells=cells, budget_bytes=budget)
