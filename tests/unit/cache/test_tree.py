from __future__ import annotations

import random
import struct
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.cache import KEY, NAMESPACE

from kvist.cache.block import Block
from kvist.cache.hash import BlockHasher
from kvist.cache.survey import BlockColumns
from kvist.cache.tree import PrefixTree, common_tokens
from kvist.types import BlockId

if TYPE_CHECKING:
    import pytest


def pack(*token_ids: int) -> bytes:
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def naive_common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    length = 0
    while length < min(len(left), len(right)) and left[length] == right[length]:
        length += 1
    return length


# Ids whose bytes agree in part: a prefix of bytes must not count as a token.
IDS = st.sampled_from([0, 1, 255, 256, 257, 2**16, 2**24, 2**32 - 1])
RUNS = st.lists(IDS, min_size=1, max_size=6).map(tuple)


@settings(max_examples=60, deadline=None)
@given(RUNS, RUNS)
def test_common_tokens_equals_counting(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    assert common_tokens(pack(*left), pack(*right)) == naive_common(left, right)
    assert common_tokens(pack(*left), b"") == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(RUNS, max_size=12), RUNS)
def test_best_child_has_the_longest_common_prefix(
    runs: list[tuple[int, ...]], query: tuple[int, ...]
) -> None:
    tree = PrefixTree(BlockColumns(4096))
    root = tree.root(NAMESPACE)
    for index, run in enumerate(runs):
        tree.open(root, Block(BlockId(index)), pack(*run))
    longest = max((naive_common(run, query) for run in runs), default=0)
    best = root.best_child(pack(*query), lambda _: True)
    if longest == 0:
        assert best is None
    else:
        assert best is not None
        assert best[1] == longest == naive_common(runs[best[0].block.block_id], query)


@settings(max_examples=60, deadline=None)
@given(st.lists(RUNS, max_size=12), RUNS, st.sets(st.integers(0, 11)))
def test_best_child_is_a_wanted_one(
    runs: list[tuple[int, ...]], query: tuple[int, ...], unwanted: set[int]
) -> None:
    tree = PrefixTree(BlockColumns(4096))
    root = tree.root(NAMESPACE)
    for index, run in enumerate(runs):
        tree.open(root, Block(BlockId(index)), pack(*run))
    wanted = [run for index, run in enumerate(runs) if index not in unwanted]
    best = root.best_child(pack(*query), lambda node: node.block.block_id not in unwanted)
    longest = max((naive_common(run, query) for run in wanted), default=0)
    assert (0 if best is None else best[1]) == longest
    assert best is None or best[0].block.block_id not in unwanted


def test_best_child_compares_few_of_many_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """All children begin alike, as with a chat template, where an index by first token would scan all."""
    tree = PrefixTree(BlockColumns(4096))
    root = tree.root(NAMESPACE)
    draw = random.Random(0)
    for index in range(2000):
        tree.open(root, Block(BlockId(index)), pack(7, 7, 7, draw.randrange(10**6)))
    calls = []

    def counted(left: bytes, right: bytes) -> int:
        calls.append(left)
        return common_tokens(left, right)

    monkeypatch.setattr("kvist.cache.tree.common_tokens", counted)
    best = root.best_child(pack(7, 7, 7, 500), lambda _: True)
    assert best is not None
    assert best[1] >= 3
    assert len(calls) == 2


def test_nodes_with_equal_tokens_are_told_apart() -> None:
    tree = PrefixTree(BlockColumns(4096))
    root = tree.root(NAMESPACE)
    nodes = [tree.open(root, Block(BlockId(index)), pack(1, 2)) for index in range(4)]
    tree.grow(nodes[2], pack(1, 2, 3))
    tree.remove(nodes[1])
    assert sorted(node.block.block_id for node in root.ordered) == [0, 2, 3]
    assert root.ordered[-1] is nodes[2]
    assert root.keys == sorted(root.keys)


def test_last_child_takes_its_root_along() -> None:
    tree = PrefixTree(BlockColumns(4096))
    node = tree.open(tree.root(NAMESPACE), Block(BlockId(0)), pack(1))
    tree.remove(node)
    assert tree.roots == {}
    assert node.block.node is None


def test_nodes_come_parents_first() -> None:
    tree = PrefixTree(BlockColumns(4096))
    hasher = BlockHasher(KEY)
    parent = tree.open(tree.root(NAMESPACE), Block(BlockId(0)), pack(1))
    tree.publish(parent, hasher.child(hasher.root(NAMESPACE), pack(1)))
    child = tree.open(parent, Block(BlockId(1)), pack(2))
    assert list(tree.nodes()) == [parent, child]
    assert not parent.is_partial
    assert not child.is_partial
    tree.seal(child)
    assert child.is_partial
    assert repr(child.block) == "Block(1, ref_count=0)"
