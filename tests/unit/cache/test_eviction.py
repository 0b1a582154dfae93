"""Which blocks go, in which order, as lists of block ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.support.cache import NAMESPACE, compute, hit_len, make_manager, serve, start

if TYPE_CHECKING:
    from kvist.cache.manager import CacheManager


def lru(manager: CacheManager) -> list[int]:
    return [block.block_id for block in manager._pool.evictable]


def test_free_blocks_are_used_before_cached_ones() -> None:
    manager = make_manager(4)
    assert serve(manager, range(8)) == [0, 1]
    assert serve(manager, range(100, 108)) == [2, 3]
    assert manager.stats().num_evictions == 0


def test_block_freed_last_is_allocated_first() -> None:
    manager = make_manager(4, prefix_cache=False)
    assert serve(manager, range(12)) == [0, 1, 2]
    assert serve(manager, range(4)) == [0]


def test_evicts_tail_before_shared_prefix() -> None:
    manager = make_manager(6)
    assert serve(manager, range(12)) == [0, 1, 2]
    assert serve(manager, [*range(4), 50, 51, 52, 53]) == [0, 3]
    # 0 is shared and was used last; of the rest, the tails of older requests go first.
    assert lru(manager) == [2, 1, 3, 0]
    lease, chain = start(manager, range(200, 224))
    tables = []
    for end in range(4, 25, 4):
        compute(manager, lease, chain, end)
        tables.append(lease.block_table[-1])
    assert tables == [4, 5, 2, 1, 3, 0]
    assert manager.stats().num_evictions == 4
    manager.release(lease)


def test_lookup_makes_a_prefix_recent() -> None:
    manager = make_manager(4)
    serve(manager, range(8))
    serve(manager, range(100, 108))
    assert lru(manager) == [1, 0, 3, 2]
    chain = manager.new_chain(NAMESPACE, range(8))
    manager.match(chain, 8)
    assert lru(manager) == [1, 0, 3, 2]
    manager.lookup(chain, 8)
    assert lru(manager) == [3, 2, 1, 0]


def test_lookup_makes_the_source_of_a_copy_recent() -> None:
    manager = make_manager(4)
    serve(manager, range(6))
    serve(manager, range(100, 106))
    assert lru(manager) == [1, 0, 3, 2]
    chain = manager.new_chain(NAMESPACE, range(7))
    assert manager.lookup(chain, 6).copy == (1, 2)
    assert lru(manager) == [3, 2, 1, 0]


def test_held_blocks_are_never_evicted() -> None:
    manager = make_manager(3)
    serve(manager, range(8))
    lease, _ = start(manager, range(9))
    assert lease.block_table == [0, 1]
    chain = manager.new_chain(NAMESPACE, [77] * 4)
    assert manager.admit(manager.lookup(chain, 3), chain, 4) is None
    manager.release(lease)


def test_evicted_inner_block_becomes_evictable_leaf_by_leaf() -> None:
    manager = make_manager(3)
    serve(manager, range(12))
    remaining = []
    for token in (100, 200, 300):
        lease, chain = start(manager, [token])
        compute(manager, lease, chain)
        remaining.append(hit_len(manager, range(12)))
        manager.release(lease)
    # Each new request takes the oldest leaf; the prefix shrinks from its end.
    assert remaining == [8, 4, 0]


def test_hits_are_held_before_allocation_can_evict_them() -> None:
    manager = make_manager(3)
    serve(manager, range(8))
    serve(manager, [90])
    lease, chain = start(manager, [*range(8), 1, 2])
    # The oldest evictable blocks were the hits themselves; the other one had to go.
    compute(manager, lease, chain)
    assert lease.block_table == [0, 1, 2]
    assert lease.num_shared == 2
    manager.release(lease)


def test_reset_drops_what_nobody_holds() -> None:
    manager = make_manager(6)
    serve(manager, range(12))
    lease, chain = start(manager, [*range(4), 9, 9])
    assert manager.reset() == 2
    manager.check_invariants()
    compute(manager, lease, chain)
    assert hit_len(manager, range(12)) == 4
    manager.release(lease)
    assert hit_len(manager, [*range(4), 9, 9]) == 6
    stats = manager.stats()
    assert (stats.num_reset_blocks, stats.num_evictions) == (2, 0)
    assert manager.reset() == 2
    assert manager.num_free == 6
