"""When a block is made smaller: by the age that it has to all who hold it, and for room."""

from __future__ import annotations

import pytest
from tests.support.cache import KEY, NAMESPACE, compute, serve, start

from kvist.cache.hash import BlockHasher
from kvist.cache.manager import CacheManager
from kvist.errors import PinBudgetExceeded
from kvist.precision import KVBudget, KVPrecision
from kvist.types import BlockCopy, MemoryOp, MissReason

RAW, SMALL = 100, 52


def make_manager(
    num_blocks: int,
    rule: str = "sink=raw16,recent:8=raw16,rest=int8",
    *,
    demote: bool = True,
    max_demotions: int | None = None,
) -> CacheManager:
    """Return a cache of so many raw blocks of 4 tokens."""
    budget = KVBudget(
        num_bytes=num_blocks * RAW,
        block_bytes={"raw16": RAW, "int8": SMALL},
        precision=KVPrecision.parse(rule),
        demote_before_evict=demote,
        max_demotions=max_demotions,
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
    manager._max_pinned_units = 8 * RAW
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


def test_blocks_that_become_old_together_are_demoted_a_few_a_step() -> None:
    manager = make_manager(40, max_demotions=2)
    lease, chain = start(manager, range(40))
    compute(manager, lease, chain)
    # Counted as small at once, and as large as before where memory is told of.
    assert manager.stats().num_demotions_by_age == 7
    assert manager._pool.num_used == 3 * RAW + 7 * SMALL
    assert manager.stats().bytes_by_codec == {"raw16": 10 * RAW, "int8": 0}
    assert manager.stats().free_units == 30 * RAW
    seen = []
    while manager.has_due_demotions:
        manager.check_invariants()
        seen.append([lease.block_table.index(block_id) for block_id in demoted(manager)])
    assert seen == [[1, 2], [3, 4], [5, 6], [7]]
    stats = manager.stats()
    assert stats.bytes_by_codec == {"raw16": 3 * RAW, "int8": 7 * SMALL}
    assert stats.num_urgent_demotions == 0
    manager.release(lease)
    manager.check_invariants()


def test_memory_of_due_demotions_is_there_for_who_needs_it() -> None:
    """Room that is counted and not there yet is made in the step that needs it, and no more than that."""
    manager = make_manager(11, max_demotions=1)
    lease, chain = start(manager, range(40))
    compute(manager, lease, chain)
    assert manager.stats().num_due_demotions == 7
    other, other_chain = start(manager, range(100, 116))
    assert manager.extend(other, 16)
    ops = manager.take_memory_ops()
    # One block was free. Three more, 300 units, need all of the seven times 48 that are due; one of them is the step's.
    kinds = [op.kind for op in ops if isinstance(op, MemoryOp)]
    assert kinds.count("demote") == 7
    assert manager.stats().num_urgent_demotions == 6
    assert manager.stats().num_evictions == 0
    compute(manager, other, other_chain)
    manager.release(lease)
    manager.release(other)
    manager.check_invariants()


def test_a_demotion_that_is_due_goes_with_its_block() -> None:
    manager = make_manager(16, max_demotions=1)
    manager.prefix_cache = False
    lease, chain = start(manager, range(40))
    lease.can_publish = False
    compute(manager, lease, chain)
    first = demoted(manager)
    assert len(first) == 1
    manager.release(lease)
    assert not manager.has_due_demotions
    assert demoted(manager) == []
    assert manager.stats().free_units == 16 * RAW
    manager.check_invariants()


def test_room_for_the_next_blocks_of_all_is_made_ahead() -> None:
    """Requests that begin a block in the same step found only large cached blocks, and made room all at once."""
    manager = make_manager(20, "recent:4=raw16,rest=int8", max_demotions=1)
    for number in range(14):
        serve(manager, [number] * 4)
        manager.take_memory_ops()
    leases = [start(manager, range(100 * number, 100 * number + 8)) for number in range(1, 5)]
    for lease, chain in leases:
        compute(manager, lease, chain, 4)
    num_steps = 0
    before = manager.stats()
    assert before.free_units < 4 * RAW
    while manager.stats().free_units < 4 * RAW and num_steps < 50:
        assert len(demoted(manager)) <= 1
        num_steps += 1
    assert manager.stats().num_demotions_for_room > before.num_demotions_for_room
    for lease, chain in leases:
        compute(manager, lease, chain, 8)
    stats = manager.stats()
    assert (stats.num_urgent_demotions, stats.num_evictions) == (before.num_urgent_demotions, 0)
    for lease, _ in leases:
        manager.release(lease)
    manager.check_invariants()


def test_head_of_a_block_of_spans_is_not_copied_and_one_beside_it_is() -> None:
    budget = KVBudget(
        num_bytes=4000,
        block_bytes={"raw16": RAW, "int8": SMALL, "int4": 27},
        precision=KVPrecision.parse("sink=int8,recent:1=raw16,rest=int4"),
    )
    manager = CacheManager(budget=budget, block_size=4, hasher=BlockHasher(KEY))
    serve(manager, [*range(8), 9])
    chain = manager.new_chain(NAMESPACE, [0, 1, 2, 3, 4, 5, 77])
    found = manager.match(chain, 6)
    assert (found.num_hit_tokens, found.copy) == (4, None)
    # Of a block of rows it is, although it is not in 16 bits any more.
    head = manager.new_chain(NAMESPACE, [0, 1, 2, 77])
    assert manager.match(head, 3).num_hit_tokens == 3
    # Another one that begins so, and is not complete.
    serve(manager, [0, 1, 2, 3, 4, 5, 88])
    found = manager.match(chain, 6)
    assert found.num_hit_tokens == 6
    assert manager.is_current(found, chain)
    lease = manager.admit(found, chain, 8)
    assert lease is not None
    assert lease.num_computed_tokens == 6
    manager.release(lease)
    manager.check_invariants()


def test_a_match_is_not_current_when_its_head_became_a_part_of_a_block_of_spans() -> None:
    budget = KVBudget(
        num_bytes=4000,
        block_bytes={"raw16": RAW, "int8": SMALL, "int4": 27},
        precision=KVPrecision.parse("sink=int8,recent:1=raw16,rest=int4"),
        max_demotions=1,
    )
    manager = CacheManager(budget=budget, block_size=4, hasher=BlockHasher(KEY))
    lease, chain = start(manager, range(12))
    compute(manager, lease, chain, 8)
    other = manager.new_chain(NAMESPACE, [*range(6), 99, 98])
    found = manager.lookup(other, 7)
    assert found.num_hit_tokens == 6
    compute(
        manager, lease, chain, 9
    )  # block 1 is old from here on, whether or not its memory has followed
    assert not manager.is_current(found, other)
    admitted = manager.admit(found, other, 8)
    assert admitted is not None
    assert admitted.num_computed_tokens == 4
    assert admitted.miss is not None
    assert admitted.miss.spans[0].reason is MissReason.BELOW_BLOCK_SIZE
    manager.release(admitted)
    manager.release(lease)
    manager.check_invariants()


def test_pins_hold_as_much_memory_as_they_may_whatever_the_codec() -> None:
    manager = make_manager(10, "recent:4=raw16,rest=int8")
    manager._max_pinned_units = 4 * RAW
    lease, chain = start(manager, range(32))
    compute(manager, lease, chain)
    manager.release(lease)
    # Seven small blocks and a large one: eight times 52 would be too many.
    assert manager.pin(chain, 28) is not None
    assert manager.num_pinned == 7 > manager.max_pinned
    assert manager.num_pinned_units == 7 * SMALL
    with pytest.raises(PinBudgetExceeded, match=r"400 of 1,000 bytes, .* makes it 464; unpin"):
        manager.pin(chain, 32)
    manager.check_invariants()


def test_reset_forgets_sizes() -> None:
    manager = make_manager(6)
    for number in range(9):
        serve(manager, [number] * 8)
    manager.reset()
    manager.check_invariants()
    assert manager.num_free == manager.num_blocks
    assert manager.stats().bytes_by_codec == {"raw16": 0, "int8": 0}
