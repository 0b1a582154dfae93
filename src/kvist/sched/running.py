"""Requests that hold blocks.

Responsible for their order, that of arrival, and for which of them sleep. Knows no blocks and no budget.
"""

from __future__ import annotations

import bisect
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvist.cache.lease import PrefixLease
    from kvist.sched.request import Request


class Running:
    """All running requests, and those that plans may schedule.

    Complexity: O(running) moves of pointers and O(log running) comparisons; there are at most ``max_running``.
    """

    __slots__ = ("_arrivals", "_awake_arrivals", "awake", "num_asleep", "requests")

    def __init__(self) -> None:
        # Arrival indices of the two lists below: bisect with a key would call it for each comparison.
        self._arrivals: list[int] = []
        self._awake_arrivals: list[int] = []
        self.requests: list[Request] = []
        """By arrival, oldest first."""
        self.awake: list[Request] = []
        """Those of them that do not sleep, in the same order."""
        self.num_asleep = 0
        """Requests that sleep."""

    def __len__(self) -> int:
        return len(self.requests)

    def add(self, request: Request) -> None:
        """Add a request, awake."""
        _insert(self.requests, self._arrivals, request)
        _insert(self.awake, self._awake_arrivals, request)

    def remove(self, request: Request) -> None:
        """Take out a request that is awake."""
        _discard(self.requests, self._arrivals, request)
        _discard(self.awake, self._awake_arrivals, request)

    def sleep(self, request: Request, on_wake: Callable[[], None]) -> None:
        """Leave a request out of ``awake`` until ``wake``."""
        request.on_wake = on_wake
        self.num_asleep += 1
        _discard(self.awake, self._awake_arrivals, request)

    def wake(self, request: Request) -> None:
        """Put a sleeping request back and let it catch up."""
        on_wake, request.on_wake = request.on_wake, None
        assert on_wake is not None
        self.num_asleep -= 1
        _insert(self.awake, self._awake_arrivals, request)
        on_wake()


def lease_of(request: Request) -> PrefixLease:
    """Return what a running request holds."""
    assert request.lease is not None, "every running request holds a lease"
    return request.lease


def _insert(requests: list[Request], arrivals: list[int], request: Request) -> None:
    """Add a request to a list by arrival."""
    place = bisect.bisect_left(arrivals, request.arrival_index)
    arrivals.insert(place, request.arrival_index)
    requests.insert(place, request)


def _discard(requests: list[Request], arrivals: list[int], request: Request) -> None:
    """Take a request out of a list by arrival that it is in."""
    place = bisect.bisect_left(arrivals, request.arrival_index)
    del arrivals[place], requests[place]
