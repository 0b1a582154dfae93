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

    __slots__ = ("awake", "requests")

    def __init__(self) -> None:
        self.requests: list[Request] = []
        """By arrival, oldest first."""
        self.awake: list[Request] = []
        """Those of them that do not sleep, in the same order."""

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def num_asleep(self) -> int:
        """Requests that sleep."""
        return len(self.requests) - len(self.awake)

    def add(self, request: Request) -> None:
        """Add a request, awake."""
        bisect.insort(self.requests, request, key=by_arrival)
        bisect.insort(self.awake, request, key=by_arrival)

    def remove(self, request: Request) -> None:
        """Take out a request that is awake."""
        _discard(self.requests, request)
        _discard(self.awake, request)

    def sleep(self, request: Request, on_wake: Callable[[], None]) -> None:
        """Leave a request out of ``awake`` until ``wake``."""
        request.on_wake = on_wake
        _discard(self.awake, request)

    def wake(self, request: Request) -> None:
        """Put a sleeping request back and let it catch up."""
        on_wake, request.on_wake = request.on_wake, None
        assert on_wake is not None
        bisect.insort(self.awake, request, key=by_arrival)
        on_wake()


def by_arrival(request: Request) -> int:
    """Return the key of the order of arrival."""
    return request.arrival_index


def lease_of(request: Request) -> PrefixLease:
    """Return what a running request holds."""
    assert request.lease is not None, "every running request holds a lease"
    return request.lease


def _discard(requests: list[Request], request: Request) -> None:
    """Take a request out of a list by arrival that it is in."""
    del requests[bisect.bisect_left(requests, request.arrival_index, key=by_arrival)]
