"""What the strategies keep, told by hit lengths, and how the segmented one moves its border."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
from benchmarks.eviction_strategies import Arc, S3Fifo
from tests.support.cache import NAMESPACE, compute, hit_len, make_manager, serve, start

from kvist.cache.eviction import STRATEGIES, Lru, SegmentedLru, strategy_factory
from kvist.config import CacheConfig
from kvist.errors import ConfigError

if TYPE_CHECKING:
    from kvist.cache.hash import TokenChain
    from kvist.cache.manager import CacheManager


def make(num_blocks: int, strategy: object = "default") -> CacheManager:
    """Make a cache of blocks of one token, so that token and block are one."""
    return make_manager(num_blocks, 1, eviction=strategy)


def segments(manager: CacheManager) -> tuple[list[int], list[int]]:
    """Return the last tokens of the blocks in probation and in protected, next to go first."""
    (partition,) = manager._pool.partitions
    strategy = partition.strategy
    assert isinstance(strategy, SegmentedLru)
    return tuple(
        [int.from_bytes(block.node.tokens, "little") for block in segment]
        for segment in (strategy._probation, strategy._protected)
    )


def border(manager: CacheManager) -> int:
    (partition,) = manager._pool.partitions
    return partition.strategy.max_protected


def chain_of(manager: CacheManager, tokens: list[int]) -> TokenChain:
    return manager.new_chain(NAMESPACE, tokens)


def sweep(manager: CacheManager, num_prompts: int, num_blocks: int = 1) -> None:
    """Serve prompts that nobody sends again."""
    for index in range(num_prompts):
        serve(manager, range(10_000 + 100 * index, 10_000 + 100 * index + num_blocks))


def test_names_and_factories() -> None:
    assert set(STRATEGIES) == {"default", "lru"}
    assert STRATEGIES["default"] is SegmentedLru
    (eviction,) = [f for f in dataclasses.fields(CacheConfig) if f.name == "eviction"]
    assert eviction.metadata["choices"] == tuple(STRATEGIES)
    assert strategy_factory("lru") is Lru
    assert strategy_factory(Arc) is Arc
    message = r"\[cache\] unknown eviction strategy 'fifo'; known: default, lru"
    with pytest.raises(ConfigError, match=message):
        make(4, "fifo")


def test_a_sweep_pushes_out_what_was_used_once_only() -> None:
    for strategy, num_kept in (("default", 3), ("lru", 0)):
        manager = make(10, strategy)
        serve(manager, [1, 2, 3])
        serve(manager, [1, 2, 3, 4])
        sweep(manager, 30)
        assert hit_len(manager, [1, 2, 3, 4]) == num_kept


def test_blocks_hit_again_are_protected() -> None:
    manager = make(10)
    serve(manager, [1, 2, 3])
    assert segments(manager) == ([3, 2, 1], [])
    serve(manager, [1, 2, 9])
    # 3 was never hit and its chain was left for 9: it goes first.
    assert segments(manager) == ([3, 9], [2, 1])


def test_protected_gives_its_oldest_blocks_another_life_in_probation() -> None:
    manager = make(10)
    for tokens in ([1, 2, 3], [1, 2, 3, 4], [11, 12, 13], [11, 12, 13, 14]):
        serve(manager, tokens)
    assert border(manager) == 5
    # 3 is the deepest of the first prompt, so the order stays that of a tree.
    assert segments(manager) == ([4, 14, 3], [2, 1, 13, 12, 11])
    manager.check_invariants()


def test_lookup_keeps_a_block_in_its_segment() -> None:
    manager = make(10)
    for tokens in ([1, 2], [1, 2, 3], [11, 12], [21, 22], [21, 22, 23]):
        serve(manager, tokens)
    assert segments(manager) == ([3, 12, 11, 23], [2, 1, 22, 21])
    manager.lookup(chain_of(manager, [1, 2, 3]), 3)
    assert segments(manager) == ([12, 11, 23, 3], [22, 21, 2, 1])


def test_a_block_that_comes_back_soon_is_no_one_off() -> None:
    manager = make(10)
    serve(manager, [1, 2])
    sweep(manager, 10)
    assert hit_len(manager, [1, 2]) == 0
    assert border(manager) == 5
    serve(manager, [1, 2])
    assert segments(manager)[1] == [2, 1]
    # Each of the two says that probation is too short; 4 is the least that protected may have.
    assert border(manager) == 4


def test_ghosts_of_hit_blocks_give_protected_more() -> None:
    manager = make(10)
    serve(manager, [1, 2])
    serve(manager, [1, 2, 3])
    # A request that needs everything pushes out protected blocks too.
    serve(manager, range(100, 110))
    assert hit_len(manager, [1, 2]) == 0
    serve(manager, [1, 2])
    assert border(manager) == 7
    assert segments(manager)[1] == [2, 1]
    for _ in range(4):
        serve(manager, range(100, 110))
        serve(manager, [1, 2])
    assert border(manager) == 9


def test_ghosts_are_bounded() -> None:
    manager = make(4)
    (partition,) = manager._pool.partitions
    sweep(manager, 100)
    assert partition.strategy.num_ghosts == 4
    for turn in range(0, 90, 3):
        serve(manager, range(turn, turn + 3))
        serve(manager, range(turn, turn + 3))
        assert partition.strategy.num_ghosts <= 8
    assert len(partition.strategy._ghosts_hit) == 4


def test_a_parent_without_ghost_does_not_go_before_its_child() -> None:
    manager = make(6)
    serve(manager, [1, 2, 3])
    (partition,) = manager._pool.partitions
    sweep(manager, 6)
    # The ghosts of 1 and 2 are lost, that of 3 is not.
    for ghost in list(partition.strategy._ghosts_new)[1:3]:
        del partition.strategy._ghosts_new[ghost]
    serve(manager, [1, 2, 3])
    assert 3 not in segments(manager)[0] or segments(manager)[0][-1] == 3
    manager.check_invariants()


def test_the_third_turn_of_a_chat_is_protected_at_once() -> None:
    manager = make(20)
    serve(manager, [1, 2])
    serve(manager, [1, 2, 3])
    assert 3 in segments(manager)[0]
    serve(manager, [1, 2, 3, 4])
    assert 4 in segments(manager)[1]
    sweep(manager, 50)
    assert hit_len(manager, [1, 2, 3, 4, 5]) == 4


def test_prompts_that_share_a_prefix_do_not_continue_each_other() -> None:
    manager = make(20)
    for tail in range(100, 110):
        serve(manager, [1, 2, tail])
    assert segments(manager)[1] == [2, 1]


def test_a_branch_is_not_abandoned_below_a_prefix_that_many_share() -> None:
    manager = make(20)
    for tail in (100, 101, 102):
        serve(manager, [1, tail])
    # 100 was left for 101, which looks like an edit; 101 was not left for 102.
    assert segments(manager)[0] == [100, 101, 102]
    serve(manager, [1, 101, 5])
    serve(manager, [1, 101, 6])
    assert segments(manager)[0][:2] == [5, 100]


def test_a_chain_that_is_held_hit_or_retained_is_not_abandoned() -> None:
    manager = make(20)
    lease, chain = start(manager, [1, 2])
    compute(manager, lease, chain)
    serve(manager, [1, 3])
    manager.release(lease)
    assert segments(manager) == ([3, 2], [1])
    manager = make(20)
    serve(manager, [1, 2, 3])
    serve(manager, [1, 2, 4])
    serve(manager, [1, 5])
    assert segments(manager) == ([3, 4, 5], [2, 1])
    manager = make(20)
    serve(manager, [1, 2])
    manager.retain(chain_of(manager, [1, 2]), 2, 60)
    serve(manager, [1, 3])
    assert segments(manager) == ([3], [])
    manager.check_invariants()


def test_a_chain_with_branches_is_not_abandoned() -> None:
    manager = make(20)
    first, first_chain = start(manager, [1, 2, 3])
    second, second_chain = start(manager, [1, 2, 4])
    compute(manager, first, first_chain)
    compute(manager, second, second_chain)
    manager.release(first)
    manager.release(second)
    serve(manager, [1, 7])
    assert segments(manager) == ([3, 4, 2, 7], [1])


def test_lru_and_the_compared_ones_ignore_abandoned_chains() -> None:
    for strategy in (Lru, S3Fifo, Arc):
        manager = make(20, strategy)
        serve(manager, [1, 2])
        serve(manager, [5])
        serve(manager, [1, 3])
        order = [int.from_bytes(b.node.tokens, "little") for b in manager._pool.evictable]
        assert order[:2] == [2, 5]


def test_partial_blocks_leave_no_ghost() -> None:
    manager = make_manager(2, 4)
    serve(manager, [1, 2])
    serve(manager, [3] * 8)
    (partition,) = manager._pool.partitions
    assert partition.strategy.num_ghosts == 0
    assert manager.stats().num_evictions == 1
