"""The cache against a naive model: what every position of every block holds, as plain tuples.

The model simulates the arena. ``contents[block_id][offset]`` is the namespace and the whole token prefix whose K and V
stand there; steps write it, copies copy it. A hit is right when each of its positions holds exactly the request's own
prefix, and it is complete when it is as long as the longest prefix that any cached or live block holds.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import pytest
from benchmarks.eviction_strategies import Arc, S3Fifo
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvist.cache.eviction import Lru, SegmentedLru
from kvist.cache.hash import BlockHasher, TokenChain
from kvist.cache.manager import CacheManager
from kvist.cache.namespaces import Namespace
from kvist.errors import NotCached, PinBudgetExceeded
from kvist.precision import PRESETS, KVBudget, KVPrecision
from kvist.spec import SPAN_CODEC_BITS
from kvist.types import BlockCopy, BlockHash

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from _pytest.mark import ParameterSet

    from kvist.cache.eviction import StrategyFactory
    from kvist.cache.lease import PrefixLease, PrefixMatch
    from kvist.cache.pins import Pin

NAMESPACES = tuple(Namespace(model="m", tenant=tenant) for tenant in ("a", "b"))
# Two tokens, so that prefixes are shared by chance at every depth.
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=12)
INDEX = st.integers(0, 10**6)


class CollidingHasher(BlockHasher):
    """Has four identities only: blocks whose tokens have equal sums collide."""

    def child(self, parent: BlockHash, tokens: bytes) -> BlockHash:
        return BlockHash(bytes([sum(tokens) % 4]) * 32)


@dataclass(eq=False)
class ModelRequest:
    namespace: Namespace
    tokens: list[int]
    num_output_tokens: int
    chain: TokenChain
    lease: PrefixLease | None = None
    tokens_at_admission: tuple[int, ...] = ()
    table: list[int] = field(default_factory=list)
    num_written: int = 0


class CacheMachine(RuleBasedStateMachine):
    hasher: BlockHasher = BlockHasher(bytes(range(32)))
    is_exact = True
    strategy: StrategyFactory = SegmentedLru
    shares: Mapping[str, float] | None = None
    pin_fraction = 0.5
    max_chunk = 10**9

    @initialize(block_size=st.sampled_from([1, 2, 3, 4]), num_blocks=st.integers(3, 12))
    def start(self, block_size: int, num_blocks: int) -> None:
        self.block_size = block_size
        self.now_ns = 1
        self.pins: list[tuple[Pin, TokenChain]] = []
        self.num_pinned_ever = 0
        self.manager = CacheManager(
            **self.memory(num_blocks),
            block_size=block_size,
            hasher=self.hasher,
            eviction=type(self).strategy,
            shares=self.shares,
            pin_fraction=self.pin_fraction,
            clock_ns=lambda: self.now_ns,
        )
        num_ids = len(self.manager._pool.blocks)
        self.contents: list[list[object]] = [[None] * block_size for _ in range(num_ids)]
        self.num_committed = [0] * num_ids
        self.waiting: list[ModelRequest] = []
        self.running: list[ModelRequest] = []
        self.found: list[tuple[TokenChain, PrefixMatch]] = []

    def memory(self, num_blocks: int) -> dict[str, Any]:
        return {"num_blocks": num_blocks}

    # --- the model

    def run_copies(self, plan: list[tuple[ModelRequest, int]]) -> None:
        assert self.manager.take_memory_ops() == ()
        for request, _ in plan:
            copy = request.lease.pending_copy
            if copy is not None:
                head = self.contents[copy.source][: copy.num_tokens]
                self.contents[copy.target][: copy.num_tokens] = head

    def known_prefixes(self, namespace: Namespace) -> set[tuple[int, ...]]:
        cached = {block.block_id for block in self.manager._pool.blocks if block.node is not None}
        held = {block_id for request in self.running for block_id in request.table}
        return {
            entry[1]
            for block_id in cached | held
            for entry in self.contents[block_id][: self.num_committed[block_id]]
            if entry[0] == namespace
        }

    def expected_hit_len(self, request: ModelRequest, max_hit_len: int) -> int:
        known = self.known_prefixes(request.namespace)
        length = 0
        while length < max_hit_len and tuple(request.tokens[: length + 1]) in known:
            length += 1
        return length

    def expected_pending(self, request: ModelRequest, num_hit_blocks: int) -> bool:
        end = min((num_hit_blocks + 1) * self.block_size, len(request.tokens))
        is_full = end % self.block_size == 0
        wanted = tuple(request.tokens[:end])
        return any(
            other.namespace == request.namespace
            and other.lease.num_computed_tokens < end
            and other.tokens_at_admission[:end] == wanted
            and (is_full or len(other.tokens_at_admission) == end)
            for other in self.running
        )

    @invariant()
    def what_is_current_is_found_again(self) -> None:
        for chain, match in self.found[-20:]:
            if self.manager.is_current(match, chain):
                assert self.manager.match(chain, match.max_hit_len) == match

    def assert_contents(self, request: ModelRequest) -> None:
        for position in range(request.num_written):
            block_id = request.table[position // self.block_size]
            expected = (request.namespace, tuple(request.tokens[: position + 1]))
            assert self.contents[block_id][position % self.block_size] == expected

    def follow_table(self, request: ModelRequest) -> None:
        """Take over blocks that the lease has got; what they held is gone."""
        for block_id in request.lease.block_table[len(request.table) :]:
            self.contents[block_id] = [None] * self.block_size
            self.num_committed[block_id] = 0
            request.table.append(block_id)
        assert request.lease.block_table == request.table

    def pick(self, requests: list[ModelRequest], index: int) -> ModelRequest:
        return requests[index % len(requests)]

    def release(self, request: ModelRequest) -> None:
        self.running.remove(request)
        self.manager.release(request.lease)
        request.lease = None

    # --- rules

    @rule(tokens=PROMPTS, tenant=st.sampled_from(NAMESPACES), num_output_tokens=st.integers(0, 6))
    def submit(self, tokens: list[int], tenant: Namespace, num_output_tokens: int) -> None:
        chain = self.manager.new_chain(tenant, tokens)
        if self.manager.can_ever_admit(len(tokens) + num_output_tokens):
            self.waiting.append(ModelRequest(tenant, list(tokens), num_output_tokens, chain))
            self.admit_request(self.waiting[-1], is_stale=False)

    @precondition(lambda self: self.running)
    @rule(index=INDEX, more=st.lists(st.integers(0, 1), max_size=3))
    def submit_continuation(self, index: int, more: list[int]) -> None:
        other = self.pick(self.running, index)
        self.submit(other.tokens + more, other.namespace, 1)

    @precondition(lambda self: self.waiting)
    @rule(index=INDEX, cap=st.one_of(st.none(), st.integers(0, 12)))
    def lookup(self, index: int, cap: int | None) -> None:
        request = self.pick(self.waiting, index)
        before = self.manager.match(request.chain, 10**9 if cap is None else cap)
        after = self.manager.lookup(request.chain, 10**9 if cap is None else cap)
        assert before == after
        if self.is_exact:
            limit = min(len(request.tokens), after.max_hit_len)
            assert after.num_hit_tokens == self.expected_hit_len(request, limit)
            expected_pending = self.expected_pending(request, len(after.block_ids))
            assert after.pending == (after.num_hit_tokens < limit and expected_pending)

    @precondition(lambda self: self.waiting)
    @rule(index=INDEX, rare=st.integers(0, 7))
    def admit(self, index: int, rare: int) -> None:
        self.admit_request(self.pick(self.waiting, index), is_stale=rare == 7)

    def admit_request(self, request: ModelRequest, *, is_stale: bool) -> None:
        footprint = len(request.tokens) + request.num_output_tokens
        match = self.manager.lookup(request.chain, len(request.tokens) - 1)
        self.found.append((request.chain, match))
        if is_stale:
            self.manager.reset()
        match_now = self.manager.match(request.chain, len(request.tokens) - 1)
        pool = self.manager._pool
        available = pool.num_available_units
        hits = [pool.blocks[block_id] for block_id in match_now.block_ids]
        cost = sum(block.size for block in hits if block.ref_count == 0)
        cost += self.manager.num_blocks_for(footprint) - len(hits)
        lease = self.manager.admit(match, request.chain, footprint)
        if lease is None:
            assert pool.is_mixed or cost > available
            assert self.running
            return
        assert pool.is_mixed or cost <= available
        self.waiting.remove(request)
        self.running.append(request)
        request.lease = lease
        request.tokens_at_admission = tuple(request.tokens)
        request.table = lease.block_table[: lease.num_shared]
        request.num_written = lease.num_shared * self.block_size
        assert lease.num_shared == len(match_now.block_ids)
        self.assert_contents(request)
        if lease.pending_copy is None:
            assert lease.num_computed_tokens == request.num_written
            assert match_now.copy is None or pool.is_mixed or cost + 1 > available
        else:
            # The copy runs with the next step; until then its source must stay as it is.
            source = self.contents[lease.pending_copy.source]
            head = request.tokens[: lease.num_computed_tokens]
            expected = [
                (request.namespace, tuple(head[: position + 1]))
                for position in range(request.num_written, len(head))
            ]
            assert source[: lease.pending_copy.num_tokens] == expected
        assert lease.num_computed_tokens < len(request.tokens)
        self.follow_table(request)

    @precondition(lambda self: self.running)
    @rule(tokens=st.lists(st.integers(0, 1), min_size=12, max_size=12))
    def step_everything(self, tokens: list[int]) -> None:
        """Compute all that is left of every running request."""
        ends = [(request, len(request.tokens)) for request in self.running]
        self.run_step(ends, aborted=[], next_tokens=tokens)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def step_some(self, data: st.DataObject) -> None:
        """Compute a part of some requests; one is aborted while the step runs."""
        ends = []
        for request in self.running:
            start = request.lease.num_computed_tokens
            ends.append((request, data.draw(st.integers(start, len(request.tokens)))))
        aborted = [self.pick(self.running, data.draw(INDEX))] if data.draw(st.booleans()) else []
        tokens = data.draw(st.lists(st.integers(0, 1), min_size=12, max_size=12))
        self.run_step(ends, aborted=aborted, next_tokens=tokens)

    def run_step(
        self,
        ends: list[tuple[ModelRequest, int]],
        *,
        aborted: list[ModelRequest],
        next_tokens: list[int],
    ) -> None:
        """Plan, run and apply one step."""
        plan = []
        for request, end in ends:
            start = request.lease.num_computed_tokens
            if end > start:
                plan.append((request, min(end, start + self.max_chunk)))
        for request, end in plan:
            # Within the footprint, so it cannot fail.
            assert self.manager.extend(request.lease, end)
            self.follow_table(request)
        self.run_copies(plan)
        for request, end in plan:
            for position in range(request.lease.num_computed_tokens, end):
                block = self.contents[request.table[position // self.block_size]]
                entry = (request.namespace, tuple(request.tokens[: position + 1]))
                block[position % self.block_size] = entry
            request.num_written = end
            self.assert_contents(request)
        for index, (request, end) in enumerate(plan):
            if request in aborted:
                self.release(request)
                continue
            if end == len(request.tokens) and request.num_output_tokens:
                request.tokens.append(next_tokens[index % len(next_tokens)])
                request.chain.append(request.tokens[-1])
                request.num_output_tokens -= 1
            self.manager.commit(request.lease, request.chain, end)
            assert request.lease.pending_copy is None
            for position in range(end):
                block_id = request.table[position // self.block_size]
                count = position % self.block_size + 1
                self.num_committed[block_id] = max(self.num_committed[block_id], count)

    @precondition(lambda self: self.running)
    @rule(index=INDEX)
    def finish(self, index: int) -> None:
        request = self.pick(self.running, index)
        lease = request.lease
        self.release(request)
        before = self.manager.stats()
        self.manager.release(lease)
        assert self.manager.stats() == before

    @precondition(lambda self: self.running)
    @rule(index=INDEX)
    def preempt(self, index: int) -> None:
        request = self.pick(self.running, index)
        self.release(request)
        request.table = []
        request.num_written = 0
        self.waiting.append(request)

    @precondition(lambda self: self.running)
    @rule(index=INDEX, num_more=st.integers(1, 30))
    def press(self, index: int, num_more: int) -> None:
        """Grow beyond the footprint: takes unreserved blocks and evicts, or changes nothing."""
        request = self.pick(self.running, index)
        before = self.manager.stats()
        num_available, is_mixed = self.manager.num_available, self.manager._pool.is_mixed
        num_tokens = len(request.tokens) + request.num_output_tokens + num_more
        num_new = self.manager.num_blocks_for(num_tokens) - len(request.table)
        num_extra = num_new - request.lease.num_reserved_blocks
        can_extend = self.manager.can_extend(request.lease, num_tokens)
        assert is_mixed or can_extend == (num_extra <= num_available)
        assert self.manager.extend(request.lease, num_tokens) == can_extend
        if not can_extend:
            assert self.manager.stats() == before
        self.follow_table(request)

    @rule(rare=st.integers(0, 7))
    def reset(self, rare: int) -> None:
        if rare != 7:
            return
        num_evictable = self.manager.num_evictable
        assert self.manager.reset() == num_evictable
        assert self.manager.num_evictable == 0

    @precondition(lambda self: self.running or self.waiting)
    @rule(index=INDEX, num_tokens=st.integers(1, 12), ttl_s=st.sampled_from([None, 1, 5]))
    def pin(self, index: int, num_tokens: int, ttl_s: float | None) -> None:
        request = self.pick(self.running + self.waiting, index)
        manager = self.manager
        before = manager.stats()
        length = min(num_tokens, len(request.tokens)) // self.block_size * self.block_size
        hit = manager.match(request.chain, length).block_ids
        blocks = [manager._pool.blocks[block_id] for block_id in hit]
        try:
            pin = manager.pin(request.chain, num_tokens, ttl_s)
        except NotCached:
            assert len(hit) * self.block_size < length or length == 0
        except PinBudgetExceeded:
            pinned = {block for pin, _ in self.pins for block in pin.blocks}
            num_units = sum(block.size for block in pinned.union(blocks))
            assert num_units > manager._pool.capacity * self.pin_fraction - 1
        else:
            if pin is not None:
                assert pin.num_tokens == length
                self.pins.append((pin, request.chain))
                self.num_pinned_ever += 1
                return
            num_taken = sum(block.size for block in blocks if block.ref_count == 0)
            assert num_taken > manager._pool.num_available_units
        assert manager.stats() == before

    @precondition(lambda self: self.pins)
    @rule(index=INDEX)
    def unpin(self, index: int) -> None:
        pin, _ = self.pins[index % len(self.pins)]
        self.manager.unpin(pin)
        before = self.manager.stats()
        self.manager.unpin(pin)
        assert self.manager.stats() == before

    @precondition(lambda self: self.running or self.waiting)
    @rule(index=INDEX, num_tokens=st.integers(1, 12), ttl_s=st.sampled_from([1, 5]))
    def retain(self, index: int, num_tokens: int, ttl_s: float) -> None:
        request = self.pick(self.running + self.waiting, index)
        before = self.manager.stats()
        length = min(num_tokens, len(request.tokens)) // self.block_size * self.block_size
        is_cached = len(self.manager.match(request.chain, length).block_ids) * self.block_size
        try:
            assert self.manager.retain(request.chain, num_tokens, ttl_s) == length
        except NotCached:
            assert is_cached < length or length == 0
        # Nothing is held by it, and nobody's admission can be in its way.
        assert self.manager.stats() == before

    @rule(seconds=st.integers(1, 4))
    def wait(self, seconds: int) -> None:
        self.now_ns += seconds * 10**9
        due = [pin for pin, _ in self.pins if (pin.deadline_ns or self.now_ns + 1) <= self.now_ns]
        self.manager.stats()  # where times end
        assert all(pin.is_released for pin in due)
        retained = [b for part in self.manager._pool.partitions for b in part.retained]
        assert all(block.node.kept_until_ns > self.now_ns for block in retained)

    # --- laws

    @invariant()
    def laws_hold(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check_invariants()
        stats = self.manager.stats()
        if not stats.bytes_by_codec:
            assert stats.num_free + stats.num_evictable + stats.num_held == stats.num_blocks
        for request in self.running:
            self.assert_contents(request)
        self.pins = [entry for entry in self.pins if not entry[0].is_released]
        for pin, chain in self.pins:
            assert self.manager.match(chain, pin.num_tokens).num_hit_tokens == pin.num_tokens
        assert stats.num_pinned == len({block for pin, _ in self.pins for block in pin.blocks})
        num_pinned = self.manager.num_pinned_units
        assert num_pinned == sum(b.size for b in {b for pin, _ in self.pins for b in pin.blocks})
        assert num_pinned <= self.manager._pool.capacity * self.pin_fraction

    def teardown(self) -> None:
        for pin, _ in getattr(self, "pins", ()):
            self.manager.unpin(pin)
        for request in list(getattr(self, "running", ())):
            self.release(request)
        if hasattr(self, "manager"):
            self.manager.check_invariants()
            assert self.manager.num_held == self.manager.num_reserved == 0
            self.manager.reset()
            assert self.manager.num_free == self.manager.num_blocks
            assert not self.manager._tree.roots


class CollidingCacheMachine(CacheMachine):
    """Collisions cost hits, never rightness: every position is still checked."""

    hasher = CollidingHasher(bytes(range(32)))
    is_exact = False


class LruCacheMachine(CacheMachine):
    strategy = Lru


class S3FifoCacheMachine(CacheMachine):
    strategy = S3Fifo


class ArcCacheMachine(CacheMachine):
    strategy = Arc


class SharedCacheMachine(CacheMachine):
    """One tenant has a share, the other what is left."""

    shares = MappingProxyType({"a": 0.3})
    pin_fraction = 0.25


class MixedCacheMachine(CacheMachine):
    """Blocks change their codec: what happens to memory is replayed in its order, as the arena does.

    Footprints are promised as their blocks will be, so that every extension within one still succeeds (``run_step``),
    and every footprint that may ever be admitted is when nothing else runs (``admit_request``).
    """

    precision = KVPrecision.parse("sink=raw16,recent:3=raw16,rest=int8")
    shares = MappingProxyType({"a": 0.3})
    pin_fraction = 0.25
    max_demotions: int | None = None

    def memory(self, num_blocks: int) -> dict[str, Any]:
        self.block_bytes = {"raw16": 100, "int8": 52, "int4": 27, "int3": 20}
        self.num_bytes = num_blocks * 100 + 30
        self.codecs: dict[int, str] = {}
        self.budget_codecs = self.precision.codecs
        self.num_urgent = 0
        # Steps of less than a block, and of most of a prompt.
        self.max_chunk = 1 + num_blocks * 5 % 13
        budget = KVBudget(
            num_bytes=self.num_bytes,
            block_bytes=self.block_bytes,
            precision=self.precision,
            max_chunk=self.max_chunk,
            max_demotions=self.max_demotions,
        )
        return {"budget": budget}

    def expected_hit_len(self, request: ModelRequest, max_hit_len: int) -> int:
        """Whole blocks of any codec, and then a head out of a block of rows."""
        pool = self.manager._pool
        known = self.known_prefixes(request.namespace)
        copyable = {
            entry[1]
            for block in pool.blocks
            if block.node is not None and self.budget_codecs[block.level] not in SPAN_CODEC_BITS
            for entry in self.contents[block.block_id][: self.num_committed[block.block_id]]
            if entry[0] == request.namespace
        }
        length, size = 0, self.block_size
        while length + size <= max_hit_len and tuple(request.tokens[: length + size]) in known:
            length += size
        while length < max_hit_len and tuple(request.tokens[: length + 1]) in copyable:
            length += 1
        return length

    def run_copies(self, plan: list[tuple[ModelRequest, int]]) -> None:
        self.replay_memory()

    def follow_table(self, request: ModelRequest) -> None:
        self.replay_memory()
        request.table = list(request.lease.block_table)

    def replay_memory(self) -> None:
        num_demoted = 0
        for op in self.manager.take_memory_ops():
            if not isinstance(op, BlockCopy) and op.kind == "demote":
                num_demoted += 1
                if self.max_demotions is not None and num_demoted > self.max_demotions:
                    # Only because the block that comes next would find no memory.
                    used = sum(self.block_bytes[codec] for codec in self.codecs.values())
                    assert used + self.block_bytes["raw16"] > self.num_bytes
                    self.num_urgent += 1
            if isinstance(op, BlockCopy):
                assert op.source in self.codecs
                assert self.codecs[op.target] == "raw16"
                head = self.contents[op.source][: op.num_tokens]
                self.contents[op.target][: op.num_tokens] = head
            elif op.kind == "allocate":
                assert op.block_id not in self.codecs
                self.codecs[op.block_id] = op.codec
                self.contents[op.block_id] = [None] * self.block_size
                self.num_committed[op.block_id] = 0
            elif op.kind == "free":
                del self.codecs[op.block_id]
            else:
                assert self.block_bytes[op.codec] < self.block_bytes[self.codecs[op.block_id]]
                assert self.num_committed[op.block_id] == (op.num_tokens or self.block_size)
                if op.codec in SPAN_CODEC_BITS:
                    # Complete, and not the first of its sequence, whose prefix is of one token.
                    assert not op.num_tokens
                    assert len(self.contents[op.block_id][0][1]) > 1
                self.codecs[op.block_id] = op.codec
            used = sum(self.block_bytes[codec] for codec in self.codecs.values())
            assert used <= self.num_bytes
        assert self.manager.stats().num_urgent_demotions == self.num_urgent

    @invariant()
    def codecs_follow_the_rule(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.replay_memory()
        pool = self.manager._pool
        usage = {codec: each.num_blocks for codec, each in pool.usage().items()}
        counts = Counter(self.codecs.values())
        assert usage == {codec: counts[codec] for codec in usage}
        if self.max_demotions is None:
            assert not self.manager.has_due_demotions
        # A block that was small when it became recent again stays so; an old one is never larger than that.
        largest: dict[int, int] = {}
        for request in self.running:
            length = request.lease.num_computed_tokens
            for index, block_id in enumerate(request.table):
                age = length - (index + 1) * self.block_size
                codec = self.precision.rest
                for window, younger in reversed(self.precision.windows):
                    codec = younger if age < window else codec
                if index == 0 and age >= self.precision.windows[0][0]:
                    codec = self.precision.sink
                size = self.block_bytes[codec]
                largest[block_id] = max(size, largest.get(block_id, 0))
        for block_id, size in largest.items():
            assert pool.blocks[block_id].size <= size
            is_due = self.block_bytes[self.codecs[block_id]] != pool.blocks[block_id].size
            assert not is_due or self.manager.has_due_demotions


class SinklessCacheMachine(MixedCacheMachine):
    precision = KVPrecision.parse("recent:5=raw16,rest=int8")


class LadderCacheMachine(MixedCacheMachine):
    precision = KVPrecision.parse("sink=int8,recent:2=raw16,recent:5=int8,recent:9=int4,rest=int3")


class Int4CacheMachine(MixedCacheMachine):
    precision = KVPrecision.parse(PRESETS["int4"])
    pin_fraction = 0.5


class PacedCacheMachine(Int4CacheMachine):
    """One block a step is made smaller, so that many are due at any time."""

    max_demotions = 1


class PacedLadderCacheMachine(LadderCacheMachine):
    max_demotions = 2


SETTINGS = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = SETTINGS
TestCollidingCacheMachine = CollidingCacheMachine.TestCase
TestCollidingCacheMachine.settings = settings(SETTINGS, max_examples=25)
TestLruCacheMachine = LruCacheMachine.TestCase
TestLruCacheMachine.settings = settings(SETTINGS, max_examples=20)
TestS3FifoCacheMachine = S3FifoCacheMachine.TestCase
TestS3FifoCacheMachine.settings = settings(SETTINGS, max_examples=20)
TestArcCacheMachine = ArcCacheMachine.TestCase
TestArcCacheMachine.settings = settings(SETTINGS, max_examples=20)
TestSharedCacheMachine = SharedCacheMachine.TestCase
TestSharedCacheMachine.settings = settings(SETTINGS, max_examples=30)
TestMixedCacheMachine = MixedCacheMachine.TestCase
TestMixedCacheMachine.settings = settings(SETTINGS, max_examples=40)
TestSinklessCacheMachine = SinklessCacheMachine.TestCase
TestSinklessCacheMachine.settings = settings(SETTINGS, max_examples=20)
TestLadderCacheMachine = LadderCacheMachine.TestCase
TestLadderCacheMachine.settings = settings(SETTINGS, max_examples=40)
TestInt4CacheMachine = Int4CacheMachine.TestCase
TestInt4CacheMachine.settings = settings(SETTINGS, max_examples=40)
TestPacedCacheMachine = PacedCacheMachine.TestCase
TestPacedCacheMachine.settings = settings(SETTINGS, max_examples=40)
TestPacedLadderCacheMachine = PacedLadderCacheMachine.TestCase
TestPacedLadderCacheMachine.settings = settings(SETTINGS, max_examples=20)
MACHINES = [
    CacheMachine,
    CollidingCacheMachine,
    LruCacheMachine,
    S3FifoCacheMachine,
    ArcCacheMachine,
    SharedCacheMachine,
    MixedCacheMachine,
    SinklessCacheMachine,
    LadderCacheMachine,
    Int4CacheMachine,
    PacedCacheMachine,
    PacedLadderCacheMachine,
]


def keep_something(soak: CacheMachine, draw: random.Random) -> None:
    choice = draw.random()
    if choice < 0.04 and (soak.running or soak.waiting):
        soak.pin(draw.randrange(100), draw.randint(1, 12), draw.choice([None, 1, 5]))
    elif choice < 0.08 and soak.pins:
        soak.unpin(draw.randrange(100))
    elif choice < 0.12 and (soak.running or soak.waiting):
        soak.retain(draw.randrange(100), draw.randint(1, 12), draw.choice([1, 5]))
    elif choice < 0.15:
        soak.wait(draw.randint(1, 4))


GEOMETRIES = [(1, 1, 9), (2, 2, 10), (3, 4, 5), (4, 3, 30), (5, 4, 12)]
"""Seed, block size and blocks of the pool."""


def soaks() -> Iterator[ParameterSet]:
    """Yield every machine with every geometry; but for the two that others derive from, most are for the long run."""
    for machine in MACHINES:
        for index, geometry in enumerate(GEOMETRIES):
            is_short = machine in (CacheMachine, MixedCacheMachine) or index in (2, 4)
            yield pytest.param(machine, *geometry, marks=() if is_short else pytest.mark.slow)


@pytest.mark.parametrize(("machine", "seed", "block_size", "num_blocks"), [*soaks()])
def test_soak(machine: type[CacheMachine], seed: int, block_size: int, num_blocks: int) -> None:
    """The same rules in a long random run: Hypothesis explores short ones, eviction needs long ones."""
    draw = random.Random(seed)
    soak = machine()
    soak.start(block_size, num_blocks)
    for _ in range(2000):
        keep_something(soak, draw)
        choice = draw.random()
        if choice < 0.25 and len(soak.waiting) < 8:
            tokens = [draw.randrange(2) for _ in range(draw.randint(1, 12))]
            if soak.running and draw.random() < 0.4:
                tokens = [*soak.pick(soak.running, draw.randrange(100)).tokens, *tokens[:3]]
            soak.submit(tokens, draw.choice(NAMESPACES), draw.randrange(7))
        elif choice < 0.45 and soak.waiting:
            soak.lookup(draw.randrange(100), draw.choice([None, draw.randrange(12)]))
            soak.admit(draw.randrange(100), draw.randrange(40))
        elif choice < 0.75 and soak.running:
            ends = [
                (request, draw.randint(request.lease.num_computed_tokens, len(request.tokens)))
                for request in soak.running
            ]
            aborted = [request for request in soak.running if draw.random() < 0.05]
            tokens = [draw.randrange(2) for _ in range(12)]
            soak.run_step(ends, aborted=aborted, next_tokens=tokens)
        elif choice < 0.93 and soak.running:
            draw.choice([soak.finish, soak.finish, soak.preempt])(draw.randrange(100))
        elif choice < 0.97 and soak.running:
            soak.press(draw.randrange(100), draw.randint(1, 12))
        elif choice > 0.99:
            soak.reset(7)
        soak.laws_hold()
    stats = soak.manager.stats()
    # Pins hold more of smaller blocks, and requests cannot count on what pins may hold.
    assert stats.num_admissions > (60 if stats.bytes_by_codec else 100)
    # Of smaller blocks more fit.
    assert stats.num_evictions > (5 if stats.bytes_by_codec else 20)
    assert stats.num_duplicate_blocks > 0 or stats.bytes_by_codec
    assert soak.num_pinned_ever > 2
    if (
        block_size > 1
    ):  # a block of one token has no head, and the weak hasher tells its two contents apart
        assert min(stats.num_partial_copies, stats.num_superseded_blocks) > 5
        assert (stats.num_verification_failures > 0) == (machine is CollidingCacheMachine)
    soak.teardown()
