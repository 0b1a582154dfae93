"""What leases are promised when their blocks get smaller with age: enough, and not all of it in the largest codec."""

from __future__ import annotations

from tests.support.cache import KEY, NAMESPACE, compute, start

from kvist.cache.hash import BlockHasher
from kvist.cache.manager import CacheManager
from kvist.precision import KVBudget, KVPrecision

SIZES = {"raw16": 100, "int8": 52, "int4": 27}
RULE = "sink=int8,recent:8=raw16,rest=int4"


def make_manager(num_units: int, rule: str = RULE, max_chunk: int = 4) -> CacheManager:
    """Return a cache of blocks of 4 tokens."""
    budget = KVBudget(
        num_bytes=num_units,
        block_bytes=SIZES,
        precision=KVPrecision.parse(rule),
        max_chunk=max_chunk,
    )
    return CacheManager(budget=budget, block_size=4, hasher=BlockHasher(KEY))


def grow(manager: CacheManager, lease, chain, num_tokens: int) -> None:
    """Compute a sequence to so many tokens in steps of 4, which must always find memory."""
    for begin in range(lease.num_computed_tokens, num_tokens, 4):
        end = min(begin + 4, num_tokens)
        for token in range(chain.num_tokens, end):
            chain.append(token)
        assert manager.extend(lease, end)
        manager.commit(lease, chain, end)
        manager.check_invariants()


def test_requests_run_beside_each_other_that_would_not_all_fit_as_they_are_written() -> None:
    manager = make_manager(2000)
    leases = []
    for number in range(100):
        chain = manager.new_chain(NAMESPACE, range(1000 * number, 1000 * number + 4))
        lease = manager.admit(manager.lookup(chain, 3), chain, 40)
        if lease is None:
            break
        leases.append((lease, chain))
    # 10 blocks each: 1,000 units as they are written; 4 of them raw at most, 5 old ones and the first.
    assert len(leases) == 2000 // (4 * 100 + 5 * 27 + 52)
    for lease, chain in leases:
        grow(manager, lease, chain, 40)
    for lease, _ in leases:
        manager.release(lease)
    manager.check_invariants()


def test_whoever_keeps_a_block_of_another_large_pays_for_it() -> None:
    """A block counted on becoming smaller, and a second lease kept it as it was: the first one ran out of memory."""
    outcomes = set()
    for num_units in range(560, 900, 3):
        manager = make_manager(num_units)
        chain = manager.new_chain(NAMESPACE, range(16))
        lease = manager.admit(manager.lookup(chain, 15), chain, 40)
        if lease is None:
            continue
        grow(manager, lease, chain, 16)
        # Hits 3 blocks, of which the last one stays young to it for ever.
        other_chain = manager.new_chain(NAMESPACE, [*range(12), 99])
        other = manager.admit(manager.lookup(other_chain, 12), other_chain, 13)
        manager.check_invariants()
        outcomes.add(other is not None)
        if other is not None:
            grow(manager, other, other_chain, 13)
        grow(manager, lease, chain, 40)
        manager.release(lease)
        manager.check_invariants()
        if other is not None:
            manager.release(other)
    assert outcomes == {True, False}


def test_a_block_is_nobodys_own_while_two_have_it_and_the_others_keep_their_promises() -> None:
    manager = make_manager(3000)
    first, first_chain = start(manager, range(16))
    compute(manager, first, first_chain)
    second, second_chain = start(manager, [*range(16), *range(50, 60)])
    owned = [block.owner is first.ref for block in first.blocks]
    assert owned == [False] * 4
    compute(manager, second, second_chain)
    manager.check_invariants()
    manager.release(first)
    manager.check_invariants()
    manager.release(second)
    manager.check_invariants()
    assert all(block.owner is None and block.num_leases == 0 for block in manager._pool.blocks)


def test_hits_are_counted_as_they_will_be_read() -> None:
    """Cached blocks that are large and old to the one that hits them become smaller as it is admitted."""
    manager = make_manager(1060, max_chunk=400)
    chain = manager.new_chain(NAMESPACE, range(40))
    lease = manager.admit(manager.lookup(chain, 39), chain, 40)
    assert lease is not None
    assert manager.extend(lease, 40)
    manager.commit(lease, chain, 40)
    manager.release(lease)
    # The two youngest stayed as they were.
    assert manager.stats().blocks_by_codec == {"raw16": 2, "int8": 1, "int4": 7}
    longer = manager.new_chain(NAMESPACE, range(100))
    again = manager.admit(manager.lookup(longer, 99), longer, 60)
    assert again is not None
    assert again.num_shared == 10
    assert again.reused_tokens == {"int8": 4, "int4": 28, "raw16": 8}
    manager.check_invariants()
    manager.release(again)


def test_heads_of_blocks_are_made_smaller_for_room_but_never_in_spans() -> None:
    manager = make_manager(600)
    for number in range(20):
        lease, chain = start(manager, range(1000 * number, 1000 * number + 6))
        compute(manager, lease, chain)
        manager.release(lease)
    ops = [op for op in manager.take_memory_ops() if getattr(op, "kind", "") == "demote"]
    heads = [op for op in ops if op.num_tokens]
    assert heads
    assert {(op.codec, op.num_tokens) for op in heads} == {("int8", 2)}
    assert {op.codec for op in ops} == {"int8"}
    manager.check_invariants()
