"""The columns of blocks, as a survey copies them."""

from __future__ import annotations

import pytest
from tests.support.cache import NAMESPACE, compute, make_manager, serve, start

from kvist.cache.hash import unpack
from kvist.errors import InvariantViolation


def published(survey):
    """Return what is published: tokens of each block by its number."""
    return {
        number: unpack(survey.tokens[block_id])
        for block_id, number in enumerate(survey.numbers)
        if number
    }


def test_describes_every_published_block():
    manager = make_manager(8)
    serve(manager, range(10))
    survey = manager.survey()
    rows = published(survey)
    assert sorted(rows.values()) == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9)]
    number_of = {tokens: number for number, tokens in rows.items()}
    by_number = {number: block_id for block_id, number in enumerate(survey.numbers) if number}
    root = survey.parents[by_number[number_of[0, 1, 2, 3]]]
    assert survey.namespaces == {root: NAMESPACE}
    assert survey.parents[by_number[number_of[8, 9]]] == number_of[4, 5, 6, 7]
    assert sum(survey.num_tokens[block_id] for block_id in by_number.values()) == 10


def test_is_a_copy():
    manager = make_manager(8)
    serve(manager, range(8))
    survey = manager.survey()
    before = published(survey)
    manager.reset()
    serve(manager, range(100, 108))
    assert published(survey) == before
    assert published(manager.survey()) != before


def test_tells_who_holds_and_pins():
    manager = make_manager(8, pin_fraction=0.5)
    serve(manager, range(8))
    lease, chain = start(manager, range(9))
    pin = manager.pin(chain, 4)
    survey = manager.survey()
    assert sorted(survey.ref_counts) == [0] * 6 + [1, 2]
    assert survey.pinned == {lease.block_table[0]}
    manager.unpin(pin)
    manager.release(lease)
    assert not manager.survey().pinned


def test_a_node_keeps_its_number_hits_and_times_when_another_block_takes_it_over():
    now = [10]
    manager = make_manager(16, clock_ns=lambda: now[0])
    one, one_chain = start(manager, range(8))
    two, two_chain = start(manager, range(8))
    compute(manager, one, one_chain)
    now[0] = 20
    compute(manager, two, two_chain)
    before = published(manager.survey())
    # The published blocks become free, and the duplicates of the other lease stand for the nodes.
    manager.release(one)
    manager.check_invariants()
    survey = manager.survey()
    assert published(survey) == before
    (block_id, *_) = [i for i, tokens in enumerate(survey.tokens) if tokens]
    assert survey.computed_ns[block_id] == 10
    manager.release(two)


def test_hits_of_siblings_of_one_call_do_not_count_but_time_does():
    now = [10]
    manager = make_manager(16, clock_ns=lambda: now[0])
    serve(manager, range(8))
    now[0] = 30
    chain = manager.new_chain(NAMESPACE, range(9))
    manager.release(manager.admit(manager.lookup(chain, 8), chain, 9, is_reuse=False))
    survey = manager.survey()
    used = [i for i, number in enumerate(survey.numbers) if number and survey.used_ns[i] == 30]
    assert len(used) == 2
    assert not any(survey.num_hits)


def test_a_copy_counts_as_use_of_its_source():
    now = [10]
    manager = make_manager(16, clock_ns=lambda: now[0])
    serve(manager, range(8))
    now[0] = 30
    lease, _ = start(manager, [0, 1, 2, 3, 4, 5, 99])
    survey = manager.survey()
    assert sorted(survey.used_ns[i] for i, n in enumerate(survey.numbers) if n) == [30, 30]
    manager.release(lease)


@pytest.mark.parametrize("column", ["numbers", "parents", "num_tokens", "num_hits"])
def test_a_column_that_lies_is_a_violation(column):
    manager = make_manager(8)
    serve(manager, range(8))
    block_id = next(i for i, number in enumerate(manager.survey().numbers) if number)
    getattr(manager._tree.columns, column)[block_id] += 5
    with pytest.raises(InvariantViolation, match=r"column|number"):
        manager.check_invariants()
