"""The cache as the scheduler sees it: look up, admit, extend, commit, release.

Responsible for who holds which block, and for what is published. Knows token ids and block ids; no tensors, no
requests, no steps. Engine thread only.

1. ``free + evictable + held == num_blocks``, and a block's ref count is the number of leases and pins that hold it.
2. Hits are held before anything is allocated, or an allocation could evict them.
3. A block is published, and its head offered for copying, only after its K and V were written (``commit``).
4. A lease that holds a node holds, for each of its ancestors, the ancestor's block or a duplicate of it. So a node
   without references has no referenced descendants, every unreferenced block can be evicted leaf by leaf, and children
   never outlive parents.
5. A hit was compared token by token with every block of its prefix.

Duplicates (inv. 4). Two leases may compute the same block at the same time. Block tables are append-only, so the one
that commits second keeps its own block and goes on below the published one. Holding that one too would cost a block
which admission never counted, and with a small pool a lease could starve itself; so its own block is noted as a
duplicate and takes the node over when the published block's last reference goes (that block is free then).

What goes when memory is needed, from first to last:

    free blocks
    evictable blocks of tenants that use more than their share, held blocks counted; several such tenants take turns.
      Of one tenant: in the order of the strategy (``eviction``), then what is under a TTL, least recently used first
    evictable blocks of the other tenants, in the same order. A share is a claim on memory that others may borrow while
      its owner does not need it, and no reservation: live requests of anybody come before cached blocks
    never: held blocks, by leases or pins

TTL. ``retain`` keeps published blocks until a time, as long as live requests leave room for them. No admission ever
waits for a retained block, so it needs no budget: who retains too much pushes out its own tenant's other blocks, and of
other tenants' no more than by computing as much. When the time is over the blocks are like all others, used just now.

Pins. ``pin`` holds published blocks as a lease does, for a user instead of a request, until ``unpin`` or the end of its
own TTL. Pins hold ``pin_fraction`` of the pool at most, and ``can_ever_admit`` counts on the rest only; so a footprint
that it accepts is admitted at the latest when nothing else runs, whatever is pinned.

Several codecs (``KVBudget``). Memory is then counted in bytes. A block is written in the largest codec; ``aging`` says
when it is made smaller: as the precision rule wants, or, before anything cached is evicted, for room. A footprint is
promised as its blocks will be: the older ones small, the youngest and those of a step large (``promises``). When a
demotion is carried out, of those that are due, is the pool's affair; all that is decided here takes it for done.

Heads of blocks are copied as long as the block's rows can be copied one by one. A head out of a block of whole spans
would have to be decoded and, once the copy is full, be encoded a second time together with what follows it: the request
would read worse K and V than it computes itself, and the next one that comes the same way would read others again. So
up to a block less is hit there, and what a prompt reads is the same each time.

Times end by the injected clock, when memory or the state of the cache is next asked for.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from typing import TYPE_CHECKING

from kvist.cache import invalidation, invariants
from kvist.cache.aging import Aging
from kvist.cache.eviction import strategy_factory
from kvist.cache.explain import Shortfall, explain, explain_off
from kvist.cache.hash import TOKEN_BYTES, BlockHasher, TokenChain
from kvist.cache.invalidation import Invalidation
from kvist.cache.lease import PartialCopy, PrefixLease, PrefixMatch
from kvist.cache.memory import DEFAULT_MAX_GHOSTS, PromptMemory
from kvist.cache.pending import PendingIdentities, pending_key
from kvist.cache.pins import Deadlines, Pin, Retention
from kvist.cache.pool import BlockPool, RoomLevels
from kvist.cache.promises import AgingPromises, Promises, owner_of
from kvist.cache.stats import CacheStats, Counters
from kvist.cache.survey import BlockColumns
from kvist.cache.tree import PrefixTree
from kvist.errors import ConfigError, InvariantViolation, NotCached, PinBudgetExceeded
from kvist.spec import SPAN_CODEC_BITS
from kvist.types import BlockCopy, MissReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from kvist.cache.block import Block
    from kvist.cache.eviction import StrategyFactory
    from kvist.cache.guard import BlockGuard
    from kvist.cache.memory import Entry
    from kvist.cache.namespaces import Namespace
    from kvist.cache.survey import CacheSurvey
    from kvist.cache.tree import Node
    from kvist.precision import KVBudget
    from kvist.types import MemoryOp


class CacheManager:
    """The prefix cache of one arena.

    Args:
        num_blocks: Blocks in the arena, >= 1; with a budget, 0.
        block_size: Tokens per block, >= 1.
        hasher: Computes block identities.
        prefix_cache: Whether blocks are published and looked up at all.
        eviction: Name of a strategy (``eviction.STRATEGIES``), or what makes one.
        shares: Fraction of the pool by tenant, each in (0, 1], 1 at most in all; the tenants not in it share the rest.
            None: nobody has a claim on anything.
        pin_fraction: Share of the pool that pins may hold at most, in [0, 1); no larger footprint than the rest is
            ever accepted.
        clock_ns: Monotonic clock in nanoseconds, for pins and TTLs.
        max_ghosts: Blocks remembered after they left the cache, >= 0, so that misses can be explained.
        budget: Memory for blocks whose codec depends on their age; None: all blocks have one codec.

    Raises:
        ConfigError: A size is below 1, a fraction outside its range, or the strategy unknown.
    """

    def __init__(  # noqa: PLR0913  # one keyword for each thing that a configuration chooses
        self,
        *,
        num_blocks: int = 0,
        block_size: int,
        hasher: BlockHasher,
        prefix_cache: bool = True,
        eviction: str | StrategyFactory = "default",
        shares: Mapping[str, float] | None = None,
        pin_fraction: float = 0.0,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
        max_ghosts: int = DEFAULT_MAX_GHOSTS,
        budget: KVBudget | None = None,
    ) -> None:
        codecs = None
        if budget is not None:
            codecs = {codec: budget.block_bytes[codec] for codec in budget.precision.codecs}
            num_blocks = budget.num_bytes // budget.block_bytes[budget.precision.codecs[0]]
        if num_blocks < 1 or block_size < 1:
            raise ConfigError(
                f"[cache] num_blocks and block_size must be >= 1, received {num_blocks=}, {block_size=}; "
                "raise --memory-gib"
            )
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.guard: BlockGuard | None = None
        """Asked before blocks are reused; None: nobody is."""
        self._hasher = hasher
        if not 0.0 <= pin_fraction < 1.0:
            raise ConfigError(f"[cache] pin_fraction must be in [0, 1), received {pin_fraction}")
        self._pool = BlockPool(
            num_blocks if budget is None else budget.num_bytes,
            strategy_factory(eviction),
            shares,
            codecs,
            room_levels=None if budget is None else _room_levels(budget),
            max_demotions=None if budget is None else budget.max_demotions,
        )
        # Blocks of other codecs come from rows and can be copied row by row.
        self._num_row_levels = sum([codec not in SPAN_CODEC_BITS for codec in codecs or ("",)])
        self._max_pinned_units = int(self._pool.capacity * pin_fraction)
        self._pins: set[Pin] = set()
        self._num_pins_of: Counter[Block] = Counter()
        self._aging: Aging | None = None
        self._promises = Promises(self._pool)
        if budget is not None:
            self._aging = Aging(self._pool, budget, block_size, self._num_pins_of)
            self._promises = AgingPromises(self._pool, budget, block_size, self._aging)
        self._max_chunk = 1 if budget is None else budget.max_chunk
        self.max_blocks_alone = self._promises.max_blocks(
            self._pool.capacity - self._max_pinned_units
        )
        """Blocks that a lease can come to have when nothing else runs and pins hold all they may."""
        self._deadlines = Deadlines(clock_ns)
        self._tree = PrefixTree(BlockColumns(len(self._pool.blocks), clock_ns))
        self._pending = PendingIdentities()
        self._memory = PromptMemory(max_ghosts, clock_ns)
        self._counters = Counters()
        # Nodes published beside one sibling by the commit that is running.
        self._forks: list[Node] = []
        # Leases that hold what was found to be wrong, until somebody asks.
        self._distrusted: list[PrefixLease] = []
        self.has_distrusted = False
        """Whether ``take_distrusted`` has something to return; only read by others."""
        # Weak: a lease that its owner forgot must be collected to be noticed.
        self._leases: weakref.WeakSet[PrefixLease] = weakref.WeakSet()

    # --- sizes

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool; with a budget, blocks of the largest codec that it holds."""
        return self._pool.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that could be allocated without giving up another one."""
        return self._pool.num_free

    @property
    def num_evictable(self) -> int:
        """Cached blocks that nobody holds."""
        return self._pool.num_evictable

    @property
    def num_held(self) -> int:
        """Blocks that leases or pins hold."""
        return self._pool.num_held

    @property
    def num_pinned(self) -> int:
        """Blocks that pins hold; leases may hold them too."""
        return len(self._num_pins_of)

    @property
    def num_pinned_units(self) -> int:
        """Units of memory that those take. O(pinned blocks) where blocks can change their codec."""
        if not self._pool.is_mixed:
            return self.num_pinned
        return sum([block.size for block in self._num_pins_of])

    @property
    def max_pinned(self) -> int:
        """Blocks that pins may hold; with a budget, new ones: of smaller ones they may hold more."""
        return self._max_pinned_units // self._pool.sizes[0]

    @property
    def has_due_demotions(self) -> bool:
        """Whether blocks are to be made smaller that no step had a turn for yet."""
        return self._pool.num_due > 0

    @property
    def num_reserved(self) -> int:
        """Blocks promised to leases, not allocated yet; with a budget, new blocks that what is promised could hold."""
        return self._pool.num_reserved

    @property
    def num_available(self) -> int:
        """Blocks that can be promised: what is free or evictable and not reserved."""
        return self._pool.num_available

    @property
    def is_mixed(self) -> bool:
        """Whether blocks have several codecs, so that ``take_memory_ops`` tells of allocations and copies."""
        return self._pool.is_mixed

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return the blocks that hold ``num_tokens`` positions."""
        return -(-num_tokens // self.block_size)

    def can_ever_admit(self, num_reserved_tokens: int) -> bool:
        """Return whether the footprint fits the pool when nothing else runs and pins hold all they may."""
        return self.num_blocks_for(num_reserved_tokens) <= self.max_blocks_alone

    # --- lookup

    def new_chain(self, namespace: Namespace, token_ids: Sequence[int]) -> TokenChain:
        """Return the chain of a sequence, for this cache's block size and key. O(tokens)."""
        return TokenChain(self._hasher, namespace, self.block_size, token_ids)

    def match(self, chain: TokenChain, max_hit_len: int) -> PrefixMatch:
        """Return what the cache holds of a sequence. Changes nothing.

        Args:
            chain: The sequence.
            max_hit_len: Hit at most so many tokens; a limit inside a full block makes it a partial copy, if its codec
                allows copies.

        Complexity: O(blocks of the sequence) dictionary lookups, each with one comparison of block_size tokens, and
            one search among the children of the last hit (``tree``).
        """
        size = self.block_size
        limit = min(max_hit_len, chain.num_tokens) if self.prefix_cache else 0
        nodes: list[Node] = []
        num_failures = 0
        node = self._tree.roots.get(chain.namespace)
        if node is not None:
            for index in range(limit // size):
                child = node.children.get(chain.block_hash(index))
                if child is None:
                    break
                if child.tokens != chain.block_tokens(index):
                    num_failures += 1
                    break
                nodes.append(child)
                node = child
        num_hit_tokens = len(nodes) * size
        source, copy = None, None
        head_len = min(limit - num_hit_tokens, size)
        if node is not None and head_len > 0:
            best = node.best_child(
                chain.block_tokens(len(nodes))[: head_len * TOKEN_BYTES], self._may_copy
            )
            if best is not None:
                source, num_copied = best
                copy = PartialCopy(source.block.block_id, num_copied)
                num_hit_tokens += num_copied
        next_key = pending_key(chain, len(nodes)) if num_hit_tokens < limit else b""
        return PrefixMatch(
            block_ids=tuple([hit.block.block_id for hit in nodes]),
            copy=copy,
            num_hit_tokens=num_hit_tokens,
            pending=next_key in self._pending,
            max_hit_len=max_hit_len,
            num_verification_failures=num_failures,
            nodes=tuple(nodes),
            source=source,
            tip=node,
            num_tip_changes=0 if node is None else node.num_changes,
            num_replacements=self._tree.num_replacements,
            next_key=next_key,
            num_tokens=chain.num_tokens,
        )

    def is_current(self, match: PrefixMatch, chain: TokenChain) -> bool:
        """Return whether ``match`` would find the same again, with the limit that it was given. O(1).

        Nodes go leaf first, so as long as the last one is there all are.

        Args:
            match: What it found before.
            chain: The sequence it was found for; may have grown since.
        """
        next_key = match.next_key
        if chain.num_tokens != match.num_tokens:
            limit = min(match.max_hit_len, chain.num_tokens) if self.prefix_cache else 0
            is_wanted = match.num_hit_tokens < limit
            next_key = pending_key(chain, len(match.nodes)) if is_wanted else b""
        tip = match.tip
        if tip is None or tip.parent is None:
            is_there = self._tree.roots.get(chain.namespace) is tip
        else:
            is_there = tip.block.node is tip
        return (
            is_there
            and (tip is None or tip.num_changes == match.num_tip_changes)
            and self._tree.num_replacements == match.num_replacements
            and (match.source is None or self._may_copy(match.source))
            and match.pending == (next_key in self._pending)
        )

    def lookup(self, chain: TokenChain, max_hit_len: int) -> PrefixMatch:
        """Return ``match`` and note that its blocks were used.

        Side effects: evictable blocks of the match become the most recently used ones; verification failures are
            counted. Tokens looked up and hit are counted by ``admit``, so asking again costs no statistics.

        Complexity: as ``match``.
        """
        match = self.match(chain, max_hit_len)
        self.note_failures(match)
        self.touch(match)
        return match

    def note_failures(self, match: PrefixMatch) -> None:
        """Count the verification failures of a new match."""
        self._counters.num_verification_failures += match.num_verification_failures

    def touch(self, match: PrefixMatch) -> None:
        """Note that the blocks of a current match were used: evictable ones become the most recently used ones.

        Complexity: O(blocks of the match).
        """
        if not match.num_hit_tokens:
            return
        touch = self._pool.touch
        # Deepest first, so that every block stays before its ancestors (eviction inv. 1).
        if match.source is not None and match.source.block.ref_count == 0:
            touch(match.source.block)
        for node in reversed(match.nodes):
            if node.block.ref_count == 0:
                touch(node.block)

    # --- leases

    def admit(
        self,
        match: PrefixMatch,
        chain: TokenChain,
        num_reserved_tokens: int,
        *,
        is_reuse: bool = True,
    ) -> PrefixLease | None:
        """Hold the hits of a match and promise the rest of the footprint.

        Args:
            match: What ``lookup`` found; looked up again when that is not current any more.
            chain: The sequence it was found for.
            num_reserved_tokens: Positions the request may come to hold, prompt included.
            is_reuse: False: the same client call computed what is hit, so that says nothing of whether it will be used
                again, and the strategy is not told.

        Returns:
            The lease, with the hits in its block table, or None: not now (nothing changed). When the copy's source
            would take the last block that the footprint needs, the lease does without the copy; so a footprint that
            ``can_ever_admit`` accepts is always admitted when no other lease is live.

        Side effects: counts the admission; a copy's target is allocated at once, which may evict. What was missed is
            explained (``PrefixLease.miss``), and the rest of the sequence is remembered as being computed. What the
            guard finds damaged is invalidated, and not hit.

        Complexity: O(blocks of the sequence).
        """
        self._expire_due()
        if not self.is_current(match, chain):
            match = self.match(chain, match.max_hit_len)
        pool = self._pool
        fit = self._fit(match, chain, self.num_blocks_for(num_reserved_tokens))
        if fit is None:
            return None
        num_blocks, source = fit
        copy = None if source is None else match.copy
        if self.guard is not None and self._has_damaged(match.nodes, source):
            # Once more without them: each round takes nodes away, so there is a last one.
            return self.admit(match, chain, num_reserved_tokens, is_reuse=is_reuse)
        owners = [owner_of(node.block) for node in match.nodes] if self._aging is not None else []
        lease = self._lease_on_hits(match, chain, is_reuse=is_reuse)
        try:
            if source is not None:
                pool.hold((source,))
                lease.copy_source = source
            lease.num_footprint_blocks = num_blocks
            lease.chunk = max(1, min(self._max_chunk, chain.num_tokens - lease.num_computed_tokens))
            for other in {owner for owner in owners if owner is not None}:
                self._promises.renew(other)
            self._promises.renew(lease)
            self._begin(lease, match, chain, copy)
        except MemoryError:
            self.release(lease)
            self._memory.drop_empty_root(chain.namespace)
            raise
        self._count_admission(lease, chain)
        return lease

    def extend(self, lease: PrefixLease, num_tokens: int) -> bool:
        """Grow the block table to cover ``num_tokens`` positions.

        Takes the blocks promised to the lease first, then free and evictable ones promised to nobody.

        Returns:
            False: not now (nothing changed). Never within the footprint that was admitted.

        Raises:
            InvariantViolation: The lease was released.

        Side effects: may evict.

        Complexity: O(blocks added).
        """
        self._require_live(lease, "extend")
        self._expire_due()
        num_new = self.num_blocks_for(num_tokens) - len(lease.blocks)
        if num_new > 0:
            num_extra = self._promises.missing(lease, num_new)
            if num_extra > self._pool.num_available_units:
                return False
            self._promises.add(lease, num_extra)
            num_blocks = len(lease.blocks) + num_new
            lease.num_footprint_blocks = max(lease.num_footprint_blocks, num_blocks)
            self._append_blocks(lease, num_new)
        return True

    def can_extend(self, lease: PrefixLease, num_tokens: int) -> bool:
        """Return whether ``extend`` would find memory. Changes nothing."""
        num_new = self.num_blocks_for(num_tokens) - len(lease.blocks)
        return num_new <= 0 or (
            self._promises.missing(lease, num_new) <= self._pool.num_available_units
        )

    def commit(self, lease: PrefixLease, chain: TokenChain, num_computed_tokens: int) -> None:
        """Note that K and V of positions ``[0, num_computed_tokens)`` are written, and publish them.

        Newly full blocks enter the prefix tree; the head of the block being written becomes a candidate for copying.
        A lower number than before says nothing new and changes nothing.

        Args:
            lease: The request's.
            chain: Its sequence; holds at least so many tokens.
            num_computed_tokens: Positions written, within the block table.

        Raises:
            InvariantViolation: The lease was released, or tokens or blocks do not reach that far.

        Side effects: the source of the lease's pending copy is let go; partial blocks that are a prefix of the new
            content are dropped.

        Complexity: O(blocks newly full), and for each a search among its siblings (``tree``).
        """
        if lease.is_released:
            self._require_live(lease, "commit")
        if num_computed_tokens > min(chain.num_tokens, len(lease.blocks) * self.block_size):
            raise InvariantViolation(
                f"[cache] commit of {num_computed_tokens=} exceeds the sequence ({chain.num_tokens}) or {lease!r}"
            )
        lease.num_computed_tokens = max(lease.num_computed_tokens, num_computed_tokens)
        if lease.can_publish:
            try:
                self._publish(lease, chain)
            except MemoryError:
                # What is published stays; what follows is the lease's alone.
                self._publish_no_more(lease)
                self._tree.drop_empty_root(chain.namespace)
                self._memory.drop_empty_root(chain.namespace)
        pending = lease.pending
        while pending and pending[0][0] <= lease.num_computed_tokens:
            self._pending.remove(pending.popleft()[1])
        if lease.copy_source is not None:
            self._end_copy(lease)
        if self._aging is not None:
            self._age(lease, self._aging, chain)
        while self._forks:
            self._abandon_sibling(self._forks.pop())

    def release(self, lease: PrefixLease) -> None:
        """Give everything back: on finish, abort, preemption and error alike. Idempotent.

        Published blocks stay cached; so does the computed head of the block that was being written, unless a sibling
        begins with the same tokens. Everything else becomes free.

        Complexity: O(blocks of the lease).
        """
        if lease.is_released:
            return
        lease.is_released = True
        self._leases.discard(lease)
        self._drop_pending(lease)
        self._end_copy(lease)
        self._promises.end(lease)
        if lease.open_node is not None:
            self._leave_head(lease.open_node)
            lease.open_node = None
        while lease.in_flight:
            self._memory.end(lease.in_flight.pop())
        if self._aging is not None:
            self._counters.num_demotions_by_age += self._aging.leave(lease)
        for block in lease.blocks:
            if block.duplicate_of is not None:
                self._tree.remove_duplicate(block)
        # Tails first, so that the longest prefix survives longest (eviction inv. 1).
        self._unhold(reversed(lease.blocks))
        lease.blocks = []
        lease.block_table = []
        lease.tip = None

    # --- for users instead of requests

    def pin(self, chain: TokenChain, num_tokens: int, ttl_s: float | None = None) -> Pin | None:
        """Hold the whole blocks of a prefix until ``unpin``, or for ``ttl_s`` seconds.

        Args:
            chain: The sequence.
            num_tokens: Its prefix; only whole blocks of it are held.
            ttl_s: > 0; None: no end.

        Returns:
            The pin, or None: not now (nothing changed), because the blocks are promised to requests that run.

        Raises:
            NotCached: Not all of the blocks are published; nothing is held.
            PinBudgetExceeded: Pins would hold more than their share of the memory; nothing is held. A block counts
                with what it takes.
            ConfigError: ttl_s is not positive.

        Complexity: O(blocks of the prefix + log pins), and with a budget O(pinned blocks).
        """
        deadline_ns = None if ttl_s is None else self._deadlines.after(ttl_s)
        self._expire_due()
        nodes = self._published(chain, num_tokens)
        blocks = [node.block for node in nodes]
        num_new = sum([block.size for block in blocks if block not in self._num_pins_of])
        num_pinned = self.num_pinned_units + num_new
        if num_pinned > self._max_pinned_units:
            raise PinBudgetExceeded(
                f"[cache] pins may hold {self._max_pinned_units:,} of {self._pool.capacity:,} "
                f"{'bytes' if self._pool.is_mixed else 'blocks'}, received a pin that makes it {num_pinned:,}; unpin "
                "something or pin fewer tokens"
            )
        num_taken = sum([block.size for block in blocks if block.ref_count == 0])
        if num_taken > self._pool.num_available_units:
            return None
        self._pool.hold(blocks)
        for node in nodes:
            node.has_expired = False
        self._num_pins_of.update(blocks)
        pin = Pin(blocks, num_tokens=len(blocks) * self.block_size, deadline_ns=deadline_ns)
        self._pins.add(pin)
        if deadline_ns is not None:
            self._deadlines.add(deadline_ns, pin)
        return pin

    def unpin(self, pin: Pin) -> None:
        """Let go of what a pin holds; its blocks stay cached. Idempotent. O(blocks of the pin)."""
        if pin.is_released:
            return
        pin.is_released = True
        self._pins.discard(pin)
        # Deepest first (eviction inv. 1).
        for block in pin.blocks:
            self._num_pins_of[block] -= 1
            if not self._num_pins_of[block]:
                del self._num_pins_of[block]
        self._unhold(reversed(pin.blocks))
        pin.blocks = []

    def retain(self, chain: TokenChain, num_tokens: int, ttl_s: float) -> int:
        """Evict the whole blocks of a prefix after all others of their tenant, for ``ttl_s`` seconds.

        Asking again moves the end later, never earlier.

        Args:
            chain: The sequence.
            num_tokens: Its prefix; only whole blocks of it are retained.
            ttl_s: > 0.

        Returns:
            The tokens retained.

        Raises:
            NotCached: Not all of the blocks are published; nothing changed.
            ConfigError: ttl_s is not positive.

        Complexity: O(blocks of the prefix + log TTLs).
        """
        deadline_ns = self._deadlines.after(ttl_s)
        self._expire_due()
        nodes = self._published(chain, num_tokens)
        for node in reversed(nodes):  # deepest first (eviction inv. 1)
            node.kept_until_ns = max(node.kept_until_ns, deadline_ns)
            node.has_expired = False
            self._queue_again(node)
        self._deadlines.add(deadline_ns, Retention(list(enumerate(nodes))))
        return len(nodes) * self.block_size

    def take_memory_ops(self) -> tuple[MemoryOp | BlockCopy, ...]:
        """Return what is to happen to the arena's memory, in order, since this was last asked; for the next plan.

        Empty where all blocks have one codec. Where they have several, copies are among them.

        Side effects: carries out demotions that are due, as many as one step may; with what is left of those, makes
            cached blocks smaller that the blocks to come would have no room for.
        """
        self._make_room_ahead()
        return self._pool.take_memory_ops()

    # --- content that must not be offered any more

    def invalidate(self, nodes: Sequence[Node]) -> Invalidation:
        """Take nodes whose content is wrong out of the cache, with all that follows them, whoever holds them.

        Who misses them is told ``verification_failed``. Live leases that hold some of it keep their blocks, publish
        nothing more, and are handed out by ``take_distrusted``; pins on it end.

        Complexity: O(nodes taken out + leases + pins), with a search among siblings for each.
        """
        taken = self._detach(nodes, MissReason.VERIFICATION_FAILED)
        self._counters.num_invalidated_blocks += taken.num_dropped + taken.num_detached
        self._distrusted += taken.leases
        self.has_distrusted = bool(self._distrusted)
        return taken

    def take_distrusted(self) -> list[PrefixLease]:
        """Return the live leases that hold what was invalidated since the last call."""
        taken = [lease for lease in self._distrusted if not lease.is_released]
        self._distrusted.clear()
        self.has_distrusted = False
        return taken

    def forget(self, nodes: Sequence[Node]) -> Invalidation:
        """Do as ``invalidate`` because somebody asked: the content is right, so its leases may go on with it."""
        taken = self._detach(nodes, MissReason.EVICTED)
        self._counters.num_reset_blocks += taken.num_dropped + taken.num_detached
        return taken

    def nodes_of(self, tenant: str | None = None) -> list[Node]:
        """Return the first nodes of every namespace of a tenant, or of all; below them is all that is cached."""
        return [
            node
            for namespace, root in self._tree.roots.items()
            if tenant is None or namespace.tenant == tenant
            for node in root.ordered
        ]

    def nodes_after(self, chain: TokenChain) -> list[Node]:
        """Return the first nodes, of all sequences that begin with ``chain``, that hold its last token or later ones.

        Below them is all that follows the sequence. O(blocks of the sequence + children of its last block).
        """
        index = (chain.num_tokens - 1) // self.block_size
        parent = self._tree.roots.get(chain.namespace)
        for nearer in range(index):
            parent = None if parent is None else parent.children.get(chain.block_hash(nearer))
        tail = chain.block_tokens(index)
        children = [] if parent is None else parent.ordered
        return [node for node in children if node.tokens.startswith(tail)]

    def is_read(self, block: Block) -> bool:
        """Return whether a live lease holds the block, or a copy is about to be made of it; pins alone read nothing."""
        return block.ref_count > self._num_pins_of[block]

    def renewed(self, node: Node) -> None:
        """Take note that a block that nobody reads holds the same tokens' K and V, computed anew."""
        self._seal(node)

    def note_missed(self, num_tokens: int) -> None:
        """Count tokens that are computed again because what was reused of them is not trusted any more."""
        missed = self._counters.missed_tokens
        missed[MissReason.VERIFICATION_FAILED.value] += num_tokens

    # --- the whole cache

    def reset(self) -> int:
        """Drop every block that nobody holds from the cache, retained ones too; return how many."""
        num_dropped = self.num_evictable
        for block in self._pool.evictable:
            self._pool.withdraw(block)
            self._drop(block, MissReason.EVICTED)
        self._counters.num_reset_blocks += num_dropped
        return num_dropped

    def stats(self) -> CacheStats:
        """Return sizes and counters, after ending what is due."""
        self._expire_due()
        usage = self._pool.usage() if self._pool.is_mixed else {}
        num_taken = self._pool.num_used + self._pool.num_due_units
        return CacheStats(
            num_blocks=self.num_blocks,
            num_ids=len(self._pool.blocks),
            block_size=self.block_size,
            num_free=self.num_free,
            num_evictable=self.num_evictable,
            num_held=self.num_held,
            num_reserved=self.num_reserved,
            num_pinned=self.num_pinned,
            num_ghosts=len(self._memory.ghosts),
            unit_bytes=int(self._pool.is_mixed),
            block_units=self._pool.sizes[0],
            free_units=self._pool.capacity - num_taken,
            evictable_units=self._pool.num_evictable_units,
            held_units=num_taken - self._pool.num_evictable_units,
            blocks_by_codec={codec: each.num_blocks for codec, each in usage.items()},
            evictable_by_codec={codec: each.num_evictable for codec, each in usage.items()},
            bytes_by_codec={codec: each.num_units for codec, each in usage.items()},
            num_due_demotions=self._pool.num_due,
            num_urgent_demotions=self._pool.num_urgent_demotions,
            **self._counters.snapshot(),
        )

    def survey(self) -> CacheSurvey:
        """Return what every block holds. O(blocks), about a millisecond for 50,000."""
        return self._tree.columns.survey(
            self._pool.blocks, self._tree.roots, self._num_pins_of, self._deadlines.now_ns()
        )

    def check_invariants(self) -> None:
        """Check every law of this package.

        Raises:
            InvariantViolation: One does not hold; the message names it and dumps the state.

        Complexity: O(blocks of the pool and of all leases).
        """
        invariants.check(
            self._pool,
            self._tree,
            self._pending,
            self._memory,
            tuple(self._leases),
            tuple(self._pins),
        )
        invariants.check_promises(self._promises, tuple(self._leases))

    # --- private

    def _may_copy(self, node: Node) -> bool:
        """Return whether the first tokens of a block can be copied: of one that is kept in rows."""
        return node.block.level < self._num_row_levels

    def _fit(
        self, match: PrefixMatch, chain: TokenChain, num_footprint: int
    ) -> tuple[int, Block | None] | None:
        """Return how many blocks a lease may come to have, and the copy's source if it is copied at all.

        None: it does not fit now, not even without the copy.
        """
        hits = [node.block for node in match.nodes]
        num_hits, num_available = len(hits), self._pool.num_available_units
        num_left = chain.num_tokens - num_hits * self.block_size
        node = match.source
        if node is not None and (self.guard is None or self.guard.may_copy(node)):
            num_blocks = max(num_footprint, num_hits + 1)
            cost = self._promises.cost(hits, num_blocks, num_left)
            # Holding an evictable block takes it from the others just as a promise does.
            cost += node.block.size if node.block.ref_count == 0 else 0
            if cost <= num_available:
                return num_blocks, node.block
        num_blocks = max(num_footprint, num_hits)
        cost = self._promises.cost(hits, num_blocks, num_left)
        return (num_blocks, None) if cost <= num_available else None

    def _age(self, lease: PrefixLease, aging: Aging, chain: TokenChain) -> None:
        """Make smaller what became old by what a lease has computed, and promise it what follows from that."""
        num_demoted = aging.advance(lease)
        self._counters.num_demotions_by_age += num_demoted
        chunk = max(1, min(lease.chunk, chain.num_tokens - lease.num_computed_tokens))
        if num_demoted or chunk < lease.chunk:
            lease.chunk = chunk
            self._promises.renew(lease)

    def _reused_tokens(self, lease: PrefixLease, source: Block | None) -> Mapping[str, int]:
        """Return the hit tokens of a lease that has just been made by the codec that they are read, or copied, in.

        Those of blocks that are to become smaller count as if they were: few steps read them before.
        """
        reused: Counter[str] = Counter()
        for block in lease.blocks[: lease.num_shared]:
            reused[self._pool.codec_of(block)] += self.block_size
        if source is not None:
            num_shared_tokens = lease.num_shared * self.block_size
            reused[self._pool.codec_of(source)] += lease.num_computed_tokens - num_shared_tokens
        return dict(reused)

    def _has_damaged(self, nodes: Sequence[Node], source: Block | None) -> bool:
        """Ask the guard for what is about to be reused; invalidate what it finds, and return whether that was any."""
        assert self.guard is not None
        damaged = self.guard.find_damaged(nodes, None if source is None else source.node)
        if damaged:
            self.invalidate(damaged)
        return bool(damaged)

    def _detach(self, roots: Sequence[Node], why: MissReason) -> Invalidation:
        nodes = invalidation.subtrees(roots)
        gone = set(nodes)
        for pin in [p for p in self._pins if any(block.node in gone for block in p.blocks)]:
            self.unpin(pin)
        leases = tuple(lease for lease in self._leases if self._is_touched(lease, gone))
        for lease in leases:
            self._stop_publishing(lease)
        num_dropped, num_detached = invalidation.detach(
            nodes, self._tree, self._pool, self._memory, why
        )
        return Invalidation(num_dropped=num_dropped, num_detached=num_detached, leases=leases)

    def _is_touched(self, lease: PrefixLease, gone: set[Node]) -> bool:
        """Return whether a lease holds content of some nodes, or copies it just now. Its path ends with its tip."""
        source = lease.copy_source
        return (
            lease.tip in gone
            or lease.open_node in gone
            or (source is not None and source.node in gone)
        )

    def _stop_publishing(self, lease: PrefixLease) -> None:
        """Let nothing that a lease computes from now on enter the tree, and its open head leave with its path."""
        lease.can_publish = False
        self._drop_pending(lease)
        while lease.in_flight:
            self._memory.end(lease.in_flight.pop())
        lease.open_node = lease.tip = None
        lease.num_sealed = 0

    def _seal(self, node: Node) -> None:
        """Tell the guard that a node's block is final."""
        if self.guard is not None:
            self.guard.seal(node)

    def _begin(
        self, lease: PrefixLease, match: PrefixMatch, chain: TokenChain, copy: PartialCopy | None
    ) -> None:
        """Explain what a new lease does without, and note what it is going to compute. It is released on failure."""
        # Before anything is evicted for it: a copy's target may take what another prompt had.
        num_hit_tokens = lease.num_computed_tokens + (0 if copy is None else copy.num_tokens)
        self._explain(
            lease, chain, Shortfall(match, num_hit_tokens, min(match.max_hit_len, chain.num_tokens))
        )
        if self.prefix_cache:
            self._begin_in_flight(lease, chain)
        source = lease.copy_source
        if source is not None and copy is not None:
            self._begin_copy(lease, source, copy.num_tokens)
        if self.prefix_cache:
            self._add_pending(lease, chain)
        if self._aging is not None:
            self._age(lease, self._aging, chain)
            lease.reused_tokens = self._reused_tokens(lease, source)

    def _lease_on_hits(
        self, match: PrefixMatch, chain: TokenChain, *, is_reuse: bool
    ) -> PrefixLease:
        """Return a lease that holds the hits of a match and nothing else yet."""
        lease = PrefixLease(can_publish=self.prefix_cache, tenant=chain.namespace.tenant)
        self._leases.add(lease)
        columns, now_ns = self._tree.columns, self._deadlines.now_ns()
        for node in match.nodes:
            node.num_hits += is_reuse
            columns.num_hits[node.block.block_id] += is_reuse
            columns.used_ns[node.block.block_id] = now_ns
        if match.source is not None:
            columns.used_ns[match.source.block.block_id] = now_ns
        lease.blocks = [node.block for node in match.nodes]
        self._pool.hold(lease.blocks)  # inv. 2
        lease.block_table = list(match.block_ids)
        if self._aging is not None:
            self._counters.num_demotions_by_age += self._aging.enter(lease)
        lease.num_shared = lease.num_sealed = len(match.nodes)
        lease.num_computed_tokens = lease.num_shared * self.block_size
        if match.nodes:
            lease.tip = match.nodes[-1]
            if lease.tip.is_end:
                lease.num_continuations = lease.tip.num_continuations + is_reuse
        return lease

    def _require_live(self, lease: PrefixLease, verb: str) -> None:
        if lease.is_released:
            raise InvariantViolation(f"[cache] {verb} needs a live lease, received {lease!r}")

    def _append_blocks(self, lease: PrefixLease, num_new: int) -> None:
        """Allocate blocks promised to the lease."""
        pool = self._pool
        allocate, tenant, size = pool.allocate, lease.tenant, pool.sizes[0]
        blocks, block_table = lease.blocks, lease.block_table
        for _ in range(num_new):
            while (block := allocate(tenant)) is None:
                self._make_room()
            if self._aging is not None:
                self._aging.add(lease, block)
            blocks.append(block)
            block_table.append(block.block_id)
            lease.num_reserved_units -= size
            pool.num_reserved_units -= size

    def _make_room_ahead(self) -> None:
        """Gain room for the next block of each lease, as far as this step has demotions left.

        Many leases may begin a block in the same step; without this, each of them would have some demoted at once.
        """
        pool = self._pool
        if self._aging is None:
            return
        num_ahead = min(len(self._leases) * pool.sizes[0], pool.num_reserved_units)
        for _ in range(pool.num_demotions_left - pool.num_due):
            if pool.num_used + num_ahead <= pool.capacity or not self._aging.demote_coldest():
                return
            self._counters.num_demotions_for_room += 1

    def _make_room(self) -> None:
        """Gain memory: at the cost of some precision where that is allowed, else of a cached block."""
        if self._aging is not None and self._aging.demote_coldest():
            self._counters.num_demotions_for_room += 1
            return
        block = self._pool.evict()
        assert block.node is not None
        if block.node.has_expired:
            self._drop(block, MissReason.EXPIRED)
            self._counters.num_expired_blocks += 1
        else:
            self._drop(block, MissReason.EVICTED)
        self._counters.num_evictions += 1

    def _drop(self, block: Block, why: MissReason) -> None:
        """Make an evictable block, taken out of its queue, free. It must be a leaf."""
        node = block.node
        assert node is not None
        assert node.entry is not None
        self._memory.leave(node.entry, why)
        self._tree.remove(node)
        self._pool.free(block)

    def _supersede(self, node: Node) -> None:
        """Free a partial block, taken out of its queue, whose tokens a sibling begins with."""
        assert node.entry is not None
        self._memory.supersede(node.entry)
        block = node.block
        self._tree.remove(node)
        self._pool.free(block)
        self._counters.num_superseded_blocks += 1

    def _unhold(self, blocks: Iterable[Block]) -> None:
        """Take one reference away from each block, deepest first; the last one decides what becomes of it."""
        pool = self._pool
        for block in pool.unhold(blocks):
            node = block.node
            if node is None:
                pool.free(block)
            elif node.duplicates:
                self._tree.replace(node, next(iter(node.duplicates)))
                self._seal(node)
                pool.free(block)
            elif node.block_hash is None and node.is_partial and self._tree.is_covered(node):
                self._supersede(node)
            else:
                pool.keep(block)

    def _begin_copy(self, lease: PrefixLease, source: Block, num_tokens: int) -> None:
        """Allocate the copy's target; the source is held already."""
        self._append_blocks(lease, 1)
        lease.pending_copy = BlockCopy(
            source=source.block_id, target=lease.block_table[-1], num_tokens=num_tokens
        )
        self._pool.note_copy(lease.pending_copy)
        lease.num_computed_tokens += num_tokens

    def _end_copy(self, lease: PrefixLease) -> None:
        """Let go of the copy's source: it has run, or never will."""
        if lease.copy_source is not None:
            self._unhold((lease.copy_source,))
            lease.copy_source = lease.pending_copy = None

    def _publish(self, lease: PrefixLease, chain: TokenChain) -> None:
        """Bring the tree up to date with what the lease has computed."""
        num_full, num_head_tokens = divmod(lease.num_computed_tokens, self.block_size)
        while lease.num_sealed < num_full:
            if not self._publish_block(lease, chain):
                return
            if lease.num_sealed < num_full and lease.tip is not None and not lease.tip.keys:
                self._publish_run(lease, chain, num_full)
        if num_head_tokens:
            tokens = chain.block_tokens(num_full)[: num_head_tokens * TOKEN_BYTES]
            self._publish_head(lease, chain, tokens)

    def _publish_block(self, lease: PrefixLease, chain: TokenChain) -> bool:
        """Publish block num_sealed, or note it as a duplicate; False when its identity collides."""
        block = lease.blocks[lease.num_sealed]
        tokens = chain.block_tokens(lease.num_sealed)
        block_hash = chain.block_hash(lease.num_sealed)
        parent = lease.tip or self._tree.root(chain.namespace)
        node = parent.children.get(block_hash)
        if node is None:
            if lease.open_node is None:
                node = self._tree.add(parent, block, tokens, block_hash)
                if len(parent.ordered) > 1:
                    self._drop_superseded_by(node)
            else:
                self._publish_head(lease, chain, tokens)
                node = lease.open_node
                self._tree.publish(node, block_hash)
            node.num_continuations = lease.num_continuations
            lease.open_node = node  # to be taken out again if there is no memory for its entry
            node.entry = self._remember(lease, node)
            if parent.parent is not None and len(parent.ordered) == 2:
                self._forks.append(node)
            self._counters.num_published_blocks += 1
            self._seal(node)
        else:
            if lease.open_node is not None:
                self._tree.remove(lease.open_node)
            if node.tokens != tokens:
                # Nothing of this sequence can be found from here on, so nothing more is published.
                self._counters.num_verification_failures += 1
                lease.open_node = None
                self._publish_no_more(lease)
                return False
            self._add_duplicate(node, block)
            if lease.in_flight:
                self._memory.end(lease.in_flight.popleft())
        lease.open_node = None
        lease.tip = node
        lease.num_sealed += 1
        return True

    def _publish_run(self, lease: PrefixLease, chain: TokenChain, end: int) -> None:
        """Publish the blocks up to ``end`` below a tip that has no children: each is new and an only child."""
        start = lease.num_sealed
        parent = lease.tip
        assert parent is not None
        hashes = chain.block_hashes(start, end)
        for index, block_hash in enumerate(hashes, start):
            tokens = chain.block_tokens(index)
            node = self._tree.add(parent, lease.blocks[index], tokens, block_hash)
            node.num_continuations = lease.num_continuations
            lease.open_node = node
            node.entry = self._remember(lease, node)
            self._seal(node)
            lease.open_node = None
            lease.tip = parent = node
            lease.num_sealed += 1
            self._counters.num_published_blocks += 1

    def _remember(self, lease: PrefixLease, node: Node) -> Entry:
        """Return the memory's entry of a block that has just been published."""
        begun = lease.in_flight[0] if lease.in_flight else None
        # The last block of a prompt was shorter when it was begun.
        if begun is not None and len(begun.tokens) == len(node.tokens):
            entry = begun
            self._memory.fulfil(begun)
        else:
            entry = self._memory.publish(self._entry_above(node), node.tokens)
            if begun is not None:
                self._memory.end(begun)
        if begun is not None:
            lease.in_flight.popleft()
        return entry

    def _leave_head(self, node: Node) -> None:
        """Leave an open node to the cache, as a partial one; without memory to remember it, it goes."""
        try:
            entry = self._memory.publish(self._entry_above(node), node.tokens)
        except MemoryError:
            self._tree.remove(node)
            self._memory.drop_empty_root(node.namespace)
            return
        self._tree.seal(node)
        node.entry = entry
        self._counters.num_partial_blocks += 1
        self._seal(node)

    def _publish_no_more(self, lease: PrefixLease) -> None:
        """Let nothing that a lease computes from now on be found, and its open head go."""
        if lease.open_node is not None:
            self._tree.remove(lease.open_node)
            lease.open_node = None
        lease.can_publish = False
        self._drop_pending(lease)

    def _publish_head(self, lease: PrefixLease, chain: TokenChain, tokens: bytes) -> None:
        """Offer the computed tokens of block num_sealed for copying."""
        node = lease.open_node
        if node is None:
            parent = lease.tip or self._tree.root(chain.namespace)
            node = self._tree.open(parent, lease.blocks[lease.num_sealed], tokens)
            lease.open_node = node
        elif node.tokens != tokens:
            self._tree.grow(node, tokens)
        if not node.is_only_child:
            self._drop_superseded_by(node)

    def _drop_superseded_by(self, node: Node) -> None:
        """Drop the head that a released lease left behind, if a node begins with it."""
        superseded = self._tree.superseded_by(node)
        if superseded is not None:
            self._pool.withdraw(superseded.block)
            self._supersede(superseded)

    def _add_duplicate(self, node: Node, block: Block) -> None:
        """Let a block with a node's content stand for the node, or stand by when the node's own block is held."""
        self._counters.num_duplicate_blocks += 1
        published = node.block
        if published.ref_count:
            self._tree.add_duplicate(node, block)
        else:
            self._pool.withdraw(published)
            self._tree.replace(node, block)
            self._seal(node)
            self._pool.free(published)

    def _abandon_sibling(self, node: Node) -> None:
        """Tell the strategy that a chain was left for ``node``, when it was never hit and nobody holds it.

        Only when ``node`` is its first sibling: below a prefix that many share, no continuation replaces another.
        """
        assert node.parent is not None
        siblings = [other for other in node.parent.ordered if other is not node]
        # None: it was the source of the copy that has just ended, and what was published begins with it.
        if not siblings or siblings[0].block.ref_count or siblings[0].kept_until_ns:
            return
        sibling = siblings[0]
        nodes = self._tree.never_hit_chain(sibling)
        if nodes is not None:
            sibling.block.partition.strategy.abandon([other.block for other in nodes])

    def _published(self, chain: TokenChain, num_tokens: int) -> list[Node]:
        """Return the nodes of the whole blocks of a prefix."""
        num_blocks = min(num_tokens, chain.num_tokens) // self.block_size
        nodes = self.match(chain, num_blocks * self.block_size).nodes
        if len(nodes) < num_blocks or not nodes:
            raise NotCached(
                f"[cache] expected a prefix of whole blocks that are computed, received {num_tokens=} with "
                f"{len(nodes)} of {num_blocks} blocks cached (block_size={self.block_size}); compute the prompt first"
            )
        return list(nodes)

    def _queue_again(self, node: Node) -> None:
        """Move an evictable block to the queue that its node's TTL asks for."""
        if node.block.ref_count == 0:
            self._pool.withdraw(node.block)
            self._pool.keep(node.block)

    def _expire_due(self) -> None:
        """End the pins and TTLs whose time is over. O(1) when there are none, else O(n log n) in what ends."""
        if not self._deadlines.entries:
            return
        now_ns = self._deadlines.now_ns()
        depths: dict[Node, int] = {}
        for entry in self._deadlines.due(now_ns):
            if isinstance(entry, Pin):
                self._counters.num_expired_pins += not entry.is_released
                for block in entry.blocks:
                    if block.node is not None and not block.node.kept_until_ns:
                        block.node.has_expired = True
                self.unpin(entry)
            else:
                depths.update({node: depth for depth, node in entry.nodes})
        # Deepest first across all that is due (eviction inv. 1).
        for node in sorted(depths, key=depths.__getitem__, reverse=True):
            # Not when it was evicted since, or retained for longer.
            if node.block.node is node and 0 < node.kept_until_ns <= now_ns:
                node.kept_until_ns = 0
                node.has_expired = True
                self._queue_again(node)

    def _explain(self, lease: PrefixLease, chain: TokenChain, shortfall: Shortfall) -> None:
        """Say why less was hit than could have been, if so, and count it."""
        if shortfall.num_hit_tokens >= shortfall.limit:
            return
        if self.prefix_cache:
            root = self._tree.roots.get(chain.namespace)
            lease.miss = explain(self._memory, root, chain, shortfall)
        else:
            lease.miss = explain_off(shortfall.limit)
        missed = self._counters.missed_tokens
        for span in lease.miss.spans:
            missed[span.reason.value] += span.end - span.start

    def _begin_in_flight(self, lease: PrefixLease, chain: TokenChain) -> None:
        """Remember what the lease is going to compute of the tokens known so far."""
        entry = lease.tip.entry if lease.tip is not None else self._memory.root(chain.namespace)
        assert entry is not None
        lease.in_flight.extend(self._memory.begin(entry, chain.tokens_from(lease.num_shared)))

    def _entry_above(self, node: Node) -> Entry:
        parent = node.parent
        assert parent is not None
        if parent.entry is not None:
            return parent.entry
        return self._memory.root(node.namespace)

    def _add_pending(self, lease: PrefixLease, chain: TokenChain) -> None:
        """Note what the lease is going to compute of the tokens known so far."""
        size, num_full = self.block_size, chain.num_full_blocks
        # A tail that was copied whole is not computed again.
        first = lease.num_computed_tokens // size
        keys: list[bytes] = [*chain.block_hashes(first, num_full)]
        ends = [*range((first + 1) * size, (num_full + 1) * size, size)]
        if chain.num_tokens > max(num_full * size, lease.num_computed_tokens):
            keys.append(pending_key(chain, num_full))
            ends.append(chain.num_tokens)
        self._pending.add(keys)
        lease.pending.extend(zip(ends, keys, strict=True))

    def _drop_pending(self, lease: PrefixLease) -> None:
        while lease.pending:
            self._pending.remove(lease.pending.popleft()[1])

    def _count_admission(self, lease: PrefixLease, chain: TokenChain) -> None:
        counters = self._counters
        counters.num_admissions += 1
        counters.num_lookup_tokens += chain.num_tokens
        counters.num_hit_tokens += lease.num_computed_tokens
        if lease.pending_copy is not None:
            counters.num_partial_copies += 1
            counters.num_copied_tokens += lease.pending_copy.num_tokens


def _room_levels(budget: KVBudget) -> RoomLevels:
    """Return in which codecs cached blocks are kept at least when there is no room."""
    rule = budget.precision
    if not budget.demote_before_evict:
        return RoomLevels(0, 0, 0)
    rows = [codec for codec in rule.codecs if codec not in SPAN_CODEC_BITS]
    first, other = rule.codecs.index(rule.sink), rule.codecs.index(rule.rest)
    return RoomLevels(first, other, min(other, len(rows) - 1))
