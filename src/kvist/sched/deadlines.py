"""Which requests have run out of time.

Responsible for the order of deadlines. Knows no clock: the caller says what time it is.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvist.sched.request import Request


class Deadlines:
    """Requests by deadline. Entries of those that left stay until they surface or outnumber the live ones."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Request]] = []
        self._live: set[Request] = set()

    def add(self, request: Request, deadline_ns: int) -> None:
        """Watch a request. O(log n)."""
        self._live.add(request)
        heapq.heappush(self._heap, (deadline_ns, request.arrival_index, request))

    def discard(self, request: Request) -> None:
        """Watch a request no longer, if it was watched. Amortised O(log n)."""
        self._live.discard(request)
        if len(self._heap) > 2 * len(self._live) + 16:
            self._heap = [entry for entry in self._heap if entry[2] in self._live]
            heapq.heapify(self._heap)

    def take_expired(self, now_ns: int) -> list[Request]:
        """Return the requests whose deadline has come, earliest first, and watch them no longer. O(log n) each."""
        expired = []
        while self._heap and self._heap[0][0] <= now_ns:
            request = heapq.heappop(self._heap)[2]
            if request in self._live:
                self._live.remove(request)
                expired.append(request)
        return expired
