"""Shares of tenants: borrowed while nobody needs them, given back first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.support.cache import compute, hit_len, make_manager, serve, start

from kvist.cache.namespaces import Namespace
from kvist.errors import ConfigError

if TYPE_CHECKING:
    from kvist.cache.manager import CacheManager

A, B, C, D = (Namespace(model="m", tenant=tenant) for tenant in "abcd")


def make(**shares: float) -> CacheManager:
    """Make a cache of ten blocks of one token."""
    return make_manager(10, 1, shares=shares)


def num_cached(manager: CacheManager, namespace: Namespace, start: int, num_prompts: int) -> int:
    return sum(
        hit_len(manager, [token], namespace=namespace)
        for token in range(start, start + num_prompts)
    )


def fill(manager: CacheManager, namespace: Namespace, start: int, num_prompts: int) -> None:
    for token in range(start, start + num_prompts):
        serve(manager, [token], namespace=namespace)


def test_unused_shares_are_borrowed() -> None:
    manager = make(a=0.3, b=0.7)
    fill(manager, A, 0, 10)
    assert num_cached(manager, A, 0, 10) == 10


def test_who_is_over_its_share_is_evicted_from_first() -> None:
    manager = make(a=0.3, b=0.7)
    fill(manager, A, 0, 10)
    fill(manager, B, 0, 7)
    # A's oldest blocks made room although B's were older than nothing of A.
    assert (num_cached(manager, A, 0, 10), num_cached(manager, B, 0, 7)) == (3, 7)
    fill(manager, B, 100, 5)
    # Nobody is over; B's next block makes it so, and from then on B pays for itself.
    assert num_cached(manager, A, 0, 10) >= 2
    assert num_cached(manager, B, 0, 7) + num_cached(manager, B, 100, 5) <= 8
    manager.check_invariants()


def test_a_sweep_of_one_tenant_leaves_the_others_their_shares() -> None:
    manager = make(a=0.4, b=0.4)
    fill(manager, A, 0, 4)
    fill(manager, B, 0, 200)
    assert num_cached(manager, A, 0, 4) == 4


def test_tenants_without_a_share_have_what_is_left_together() -> None:
    manager = make(a=0.8)
    fill(manager, C, 0, 5)
    fill(manager, D, 0, 5)
    fill(manager, A, 0, 8)
    assert num_cached(manager, A, 0, 8) == 8
    assert num_cached(manager, C, 0, 5) + num_cached(manager, D, 0, 5) == 2


def test_tenants_over_their_share_take_turns() -> None:
    manager = make(a=0.2, b=0.2, c=0.6)
    fill(manager, A, 0, 5)
    fill(manager, B, 0, 5)
    fill(manager, C, 0, 4)
    assert (num_cached(manager, A, 0, 5), num_cached(manager, B, 0, 5)) == (3, 3)


def test_held_blocks_count_in_the_share() -> None:
    manager = make(a=0.5, b=0.5)
    lease, chain = start(manager, range(5), namespace=A)
    compute(manager, lease, chain)
    fill(manager, A, 100, 1)
    fill(manager, B, 0, 4)
    fill(manager, B, 50, 1)
    # A held five and had one more: that one went, not one of B's.
    assert num_cached(manager, A, 100, 1) == 0
    assert num_cached(manager, B, 0, 4) + num_cached(manager, B, 50, 1) == 5
    manager.release(lease)
    manager.check_invariants()


def test_live_requests_come_before_cached_blocks_of_anybody() -> None:
    manager = make(a=0.5, b=0.5)
    fill(manager, B, 0, 5)
    lease, chain = start(manager, range(10), namespace=A)
    compute(manager, lease, chain)
    assert num_cached(manager, B, 0, 5) == 0
    manager.release(lease)
    manager.check_invariants()


def test_retained_blocks_of_who_is_over_go_before_what_others_have() -> None:
    manager = make(a=0.3, b=0.7)
    serve(manager, range(10), namespace=A)
    manager.retain(manager.new_chain(A, range(10)), 10, ttl_s=60)
    fill(manager, B, 0, 7)
    assert hit_len(manager, range(10), namespace=A) == 3
    assert num_cached(manager, B, 0, 7) == 7
    manager.check_invariants()


@pytest.mark.parametrize(
    "shares", [{"a": 0.0}, {"a": -0.1}, {"a": 0.6, "b": 0.5}, {"a": float("nan")}]
)
def test_refuses_shares_that_cannot_be(shares: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="shares must be above 0 and 1 at most in all, received"):
        make(**shares)


def test_shares_written_in_decimal_may_fill_the_pool() -> None:
    manager = make(a=0.1, b=0.1, c=0.1, d=0.7)
    fill(manager, D, 0, 12)
    manager.check_invariants()
