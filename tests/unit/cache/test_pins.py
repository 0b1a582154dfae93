"""Pins and TTLs: what is held, what goes last, what is refused, and when it ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.support.cache import NAMESPACE, compute, hit_len, make_manager, serve, start

from kvist.cache.pins import MIN_SWEEP
from kvist.errors import ConfigError, NotCached, PinBudgetExceeded, RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvist.cache.hash import TokenChain
    from kvist.cache.manager import CacheManager


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> int:
        return round(self.now_s * 1e9)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def manager(clock: Clock) -> CacheManager:
    """Ten blocks of four tokens, half of which may be pinned."""
    return make_manager(10, pin_fraction=0.5, clock_ns=clock)


def chain_of(manager: CacheManager, tokens: Sequence[int]) -> TokenChain:
    return manager.new_chain(NAMESPACE, tokens)


def sweep(manager: CacheManager, num_prompts: int = 30) -> None:
    for index in range(num_prompts):
        serve(manager, range(1000 + 10 * index, 1008 + 10 * index))


def test_times_that_end_nothing_any_more_are_forgotten(manager: CacheManager) -> None:
    """They used to stay, with the nodes of blocks evicted long ago, until their time was over."""
    for index in range(1000):
        tokens = range(1000 + 10 * index, 1008 + 10 * index)
        serve(manager, tokens)
        manager.retain(chain_of(manager, tokens), 8, 86_400.0)
        pin = manager.pin(chain_of(manager, tokens), 8, 86_400.0)
        assert pin is not None
        manager.unpin(pin)
    assert len(manager._deadlines.entries) <= 2 * MIN_SWEEP


def test_sweeping_keeps_the_times_of_what_is_there(manager: CacheManager, clock: Clock) -> None:
    serve(manager, range(8))
    manager.retain(chain_of(manager, range(8)), 8, 50.0)
    manager.retain(chain_of(manager, range(4)), 4, 99.0)
    for _ in range(3 * MIN_SWEEP):
        clock.now_s += 0.001
        manager.retain(chain_of(manager, range(4)), 4, 90.0)
    sweep(manager)
    assert hit_len(manager, range(8)) == 8
    clock.now_s = 151.0
    sweep(manager)
    assert hit_len(manager, range(8)) == 4
    clock.now_s = 200.0
    sweep(manager)
    assert hit_len(manager, range(8)) == 0


def test_a_pin_holds_whole_blocks_through_any_sweep(manager: CacheManager) -> None:
    serve(manager, range(10))
    pin = manager.pin(chain_of(manager, range(10)), 10)
    assert pin is not None
    assert (pin.num_tokens, manager.num_pinned, manager.num_held) == (8, 2, 2)
    assert repr(pin) == "Pin(live, 2 blocks, deadline_ns=None)"
    sweep(manager)
    assert manager.reset() > 0
    assert hit_len(manager, range(10)) == 8
    manager.unpin(pin)
    assert (manager.num_pinned, manager.num_held) == (0, 0)
    assert hit_len(manager, range(10)) == 8
    once = manager.stats()
    manager.unpin(pin)
    assert manager.stats() == once
    assert repr(pin) == "Pin(released, 0 blocks, deadline_ns=None)"
    manager.check_invariants()
    manager.reset()
    assert hit_len(manager, range(10)) == 0


def test_a_pin_ends_by_the_clock(manager: CacheManager, clock: Clock) -> None:
    serve(manager, range(8))
    pin = manager.pin(chain_of(manager, range(8)), 8, ttl_s=2.5)
    assert pin is not None
    clock.now_s += 2.4
    assert manager.stats().num_pinned == 2
    clock.now_s += 0.1
    assert manager.stats().num_pinned == 0
    assert pin.is_released
    assert manager.stats().num_expired_pins == 1


def test_a_pin_given_back_before_its_end_does_not_expire(
    manager: CacheManager, clock: Clock
) -> None:
    serve(manager, range(8))
    pin = manager.pin(chain_of(manager, range(8)), 8, ttl_s=1)
    assert pin is not None
    manager.unpin(pin)
    clock.now_s += 2
    assert manager.stats().num_expired_pins == 0


@pytest.mark.parametrize("verb", ["admit", "extend"])
def test_memory_of_a_pin_that_is_over_is_there_at_once(clock: Clock, verb: str) -> None:
    manager = make_manager(4, pin_fraction=0.5, clock_ns=clock)
    serve(manager, range(8))
    manager.pin(chain_of(manager, range(8)), 8, ttl_s=1)
    lease, _ = start(manager, [90], reserve=8)
    clock.now_s += 1
    if verb == "extend":
        assert manager.extend(lease, 16)
    else:
        chain = chain_of(manager, [80] * 8)
        other = manager.admit(manager.lookup(chain, 7), chain, 8)
        assert other is not None
        manager.release(other)
    manager.release(lease)


def test_a_shared_prefix_counts_once(manager: CacheManager) -> None:
    serve(manager, range(12))
    serve(manager, [*range(8), 50, 51, 52, 53])
    first = manager.pin(chain_of(manager, range(12)), 12)
    second = manager.pin(chain_of(manager, [*range(8), 50, 51, 52, 53]), 12)
    assert first is not None
    assert second is not None
    assert manager.num_pinned == 4
    manager.unpin(first)
    assert manager.num_pinned == 3
    manager.check_invariants()
    manager.unpin(second)


def test_the_budget_is_kept_and_named(manager: CacheManager) -> None:
    serve(manager, range(24))
    assert manager.max_pinned == 5
    before = manager.stats()
    message = r"pins may hold 5 of 10 blocks, received a pin that makes it 6; unpin something"
    with pytest.raises(PinBudgetExceeded, match=message) as caught:
        manager.pin(chain_of(manager, range(24)), 24)
    assert isinstance(caught.value, RequestError)
    assert caught.value.code == "pin_budget_exceeded"
    assert manager.stats() == before
    assert manager.pin(chain_of(manager, range(24)), 20) is not None
    without = make_manager(10)
    serve(without, range(8))
    with pytest.raises(PinBudgetExceeded, match="pins may hold 0 of 10 blocks"):
        without.pin(chain_of(without, range(8)), 8)


@pytest.mark.parametrize("tokens", [range(20), range(3), [9, 9, 9, 9]])
def test_only_what_is_computed_can_be_kept(manager: CacheManager, tokens: Sequence[int]) -> None:
    serve(manager, range(10))
    chain = chain_of(manager, tokens)
    before = manager.stats()
    with pytest.raises(NotCached, match=r"of \d blocks cached \(block_size=4\); compute the"):
        manager.pin(chain, chain.num_tokens)
    with pytest.raises(NotCached, match=r"of \d blocks cached \(block_size=4\); compute the"):
        manager.retain(chain, chain.num_tokens, 1)
    assert manager.stats() == before


@pytest.mark.parametrize("ttl_s", [0, -1, float("inf"), float("nan")])
def test_a_time_must_be_positive(manager: CacheManager, ttl_s: float) -> None:
    serve(manager, range(8))
    with pytest.raises(ConfigError, match=r"ttl_s must be a positive number of seconds, received"):
        manager.pin(chain_of(manager, range(8)), 8, ttl_s)
    with pytest.raises(ConfigError, match=r"ttl_s must be a positive number of seconds, received"):
        manager.retain(chain_of(manager, range(8)), 8, ttl_s)


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_the_budget_must_leave_room_for_requests(fraction: float) -> None:
    with pytest.raises(ConfigError, match=r"pin_fraction must be in \[0, 1\), received"):
        make_manager(10, pin_fraction=fraction)


def test_blocks_promised_to_running_requests_are_not_pinned(manager: CacheManager) -> None:
    serve(manager, range(8))
    lease, _ = start(manager, [70], reserve=36)
    assert manager.pin(chain_of(manager, range(8)), 8) is None
    assert manager.num_pinned == 0
    manager.release(lease)
    assert manager.pin(chain_of(manager, range(8)), 8) is not None


def test_pins_never_starve_a_footprint_that_was_accepted(manager: CacheManager) -> None:
    assert manager.can_ever_admit(20)
    assert not manager.can_ever_admit(21)
    serve(manager, range(20))
    assert manager.pin(chain_of(manager, range(20)), 20) is not None
    lease, chain = start(manager, range(500, 520))
    compute(manager, lease, chain)
    manager.release(lease)


def test_a_pinned_block_survives_the_lease_that_computed_it(manager: CacheManager) -> None:
    lease, chain = start(manager, range(8))
    compute(manager, lease, chain)
    pin = manager.pin(chain, 8)
    assert pin is not None
    manager.release(lease)
    manager.reset()
    manager.check_invariants()
    assert hit_len(manager, range(8)) == 8


# --- TTL


def test_retained_blocks_go_after_all_others(manager: CacheManager) -> None:
    serve(manager, range(8))
    assert manager.retain(chain_of(manager, range(8)), 8, ttl_s=60) == 8
    sweep(manager)
    assert hit_len(manager, range(8)) == 8
    assert manager.num_held == 0
    manager.check_invariants()


def test_live_requests_may_take_retained_blocks(manager: CacheManager) -> None:
    # The whole pool retained, more than any pin may hold, and still nobody waits.
    free = make_manager(10)
    serve(free, range(40))
    free.retain(chain_of(free, range(40)), 40, ttl_s=60)
    lease, chain = start(free, range(500, 528))
    compute(free, lease, chain)
    assert hit_len(free, range(40)) == 12
    free.release(lease)


def test_retained_blocks_stay_retained_while_they_are_used(manager: CacheManager) -> None:
    serve(manager, range(8))
    serve(manager, range(100, 108))
    manager.retain(chain_of(manager, range(8)), 8, ttl_s=60)
    manager.retain(chain_of(manager, range(100, 108)), 8, ttl_s=60)
    manager.lookup(chain_of(manager, range(8)), 8)
    serve(manager, range(100, 108))
    serve(manager, range(9))
    manager.lookup(chain_of(manager, range(100, 108)), 8)
    manager.check_invariants()
    lease, chain = start(manager, range(500, 528))
    compute(manager, lease, chain)
    # One of the four had to go: of the least recently used prefix, the deepest block.
    assert (hit_len(manager, range(8)), hit_len(manager, range(100, 108))) == (4, 8)
    manager.release(lease)


def test_a_time_that_is_over_makes_blocks_like_all_others(
    manager: CacheManager, clock: Clock
) -> None:
    serve(manager, range(8))
    manager.retain(chain_of(manager, range(8)), 8, ttl_s=5)
    clock.now_s += 5
    sweep(manager)
    assert hit_len(manager, range(8)) == 0


def test_asking_again_moves_the_end_later_and_never_earlier(
    manager: CacheManager, clock: Clock
) -> None:
    serve(manager, range(12))
    manager.retain(chain_of(manager, range(12)), 8, ttl_s=5)
    manager.retain(chain_of(manager, range(12)), 8, ttl_s=9)
    manager.retain(chain_of(manager, range(12)), 12, ttl_s=2)
    for seconds, num_retained in ((3, 2), (3, 2), (3, 0)):
        clock.now_s += seconds
        manager.stats()
        manager.check_invariants()
        (partition,) = manager._pool.partitions
        assert len(partition.retained) == num_retained


def test_ends_of_one_moment_keep_children_before_parents(
    manager: CacheManager, clock: Clock
) -> None:
    """A shorter prefix retained first used to be queued before what stands below it."""
    serve(manager, range(12))
    for num_tokens in (4, 12, 8):
        manager.retain(chain_of(manager, range(12)), num_tokens, ttl_s=5)
    clock.now_s += 5
    manager.stats()
    manager.check_invariants()


def test_retaining_what_is_held_takes_effect_when_it_is_released(manager: CacheManager) -> None:
    lease, chain = start(manager, range(8))
    compute(manager, lease, chain)
    manager.retain(chain, 8, ttl_s=60)
    manager.release(lease)
    (partition,) = manager._pool.partitions
    assert len(partition.retained) == 2
    assert manager.reset() == 2


def test_the_end_of_an_evicted_block_changes_nothing(manager: CacheManager, clock: Clock) -> None:
    serve(manager, range(8))
    manager.retain(chain_of(manager, range(8)), 8, ttl_s=5)
    manager.reset()
    serve(manager, range(8))
    clock.now_s += 5
    before = manager.match(chain_of(manager, range(8)), 8)
    manager.stats()
    assert manager.match(chain_of(manager, range(8)), 8) == before
    manager.check_invariants()
