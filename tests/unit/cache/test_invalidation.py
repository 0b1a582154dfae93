"""Content that must not be offered any more leaves the tree, whoever holds it, and every law still holds."""

from __future__ import annotations

import random

import pytest
from tests.support.cache import make_manager

from kvist.cache.namespaces import Namespace
from kvist.types import MissReason

SPACE = Namespace(model="m")
TOKENS = list(range(1, 30))


def compute(manager, tokens, *, namespace=SPACE, end=None):
    """Return a live lease, and its chain, with all of its tokens computed (or the first ``end``)."""
    chain = manager.new_chain(namespace, tokens)
    lease = manager.admit(manager.lookup(chain, len(tokens) - 1), chain, len(tokens))
    assert lease is not None
    assert manager.extend(lease, len(tokens))
    manager.commit(lease, chain, len(tokens) if end is None else end)
    manager.check_invariants()
    return lease, chain


def cached(manager, tokens, namespace=SPACE) -> int:
    return manager.match(manager.new_chain(namespace, tokens), len(tokens)).num_hit_tokens


def path(manager, tokens):
    return manager.match(manager.new_chain(SPACE, tokens), len(tokens)).nodes


def test_a_block_goes_with_all_that_follows_it_and_nothing_else():
    manager = make_manager(64)
    for tokens in (TOKENS, TOKENS[:12] + [99] * 8, TOKENS[:4] + [77] * 8):
        manager.release(compute(manager, tokens)[0])
    taken = manager.invalidate([path(manager, TOKENS)[2]])
    manager.check_invariants()
    assert taken.num_detached == 0
    assert taken.num_dropped == 5 + 1 + 2  # the rest of two branches, and the head of one
    assert cached(manager, TOKENS) == 8
    assert cached(manager, TOKENS[:4] + [77] * 8) == 12
    assert manager.num_held == 0


def test_whoever_misses_it_is_told_that_it_was_wrong():
    manager = make_manager(64)
    manager.release(compute(manager, TOKENS)[0])
    manager.invalidate([path(manager, TOKENS)[2]])
    lease, _ = compute(manager, TOKENS)
    (span,) = lease.miss.spans
    assert (span.start, span.end, span.reason) == (8, 28, MissReason.VERIFICATION_FAILED)
    manager.release(lease)


def test_a_holder_keeps_its_blocks_and_publishes_nothing_more():
    manager = make_manager(64)
    lease, chain = compute(manager, TOKENS, end=14)
    table = list(lease.block_table)
    taken = manager.invalidate([path(manager, TOKENS)[1]])
    manager.check_invariants()
    assert (taken.num_dropped, taken.num_detached) == (0, 3)
    assert taken.leases == (lease,)
    assert manager.take_distrusted() == [lease]
    assert manager.take_distrusted() == []
    manager.commit(lease, chain, len(TOKENS))
    manager.check_invariants()
    assert lease.block_table == table
    assert cached(manager, TOKENS) == 4
    manager.release(lease)
    manager.check_invariants()
    assert cached(manager, TOKENS) == 4
    assert manager.num_free == manager.num_blocks - 1


def test_leases_of_the_same_blocks_duplicates_included():
    manager = make_manager(64)
    # Both compute the same at once, so one has duplicates.
    chains = [manager.new_chain(SPACE, TOKENS) for _ in range(2)]
    leases = [manager.admit(manager.match(c, 28), c, 29) for c in chains]
    for lease, chain in zip(leases, chains, strict=True):
        assert manager.extend(lease, 29)
        manager.commit(lease, chain, 29)
    manager.check_invariants()
    taken = manager.invalidate([path(manager, TOKENS)[3]])
    manager.check_invariants()
    assert set(taken.leases) == set(leases)
    for lease in leases:
        manager.release(lease)
        manager.check_invariants()
    assert cached(manager, TOKENS) == 12
    assert manager.num_free == manager.num_blocks - 3


def test_a_lease_that_copies_is_distrusted_and_one_that_only_waits_above_is_not():
    manager = make_manager(64)
    manager.release(compute(manager, TOKENS)[0])
    chain = manager.new_chain(SPACE, [*TOKENS[:10], 50, 51])
    copier = manager.admit(manager.match(chain, 11), chain, 12)
    assert copier.pending_copy is not None
    other = manager.new_chain(SPACE, [*TOKENS[:8], 60, 61])
    above = manager.admit(manager.match(other, 9), other, 10)
    taken = manager.invalidate([path(manager, TOKENS)[2]])
    manager.check_invariants()
    assert taken.leases == (copier,)
    manager.release(copier)
    manager.release(above)
    manager.check_invariants()


def test_pins_end():
    manager = make_manager(64, pin_fraction=0.5)
    manager.release(compute(manager, TOKENS)[0])
    pin = manager.pin(manager.new_chain(SPACE, TOKENS), 16)
    other = manager.pin(manager.new_chain(SPACE, TOKENS), 4)
    manager.invalidate([path(manager, TOKENS)[2]])
    manager.check_invariants()
    assert pin.is_released
    assert not other.is_released
    assert manager.num_pinned == 1


def test_nodes_given_twice_or_below_each_other():
    manager = make_manager(64)
    manager.release(compute(manager, TOKENS)[0])
    nodes = path(manager, TOKENS)
    taken = manager.invalidate([nodes[5], nodes[2], nodes[5], nodes[3]])
    manager.check_invariants()
    assert taken.num_dropped == 6


