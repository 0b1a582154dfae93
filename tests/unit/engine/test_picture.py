"""Pictures of the cache against sums made block by block."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.cache import NAMESPACE, make_manager, serve, start

from kvist.cache.hash import unpack
from kvist.cache.namespaces import Namespace
from kvist.engine.picture import BlockState, CachePicture

OTHER = Namespace(model="m", tenant="other")
MINE = Namespace(model="m", tenant="mine")


def picture_of(manager) -> CachePicture:
    return CachePicture(manager.survey())


def nodes_of(manager, tenant):
    return [node for node in manager._tree.nodes() if node.namespace.tenant == tenant]


def below(node):
    return len(node.tokens) // 4 + sum(map(below, node.ordered))


def hits_of(manager):
    """Requests that hit a node, by its number. Not ``num_hits``, which a strategy may set."""
    columns = manager._tree.columns
    return dict(zip(columns.numbers, columns.num_hits, strict=True))


def continues(node, hits):
    """Whether a node belongs to the same prefix as its parent."""
    parent = node.parent
    return (
        parent.parent is not None
        and len(parent.ordered) == 1
        and hits[parent.number] == hits[node.number]
    )


def test_an_empty_cache_has_an_empty_picture():
    picture = picture_of(make_manager(8))
    assert picture.state_counts().tolist() == [8, 0, 0, 0, 0]
    assert picture.cells().tolist() == [[1, 0, 0, 0, 0]] * 8
    assert picture.prefixes("").rows == []
    assert picture.tokens_by_tenant() == {}


def test_states_of_blocks():
    manager = make_manager(32, pin_fraction=0.5)
    serve(manager, range(8))
    serve(manager, range(9))
    lease, _ = start(manager, [50, 51, 52, 53, 54], reserve=8)
    manager.extend(lease, 5)
    counts = picture_of(manager).state_counts()
    assert counts.tolist() == [27, 1, 2, 2, 0]
    manager.pin(manager.new_chain(NAMESPACE, range(8)), 8)
    counts = picture_of(manager).state_counts()
    assert counts[BlockState.PINNED] == 2
    assert counts[BlockState.REUSED] == 0
    manager.release(lease)


@pytest.mark.parametrize("num_blocks", [1, 7, 10, 11, 25])
def test_cells_have_every_block_once(num_blocks):
    manager = make_manager(num_blocks)
    cells = picture_of(manager).cells(max_cells=10)
    assert len(cells) == min(10, num_blocks)
    assert cells.sum() == num_blocks
    assert cells.sum(axis=1).max() - cells.sum(axis=1).min() <= 1


PROMPTS = st.lists(
    st.tuples(st.booleans(), st.lists(st.integers(0, 2), min_size=1, max_size=22)),
    min_size=1,
    max_size=12,
)


@settings(max_examples=80, deadline=None)
@given(PROMPTS, st.integers(1, 40))
def test_sums_are_those_of_the_tree(prompts, max_rows):
    # Small enough that some of it is evicted.
    manager = make_manager(24, block_size=2)
    for is_mine, tokens in prompts:
        serve(manager, tokens, namespace=MINE if is_mine else OTHER)
    picture, hits = picture_of(manager), hits_of(manager)
    nodes = {tenant: nodes_of(manager, tenant) for tenant in ("mine", "other")}
    totals = {tenant: sum(len(n.tokens) // 4 for n in nodes[tenant]) for tenant in nodes}
    assert picture.tokens_by_tenant() == {t: n for t, n in totals.items() if n}
    for tenant, own in nodes.items():
        found = picture.prefixes(tenant, max_rows)
        heads = {node.number: node for node in own if not continues(node, hits)}
        assert found.num_tokens == totals[tenant]
        assert found.num_prefixes == len(heads)
        assert len(found.rows) == min(max_rows, len(heads))
        check_rows(found.rows, heads, tenant, hits)


def check_rows(rows, heads, tenant, hits):
    numbers = [row.number for row in rows]
    assert len(set(numbers)) == len(numbers)
    largest = sorted(map(below, heads.values()), reverse=True)[: len(rows)]
    assert [row.num_subtree_tokens for row in rows] == largest
    shown = Counter()
    for row in rows:
        head = heads[row.number]
        assert head.namespace.tenant == tenant
        assert row.num_subtree_tokens == below(head)
        assert row.num_hits == hits[head.number]
        parent = head.parent
        while parent.parent is not None and continues(parent, hits):
            parent = parent.parent
        if parent.parent is None:
            assert row.parent is None
        else:
            assert row.parent == parent.number
            # Parents first.
            assert numbers.index(row.parent) < numbers.index(row.number)
        shown[row.parent] += row.num_subtree_tokens
        assert row.tokens.startswith(head.tokens)
        assert row.num_blocks >= 1
    for row in rows:
        assert row.num_subtree_tokens == row.num_tokens + row.num_rest_tokens + shown[row.number]


def test_a_prefix_is_named_by_its_first_tokens_and_by_where_it_parts_from_its_siblings():
    manager = make_manager(64)
    serve(manager, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    serve(manager, [1, 2, 3, 4, 5, 6, 70, 80, 90, 100])
    rows = picture_of(manager).prefixes("").rows
    first = next(row for row in rows if row.parent is None)
    assert (unpack(first.tokens), first.num_common) == ((1, 2, 3, 4), 0)
    parts = {unpack(row.tokens)[row.num_common :] for row in rows if row.parent == first.number}
    assert parts == {(7, 8, 9, 10), (70, 80, 90, 100)}


def test_numbers_stay_while_prefixes_are_cached():
    manager = make_manager(64)
    serve(manager, range(20))
    before = picture_of(manager).prefixes("").rows[0].number
    serve(manager, [*range(12), 99, 98])
    rows = picture_of(manager).prefixes("").rows
    assert rows[0].number == before
    assert rows[0].num_tokens == 12


def test_ages_and_holders():
    now = [100]
    manager = make_manager(64, clock_ns=lambda: now[0])
    serve(manager, range(8))
    now[0] = 250
    lease, _ = start(manager, [*range(8), 9])
    (row, *_) = picture_of(manager).prefixes("").rows
    assert (row.computed_ns, row.used_ns, row.num_holders, row.num_hits) == (100, 250, 1, 1)
    manager.release(lease)
    (row, *_) = picture_of(manager).prefixes("").rows
    assert (row.used_ns, row.num_holders) == (250, 0)
