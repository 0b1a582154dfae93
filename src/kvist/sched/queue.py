"""The waiting queue: requests in order, and beside it those that wait for a block another request is computing.

Responsible for order, removal and deferral. Knows neither blocks nor budgets: what a deferred request waits for is an
opaque key. The bound on its length is the scheduler's, since a preempted request must always find room.

Invariant: a request is in the ordered part or in exactly one deferred group, never in both.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from kvist.sched.request import Request
    from kvist.types import RequestId


class WaitingQueue:
    """Requests that hold no blocks.

    The ordered part is a heap; a removed request's entry stays in it, dead, until it surfaces or until dead entries
    outnumber the live ones. ``list.remove`` instead would be O(n) for each client that goes away.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, ...], int, Request]] = []
        # The number of a request's live entry in the heap; an entry with another number is dead.
        self._live: dict[RequestId, int] = {}
        self._next_entry = 0
        self._groups: dict[Hashable, dict[RequestId, Request]] = {}
        self._keys_of_deferred: dict[RequestId, Hashable] = {}

    def __len__(self) -> int:
        """Return how many requests wait, deferred ones included."""
        return len(self._live) + len(self._keys_of_deferred)

    def push(self, request: Request, key: tuple[int, ...]) -> None:
        """Add a request at the place of its key. O(log n)."""
        self._live[request.request_id] = self._next_entry
        heapq.heappush(self._heap, (key, self._next_entry, request))
        self._next_entry += 1

    def peek(self) -> Request | None:
        """Return the first request that is not deferred; None when there is none. Amortised O(log n).

        Mutates:
            Drops dead entries at the top.
        """
        while self._heap:
            _, entry, request = self._heap[0]
            if self._live.get(request.request_id) == entry:
                return request
            heapq.heappop(self._heap)
        return None

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it waits. Amortised O(log n).

        Raises:
            KeyError: It does not wait here.
        """
        key = self._keys_of_deferred.pop(request.request_id, None)
        if key is None:
            del self._live[request.request_id]
            self._drop_dead_entries()
            return
        group = self._groups[key]
        del group[request.request_id]
        if not group:
            del self._groups[key]

    def defer(self, request: Request, awaited: Hashable) -> None:
        """Set a request aside until ``awaited`` has been computed. Amortised O(log n).

        Args:
            request: In the ordered part.
            awaited: What it waits for; equal for requests that wait for the same thing. Not None.
        """
        self.remove(request)
        self._groups.setdefault(awaited, {})[request.request_id] = request
        self._keys_of_deferred[request.request_id] = awaited

    def first_deferred(self) -> Mapping[Hashable, Request]:
        """Return one request of each deferred group. O(groups)."""
        return {awaited: next(iter(group.values())) for awaited, group in self._groups.items()}

    def pop_group(self, awaited: Hashable) -> list[Request]:
        """Take out all requests that wait for ``awaited``, in the order they were set aside. O(group)."""
        group = self._groups.pop(awaited)
        for request_id in group:
            del self._keys_of_deferred[request_id]
        return list(group.values())

    def _drop_dead_entries(self) -> None:
        if len(self._heap) > 2 * len(self._live) + 16:
            self._heap = [item for item in self._heap if self._live.get(item[2].request_id) == item[1]]
            heapq.heapify(self._heap)