def test_what_follows_a_prompt():
    manager = make_manager(64)
    manager.release(compute(manager, TOKENS)[0])

    def after(tokens):
        return manager.nodes_after(manager.new_chain(SPACE, tokens))

    nodes = path(manager, TOKENS)
    assert after(TOKENS[:8]) == [nodes[1]]
    assert after(TOKENS[:9]) == [nodes[2]]
    assert after(TOKENS[:1]) == [nodes[0]]
    assert after([*TOKENS[:9], 99]) == []
    assert after([99]) == []
    assert manager.nodes_after(manager.new_chain(Namespace(model="other"), [1])) == []


class Guard:
    """Finds what it is told to find, and remembers what it was asked."""

    def __init__(self) -> None:
        self.damaged = set()
        self.sealed = []
        self.asked = []
        self.copies = True

    def seal(self, node) -> None:
        self.sealed.append(node)

    def may_copy(self, node) -> bool:
        return self.copies

    def find_damaged(self, nodes, copied):
        asked = [*nodes, *([] if copied is None else [copied])]
        self.asked.append(asked)
        return [node for node in asked if node in self.damaged]


class TestGuard:
    def setup_method(self) -> None:
        self.manager = make_manager(64)
        self.guard = self.manager.guard = Guard()

    def test_every_block_is_sealed_once_full_and_every_head_when_it_is_left(self):
        lease, _ = compute(self.manager, TOKENS)
        assert len(self.guard.sealed) == 7
        self.manager.release(lease)
        assert [len(node.tokens) // 4 for node in self.guard.sealed] == [4] * 7 + [1]

    def test_a_block_that_stands_in_is_sealed_again(self):
        self.manager.release(compute(self.manager, TOKENS)[0])
        node = path(self.manager, TOKENS)[6]
        chain = self.manager.new_chain(SPACE, TOKENS[:28])
        lease = self.manager.admit(self.manager.match(chain, 26), chain, 28)
        assert self.manager.extend(lease, 28)
        self.guard.sealed.clear()
        self.manager.commit(lease, chain, 28)
        assert self.guard.sealed == [node]
        self.manager.release(lease)

    def test_admission_is_without_what_is_damaged(self):
        self.manager.release(compute(self.manager, TOKENS)[0])
        self.guard.damaged = {path(self.manager, TOKENS)[4]}
        lease, _ = compute(self.manager, TOKENS)
        assert lease.num_shared == 4
        # What is left is asked for again.
        assert [len(asked) for asked in self.guard.asked[-2:]] == [7, 4]
        self.manager.release(lease)

    def test_all_of_it_damaged_one_after_the_other(self):
        self.manager.release(compute(self.manager, TOKENS)[0])
        self.guard.find_damaged = lambda nodes, copied: [*nodes, copied][-2:-1] if nodes else []
        lease, _ = compute(self.manager, TOKENS)
        assert lease.num_shared == 0
        self.manager.release(lease)
        self.manager.check_invariants()

    def test_a_damaged_source_is_not_copied(self):
        self.manager.release(compute(self.manager, TOKENS[:10])[0])
        (head,) = [n for n in self.manager._tree.nodes() if n.is_partial]
        self.guard.damaged = {head}
        lease, _ = compute(self.manager, TOKENS)
        assert lease.num_shared == 2
        assert cached(self.manager, TOKENS) == len(TOKENS)
        self.manager.release(lease)

    def test_no_copy_where_none_is_allowed(self):
        self.manager.release(compute(self.manager, TOKENS[:10])[0])
        self.guard.copies = False
        chain = self.manager.new_chain(SPACE, TOKENS)
        lease = self.manager.admit(self.manager.match(chain, 28), chain, 29)
        assert lease.pending_copy is None
        assert lease.num_computed_tokens == 8
        self.manager.release(lease)
        self.manager.check_invariants()

    def test_nobody_is_asked_for_a_request_that_does_not_fit(self):
        self.manager.release(compute(self.manager, TOKENS)[0])
        chain = self.manager.new_chain(SPACE, TOKENS)
        match = self.manager.match(chain, 28)
        self.guard.asked.clear()
        assert self.manager.admit(match, chain, 10_000) is None
        assert self.guard.asked == []


@pytest.mark.parametrize("seed", range(6))
def test_in_any_order_with_anything(seed):
    """Admissions, steps, releases, evictions and invalidations at random; every law is checked after each."""
    chance = random.Random(seed)
    manager = make_manager(num_blocks=24)
    live = []
    for _ in range(400):
        what = chance.random()
        if what < 0.4 and len(live) < 5:
            tokens = TOKENS[: chance.randrange(1, 20)] + [chance.randrange(40, 44)] * 3
            chain = manager.new_chain(SPACE, tokens)
            lease = manager.admit(manager.match(chain, len(tokens) - 1), chain, len(tokens))
            if lease is not None:
                live.append((lease, chain))
        elif what < 0.7 and live:
            lease, chain = chance.choice(live)
            end = chance.randint(lease.num_computed_tokens, chain.num_tokens)
            if manager.extend(lease, end):
                manager.commit(lease, chain, end)
        elif what < 0.85 and live:
            manager.release(live.pop(chance.randrange(len(live)))[0])
        else:
            nodes = list(manager._tree.nodes())
            if nodes:
                change = manager.invalidate if chance.random() < 0.5 else manager.forget
                change(chance.sample(nodes, min(len(nodes), chance.randrange(1, 4))))
        manager.check_invariants()
    for lease, _ in live:
        manager.release(lease)
    manager.forget(manager.nodes_of())
    manager.check_invariants()
    assert manager.num_free == 24
