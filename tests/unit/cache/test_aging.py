"""When a block is made smaller: by the age that it has to all who hold it, and for room."""

from __future__ import annotations

from tests.support.cache import KEY, NAMESPACE, compute, serve, start

from kvist.cache.hash import BlockHasher
from kvist.cache.manager import CacheManager
from kvist.precision import KVBudget, KVPrecision
from kvist.types import BlockCopy, MemoryOp

RAW, SMALL = 100, 52


def make_manager(
    num_blocks: int, rule: str = "sink=raw16,recent:8=raw16,rest=int8", *, demote: bool = True
) -> CacheManager:
    """Return a cache of so many raw blocks of 4 tokens."""
    budget = KVBudget(
        num_bytes=num_blocks * RAW,
        block_bytes={"raw16": RAW, "int8": SMALL},
        precision=KVPrecision.parse(rule),
        demote_before_evict=demote,
    )
    return CacheManager(budget=budget, block_size=4, hasher=BlockHasher(KEY))


def demoted(manager: CacheManager) -> list[int]:
    """Return the blocks demoted since this was last asked."""
    return [
        op.block_id
        for op in manager.take_memory_ops()
        if isinstance(op, MemoryOp) and op.kind == "demote"
    ]


def test_block_is_demoted_when_it_leaves_the_window_and_the_sink_never() -> None:
    manager = make_manager(16)
    lease, chain = start(manager, range(40))
    seen = []
    for end in range(4, 41, 4):
        compute(manager, lease, chain, end)
        seen.append([lease.block_table.index(block_id) for block_id in demoted(manager)])
    # 8 tokens back from 16 begins block 2, so block 1 is old then.
    assert seen == [[], [], [], [1], [2], [3], [4], [5], [6], [7]]
    assert manager.stats().bytes_by_codec == {"raw16": 3 * RAW, "int8": 7 * SMALL}
    manager.release(lease)
    manager.check_invariants()


def test_demotions_say_where_in_its_sequence_a_block_is() -> None:
    """By age, and for room once nobody has it; encoders turn what they know of a model to there."""
    manager = make_manager(10)
    places: dict[int, int] = {}
    for first in range(3):
        lease, chain = start(manager, [first, *range(1, 32)])
        compute(manager, lease, chain)
        table = list(lease.block_table)
        manager.release(lease)
        seen = []
        for op in manager.take_memory_ops():
            assert isinstance(op, MemoryOp)
            if op.kind == "allocate":
                places[op.block_id] = table.index(op.block_id)
            elif op.kind == "demote":
                seen.append(op.block_index)
                assert op.block_index == places[op.block_id]
        assert len(set(seen)) > 2
    assert manager.stats().num_demotions_for_room > 0


def test_block_straddling_the_window_stays_as_it_was_written() -> None:
    manager = make_manager(16, "recent:6=raw16,rest=int8")
    lease, chain = start(manager, range(16))
    compute(manager, lease, chain, 13)
    # 6 tokens back from 13 is inside block 1: only block 0 is old, and without a sink it is as all others.
    assert [lease.block_table.index(block_id) for block_id in demoted(manager)] == [0]
    manager.release(lease)


def test_of_two_that_disagree_about_the_age_the_better_precision_wins() -> None:
    manager = make_manager(32)
    short, short_chain = start(manager, range(14))
    compute(manager, short, short_chain)
    assert demoted(manager) == []
    long, long_chain = start(manager, [*range(12), *range(100, 128)])
    compute(manager, long, long_chain)
    shared = short.block_table[:3]
    assert long.block_table[:3] == shared
    aged = demoted(manager)
    # Of what both hold, blocks 1 and 2 are recent for the short one.
    assert not set(aged) & set(shared)
    assert len(aged) == 10 - 3 - 2
    manager.release(short)
    assert set(demoted(manager)) == set(shared[1:])
    # Its own last blocks stay as they are when nobody else reads them.
    manager.release(long)
    assert demoted(manager) == []
    # Until somebody holds them as old ones.
    again, chain = start(manager, [*range(12), *range(100, 128), *range(200, 208)])
    compute(manager, again, chain)
    assert demoted(manager) == again.block_table[8:10]
    manager.release(again)
    manager.check_invariants()


