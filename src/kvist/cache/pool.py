"""All blocks, which of three sets each is in, and how much memory they take.

Responsible for reference counts, the free blocks, the evictable ones in their partitions, what is promised to leases,
and the size of each block. The only module that changes a reference count or a size. Knows no tokens.

1. Every block is in exactly one set: free (holds nothing), evictable (published, ref count 0), held (ref count > 0).
2. The sizes of the blocks that are not free add up to ``num_used <= capacity``.
3. ``capacity - num_used + num_evictable_units >= num_reserved_units``: what is promised can always be allocated.

Where all blocks have one codec, a block is the unit of memory, and sizes are 1. Where a block can change its codec,
the unit is a byte: a block is allocated in the first and largest size and can be demoted to smaller ones. What happens
to memory is then noted in order, for whoever owns it to do the same (``take_memory_ops``).

Demotions take time, so a step carries out ``max_demotions`` of them, and the others are *due*: a block has its new size
in all that is counted here from the moment it is demoted, and its memory stays as large as it was until its turn comes.
So nothing that is promised depends on when that is. Room for it is found in time because of

4. ``num_used + num_due_units <= capacity``, which is what memory holds. An allocation that finds too little carries out
   as many of the due demotions as it needs, whatever a step may; by 2 they are enough.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

from kvist.cache.block import Block
from kvist.cache.eviction import Lru
from kvist.cache.hash import TOKEN_BYTES
from kvist.cache.partition import Partitions
from kvist.types import BlockCopy, BlockId, MemoryOp

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvist.cache.eviction import StrategyFactory
    from kvist.cache.tree import Node


class RoomLevels(NamedTuple):
    """In which codecs cached blocks are kept at least when there is no room, as indices."""

    first: int
    """The first block of a sequence."""
    other: int
    """Other full blocks."""
    head: int
    """Blocks that are not full."""


class CodecUsage(NamedTuple):
    """What the memory of the blocks in one codec is."""

    num_blocks: int
    """Blocks that are not free."""
    num_evictable: int
    """Subset of num_blocks."""
    num_units: int
    """Units that num_blocks take."""


class _Due(NamedTuple):
    """A demotion that is counted and not carried out yet."""

    level: int
    """In which the block's memory still is."""
    op: MemoryOp


