"""Miss reports against an oracle that forgets nothing.

The oracle keeps every sequence of every namespace with the length that was computed, and every block that left the
cache with the reason. For each admission it derives, position by position, which reasons would be right, and compares
the spans, the first difference and what the report tells of the nearest earlier prompt.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from kvist.cache.hash import BlockHasher, TokenChain, unpack
from kvist.cache.manager import CacheManager
from kvist.cache.namespaces import Namespace
from kvist.errors import NotCached, PinBudgetExceeded
from kvist.types import MissReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvist.cache.block import Block
    from kvist.cache.lease import PrefixLease, PrefixMatch
    from kvist.cache.pins import Pin
    from kvist.cache.tree import Node
    from kvist.types import MissReport

NUM_TRACES = 1200
NUM_OPERATIONS = 90
NAMESPACES = (
    Namespace(model="m", tenant="a"),
    Namespace(model="m", tenant="b"),
    Namespace(model="m2", tenant="a"),
    Namespace(model="m", tenant="a", layout="other"),
)
Piece = tuple[Namespace, tuple[int, ...]]
"""A namespace and a whole prefix up to the end of one block's known tokens."""


def common(left: Sequence[int], right: Sequence[int]) -> int:
    length = 0
    while length < min(len(left), len(right)) and left[length] == right[length]:
        length += 1
    return length


@dataclass(eq=False)
class Sequenced:
    """One admitted sequence, and how much of it is known."""

    namespace: Namespace
    tokens: list[int]
    num_prompt: int
    chain: TokenChain
    lease: PrefixLease | None = None
    num_computed: int = 0

    @property
    def known(self) -> list[int]:
        end = self.num_computed if self.lease is None else max(self.num_prompt, self.num_computed)
        return self.tokens[:end]


@dataclass
class Oracle:
    sequences: list[Sequenced] = field(default_factory=list)
    left: dict[Piece, MissReason] = field(default_factory=dict)
    """Blocks that left the cache, with the latest reason."""

    def known(self, namespace: Namespace) -> list[list[int]]:
        return [s.known for s in self.sequences if s.namespace == namespace and s.known]