def test_pinned_block_that_nobody_reads_stays_as_it_is() -> None:
    manager = make_manager(32)
    lease, chain = start(manager, range(12))
    compute(manager, lease, chain)
    manager._max_pinned = 8
    pin = manager.pin(chain, 12)
    manager.release(lease)
    assert demoted(manager) == []
    manager.unpin(pin)
    manager.check_invariants()


def test_cached_blocks_are_demoted_before_any_is_evicted() -> None:
    manager = make_manager(8, "recent:1000=raw16,rest=int8")
    first = serve(manager, range(16))
    serve(manager, range(100, 116))
    assert demoted(manager) == []
    serve(manager, range(200, 208))  # two blocks more than there is room for
    stats = manager.stats()
    assert (stats.num_evictions, stats.num_demotions_by_age) == (0, 0)
    assert stats.num_demotions_for_room == 5  # two blocks of 100 out of five times 48
    assert set(demoted(manager)) & set(first)
    # All of the first prompt is still there.
    chain = manager.new_chain(NAMESPACE, range(16))
    assert manager.match(chain, 16).num_hit_tokens == 16


def test_what_was_used_least_recently_is_demoted_first() -> None:
    manager = make_manager(4, "recent:1000=raw16,rest=int8")
    old = serve(manager, [0, 1, 2, 3])
    new = serve(manager, [4, 5, 6, 7])
    serve(manager, [0, 1, 2, 3, 8])
    serve(manager, [9, 9, 9, 9])
    manager.take_memory_ops()
    serve(manager, [10, 10, 10, 10])
    assert demoted(manager)[:1] == new
    assert old != new


def test_nothing_is_demoted_for_room_when_that_is_off() -> None:
    manager = make_manager(4, demote=False)
    for number in range(6):
        serve(manager, [number] * 4)
    stats = manager.stats()
    assert (stats.num_demotions_for_room, stats.num_evictions) == (0, 2)


def test_memory_holds_as_many_small_blocks_as_its_bytes_allow() -> None:
    manager = make_manager(20, "recent:4=raw16,rest=int8")
    for number in range(60):
        serve(manager, [number] * 4)
    stats = manager.stats()
    num_cached = stats.num_evictable
    assert stats.num_evictions > 0
    # All but what the last ones needed is small: 20 raw blocks are 38 small ones.
    assert num_cached >= 36
    assert sum(stats.bytes_by_codec.values()) <= 20 * RAW


def test_copy_stands_in_its_place_among_what_happens_to_memory() -> None:
    manager = make_manager(8)
    source = serve(manager, range(8))[1]
    manager.take_memory_ops()
    lease, _ = start(manager, [0, 1, 2, 3, 4, 5, 99, 98])
    assert manager.take_memory_ops() == (
        MemoryOp("allocate", lease.block_table[1], "raw16"),
        BlockCopy(source=source, target=lease.block_table[1], num_tokens=2),
    )
    manager.release(lease)


def test_footprint_is_promised_as_it_is_written() -> None:
    manager = make_manager(10)
    assert manager.num_blocks == 10
    assert manager.can_ever_admit(40)
    assert not manager.can_ever_admit(41)
    # Whatever is cached and however small: a footprint that fits alone is admitted when nothing else runs.
    for number in range(12):
        serve(manager, [number] * 8)
    lease, chain = start(manager, range(50, 90))
    compute(manager, lease, chain)
    manager.release(lease)


def test_reset_forgets_sizes() -> None:
    manager = make_manager(6)
    for number in range(9):
        serve(manager, [number] * 8)
    manager.reset()
    manager.check_invariants()
    assert manager.num_free == manager.num_blocks
    assert manager.stats().bytes_by_codec == {"raw16": 0, "int8": 0}
