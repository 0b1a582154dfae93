from __future__ import annotations

import pytest
from tests.support.cache import compute, make_manager, serve, start

from kvist.errors import InvariantViolation


def test_release_twice_is_release_once() -> None:
    manager = make_manager(4)
    lease, chain = start(manager, range(10), reserve=12)
    compute(manager, lease, chain, 6)
    manager.release(lease)
    once = manager.stats()
    manager.release(lease)
    assert manager.stats() == once
    assert lease.is_released
    assert lease.block_table == []
    assert (once.num_held, once.num_reserved) == (0, 0)
    manager.check_invariants()


@pytest.mark.parametrize("verb", ["extend", "commit"])
def test_released_lease_is_refused(verb: str) -> None:
    manager = make_manager(4)
    lease, chain = start(manager, range(4))
    manager.release(lease)
    calls = {
        "extend": lambda: manager.extend(lease, 4),
        "commit": lambda: manager.commit(lease, chain, 4),
    }
    message = rf"{verb} needs a live lease, received PrefixLease\(released"
    with pytest.raises(InvariantViolation, match=message):
        calls[verb]()


def test_dropped_lease_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    manager = make_manager(4)
    lease, chain = start(manager, range(8))
    compute(manager, lease, chain, 4)
    held = [lease]
    del lease
    message = r"PrefixLease\(live.*dropped without CacheManager.release"
    with pytest.warns(ResourceWarning, match=message):
        held.clear()
    assert caplog.messages == ["[cache] a lease was dropped without release; its 1 blocks are lost"]
    # The blocks stay held: a running step may still use them.
    assert manager.num_held == 1
    with pytest.raises(InvariantViolation, match="has 0 holders"):
        manager.check_invariants()


def test_manager_does_not_keep_leases_alive() -> None:
    manager = make_manager(4)
    lease, _ = start(manager, range(4))
    manager.release(lease)
    assert len(manager._leases) == 0


def test_release_of_a_partly_extended_lease_keeps_what_was_computed() -> None:
    manager = make_manager(6)
    lease, chain = start(manager, range(20))
    compute(manager, lease, chain, 6)
    assert manager.extend(lease, 20)
    assert lease.block_table == [0, 1, 2, 3, 4]
    manager.release(lease)
    manager.check_invariants()
    assert (manager.num_evictable, manager.num_free) == (2, 4)
    assert serve(manager, range(20))[:1] == [0]


def test_release_before_anything_was_computed_keeps_nothing() -> None:
    manager = make_manager(6)
    lease, _ = start(manager, range(20))
    assert manager.extend(lease, 8)
    manager.release(lease)
    manager.check_invariants()
    assert manager.num_free == 6
    assert manager.stats().num_partial_blocks == 0


def test_repr_tells_no_tokens() -> None:
    manager = make_manager(6)
    lease, _ = start(manager, [123456])
    assert "123456" not in repr(lease)
    manager.release(lease)
