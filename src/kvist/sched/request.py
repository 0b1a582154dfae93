"""One sequence on its way through the engine: its tokens, its state and what it has cost.

Responsible for the record of a sequence and for its life cycle. Knows nothing of queues, budgets or blocks beyond the
lease it keeps for the scheduler. A client call with ``n > 1`` is n requests here.

            +----------------- preempt -----------------+
            v                                           |
    PREEMPTED --- admit ---> RUNNING <--- admit --- WAITING (new)
        |                       |                       |
        +------- finish --------+-------- finish -------+--> FINISHED
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import TYPE_CHECKING

from kvist.errors import InvariantViolation
from kvist.types import Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvist.cache.hash import TokenChain
    from kvist.cache.lease import PrefixLease, PrefixMatch
    from kvist.cache.namespaces import Namespace
    from kvist.types import Keep, MissReport, RequestId, SamplingParams, TokenId


class RequestStatus(Enum):
    """Where a request stands. Never compared by order."""

    WAITING = "waiting"
    """Accepted, nothing computed yet, holds no blocks."""
    RUNNING = "running"
    """Holds a lease; gets token positions in every step with room for it."""
    PREEMPTED = "preempted"
    """Gave its blocks back and waits to recompute prompt and output so far."""
    FINISHED = "finished"
    """Holds nothing; never seen again."""


TRANSITIONS: Mapping[RequestStatus, frozenset[RequestStatus]] = MappingProxyType(
    {
        RequestStatus.WAITING: frozenset({RequestStatus.RUNNING, RequestStatus.FINISHED}),
        RequestStatus.RUNNING: frozenset({RequestStatus.PREEMPTED, RequestStatus.FINISHED}),
        RequestStatus.PREEMPTED: frozenset({RequestStatus.RUNNING, RequestStatus.FINISHED}),
        RequestStatus.FINISHED: frozenset(),
    }
)
"""Every legal change of state; any other is a bug."""


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One sequence: what was asked for, and how far it has come.

    Made by the engine, handed to ``Scheduler.add`` and owned by the scheduler from then on.

    Invariants:
        1. ``token_ids`` is prompt then output, and only ever grows; ``chain`` holds the same tokens, ``num_tokens`` of
           them.
        2. A lease is held exactly while RUNNING.
        3. ``0 <= num_computed_tokens <= num_tokens``, and 0 unless RUNNING.
    """

    request_id: RequestId
    prompt_token_ids: tuple[TokenId, ...]
    """At least one token."""
    params: SamplingParams
    namespace: Namespace
    """Blocks are shared within it, never across."""
    seed: int
    """Of this sequence; siblings of one client call have different ones."""
    eos_token_ids: frozenset[TokenId] = frozenset()
    """The model's own end-of-sequence ids."""
    priority: int = 0
    """Lower goes first."""
    deadline_s: float | None = None
    """Seconds after its arrival at which it ends, wherever it stands; None: never."""
    is_sibling: bool = False
    """Whether it is one of the further sequences of a client call."""
    keep: Keep | None = None
    """How long its prompt is to stay in the cache; None: as its use earns it."""

    # Everything below is written by the scheduler only.
    token_ids: list[TokenId] = field(init=False)
    """Prompt, then output."""
    num_tokens: int = field(init=False)
    """Prompt and output tokens so far."""
    num_prompt_tokens: int = field(init=False)
    """Tokens given by the client."""
    needs_history: bool = field(init=False)
    """``params.needs_history``, worked out once instead of for each token."""
    takes_best: bool = field(init=False)
    """``params.takes_best``, likewise."""
    status: RequestStatus = field(init=False, default=RequestStatus.WAITING)
    arrival_index: int = field(init=False, default=-1)
    """Order of arrival, from 0; kept through preemption, so an old request stays old."""
    arrival_ns: int = field(init=False, default=0)
    """When it arrived, on the scheduler's clock."""
    num_expected_hit_tokens: int = field(init=False, default=0)
    """While it waits under a policy that looks at the cache: what the cache held of it when it was asked last."""
    match: PrefixMatch | None = field(init=False, default=None)
    """While it waits: what was found of it last, which is found again as long as it is current."""
    chain: TokenChain = field(init=False)
    """The same tokens with their block identities; set by ``Scheduler.add``."""
    lease: PrefixLease | None = field(init=False, default=None)
    num_queued_tokens: int = field(init=False, default=0)
    """While it waits: positions it is expected to need, as counted for the clients that are told to come back."""
    num_computed_tokens: int = field(init=False, default=0)
    """Leading positions whose K and V are present now."""
    num_computed_before: int = field(init=False, default=0)
    """Leading positions that were ever computed or cached for this request; below it, computing is recomputing."""
    num_cached_tokens: int | None = field(init=False, default=None)
    """Hit tokens at first admission; None before it."""
    cached_by_codec: Mapping[str, int] = field(init=False, default_factory=dict)
    """Those by the codec that they were in; empty where all blocks have one."""
    num_positions_computed: int = field(init=False, default=0)
    """All work done for this request, in token positions, repeated work included."""
    num_recomputed_tokens: int = field(init=False, default=0)
    """The part of that work that had been done, or found in the cache, for it before; planned steps count."""
    miss: MissReport | None = field(init=False, default=None)
    """Why the rest of the prompt was not hit at first admission; None: it was, or before."""
    admitted_ns: int | None = field(init=False, default=None)
    """When it was admitted first, on the scheduler's clock; None before."""
    num_preemptions: int = field(init=False, default=0)
    is_distrustful: bool = field(init=False, default=False)
    """Whether it reuses nothing any more, because something that it had reused, or computed, was wrong."""
    on_wake: Callable[[], None] | None = field(init=False, default=None)
    """Set while the request sleeps (``Scheduler.sleep``); only while RUNNING."""
    num_tokens_at_preemption: int = field(init=False, default=0)
    """``num_tokens`` when it was preempted last; 0 before."""
    has_been_kept: bool = field(init=False, default=False)
    """Whether ``keep`` was carried out."""
    num_retained_tokens: int = field(init=False, default=0)
    """Prompt tokens that got a TTL."""
    num_pinned_tokens: int = field(init=False, default=0)
    """Prompt tokens that were pinned."""

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.num_tokens = self.num_prompt_tokens = len(self.prompt_token_ids)
        self.needs_history = self.params.needs_history
        self.takes_best = self.params.takes_best

    @property
    def num_output_tokens(self) -> int:
        """Tokens produced so far."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Positions still to compute before the next token can be chosen; 0 while it sleeps."""
        if self.on_wake is not None:
            return 0
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_expected_prefill_tokens(self) -> int:
        """While it waits: positions to compute before the next token, if the cache holds what it held."""
        return self.num_tokens - self.num_expected_hit_tokens

    @property
    def is_reuse(self) -> bool:
        """Whether what it finds in the cache was left by others: neither by its own call nor by itself."""
        return not self.is_sibling and self.num_cached_tokens is None

    @property
    def has_progressed(self) -> bool:
        """Whether it produced a token since it was preempted last, or never was."""
        return self.num_tokens > self.num_tokens_at_preemption

    @property
    def output_token_ids(self) -> tuple[TokenId, ...]:
        """Tokens produced so far. O(output)."""
        return tuple(self.token_ids[self.num_prompt_tokens :])

    def move_to(self, status: RequestStatus) -> None:
        """Change the state.

        Raises:
            InvariantViolation: The table does not allow the change.
        """
        if status not in TRANSITIONS[self.status]:
            raise InvariantViolation(
                f"[request] {self.request_id} cannot go from {self.status.value} to {status.value}"
            )
        self.status = status

    def append(self, token_id: TokenId) -> None:
        """Add one output token."""
        self.token_ids.append(token_id)
        self.num_tokens += 1
        self.chain.append(token_id)

    def usage(self) -> Usage:
        """Return what the request has cost so far."""
        return Usage(
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens or 0,
            num_computed_tokens=self.num_positions_computed,
            num_output_tokens=self.num_output_tokens,
            num_preemptions=self.num_preemptions,
            num_recomputed_tokens=self.num_recomputed_tokens,
            cached_by_codec=self.cached_by_codec,
            queue_s=None
            if self.admitted_ns is None
            else (self.admitted_ns - self.arrival_ns) / 1e9,
            miss=self.miss,
            num_retained_tokens=None if self.keep is None else self.num_retained_tokens,
            num_pinned_tokens=self.num_pinned_tokens
            if self.keep is not None and self.keep.is_pinned
            else None,
        )
