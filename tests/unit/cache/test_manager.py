from __future__ import annotations

import pytest
from tests.support.cache import KEY, NAMESPACE, compute, hit_len, make_manager, serve, start

from kvist.cache.hash import BlockHasher
from kvist.cache.manager import CacheManager
from kvist.cache.namespaces import Namespace
from kvist.errors import ConfigError, InvariantViolation
from kvist.types import BlockCopy, BlockHash

# --- matching


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 7, 8, 9, 12])
def test_same_prompt_hits_all_but_the_last_token(num_tokens: int) -> None:
    manager = make_manager(8)
    serve(manager, range(num_tokens))
    lease, _ = start(manager, range(num_tokens))
    assert lease.num_computed_tokens == num_tokens - 1
    assert lease.num_shared == (num_tokens - 1) // 4
    num_copied = (num_tokens - 1) % 4
    if num_copied:
        assert lease.pending_copy is not None
        assert lease.pending_copy.num_tokens == num_copied
        assert lease.pending_copy.target == lease.block_table[-1]
    else:
        assert lease.pending_copy is None
    manager.release(lease)


@pytest.mark.parametrize("max_hit_len", range(-1, 14))
def test_limit_inside_a_full_block_makes_it_a_partial_copy(max_hit_len: int) -> None:
    manager = make_manager(8)
    table = serve(manager, range(12))
    match = manager.match(manager.new_chain(NAMESPACE, range(12)), max_hit_len)
    hit = min(max(max_hit_len, 0), 12)
    assert match.num_hit_tokens == hit
    assert list(match.block_ids) == table[: hit // 4]
    assert match.copy == ((table[hit // 4], hit % 4) if hit % 4 else None)
    assert not match.pending


def test_nothing_is_shared_across_namespaces() -> None:
    manager = make_manager(8)
    serve(manager, range(8))
    for field in ("adapter", "tenant", "layout"):
        assert hit_len(manager, range(8), namespace=Namespace(model="m", **{field: "x"})) == 0
    assert hit_len(manager, range(8), namespace=Namespace(model="x")) == 0
    assert hit_len(manager, range(8), namespace=Namespace(model="m")) == 8


def test_equal_block_after_another_prefix_is_no_hit() -> None:
    manager = make_manager(8)
    serve(manager, [1, 1, 1, 1, 5, 6, 7, 8])
    assert hit_len(manager, [2, 2, 2, 2, 5, 6, 7, 8]) == 0
    assert hit_len(manager, [5, 6, 7, 8]) == 0


def test_prefix_cache_off_publishes_and_finds_nothing() -> None:
    manager = make_manager(4, prefix_cache=False)
    lease, chain = start(manager, range(8))
    compute(manager, lease, chain)
    assert not manager.match(chain, 7).pending
    assert hit_len(manager, range(8)) == 0
    manager.release(lease)
    assert (manager.num_free, manager.num_evictable) == (4, 0)
    assert manager.stats().prefix_hit_fraction == 0.0


# --- partial blocks


def test_next_turn_continues_the_head_left_behind() -> None:
    manager = make_manager(8)
    assert serve(manager, range(6)) == [0, 1]
    lease, chain = start(manager, range(11))
    assert lease.pending_copy == BlockCopy(source=1, target=2, num_tokens=2)
    assert lease.num_computed_tokens == 6
    compute(manager, lease, chain, 7)
    # The longer head serves whoever the old one served, so its block is free again.
    assert lease.pending_copy is None
    assert manager.num_free == 6
    assert manager.stats().num_superseded_blocks == 1
    manager.release(lease)


def test_partial_block_is_superseded_by_a_longer_one() -> None:
    manager = make_manager(8)
    serve(manager, range(5))
    serve(manager, range(7))
    assert (manager.num_evictable, manager.num_free) == (2, 6)
    serve(manager, range(8))
    assert (manager.num_evictable, manager.num_free) == (2, 6)
    assert manager.stats().num_superseded_blocks == 2


@pytest.mark.parametrize("num_computed_tokens", [3, 4])
def test_head_left_behind_is_superseded_by_a_lease_that_did_not_copy_it(
    num_computed_tokens: int,
) -> None:
    manager = make_manager(8)
    lease, chain = start(manager, range(4))
    serve(manager, range(3))
    assert (manager.num_evictable, manager.num_free) == (1, 7)
    compute(manager, lease, chain, num_computed_tokens)
    assert (manager.num_evictable, manager.num_free) == (0, 7)
    assert manager.stats().num_superseded_blocks == 1
    manager.release(lease)
    assert hit_len(manager, range(4)) == num_computed_tokens


def test_head_that_a_sibling_begins_with_is_not_kept() -> None:
    manager = make_manager(8)
    serve(manager, range(8))
    lease, chain = start(manager, range(6))
    compute(manager, lease, chain)
    manager.release(lease)
    assert (manager.num_evictable, manager.num_free) == (2, 6)


def test_heads_that_diverge_are_both_kept() -> None:
    manager = make_manager(8)
    serve(manager, [1, 2, 3])
    serve(manager, [1, 2, 4])
    assert hit_len(manager, [1, 2, 3]) == hit_len(manager, [1, 2, 4]) == 3


def test_source_of_a_copy_stays_until_it_has_run() -> None:
    manager = make_manager(3)
    serve(manager, range(3))
    lease, chain = start(manager, [0, 1, 9], reserve=4)
    assert lease.pending_copy == BlockCopy(source=0, target=1, num_tokens=2)
    other, _ = start(manager, [50], reserve=4)
    assert manager.extend(other, 4)
    assert other.block_table == [2]
    assert not manager.extend(other, 8)
    assert manager.reset() == 0
    compute(manager, lease, chain)
    assert manager.extend(other, 8)
    assert other.block_table == [2, 0]
    manager.release(lease)
    manager.release(other)


def test_copy_that_never_ran_is_not_kept() -> None:
    """An abort before the first step: the target holds nothing of what the lease counts as computed."""
    manager = make_manager(4)
    serve(manager, range(7))
    lease, _ = start(manager, [*range(6), 9, 9])
    assert lease.num_computed_tokens == 6
    manager.release(lease)
    manager.check_invariants()
    assert hit_len(manager, [*range(6), 9, 9]) == 6
    assert (manager.num_evictable, manager.num_free) == (2, 2)


def test_open_block_of_a_live_lease_is_copied_as_far_as_computed() -> None:
    manager = make_manager(8)
    lease, chain = start(manager, range(8))
    compute(manager, lease, chain, 3)
    assert hit_len(manager, range(8)) == 3
    compute(manager, lease, chain, 6)
    fork, fork_chain = start(manager, [*range(7), 9])
    assert fork.block_table[0] == lease.block_table[0]
    assert fork.pending_copy == BlockCopy(source=1, target=2, num_tokens=2)
    # The source may go on, fill up and be given back before the copy has run.
    compute(manager, lease, chain)
    manager.release(lease)
    assert manager.num_held == 3
    compute(manager, fork, fork_chain)
    manager.release(fork)
    assert manager.num_evictable == 3


def test_copy_is_dropped_when_its_source_is_needed_for_the_footprint() -> None:
    manager = make_manager(2)
    serve(manager, range(7))
    chain = manager.new_chain(NAMESPACE, [*range(6), 9])
    match = manager.lookup(chain, 6)
    assert match.copy == (1, 2)
    lease = manager.admit(match, chain, 8)
    assert lease is not None
    assert lease.pending_copy is None
    assert lease.num_computed_tokens == 4
    compute(manager, lease, chain)
    assert lease.block_table == [0, 1]
    manager.release(lease)
    stats = manager.stats()
    assert stats.num_partial_copies == 0
    assert stats.num_hit_tokens == 4


def test_copy_out_of_a_held_block_costs_nothing() -> None:
    manager = make_manager(3)
    lease, chain = start(manager, range(7))
    compute(manager, lease, chain)
    fork, _ = start(manager, [*range(6), 9])
    assert fork.pending_copy == BlockCopy(source=1, target=2, num_tokens=2)
    assert manager.num_available == 0
    manager.release(lease)
    manager.release(fork)


# --- reservations


def test_footprint_is_promised_and_allocated_when_needed() -> None:
    manager = make_manager(8)
    lease, _ = start(manager, range(5), reserve=18)
    assert (manager.num_reserved, manager.num_held, manager.num_available) == (5, 0, 3)
    assert manager.extend(lease, 5)
    assert (manager.num_reserved, manager.num_held, manager.num_available) == (3, 2, 3)
    assert manager.extend(lease, 3)
    assert lease.block_table == [0, 1]
    assert manager.extend(lease, 18)
    assert (manager.num_reserved, manager.num_held) == (0, 5)
    manager.release(lease)
    assert manager.num_available == 8


def test_admission_counts_what_others_were_promised() -> None:
    manager = make_manager(8)
    lease, _ = start(manager, range(5), reserve=24)
    chain = manager.new_chain(NAMESPACE, [9] * 9)
    match = manager.lookup(chain, 8)
    before = manager.stats()
    assert manager.admit(match, chain, 12) is None
    assert manager.stats() == before
    other = manager.admit(match, chain, 8)
    assert other is not None
    manager.release(lease)
    manager.release(other)


def test_hit_on_an_evictable_block_takes_from_what_is_available() -> None:
    manager = make_manager(4)
    serve(manager, range(8))
    lease, _ = start(manager, [50], reserve=8)
    chain = manager.new_chain(NAMESPACE, range(9))
    match = manager.lookup(chain, 8)
    assert len(match.block_ids) == 2
    # Two hits and one more block; two blocks are available, and both are the hits themselves.
    assert manager.num_available == 2
    assert manager.admit(match, chain, 9) is None
    manager.release(lease)
    lease = manager.admit(match, chain, 9)
    assert lease is not None
    assert manager.num_available == 1
    manager.release(lease)


def test_hit_on_a_held_block_takes_nothing() -> None:
    manager = make_manager(3)
    lease, chain = start(manager, range(9))
    compute(manager, lease, chain, 8)
    assert manager.num_available == 0
    assert manager.extend(lease, 9)
    other_chain = manager.new_chain(NAMESPACE, range(8))
    other = manager.admit(manager.lookup(other_chain, 8), other_chain, 8)
    assert other is not None
    assert other.block_table == [0, 1]
    manager.release(lease)
    manager.release(other)


def test_growth_beyond_the_footprint_needs_unpromised_blocks() -> None:
    manager = make_manager(5)
    lease, _ = start(manager, range(4), reserve=4)
    other, _ = start(manager, [9], reserve=12)
    assert manager.extend(lease, 8)
    before = manager.stats()
    assert not manager.extend(lease, 12)
    assert manager.stats() == before
    assert lease.block_table == [0, 1]
    assert manager.extend(other, 12)
    manager.release(other)
    assert manager.extend(lease, 20)
    manager.release(lease)


def test_footprint_smaller_than_the_hits_promises_nothing() -> None:
    manager = make_manager(4)
    serve(manager, range(12))
    chain = manager.new_chain(NAMESPACE, range(12))
    lease = manager.admit(manager.lookup(chain, 12), chain, 1)
    assert lease is not None
    assert len(lease.block_table) == 3
    assert manager.num_reserved == 0
    manager.release(lease)


def test_sizes() -> None:
    manager = make_manager(3)
    assert manager.num_blocks == 3
    assert [manager.num_blocks_for(n) for n in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]
    assert manager.can_ever_admit(12)
    assert not manager.can_ever_admit(13)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0), (-1, 4)])
def test_refuses_impossible_sizes(num_blocks: int, block_size: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"num_blocks={num_blocks}, block_size={block_size}.*--memory-gib"
    ):
        make_manager(num_blocks, block_size)


def test_match_that_lost_blocks_is_looked_up_again() -> None:
    manager = make_manager(4)
    serve(manager, range(8))
    chain = manager.new_chain(NAMESPACE, range(9))
    match = manager.lookup(chain, 8)
    manager.reset()
    lease = manager.admit(match, chain, 9)
    assert lease is not None
    assert (lease.num_shared, lease.num_computed_tokens) == (0, 0)
    manager.release(lease)


# --- commit


def test_nothing_is_found_before_it_is_computed() -> None:
    manager = make_manager(4)
    lease, chain = start(manager, range(8))
    assert manager.extend(lease, 8)
    assert hit_len(manager, range(8)) == 0
    manager.commit(lease, chain, 4)
    assert hit_len(manager, range(8)) == 4
    manager.release(lease)


def test_commit_of_less_than_before_changes_nothing() -> None:
    manager = make_manager(4)
    lease, chain = start(manager, range(8))
    compute(manager, lease, chain, 7)
    before = manager.stats()
    manager.commit(lease, chain, 2)
    assert lease.num_computed_tokens == 7
    assert manager.stats() == before
    manager.release(lease)


@pytest.mark.parametrize("num_computed_tokens", [5, 9])
def test_commit_beyond_blocks_or_tokens_is_refused(num_computed_tokens: int) -> None:
    manager = make_manager(4)
    lease, chain = start(manager, range(8))
    assert manager.extend(lease, 4 if num_computed_tokens == 5 else 12)
    with pytest.raises(
        InvariantViolation, match=rf"num_computed_tokens={num_computed_tokens} exceeds"
    ):
        manager.commit(lease, chain, num_computed_tokens)
    manager.release(lease)


def test_output_tokens_are_published_too() -> None:
    manager = make_manager(4)
    lease, chain = start(manager, range(3), reserve=8)
    compute(manager, lease, chain)
    for token_id in (3, 4, 5):
        chain.append(token_id)
        compute(manager, lease, chain)
    manager.release(lease)
    assert hit_len(manager, range(6)) == 6


# --- duplicates


def start_twins(manager: CacheManager, tokens: range):
    """Admit two equal requests before either has computed anything."""
    return start(manager, tokens), start(manager, tokens)


def test_duplicate_block_takes_over_when_the_published_one_goes() -> None:
    manager = make_manager(6)
    (first, first_chain), (second, second_chain) = start_twins(manager, range(12))
    compute(manager, first, first_chain, 4)
    compute(manager, second, second_chain, 12)
    assert manager.stats().num_duplicate_blocks == 1
    assert hit_len(manager, range(12)) == 12
    published, own = first.block_table[0], second.block_table[0]
    chain = manager.new_chain(NAMESPACE, range(12))
    assert manager.match(chain, 4).block_ids == (published,)
    manager.release(first)
    manager.check_invariants()
    # Nothing is evictable: the second lease holds the whole path, with its own block for the first node.
    assert (manager.num_evictable, manager.num_held, manager.num_free) == (0, 3, 3)
    assert manager.match(chain, 4).block_ids == (own,)
    manager.release(second)
    assert manager.num_evictable == 3


def test_block_is_handed_on_along_all_duplicates() -> None:
    manager = make_manager(6)
    leases = [start(manager, range(8)) for _ in range(3)]
    for lease, chain in leases:
        compute(manager, lease, chain, 8)
    chain = manager.new_chain(NAMESPACE, range(8))
    for place, (lease, _) in enumerate(leases):
        assert list(manager.match(chain, 8).block_ids) == lease.block_table
        assert manager.num_held == 6 - 2 * place
        manager.release(lease)
        manager.check_invariants()
    assert (manager.num_evictable, manager.num_free) == (2, 4)


def test_duplicate_that_is_released_first_is_forgotten() -> None:
    manager = make_manager(6)
    (first, first_chain), (second, second_chain) = start_twins(manager, range(8))
    compute(manager, first, first_chain)
    compute(manager, second, second_chain)
    manager.release(second)
    manager.check_invariants()
    assert (manager.num_held, manager.num_free) == (2, 4)
    manager.release(first)
    assert manager.num_evictable == 2


def test_duplicate_replaces_a_block_that_nobody_holds() -> None:
    manager = make_manager(6)
    (first, first_chain), (second, second_chain) = start_twins(manager, range(8))
    compute(manager, first, first_chain)
    manager.release(first)
    assert manager.num_evictable == 2
    compute(manager, second, second_chain)
    # One block per content: those of the first are free, not cached below a path that is held.
    assert (manager.num_evictable, manager.num_held, manager.num_free) == (0, 2, 4)
    manager.release(second)


def test_many_duplicates_cannot_starve_the_last_lease() -> None:
    """Holding published twins as well would keep half the pool from the only lease left."""
    manager = make_manager(4)
    (first, first_chain), (second, second_chain) = start_twins(manager, range(8))
    compute(manager, first, first_chain)
    compute(manager, second, second_chain)
    manager.release(first)
    assert manager.extend(second, 16)
    manager.release(second)


def test_duplicate_may_be_the_source_of_a_copy_when_its_lease_goes() -> None:
    manager = make_manager(8)
    first, first_chain = start(manager, range(4))
    second, second_chain = start(manager, range(4))
    compute(manager, second, second_chain, 3)
    fork, fork_chain = start(manager, [0, 1, 2, 9])
    assert fork.pending_copy == BlockCopy(source=second.block_table[0], target=1, num_tokens=3)
    compute(manager, first, first_chain)
    compute(manager, second, second_chain)
    assert manager.stats().num_duplicate_blocks == 1
    manager.release(second)
    manager.check_invariants()
    assert manager.num_held == 3
    compute(manager, fork, fork_chain)
    assert manager.num_held == 2
    manager.release(first)
    manager.release(fork)


# --- collisions


class EqualHasher(BlockHasher):
    """Gives every block the same identity."""

    def child(self, parent: BlockHash, tokens: bytes) -> BlockHash:
        return BlockHash(bytes(32))


def make_colliding_manager() -> CacheManager:
    return CacheManager(num_blocks=8, block_size=4, hasher=EqualHasher(KEY))


def test_equal_identity_with_other_tokens_is_a_counted_miss() -> None:
    manager = make_colliding_manager()
    serve(manager, range(8))
    chain = manager.new_chain(NAMESPACE, [9] * 8)
    match = manager.lookup(chain, 8)
    assert (match.block_ids, match.copy, match.num_hit_tokens) == ((), None, 0)
    assert match.num_verification_failures == 1
    assert manager.stats().num_verification_failures == 1
    assert manager.match(manager.new_chain(NAMESPACE, range(8)), 8).num_hit_tokens == 8


def test_colliding_block_is_not_published_nor_anything_after_it() -> None:
    manager = make_colliding_manager()
    serve(manager, range(8))
    lease, chain = start(manager, [9] * 12)
    compute(manager, lease, chain, 3)
    compute(manager, lease, chain, 10)
    assert manager.stats().num_verification_failures == 2
    assert not manager.match(manager.new_chain(NAMESPACE, [9] * 12), 12).pending
    compute(manager, lease, chain, 12)
    manager.release(lease)
    manager.check_invariants()
    assert hit_len(manager, [9] * 12) == 0
    assert hit_len(manager, range(8)) == 8
    assert manager.num_free == 6


def test_tokens_in_common_with_a_colliding_block_are_copied() -> None:
    """The copy compares tokens, not identities."""
    manager = make_colliding_manager()
    serve(manager, range(4))
    assert hit_len(manager, [0, 1, 9, 9]) == 2


# --- same-step sharing


def test_next_block_in_flight_is_pending() -> None:
    manager = make_manager(12)
    lease, chain = start(manager, range(10))
    other = manager.new_chain(NAMESPACE, [*range(8), 50, 51])
    assert manager.match(other, 9).pending
    compute(manager, lease, chain, 4)
    assert manager.match(other, 9).pending
    compute(manager, lease, chain, 8)
    match = manager.match(other, 9)
    assert (match.pending, match.num_hit_tokens) == (False, 8)
    manager.release(lease)


def test_identical_tail_in_flight_is_pending() -> None:
    manager = make_manager(12)
    lease, chain = start(manager, range(6))
    twin = manager.new_chain(NAMESPACE, range(6))
    assert manager.match(twin, 5).pending
    compute(manager, lease, chain, 4)
    assert manager.match(twin, 5).pending
    other_tail = manager.new_chain(NAMESPACE, [0, 1, 2, 3, 4, 9])
    assert not manager.match(other_tail, 5).pending
    compute(manager, lease, chain)
    match = manager.match(twin, 5)
    assert (match.pending, match.num_hit_tokens) == (False, 5)
    manager.release(lease)


def test_prompt_of_whole_blocks_waits_for_its_twin_too() -> None:
    manager = make_manager(12)
    lease, chain = start(manager, range(8))
    twin = manager.new_chain(NAMESPACE, range(8))
    compute(manager, lease, chain, 4)
    assert manager.match(twin, 7).pending
    compute(manager, lease, chain)
    match = manager.match(twin, 7)
    assert (match.pending, match.copy) == (False, (1, 3))
    manager.release(lease)


def test_nothing_to_gain_is_not_pending() -> None:
    manager = make_manager(12)
    lease, chain = start(manager, range(8))
    compute(manager, lease, chain, 7)
    match = manager.match(manager.new_chain(NAMESPACE, range(8)), 7)
    assert (match.pending, match.num_hit_tokens) == (False, 7)
    manager.release(lease)


def test_tail_that_was_hit_whole_is_not_in_flight() -> None:
    manager = make_manager(12)
    serve(manager, range(6))
    chain = manager.new_chain(NAMESPACE, range(6))
    lease = manager.admit(manager.lookup(chain, 6), chain, 8)
    assert lease is not None
    assert (lease.num_computed_tokens, len(lease.pending)) == (6, 0)
    manager.check_invariants()
    manager.release(lease)


def test_release_ends_what_was_pending() -> None:
    manager = make_manager(12)
    first, _ = start(manager, range(8))
    second, _ = start(manager, range(8))
    chain = manager.new_chain(NAMESPACE, range(8))
    manager.release(first)
    assert manager.match(chain, 7).pending
    manager.release(second)
    assert not manager.match(chain, 7).pending


def test_other_namespace_does_not_wait() -> None:
    manager = make_manager(12)
    lease, _ = start(manager, range(8))
    chain = manager.new_chain(Namespace(model="m", tenant="x"), range(8))
    assert not manager.match(chain, 7).pending
    manager.release(lease)


# --- statistics


def test_statistics_weigh_tokens_and_count_admissions_once() -> None:
    manager = make_manager(8)
    serve(manager, range(10))
    chain = manager.new_chain(NAMESPACE, [*range(9), 50])
    for _ in range(3):
        match = manager.lookup(chain, 9)
    lease = manager.admit(match, chain, 10)
    assert lease is not None
    manager.release(lease)
    stats = manager.stats()
    assert stats.num_admissions == 2
    assert (stats.num_lookup_tokens, stats.num_hit_tokens, stats.num_copied_tokens) == (20, 9, 1)
    assert stats.num_partial_copies == 1
    assert stats.prefix_hit_fraction == 0.45
    assert (stats.num_published_blocks, stats.num_partial_blocks) == (2, 1)
    assert (stats.num_blocks, stats.block_size) == (8, 4)
    assert stats.num_free + stats.num_evictable + stats.num_held == stats.num_blocks


def test_hit_fraction_of_an_unused_cache_is_zero() -> None:
    assert make_manager(1).stats().prefix_hit_fraction == 0.0
