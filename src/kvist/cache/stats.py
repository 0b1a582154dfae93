"""Counters of the cache.

Responsible for what is counted and for the frozen snapshot handed out. Knows nothing of how it comes about.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvist.types import MissReason

if TYPE_CHECKING:
    from collections.abc import Mapping


def _none_missed() -> dict[str, int]:
    return {reason.value: 0 for reason in MissReason}


@dataclass(slots=True, kw_only=True)
class Counters:
    """What the manager counts up since it was made; never reset."""

    num_admissions: int = 0
    num_lookup_tokens: int = 0
    num_hit_tokens: int = 0
    num_copied_tokens: int = 0
    num_partial_copies: int = 0
    num_published_blocks: int = 0
    num_partial_blocks: int = 0
    num_duplicate_blocks: int = 0
    num_superseded_blocks: int = 0
    num_evictions: int = 0
    num_reset_blocks: int = 0
    num_demotions_by_age: int = 0
    num_demotions_for_room: int = 0
    num_invalidated_blocks: int = 0
    num_expired_pins: int = 0
    num_expired_blocks: int = 0
    num_verification_failures: int = 0
    missed_tokens: dict[str, int] = field(default_factory=_none_missed)

    def snapshot(self) -> dict[str, Any]:  # Any: each field has its own type
        """Return the fields as they are now. Not ``asdict``, which takes ten times as long, after every step."""
        values = {name: getattr(self, name) for name in self.__slots__}
        values["missed_tokens"] = self.missed_tokens.copy()
        return values


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStats:
    """The cache at one moment.

    Counters run since the start. A sequence counts when it is admitted, however often it was looked up before.
    """

    num_blocks: int
    """Blocks in the pool: num_free + num_evictable + num_held. Where blocks can change their codec, new blocks that
    the whole memory could hold; that law then holds for bytes."""
    num_ids: int
    """Blocks there can be at most: num_blocks, or as many of the smallest codec as the memory could hold."""
    block_size: int
    """Tokens per block."""
    num_free: int
    """Blocks that could be allocated without giving up another one: new ones, as they are written."""
    num_evictable: int
    """Cached blocks that nobody holds."""
    num_held: int
    """Blocks that leases or pins hold."""
    num_reserved: int
    """Blocks promised to leases, not allocated yet; at most num_free + num_evictable."""
    num_pinned: int
    """Subset of num_held: those that pins hold, whether or not leases do too."""
    num_admissions: int
    """Leases given out; a preempted request counts again."""
    num_lookup_tokens: int
    """Tokens of the admitted sequences."""
    num_hit_tokens: int
    """Subset of num_lookup_tokens: those not computed again."""
    num_copied_tokens: int
    """Subset of num_hit_tokens: those copied from a partially matching block; the rest is shared."""
    num_partial_copies: int
    """Subset of num_admissions: those that copied a block's head."""
    num_published_blocks: int
    """Full blocks that entered the prefix tree."""
    num_partial_blocks: int
    """Heads of blocks that released leases left behind in the tree."""
    num_duplicate_blocks: int
    """Full blocks computed although an identical one was there already; not in num_published_blocks."""
    num_superseded_blocks: int
    """Subset of num_partial_blocks: dropped because a sibling begins with the same tokens."""
    num_evictions: int
    """Cached blocks dropped to allocate their memory."""
    num_reset_blocks: int
    """Cached blocks dropped by reset, those that were still held too; not in num_evictions."""
    num_demotions_by_age: int
    """Times a block was made smaller because no running request had it among its recent ones any more."""
    num_demotions_for_room: int
    """Times a cached block that nobody used was made smaller instead of evicting one."""
    num_invalidated_blocks: int
    """Cached blocks taken out of the cache because what they held, or a block before them, was wrong; as above."""
    num_expired_pins: int
    """Pins whose TTL ended before they were given up."""
    num_expired_blocks: int
    """Subset of num_evictions: those whose TTL or pin had ended by its time before."""
    unit_bytes: int
    """Bytes in a unit of memory: 1 where blocks can change their codec; 0: a unit is a block, of whatever bytes."""
    block_units: int
    """Units that a block takes when it is written."""
    free_units: int
    evictable_units: int
    held_units: int
    """Units of the whole memory by the state of what is in them."""
    blocks_by_codec: Mapping[str, int]
    """Blocks that are not free; empty where there is one codec."""
    evictable_by_codec: Mapping[str, int]
    """Subset of blocks_by_codec: those that nobody holds."""
    bytes_by_codec: Mapping[str, int]
    """Bytes that blocks_by_codec take, those included that due demotions will give back; empty where there is one
    codec."""
    num_due_demotions: int
    """Blocks that are to be made smaller and still take as much memory as before; they are in the figures by codec with
    the codec that they are in."""
    num_urgent_demotions: int
    """Demotions beyond what a step may carry out, because memory of the step could not be had otherwise."""
    num_verification_failures: int
    """Identities that matched while the tokens did not, at lookup or commit. Never used."""
    num_ghosts: int
    """Blocks remembered after they left the cache."""
    missed_tokens: Mapping[str, int]
    """Tokens of num_lookup_tokens that could have been hits and were not, by ``MissReason``. The last token of each
    sequence is in neither."""

    @property
    def prefix_hit_fraction(self) -> float:
        """Hit tokens per token looked up, in [0, 1]; 0 before the first admission."""
        return self.num_hit_tokens / self.num_lookup_tokens if self.num_lookup_tokens else 0.0