class Trace:
    """Random operations on one manager, each admission checked."""

    def __init__(self, seed: int, **options: object) -> None:
        self.random = random.Random(seed)
        self.now_ns = 1
        self.block_size = self.random.choice((1, 2, 3, 4))
        self.manager = CacheManager(
            num_blocks=self.random.randint(4, 10),
            block_size=self.block_size,
            hasher=BlockHasher(bytes(32)),
            pin_fraction=0.3,
            clock_ns=lambda: self.now_ns,
            **options,  # type: ignore[arg-type]
        )
        self.oracle = Oracle()
        self.running: list[Sequenced] = []
        self.pins: list[tuple[Pin, list[Piece]]] = []
        self.keeping: dict[Piece, list[list[int | None]]] = {}
        """Per piece the times for which it was to be kept: [begin, end or None]."""
        self.reasons: Counter[MissReason] = Counter()
        self._watch_drops()

    def _watch_drops(self) -> None:
        drop = self.manager._drop

        def watched(block: Block, why: MissReason) -> None:
            node = block.node
            assert node is not None
            piece = self.piece_of(node)
            is_expired = self.is_expired(piece)
            if why is not MissReason.EVICTED or not self.is_resetting:
                assert why is (MissReason.EXPIRED if is_expired else MissReason.EVICTED)
            self.oracle.left[piece] = why
            self.keeping.pop(piece, None)
            drop(block, why)

        self.is_resetting = False
        self.manager._drop = watched  # type: ignore[method-assign]

    def piece_of(self, node: Node) -> Piece:
        tokens: list[int] = []
        step: Node | None = node
        while step is not None and step.parent is not None:
            tokens = [*unpack(step.tokens), *tokens]
            step = step.parent
        return node.namespace, tuple(tokens)

    def is_expired(self, piece: Piece) -> bool:
        """Whether a time ended by itself and no other has begun since."""
        flag = False
        events = []
        for begin, end in self.keeping.get(piece, []):
            events.append((begin, 1, False))
            if end is not None and end <= self.now_ns:
                events.append((end, 0, True))
        for _, _, value in sorted(events):
            flag = value
        return flag

    # --- operations

    def prompt(self) -> list[int]:
        choice = self.random.random()
        earlier = [s for s in self.oracle.sequences if len(s.tokens) > 1]
        if earlier and choice < 0.75:
            base = self.random.choice(earlier)
            is_whole = self.random.random() < 0.5
            length = len(base.tokens)
            tokens = base.tokens[: length if is_whole else self.random.randint(1, length)][:12]
            return tokens + [self.random.randrange(2) for _ in range(self.random.randrange(4))]
        return [self.random.randrange(2) for _ in range(self.random.randint(1, 12))]

    def submit(self) -> None:
        namespace = self.random.choices(NAMESPACES, (20, 4, 1, 1))[0]
        tokens = self.prompt()
        footprint = len(tokens) + self.random.randrange(4)
        if not self.manager.can_ever_admit(footprint):
            return
        chain = self.manager.new_chain(namespace, tokens)
        limit = len(tokens) - 1
        match = self.manager.lookup(chain, limit)
        expected_known = {ns: self.oracle.known(ns) for ns in NAMESPACES}
        in_flight = self.in_flight_pieces()
        left = dict(self.oracle.left)
        lease = self.manager.admit(match, chain, footprint)
        if lease is None:
            return
        self.check(namespace, tokens, limit, match, lease, expected_known, in_flight, left)
        sequence = Sequenced(namespace, tokens, len(tokens), chain, lease)
        self.oracle.sequences.append(sequence)
        self.running.append(sequence)

    def in_flight_pieces(self) -> set[Piece]:
        pieces: set[Piece] = set()
        for sequence in self.running:
            assert sequence.lease is not None
            size = self.block_size
            for start in range(sequence.lease.num_sealed * size, sequence.num_prompt, size):
                end = min(start + size, sequence.num_prompt)
                pieces.add((sequence.namespace, tuple(sequence.tokens[:end])))
        return pieces

    def check(
        self,
        namespace: Namespace,
        tokens: list[int],
        limit: int,
        match: PrefixMatch,
        lease: PrefixLease,
        known: dict[Namespace, list[list[int]]],
        in_flight: set[Piece],
        left: dict[Piece, MissReason],
    ) -> None:
        hit = lease.num_computed_tokens
        report = lease.miss
        if hit >= limit:
            assert report is None
            return
        assert report is not None
        longest = max((common(tokens[:limit], seq) for seq in known[namespace]), default=0)
        assert report.num_common_tokens == longest
        allowed: list[set[MissReason]] = []
        for position in range(hit, limit):
            if position < match.num_hit_tokens:
                allowed.append({MissReason.BELOW_BLOCK_SIZE})
            elif position < longest:
                allowed.append(
                    self.known_reasons(namespace, tokens, limit, position, longest, in_flight, left)
                )
            else:
                allowed.append({self.unknown_reason(namespace, tokens, limit, longest, known)})
        given = [span.reason for span in report.spans for _ in range(span.start, span.end)]
        assert report.spans[0].start == hit
        assert report.spans[-1].end == limit
        for before, after in zip(report.spans[:-1], report.spans[1:], strict=True):
            assert before.end == after.start
            assert before.reason is not after.reason
        for reason, right in zip(given, allowed, strict=True):
            assert reason in right, (hit, longest, limit, report, allowed)
            self.reasons[reason] += 1
        self.check_expected(report, tokens, longest, known[namespace])

    def known_reasons(
        self,
        namespace: Namespace,
        tokens: list[int],
        limit: int,
        position: int,
        longest: int,
        in_flight: set[Piece],
        left: dict[Piece, MissReason],
    ) -> set[MissReason]:
        size = self.block_size
        start = position // size * size
        reached = min(longest, start + size)
        whole = (namespace, tuple(tokens[: start + size]))
        pieces = [
            piece
            for piece in in_flight | left.keys()
            if piece[0] == namespace
            and start < len(piece[1]) <= start + size
            and common(piece[1], tokens[:limit]) >= reached
        ]
        if reached == start + size:
            pieces = [whole]
        return {
            MissReason.NOT_YET_COMPUTED if piece in in_flight else left[piece] for piece in pieces
        }

    def unknown_reason(
        self,
        namespace: Namespace,
        tokens: list[int],
        limit: int,
        longest: int,
        known: dict[Namespace, list[list[int]]],
    ) -> MissReason:
        lengths = {
            other: max((common(tokens, seq) for seq in known[other]), default=0)
            for other in NAMESPACES
            if other != namespace and other.tenant == namespace.tenant
        }
        best = max(lengths.values(), default=0)
        if best > longest:
            is_other_model = any(
                other.model != namespace.model and length == best
                for other, length in lengths.items()
            )
            return MissReason.MODEL_CHANGED if is_other_model else MissReason.NAMESPACE_DIFFERS
        if not known[namespace]:
            others = [ns for ns in NAMESPACES if ns.tenant != namespace.tenant and known[ns]]
            return MissReason.NAMESPACE_DIFFERS if others else MissReason.NEW_PROMPT
        goes_on = [
            seq
            for seq in known[namespace]
            if common(tokens[:limit], seq) == longest and len(seq) > longest
        ]
        return MissReason.TOKENS_DIFFER if longest and goes_on else MissReason.NEW_PROMPT

    def check_expected(
        self, report: MissReport, tokens: list[int], longest: int, known: list[list[int]]
    ) -> None:
        differs = report.spans[-1].reason is MissReason.TOKENS_DIFFER
        assert bool(report.expected_token_ids) == differs
        if differs:
            told = list(report.expected_token_ids)
            assert told[0] != tokens[longest]
            assert any(
                seq[:longest] == tokens[:longest] and seq[longest : longest + len(told)] == told
                for seq in known
            )

    def compute(self) -> None:
        if not self.running:
            return
        sequence = self.random.choice(self.running)
        assert sequence.lease is not None
        if self.random.random() < 0.3 and sequence.num_computed >= len(sequence.tokens):
            sequence.tokens.append(self.random.randrange(2))
            sequence.chain.append(sequence.tokens[-1])
        low = sequence.lease.num_computed_tokens
        is_whole = self.random.random() < 0.6
        end = len(sequence.tokens) if is_whole else self.random.randint(low, len(sequence.tokens))
        if self.manager.extend(sequence.lease, end):
            self.manager.commit(sequence.lease, sequence.chain, end)
            sequence.num_computed = max(sequence.num_computed, end)

    def release(self) -> None:
        if self.running:
            sequence = self.running.pop(self.random.randrange(len(self.running)))
            assert sequence.lease is not None
            self.manager.release(sequence.lease)
            sequence.lease = None

    def keep(self) -> None:
        if not self.oracle.sequences:
            return
        sequence = self.random.choice(self.oracle.sequences)
        ttl_s = self.random.randint(1, 3) * 1e-9
        chain = self.manager.new_chain(sequence.namespace, sequence.tokens)
        size = self.block_size
        num_blocks = min(self.random.randint(1, 3), len(sequence.tokens) // size)
        pieces = [
            (sequence.namespace, tuple(sequence.tokens[: (i + 1) * size]))
            for i in range(num_blocks)
        ]
        end = self.now_ns + round(ttl_s * 1e9)
        try:
            if self.random.random() < 0.5:
                self.manager.retain(chain, num_blocks * size, ttl_s)
                for piece in pieces:
                    spells = self.keeping.setdefault(piece, [])
                    for spell in spells:
                        if spell[1] is not None and spell[1] > self.now_ns:
                            end = max(end, spell[1])
                            spell[1] = None  # ended by the later one, not by its time
                    spells.append([self.now_ns, end])
            elif not self.keeping:
                pin = self.manager.pin(chain, num_blocks * size, ttl_s)
                if pin is not None:
                    self.pins.append((pin, pieces))
                    for piece in pieces:
                        self.keeping.setdefault(piece, []).append([self.now_ns, end])
        except (NotCached, PinBudgetExceeded):
            return

    def reset(self) -> None:
        self.is_resetting = True
        self.manager.reset()
        self.is_resetting = False

    def run(self, num_operations: int) -> None:
        for _ in range(num_operations):
            self.now_ns += self.random.randrange(3)
            operation = self.random.choices(
                (self.submit, self.compute, self.release, self.keep, self.reset),
                (10, 14, 8, 6, 0.3),
            )[0]
            operation()
        self.manager.check_invariants()
        stats = self.manager.stats()
        assert sum(stats.missed_tokens.values()) == (
            stats.num_lookup_tokens - stats.num_hit_tokens - stats.num_admissions
        )
        while self.running:
            self.release()
        self.manager.check_invariants()


@pytest.mark.parametrize("part", range(3))
def test_reports_are_those_of_an_oracle_that_forgets_nothing(part):
    reasons: Counter[MissReason] = Counter()
    for seed in range(part, NUM_TRACES, 3):
        trace = Trace(seed)
        try:
            trace.run(NUM_OPERATIONS)
        except AssertionError as error:
            raise AssertionError(f"trace {seed}: {error}") from error
        reasons += trace.reasons
    impossible = {MissReason.CACHE_OFF, MissReason.VERIFICATION_FAILED}
    assert set(reasons) == set(MissReason) - impossible


class ForgetfulTrace(Trace):
    """A memory of a few blocks: what it says may be less, and is never more."""

    def check(self, namespace, tokens, limit, match, lease, known, in_flight, left) -> None:
        memory = self.manager._memory
        assert len(memory.ghosts) <= memory.max_ghosts
        report = lease.miss
        assert (report is None) == (lease.num_computed_tokens >= limit)
        if report is not None:
            longest = max((common(tokens[:limit], seq) for seq in known[namespace]), default=0)
            assert lease.num_computed_tokens <= report.num_common_tokens <= longest
            assert report.spans[0].start == lease.num_computed_tokens
            assert report.spans[-1].end == limit
            self.check_expected(report, tokens, report.num_common_tokens, known[namespace])


@pytest.mark.parametrize("max_ghosts", [0, 1, 5])
def test_a_bounded_memory_says_less_and_nothing_wrong(max_ghosts):
    for seed in range(200):
        ForgetfulTrace(seed, max_ghosts=max_ghosts).run(NUM_OPERATIONS)


def reports_of(own: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> list[object]:
    """Serve one tenant's prompts, with another tenant's in between, and return the reports of the first."""
    manager = CacheManager(num_blocks=4096, block_size=4, hasher=BlockHasher(bytes(32)))
    reports: list[object] = []
    for tokens, other in zip(own, others, strict=True):
        for namespace, prompt in ((NAMESPACES[1], other), (NAMESPACES[0], tokens)):
            chain = manager.new_chain(namespace, prompt)
            lease = manager.admit(manager.lookup(chain, len(prompt) - 1), chain, len(prompt))
            assert lease is not None
            assert manager.extend(lease, len(prompt))
            manager.commit(lease, chain, len(prompt))
            if namespace == NAMESPACES[0]:
                reports.append((lease.num_computed_tokens, lease.miss))
            manager.release(lease)
    return reports


def test_what_one_tenant_is_told_does_not_depend_on_what_another_sends():
    chance = random.Random(6)
    for _ in range(200):
        own = [[chance.randrange(3) for _ in range(chance.randint(2, 20))] for _ in range(6)]
        noise = [[chance.randrange(3, 6) for _ in prompt] for prompt in own]
        guesses = [own[(index + 1) % len(own)] for index in range(len(own))]
        told = reports_of(own, noise)
        assert reports_of(own, own) == told
        assert reports_of(own, guesses) == told
