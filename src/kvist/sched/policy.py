"""In which order waiting requests are admitted.

Responsible for the order and nothing else: what fits, what is deferred, who is preempted and how often a request may be
overtaken are the scheduler's affair. A policy sees requests that wait for the first time only; preempted ones always
resume before them.

    fcfs      order of arrival; nothing passes a request that does not fit the memory
    shortest  least prefill that the cache does not save first
    prefix    longest prefix in the cache first, so that requests which share one run together, deepest first; of equal
              ones, least prefill first
    fair      the namespace that got the fewest tokens computed first; inside it, order of arrival
    static    order of arrival, in batches: the next one starts when the last request of the previous one has ended.
              The baseline that servers without continuous batching set; as large a batch as the memory holds

A lower ``priority`` goes before everything else, under ``fair`` inside its namespace only: nobody gains a larger share
by calling everything urgent.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from kvist.errors import ConfigError, UnsupportedParameter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvist.cache.namespaces import Namespace
    from kvist.sched.request import Request


class SchedulingPolicy(Protocol):
    """Orders waiting requests by lanes, and inside a lane by keys.

    The next request is that of the smallest key in the lane of the smallest virtual time. How many later requests may
    start before one that waits is bounded by the queue, so no policy can starve anybody.
    """

    @property
    def name(self) -> str:
        """What the user types after ``--schedule``."""

    @property
    def is_cache_aware(self) -> bool:
        """Whether keys depend on ``Request.num_expected_hit_tokens``, so that they have to follow the cache."""

    @property
    def can_pass(self) -> bool:
        """Whether later requests may start before one that does not fit the memory now."""

    @property
    def is_batched(self) -> bool:
        """Whether a new batch is admitted only when nothing of the one before runs; such a policy knows no priority."""

    def key(self, request: Request) -> tuple[int, ...]:
        """Return the place of a request in its lane: smaller goes first. Priority and arrival need not be in it."""

    def lane(self, request: Request) -> Namespace | None:
        """Return the lane a request waits in; None for all where there is but one."""

    def virtual_time(self, lane: Namespace | None) -> int:
        """Return how far a lane is ahead; never falls while the lane has requests in progress."""

    def arrive(self, request: Request) -> None:
        """Note that a request has arrived."""

    def charge(self, request: Request, num_tokens: int) -> None:
        """Note that so many tokens are computed for a request."""

    def leave(self, request: Request) -> None:
        """Note that a request has ended."""


class _OneLane:
    """What the policies have in common that keep no account of anybody."""

    is_cache_aware = False
    can_pass = True
    is_batched = False

    def lane(self, request: Request) -> Namespace | None:  # noqa: ARG002  # the protocol's signature
        """Return the only lane."""
        return None

    def virtual_time(self, lane: Namespace | None) -> int:  # noqa: ARG002  # the protocol's signature
        """Return 0: one lane is never ahead."""
        return 0

    def arrive(self, request: Request) -> None:
        """Keep no account."""

    def charge(self, request: Request, num_tokens: int) -> None:
        """Keep no account."""

    def leave(self, request: Request) -> None:
        """Keep no account."""


class Fcfs(_OneLane):
    """First come, first served."""

    name = "fcfs"
    can_pass = False

    def key(self, request: Request) -> tuple[int, ...]:
        """Return the order of arrival."""
        return (request.arrival_index,)


class Shortest(_OneLane):
    """Least remaining prefill first, counted without what the cache holds now."""

    name = "shortest"
    is_cache_aware = True

    def key(self, request: Request) -> tuple[int, ...]:
        """Return the prompt tokens that would have to be computed."""
        return (request.num_expected_prefill_tokens,)


class Prefix(_OneLane):
    """Longest cached prefix first.

    Of requests whose common prefix nobody has computed, one starts and the scheduler sets the others aside until its
    blocks are there; from then on theirs is the longest prefix, and they go before everybody who shares less.

    Most that wait at a time share nothing that is cached. In order of arrival, short ones among them would stand behind
    long ones as under ``fcfs``, and each of these would push out what others are about to share.
    """

    name = "prefix"
    is_cache_aware = True

    def key(self, request: Request) -> tuple[int, ...]:
        """Return the tokens that the cache holds, most first, and the prompt tokens to be computed."""
        return (-request.num_expected_hit_tokens, request.num_expected_prefill_tokens)


class Fair(_OneLane):
    """Equal shares of computed tokens for every namespace that has work.

    Each namespace has a virtual time: the tokens computed for it. A request is charged for its uncached prompt when it
    starts, and for each output token; what has to be computed again after a preemption is nobody's fault. A namespace
    that had nothing to do starts from the least virtual time of those that have (its own, if later): idleness saves
    nothing up, and a short pause forgives nothing.

    Source: Sheng et al., Fairness in Serving Large Language Models, 2024, the virtual token counter; here with prompt
        and output tokens of equal weight and without cached ones.
    """

    name = "fair"

    def __init__(self) -> None:
        self._times: dict[Namespace, int] = {}
        # Requests in progress, waiting or running; a namespace without any is not in it.
        self._num_active: dict[Namespace, int] = {}

    def key(self, request: Request) -> tuple[int, ...]:
        """Return the order of arrival."""
        return (request.arrival_index,)

    def lane(self, request: Request) -> Namespace | None:
        """Return the namespace."""
        return request.namespace

    def virtual_time(self, lane: Namespace | None) -> int:
        """Return the tokens charged to a namespace."""
        return 0 if lane is None else self._times[lane]

    def arrive(self, request: Request) -> None:
        """Start the account of a namespace that had nothing to do. O(namespaces in progress) then, else O(1)."""
        namespace = request.namespace
        if namespace not in self._num_active:
            least = min((self._times[other] for other in self._num_active), default=0)
            self._times[namespace] = max(self._times.get(namespace, 0), least)
        self._num_active[namespace] = self._num_active.get(namespace, 0) + 1

    def charge(self, request: Request, num_tokens: int) -> None:
        """Let the virtual time of the request's namespace go on."""
        self._times[request.namespace] += num_tokens

    def leave(self, request: Request) -> None:
        """Forget what no longer tells namespaces apart: O(accounts) when one runs out of requests, else O(1)."""
        namespace = request.namespace
        self._num_active[namespace] -= 1
        if self._num_active[namespace]:
            return
        del self._num_active[namespace]
        # Who is behind the least of those in progress would start from there anyway.
        least = min((self._times[other] for other in self._num_active), default=None)
        self._times = {
            name: time
            for name, time in self._times.items()
            if least is not None and (name in self._num_active or time > least)
        }


class Static(_OneLane):
    """Static batching in order of arrival."""

    name = "static"
    can_pass = False
    is_batched = True

    def key(self, request: Request) -> tuple[int, ...]:
        """Return the order of arrival."""
        return (request.arrival_index,)


def check_priority(policy: SchedulingPolicy, priority: int) -> None:
    """Raise UnsupportedParameter when a policy would ignore a request's priority."""
    if priority and policy.is_batched:
        raise UnsupportedParameter(
            f"[scheduler] --schedule {policy.name} starts requests in order of arrival, received {priority=}; "
            "leave it out, or start the engine with another --schedule",
            param="priority",
        )


POLICIES: Mapping[str, Callable[[], SchedulingPolicy]] = MappingProxyType(
    {kind.name: kind for kind in (Fcfs, Shortest, Prefix, Fair, Static)}
)
"""Every policy by the name the user gives."""


def get(name: str) -> SchedulingPolicy:
    """Return a new policy of that name.

    Raises:
        ConfigError: There is none.
    """
    if name not in POLICIES:
        raise ConfigError(
            f"[scheduler] --schedule must be one of {', '.join(POLICIES)}, received {name!r}"
        )
    return POLICIES[name]()