class BlockPool:
    """The blocks of one arena. Engine thread only; every operation is O(1), amortised where a strategy is asked.

    Args:
        capacity: Memory of the arena in units: blocks where there is one codec, else bytes.
        make_strategy: Makes the strategy of each partition.
        shares: Fraction of the pool by tenant (``partition``).
        codecs: Units that a block takes by codec, in the order in which it can change, sizes falling; None: one codec.
        room_levels: Codecs, as indices into ``codecs``, in which cached blocks that nobody uses are kept at least when
            there is no room: the first block of a sequence, other full ones, and heads of blocks.
        max_demotions: Demotions that a step carries out, >= 1; None: all, at once.
    """

    __slots__ = (
        "_codecs",
        "_demotable",
        "_due",
        "_free",
        "_is_single",
        "_memory_ops",
        "_num_by_level",
        "_num_demoted_now",
        "_num_evictable_by_level",
        "_only",
        "_room_levels",
        "blocks",
        "capacity",
        "max_demotions",
        "num_due_units",
        "num_evictable",
        "num_evictable_units",
        "num_reserved_units",
        "num_urgent_demotions",
        "num_used",
        "partitions",
        "sizes",
    )

    def __init__(
        self,
        capacity: int,
        make_strategy: StrategyFactory = Lru,
        shares: Mapping[str, float] | None = None,
        codecs: Mapping[str, int] | None = None,
        *,
        room_levels: RoomLevels | None = None,
        max_demotions: int | None = None,
    ) -> None:
        self._codecs = tuple(codecs or ("",))
        self.sizes = tuple(codecs.values()) if codecs else (1,)
        """Units that a block takes, by its level."""
        self.capacity = capacity
        num_blocks = capacity // self.sizes[-1]
        self.partitions = Partitions(make_strategy, num_blocks, capacity, shares or {})
        self._is_single = self.partitions.is_single
        self._only = self.partitions.of("")
        self.blocks: Sequence[Block] = tuple(Block(BlockId(i)) for i in range(num_blocks))
        # A stack: only its end is ever touched, and the block freed last is the one most likely still in the caches.
        self._free = list(reversed(self.blocks))
        self._room_levels = room_levels or RoomLevels(0, 0, 0)
        # Evictable blocks that can be made smaller, least recently used first.
        self._demotable: OrderedDict[Block, None] = OrderedDict()
        self._memory_ops: list[MemoryOp | BlockCopy] | None = [] if codecs else None
        # Oldest first.
        self._due: dict[Block, _Due] = {}
        # Since ``take_memory_ops``.
        self._num_demoted_now = 0
        # Blocks that are not free, and those of them that are evictable, by the codec that their memory is in.
        self._num_by_level = [0] * len(self.sizes)
        self._num_evictable_by_level = [0] * len(self.sizes)
        self.max_demotions = max_demotions
        """Demotions that a step carries out; None: all, at once."""
        self.num_due_units = 0
        """Units that due demotions will give back."""
        self.num_urgent_demotions = 0
        """Demotions, since the start, that an allocation could not do without and a step had no turn for."""
        self.num_used = 0
        """Units that blocks take."""
        self.num_evictable = 0
        """Cached blocks without references."""
        self.num_evictable_units = 0
        """Units that they take."""
        self.num_reserved_units = 0
        """Units promised to leases beside what they have."""

    @property
    def is_mixed(self) -> bool:
        """Whether blocks can change their size."""
        return self._memory_ops is not None

    @property
    def free_blocks(self) -> Sequence[Block]:
        """The free blocks, next to be allocated last."""
        return self._free

    @property
    def evictable(self) -> Sequence[Block]:
        """The evictable blocks, those of a tree in the order they would go. O(blocks), for checks and resets."""
        return list(chain.from_iterable(self.partitions))

    @property
    def num_blocks(self) -> int:
        """Blocks of the first size that the capacity holds."""
        return self.capacity // self.sizes[0]

    @property
    def num_free(self) -> int:
        """Blocks that could be allocated without giving up another one."""
        return (self.capacity - self.num_used) // self.sizes[0]

    @property
    def num_held(self) -> int:
        """Blocks with references."""
        return len(self.blocks) - len(self._free) - self.num_evictable

    @property
    def num_available_units(self) -> int:
        """Units that can be promised to someone."""
        num_unheld = self.capacity - self.num_used + self.num_evictable_units
        return num_unheld - self.num_reserved_units

    @property
    def num_reserved(self) -> int:
        """Blocks of the first size that the promises hold, the last one maybe in part."""
        return -(-self.num_reserved_units // self.sizes[0])

    @property
    def num_available(self) -> int:
        """Blocks that can be promised to someone."""
        return self.num_available_units // self.sizes[0]

    def allocate(self, tenant: str) -> Block | None:
        """Take a free block and hold it; None: another one has to be given up first (``num_free``)."""
        size = self.sizes[0]
        if self.num_used + size > self.capacity:
            return None
        while self.num_used + self.num_due_units + size > self.capacity:
            self.num_urgent_demotions += self.num_demotions_left == 0
            self._carry_out(next(iter(self._due)))
        block = self._free.pop()
        block.ref_count = 1
        block.level = 0
        block.size = size
        self._num_by_level[0] += 1
        self.num_used += size
        partition = self._only if self._is_single else self.partitions.of(tenant)
        block.partition = partition
        partition.num_used += size
        if not self._is_single:
            self.partitions.rank(partition)
        if self._memory_ops is not None:
            self._memory_ops.append(MemoryOp("allocate", block.block_id, self._codecs[0]))
        return block

    def hold(self, blocks: Iterable[Block]) -> None:
        """Add a reference to each of some evictable or held blocks."""
        for block in blocks:
            if block.ref_count == 0:
                self.withdraw(block)
            block.ref_count += 1

    def unhold(self, blocks: Iterable[Block]) -> Sequence[Block]:
        """Take a reference away from each of some held blocks.

        Returns:
            Those for which it was the last one, in the same order; the caller then calls ``keep`` or ``free``.
        """
        unheld = []
        for block in blocks:
            block.ref_count -= 1
            if block.ref_count == 0:
                unheld.append(block)
        return unheld

    def keep(self, block: Block) -> None:
        """Make a published block whose last reference has gone evictable."""
        assert block.node is not None
        if block.node.kept_until_ns:
            block.partition.retained[block] = None
        else:
            block.partition.strategy.append(block)
        self.num_evictable += 1
        self.num_evictable_units += block.size
        if self._memory_ops is not None:
            self._num_evictable_by_level[self._level_in_memory(block)] += 1
            if self.room_level_of(block.node) > block.level:
                self._demotable[block] = None
        if not self._is_single:
            self.partitions.rank(block.partition)

    def touch(self, block: Block) -> None:
        """Note that an evictable block was looked up."""
        retained = block.partition.retained
        if retained and block in retained:
            retained.move_to_end(block)
        else:
            block.partition.strategy.touch(block)
        if block in self._demotable:
            self._demotable.move_to_end(block)

    def withdraw(self, block: Block) -> None:
        """Take an evictable block out of its queue; the caller holds it, keeps it again or frees it."""
        partition = block.partition
        if partition.retained and block in partition.retained:
            del partition.retained[block]
        else:
            partition.strategy.remove(block)
        self._unqueue(block)

    def evict(self) -> Block:
        """Take out of its queue the block that is to go; the caller frees it. There must be one."""
        block = (
            self._only.evict() if self._is_single else self.partitions.next_to_evict_from().evict()
        )
        self._unqueue(block)
        return block

    def free(self, block: Block) -> None:
        """Make a block with no reference, and out of the queue, free."""
        self._free.append(block)
        self.num_used -= block.size
        self._num_by_level[self._level_in_memory(block)] -= 1
        block.partition.num_used -= block.size
        if not self._is_single:
            self.partitions.rank(block.partition)
        if self._memory_ops is not None:
            due = self._due.pop(block, None)
            if due is not None:
                self.num_due_units -= self.sizes[due.level] - block.size
            self._memory_ops.append(MemoryOp("free", block.block_id, ""))

    # --- several codecs

    def coldest_demotable(self) -> Block | None:
        """Return the evictable block used least recently of those that can be made smaller, if there is one."""
        return next(iter(self._demotable), None)

    def room_level_of(self, node: Node) -> int:
        """Return in which codec a cached block is kept at least when there is no room."""
        assert node.parent is not None
        first, other, head = self._room_levels
        level = first if node.parent.parent is None else other
        return min(level, head) if node.is_partial else level

    @property
    def num_due(self) -> int:
        """Demotions that are due."""
        return len(self._due)

    @property
    def num_demotions_left(self) -> int:
        """Demotions that this step may still carry out, of those that are due; 0 where none ever are."""
        return max(0, (self.max_demotions or 0) - self._num_demoted_now)

    def demote(self, block: Block, level: int) -> None:
        """Give an allocated block, whose tokens will not change, a smaller size; its memory follows in its turn."""
        assert self._memory_ops is not None
        assert level > block.level
        gain = block.size - self.sizes[level]
        in_memory = self._level_in_memory(block)
        block.size -= gain
        block.level = level
        self.num_used -= gain
        self.num_due_units += gain
        block.partition.num_used -= gain
        if block.ref_count == 0:
            self.num_evictable_units -= gain
            self._demotable.pop(block, None)
        if not self._is_single:
            self.partitions.rank(block.partition)
        node = block.node
        num_tokens = len(node.tokens) // TOKEN_BYTES if node is not None and node.is_partial else 0
        op = MemoryOp("demote", block.block_id, self._codecs[level], num_tokens, block.index)
        # One that is due already keeps its place, and the step between is left out.
        self._due[block] = _Due(in_memory, op)
        if self.max_demotions is None:
            self._carry_out(block)

    def codec_of(self, block: Block) -> str:
        """Return the codec of a block that is not free, a due demotion taken for done; nothing where all have one."""
        return self._codecs[block.level]

    def codec_in_memory(self, block: Block) -> str:
        """Return the codec that the memory of such a block is in."""
        return self._codecs[self._level_in_memory(block)]

    def note_copy(self, copy: BlockCopy) -> None:
        """Note a copy in its place among what happens to memory, where that is noted."""
        if self._memory_ops is not None:
            self._memory_ops.append(copy)

    def take_memory_ops(self) -> tuple[MemoryOp | BlockCopy, ...]:
        """Return what has happened to memory since this was last asked, in order; nothing where there is one codec.

        Side effects: carries out the oldest demotions that are due, as many as a step may.
        """
        while self._due and self.num_demotions_left:
            self._carry_out(next(iter(self._due)))
        self._num_demoted_now = 0
        if not self._memory_ops:
            return ()
        memory_ops, self._memory_ops = tuple(self._memory_ops), []
        return memory_ops

    def usage(self) -> dict[str, CodecUsage]:
        """Return what the memory of blocks that are not free is, by codec; codecs in falling size."""
        return {
            codec: CodecUsage(count, num_evictable, count * size)
            for codec, count, num_evictable, size in zip(
                self._codecs,
                self._num_by_level,
                self._num_evictable_by_level,
                self.sizes,
                strict=True,
            )
        }

    def _level_in_memory(self, block: Block) -> int:
        if not self._due:
            return block.level
        due = self._due.get(block)
        return block.level if due is None else due.level

    def _carry_out(self, block: Block) -> None:
        """Let the memory of a block follow its demotion."""
        assert self._memory_ops is not None
        due = self._due.pop(block)
        self._memory_ops.append(due.op)
        self._num_demoted_now += 1
        self.num_due_units -= self.sizes[due.level] - block.size
        self._num_by_level[due.level] -= 1
        self._num_by_level[block.level] += 1
        if block.ref_count == 0:
            self._num_evictable_by_level[due.level] -= 1
            self._num_evictable_by_level[block.level] += 1

    def _unqueue(self, block: Block) -> None:
        self.num_evictable -= 1
        self.num_evictable_units -= block.size
        if self._memory_ops is not None:
            self._num_evictable_by_level[self._level_in_memory(block)] -= 1
        if self._demotable:
            self._demotable.pop(block, None)
        if not self._is_single:
            self.partitions.rank(block.partition)
