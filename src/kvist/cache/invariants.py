"""The laws of the cache, checked from scratch.

Responsible for saying which law does not hold, with a dump of the state. Recomputes everything from the records, so it
costs O(blocks): for tests, and for an idle engine. Knows nothing of how the state came about.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvist.cache.hash import TOKEN_BYTES
from kvist.errors import InvariantViolation

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from kvist.cache.block import Block
    from kvist.cache.lease import PrefixLease
    from kvist.cache.memory import Entry, PromptMemory
    from kvist.cache.partition import Partition
    from kvist.cache.pending import PendingIdentities
    from kvist.cache.pins import Pin
    from kvist.cache.pool import BlockPool
    from kvist.cache.promises import Promises
    from kvist.cache.tree import Node, PrefixTree


def check(
    pool: BlockPool,
    tree: PrefixTree,
    pending: PendingIdentities,
    memory: PromptMemory,
    leases: Sequence[PrefixLease],
    pins: Sequence[Pin] = (),
) -> None:
    """Check every law.

    Args:
        pool: All blocks.
        tree: What is published.
        pending: What is in flight.
        memory: What is remembered of prompts.
        leases: All live leases.
        pins: All live pins.

    Raises:
        InvariantViolation: At least one does not hold; all that do not are listed.
    """
    problems = [
        *_conservation(pool, leases, pins),
        *_promised(pool, leases),
        *_sizes(pool, leases),
        *_partitions(pool),
        *_tree_shape(tree),
        *_tree_references(pool, tree),
        *_columns(pool, tree),
        *_lease_paths(leases),
        *_memory(memory, tree, leases),
    ]
    in_flight = Counter(key for lease in leases for _, key in lease.pending)
    if in_flight != pending.counts:
        problems.append(f"{len(pending.counts)} identities in flight, leases have {len(in_flight)}")
    if problems:
        raise InvariantViolation(
            f"[cache] expected every law to hold, {len(problems)} do not: {'; '.join(problems)}\n"
            f"{dump(pool, tree, leases, pins)}"
        )


def dump(
    pool: BlockPool, tree: PrefixTree, leases: Sequence[PrefixLease], pins: Sequence[Pin] = ()
) -> str:
    """Return the state in lines, without token ids."""
    lines = [
        f"free (next last): {[block.block_id for block in pool.free_blocks]}",
        f"evictable (next first): {[block.block_id for block in pool.evictable]}",
        f"held: {[block for block in pool.blocks if block.ref_count]}",
        f"reserved: {pool.num_reserved_units} units",
        *(repr(holder) for holder in (*leases, *pins)),
        *(_describe(node) for node in tree.nodes()),
    ]
    return "\n".join(lines)


def _describe(node: Node) -> str:
    kind = "open" if node.is_open else "partial" if node.is_partial else "full"
    parent = node.parent.block if node.parent is not None else None
    return (
        f"{kind} node: {node.block!r} below {parent!r}, {len(node.tokens) // 4} tokens, "
        f"{len(node.keys)} children, duplicates {list(node.duplicates)}"
    )


def _conservation(
    pool: BlockPool, leases: Sequence[PrefixLease], pins: Sequence[Pin]
) -> Iterator[str]:
    free, evictable = set(pool.free_blocks), set(pool.evictable)
    held = {block for block in pool.blocks if block.ref_count}
    num_listed = len(pool.free_blocks) + len(pool.evictable) + len(held)
    if pool.num_evictable != len(pool.evictable):
        yield f"{pool.num_evictable} evictable blocks counted, {len(pool.evictable)} are queued"
    if num_listed != len(pool.blocks) or free | evictable | held != set(pool.blocks):
        yield (
            f"{len(free)} free + {len(evictable)} evictable + {len(held)} held blocks are not "
            f"each of the {len(pool.blocks)} blocks once"
        )
    references: Counter[Block] = Counter()
    for lease in leases:
        references.update(lease.blocks)
        references.update([lease.copy_source] if lease.copy_source is not None else [])
        if lease.block_table != [block.block_id for block in lease.blocks]:
            yield f"block table and blocks differ in {lease!r}"
    for pin in pins:
        references.update(pin.blocks)
    for block in pool.blocks:
        if block.ref_count != references[block]:
            yield f"{block!r} has {references[block]} holders"


def check_promises(promises: Promises, leases: Sequence[PrefixLease]) -> None:
    """Check that all live leases are promised what they may need.

    Raises:
        InvariantViolation: One is not.
    """
    for lease in leases:
        need = promises.need(lease)
        if lease.num_reserved_units < need:
            raise InvariantViolation(
                f"[cache] {lease!r} is promised {lease.num_reserved_units} units and may need {need}"
            )


def _promised(pool: BlockPool, leases: Sequence[PrefixLease]) -> Iterator[str]:
    num_reserved = sum(lease.num_reserved_units for lease in leases)
    if num_reserved != pool.num_reserved_units or pool.num_available_units < 0:
        yield (
            f"{pool.num_reserved_units} units reserved, leases have {num_reserved}, "
            f"{pool.num_available_units} are available"
        )
    if pool.is_mixed:
        holders = Counter(block for lease in leases for block in lease.blocks)
        if any(block.num_leases != holders[block] for block in pool.blocks):
            yield "the leases that have a block are miscounted"
        owned = [block for block in pool.blocks if block.owner is not None]
        if any(block.num_leases != 1 for block in owned):
            yield "a block has an owner, and not the one lease that has it"
        yield from _indices(pool, leases)


def _indices(pool: BlockPool, leases: Sequence[PrefixLease]) -> Iterator[str]:
    for lease in leases:
        if [block.index for block in lease.blocks] != list(range(len(lease.blocks))):
            yield f"blocks of {lease!r} are not at their indices"
    for block in pool.blocks:
        if block.node is not None and block.node.parent is not None:
            above = block.node.parent
            if block.index != (0 if above.parent is None else above.block.index + 1):
                yield f"{block!r} is not at its index in its sequence"


def _sizes(pool: BlockPool, leases: Sequence[PrefixLease]) -> Iterator[str]:
    evictable = pool.evictable
    in_use = {block for block in pool.blocks if block.ref_count}.union(evictable)
    num_used = sum([block.size for block in in_use])
    num_evictable_units = sum([block.size for block in evictable])
    if (num_used, num_evictable_units) != (pool.num_used, pool.num_evictable_units):
        yield (
            f"{pool.num_used} units counted, {pool.num_evictable_units} of them evictable; blocks take {num_used} "
            f"and {num_evictable_units}"
        )
    if num_used > pool.capacity:
        yield f"blocks take {num_used} of {pool.capacity} units"
    yield from _memory_of_codecs(pool, in_use, set(evictable))
    if any(block.size != pool.sizes[block.level] for block in in_use):
        yield "a block has not the size of its codec"
    for window in range(len(leases[0].windows) if leases else 0):
        holders = Counter(
            block for lease in leases for block in lease.blocks[lease.windows[window] :]
        )
        if any(block.fresh[window] != holders[block] for block in pool.blocks):
            yield f"the leases that have a block within window {window} are miscounted"


def _memory_of_codecs(pool: BlockPool, in_use: set[Block], evictable: set[Block]) -> Iterator[str]:
    if not pool.is_mixed:
        return
    usage = pool.usage()
    for counted, blocks in (
        ({codec: each.num_blocks for codec, each in usage.items()}, in_use),
        ({codec: each.num_evictable for codec, each in usage.items()}, evictable),
    ):
        found = Counter(pool.codec_in_memory(block) for block in blocks)
        if any(num_blocks != found[codec] for codec, num_blocks in counted.items()):
            yield f"{counted} counted by codec, {dict(found)} are there"
    num_taken = sum(each.num_units for each in usage.values())
    if num_taken != pool.num_used + pool.num_due_units or num_taken > pool.capacity:
        yield (
            f"memory of {num_taken} of {pool.capacity} units is taken, {pool.num_used} are counted and "
            f"{pool.num_due_units} are due"
        )


def _partitions(pool: BlockPool) -> Iterator[str]:
    in_use = {block for block in pool.blocks if block.ref_count}.union(pool.evictable)
    used: Counter[Partition] = Counter()
    for block in in_use:
        used[block.partition] += block.size
    for partition in pool.partitions:
        if used[partition] != partition.num_used:
            yield f"{partition.num_used} units counted in a partition that has {used[partition]}"
        if any(block.partition is not partition for block in partition):
            yield "a block is queued in another partition than its own"
        if any(not block.node or not block.node.kept_until_ns for block in partition.retained):
            yield "a block without a TTL is retained"
        if any(block.node and block.node.kept_until_ns for block in partition.strategy):
            yield "a block with a TTL is queued with those without"
        if not pool.partitions.is_single and partition.rank != pool.partitions.rank_of(partition):
            yield f"a partition of {partition.num_used} units is ranked {partition.rank}"


def _tree_shape(tree: PrefixTree) -> Iterator[str]:
    parents = [*tree.roots.values(), *tree.nodes()]
    for parent in parents:
        if parent.keys != [child.tokens for child in parent.ordered] or parent.keys != sorted(
            parent.keys
        ):
            yield f"keys and children differ below {parent.block!r}"
        full = {child.block_hash: child for child in parent.ordered if child.block_hash is not None}
        if full != parent.children:
            yield f"identities and full children differ below {parent.block!r}"
        if parent.keys and parent.parent is not None and parent.block_hash is None:
            yield f"{_describe(parent)} has children without being full"
        if not parent.keys and parent.parent is None:
            yield f"a root has no children: {parent.namespace!r}"
        for child in parent.ordered:
            if child.parent is not parent or child.namespace != parent.namespace:
                yield f"{_describe(child)} stands below {parent.block!r}"
            if parent.parent is not None and child.kept_until_ns > parent.kept_until_ns:
                yield f"{_describe(child)} is kept longer than its parent"


def _tree_references(pool: BlockPool, tree: PrefixTree) -> Iterator[str]:
    nodes = list(tree.nodes())
    order: dict[Block, int] = {block: place for place, block in enumerate(pool.evictable)}
    if {node.block for node in nodes} != {block for block in pool.blocks if block.node is not None}:
        yield "nodes and blocks do not point at each other"
    if not order.keys() <= {node.block for node in nodes}:
        yield "an evictable block is not in the tree"
    for node in nodes:
        block = node.block
        if block.node is not node or block.duplicate_of is not None:
            yield f"{_describe(node)} is not what its block says"
        elif block.ref_count:
            yield from _held_node(node, order)
        else:
            yield from _unreferenced_node(tree, node, order)


def _held_node(node: Node, order: Mapping[Block, int]) -> Iterator[str]:
    parent = node.parent
    if parent is not None and parent.block in order:
        yield f"{_describe(node)} is held below an evictable block"
    for duplicate in node.duplicates:
        if duplicate.duplicate_of is not node or duplicate.node or not duplicate.ref_count:
            yield f"{duplicate!r} is not a duplicate of {_describe(node)}"


def _unreferenced_node(tree: PrefixTree, node: Node, order: Mapping[Block, int]) -> Iterator[str]:
    if node.is_open or node.duplicates:
        yield f"{_describe(node)} is open or has duplicates without being held"
    if node.is_partial and tree.is_covered(node):
        yield f"{_describe(node)} is a prefix of a sibling"
    for child in node.ordered:
        if child.block not in order or order[child.block] > order.get(node.block, -1):
            yield f"{_describe(child)} would be evicted after its parent"


def _columns(pool: BlockPool, tree: PrefixTree) -> Iterator[str]:
    columns = tree.columns
    for block in pool.blocks:
        node, block_id = block.node, block.block_id
        if columns.numbers[block_id] != (0 if node is None else node.number):
            yield f"{block!r} has the number {columns.numbers[block_id]} of another node"
        elif node is not None:
            assert node.parent is not None
            is_described = (
                columns.parents[block_id] == node.parent.number
                and columns.tokens[block_id] == node.tokens
                and columns.num_tokens[block_id] == len(node.tokens) // TOKEN_BYTES
                and columns.num_hits[block_id] <= node.num_hits
                and columns.computed_ns[block_id] <= columns.used_ns[block_id]
            )
            if not is_described:
                yield f"the columns of {block!r} do not describe its node"


def _lease_paths(leases: Sequence[PrefixLease]) -> Iterator[str]:
    for lease in leases:
        node = lease.tip
        for index in reversed(range(lease.num_sealed)):
            block = lease.blocks[index]
            if node is None or (block.node is not node and block.duplicate_of is not node):
                yield f"block {index} of {lease!r} is not on its path in the tree"
                break
            node = node.parent
        if any(end <= lease.num_computed_tokens for end, _ in lease.pending):
            yield f"{lease!r} is computing what it has computed"
        if (
            lease.open_node is not None
            and lease.open_node.block is not lease.blocks[lease.num_sealed]
        ):
            yield f"the open node of {lease!r} is not its next block"


def _memory(memory: PromptMemory, tree: PrefixTree, leases: Sequence[PrefixLease]) -> Iterator[str]:
    entries = [entry for _, entry in memory.entries()]
    cached = Counter(node.entry for node in tree.nodes() if node.entry is not None)
    in_flight = Counter(entry for lease in leases for entry in lease.in_flight)
    if not {*cached, *in_flight} <= set(entries):
        yield "a block that is cached or in flight is not remembered"
    for entry in entries:
        if (entry.num_cached, entry.num_in_flight) != (cached[entry], in_flight[entry]):
            yield f"{_describe_entry(entry)} is cached {cached[entry]} times, in flight {in_flight[entry]} times"
    for parent in {entry.parent for entry in entries if entry.parent is not None}:
        tokens = [child.tokens for child in parent.children]
        if tokens != sorted(set(tokens)):
            yield f"the blocks remembered of a namespace are not in order below {_describe_entry(parent)}"
    for node in tree.nodes():
        if not node.is_open and (node.entry is None or node.entry.tokens != node.tokens):
            yield f"{_describe(node)} is not remembered by its tokens"
    yield from _ghosts(memory, [entry for entry in entries if entry.is_idle])


def _ghosts(memory: PromptMemory, idle: Sequence[Entry]) -> Iterator[str]:
    if set(idle) != set(memory.ghosts) or len(idle) > memory.max_ghosts:
        yield f"{len(idle)} entries are idle, {len(memory.ghosts)} of {memory.max_ghosts} ghosts are listed"
    order = {entry: place for place, entry in enumerate(memory.ghosts)}
    for entry in idle:
        if entry.left_why is None:
            yield f"{_describe_entry(entry)} was never computed"
        if any(order.get(child, len(order)) > order.get(entry, -1) for child in entry.children):
            yield f"{_describe_entry(entry)} would be forgotten before what follows it"


def _describe_entry(entry: Entry) -> str:
    return (
        f"an entry of {len(entry.tokens) // 4} tokens ({entry.num_cached} cached, {entry.num_in_flight} in flight, "
        f"{len(entry.children)} children)"
    )
