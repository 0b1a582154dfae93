"""Each law, broken on purpose in one place, is named. A checker that cannot fail checks nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from tests.support.cache import NAMESPACE, compute, make_manager, serve, start

from kvist.cache.namespaces import Namespace
from kvist.errors import InvariantViolation

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvist.cache.lease import PrefixLease
    from kvist.cache.manager import CacheManager
    from kvist.cache.memory import Entry
    from kvist.cache.tree import Node


class State:
    """A cache with every kind of block, and names for what stands where.

    first   live, 10 tokens: full nodes 0 and 1, open node 2
    second  live, same first block: its own is a duplicate of node 0
    pinned  node 0 of first, by a pin too
    cached  [50] * 8 and one more: full nodes, then a partial one, unreferenced
    """

    def __init__(self) -> None:
        self.manager: CacheManager = make_manager(16, shares={"a": 0.1}, pin_fraction=0.1)
        self.first, first_chain = start(self.manager, range(10), reserve=16)
        self.second, second_chain = start(self.manager, [*range(4), 70, 71], reserve=8)
        compute(self.manager, self.first, first_chain)
        compute(self.manager, self.second, second_chain)
        serve(self.manager, [*[50] * 8, 51, 52])
        self.manager.pin(self.manager.new_chain(NAMESPACE, range(4)), 4)
        self.pool = self.manager._pool
        self.tree = self.manager._tree
        self.root = next(iter(self.tree.roots.values()))

    def node_of(self, lease: PrefixLease, index: int) -> Node:
        node = lease.blocks[index].node
        assert node is not None
        return node

    @property
    def cached(self) -> list[Node]:
        """The unreferenced path, from the root."""
        path = [block.node for block in reversed(list(self.pool.evictable))]
        assert all(node is not None for node in path)
        return path

    def restore_leases(self) -> None:
        """Keep broken leases from being reported again when they are collected."""
        self.first.is_released = self.second.is_released = True


def lose_a_block(state: State) -> None:
    state.pool._free.pop()


def list_a_block_twice(state: State) -> None:
    state.pool.free(state.cached[2].block)


def miscount_references(state: State) -> None:
    state.first.blocks[0].ref_count += 1


def miscount_reservation(state: State) -> None:
    state.pool.num_reserved_units += 1


def promise_too_much(state: State) -> None:
    state.first.num_reserved_units += 20
    state.pool.num_reserved_units += 20


def change_a_block_table(state: State) -> None:
    state.first.block_table.reverse()


def unsort_keys(state: State) -> None:
    state.root.keys.reverse()
    state.root.ordered.reverse()


def mix_up_children(state: State) -> None:
    state.root.ordered.reverse()


def forget_an_identity(state: State) -> None:
    state.root.children.popitem()


def put_a_child_below_a_partial_block(state: State) -> None:
    full, partial = state.cached[1:]
    state.node_of(state.first, 2).parent = partial
    partial.ordered.append(state.node_of(state.first, 2))
    partial.keys.append(state.node_of(state.first, 2).tokens)
    assert full.ordered == [partial]


def keep_an_empty_root(state: State) -> None:
    state.tree.root(Namespace(model="empty"))


def mix_up_parents(state: State) -> None:
    state.node_of(state.first, 1).parent = state.root


def mix_up_blocks_and_nodes(state: State) -> None:
    block = state.first.blocks[1]
    block.node = state.cached[0]


def forget_a_node(state: State) -> None:
    state.first.blocks[1].node = None


def forget_the_node_of_an_evictable_block(state: State) -> None:
    state.tree.remove(state.cached[2])


def leave_an_open_node_unheld(state: State) -> None:
    state.cached[2].is_open = True


def hold_below_an_evictable_block(state: State) -> None:
    state.pool.hold([state.cached[2].block])


def keep_a_stranger_as_duplicate(state: State) -> None:
    node = state.node_of(state.first, 0)
    node.duplicates[state.pool.blocks[15]] = None


def keep_duplicates_of_an_unheld_node(state: State) -> None:
    node = state.cached[0]
    state.tree.add_duplicate(node, state.second.blocks[1])


def keep_a_covered_partial_block(state: State) -> None:
    partial = state.cached[2]
    extension = state.tree.open(partial.parent, state.pool.allocate(""), partial.tokens + bytes(4))
    assert extension.parent is partial.parent


def evict_parents_first(state: State) -> None:
    state.pool.touch(state.cached[2].block)


def leave_the_path(state: State) -> None:
    state.first.tip = state.cached[0]


def end_the_path_early(state: State) -> None:
    state.first.tip = None


def mix_up_the_open_node(state: State) -> None:
    state.first.open_node = state.second.open_node


def compute_what_is_computed(state: State) -> None:
    state.first.pending.append((10, b"done"))


def miscount_pending(state: State) -> None:
    state.manager._pending.add([b"nobody's"])


def miscount_evictable_blocks(state: State) -> None:
    state.pool.num_evictable -= 1


def miscount_a_partition(state: State) -> None:
    state.pool.partitions.of("").num_used += 1


def queue_in_the_wrong_partition(state: State) -> None:
    block = state.cached[2].block
    block.partition = state.pool.partitions.of("a")


def retain_without_a_ttl(state: State) -> None:
    block = state.cached[0].block
    block.partition.strategy.remove(block)
    block.partition.retained[block] = None


def queue_a_retained_block(state: State) -> None:
    state.cached[0].kept_until_ns = 5


def keep_a_child_longer(state: State) -> None:
    state.cached[1].kept_until_ns = 5


def rank_a_partition_wrong(state: State) -> None:
    state.pool.partitions.of("").rank = 2


def forget_a_pin(state: State) -> None:
    state.manager._pins.clear()


def entry_of(state: State, index: int) -> Entry:
    entry = state.cached[index].entry
    assert entry is not None
    return entry


def forget_tokens(state: State) -> None:
    entry_of(state, 0).children.clear()


def miscount_cached_tokens(state: State) -> None:
    entry_of(state, 1).num_cached += 1


def unsort_remembered_tokens(state: State) -> None:
    state.manager._memory.root(NAMESPACE).children.reverse()


def remember_other_tokens(state: State) -> None:
    entry_of(state, 2).tokens += bytes(4)


def lose_a_ghost(state: State) -> None:
    state.manager.reset()
    state.manager._memory.ghosts.popitem()


def remember_what_was_never_computed(state: State) -> None:
    state.manager.reset()
    next(iter(state.manager._memory.ghosts)).left_why = None


def forget_parents_first(state: State) -> None:
    state.manager.reset()
    memory = state.manager._memory
    memory.ghosts.move_to_end(next(iter(memory.ghosts)))


BREAKS: dict[Callable[[State], None], str] = {
    lose_a_block: "are not each of the 16 blocks once",
    list_a_block_twice: "are not each of the 16 blocks once",
    miscount_references: r"ref_count=3\) has 2 holders",
    miscount_reservation: "2 units reserved, leases have 1",
    promise_too_much: "are available",
    change_a_block_table: "block table and blocks differ",
    unsort_keys: "keys and children differ",
    mix_up_children: "keys and children differ",
    forget_an_identity: "identities and full children differ",
    put_a_child_below_a_partial_block: "has children without being full",
    keep_an_empty_root: "a root has no children: Namespace",
    mix_up_parents: r"full node.* stands below Block\(0",
    mix_up_blocks_and_nodes: "is not what its block says",
    forget_a_node: "nodes and blocks do not point at each other",
    forget_the_node_of_an_evictable_block: "an evictable block is not in the tree",
    leave_an_open_node_unheld: "open or has duplicates without being held",
    hold_below_an_evictable_block: "is held below an evictable block",
    keep_a_stranger_as_duplicate: "is not a duplicate of full node",
    keep_duplicates_of_an_unheld_node: "open or has duplicates without being held",
    keep_a_covered_partial_block: "partial node.*is a prefix of a sibling",
    evict_parents_first: "would be evicted after its parent",
    leave_the_path: "is not on its path in the tree",
    end_the_path_early: "is not on its path in the tree",
    mix_up_the_open_node: "is not its next block",
    compute_what_is_computed: "is computing what it has computed",
    miscount_pending: "identities in flight, leases have",
    miscount_evictable_blocks: "2 evictable blocks counted, 3 are queued",
    miscount_a_partition: "9 units counted in a partition that has 8",
    queue_in_the_wrong_partition: "a block is queued in another partition than its own",
    retain_without_a_ttl: "a block without a TTL is retained",
    queue_a_retained_block: "a block with a TTL is queued with those without",
    keep_a_child_longer: "is kept longer than its parent",
    rank_a_partition_wrong: "units is ranked 2",
    forget_a_pin: r"ref_count=2\) has 1 holders",
    forget_tokens: "cached or in flight is not remembered",
    miscount_cached_tokens: "is cached 1 times, in flight 0 times",
    unsort_remembered_tokens: "blocks remembered of a namespace are not in order",
    remember_other_tokens: "is not remembered by its tokens",
    lose_a_ghost: "3 entries are idle, 2 of 32768 ghosts are listed",
    remember_what_was_never_computed: "was never computed",
    forget_parents_first: "would be forgotten before what follows it",
}


@pytest.mark.parametrize("break_it", BREAKS, ids=lambda function: function.__name__)
def test_broken_law_is_named(break_it: Callable[[State], None]) -> None:
    state = State()
    state.manager.check_invariants()
    break_it(state)
    with pytest.raises(InvariantViolation, match=BREAKS[break_it]):
        state.manager.check_invariants()
    state.restore_leases()


def test_dump_shows_the_state_without_tokens() -> None:
    state = State()
    state.pool.num_reserved_units += 1
    with pytest.raises(InvariantViolation) as caught:
        state.manager.check_invariants()
    message = str(caught.value)
    for part in (
        "free (next last): [",
        "evictable (next first): [",
        "held: [Block(",
        "full node",
        "open node",
    ):
        assert part in message
    assert "partial node: Block(" in message
    assert "PrefixLease(live" in message
    assert "Pin(live, 1 blocks" in message
    assert "\\x" not in message
    state.restore_leases()
