"""The waiting queue: requests without blocks, in the order in which they are to start.

Responsible for order and removal. Knows neither blocks nor budgets. The bound on its length is the scheduler's, since a
preempted request must always find room.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvist.sched.request import Request
    from kvist.types import RequestId


class WaitingQueue:
    """Requests in the order of their keys; equal keys keep the order of pushing.

    A heap. A removed request's entry stays in it, dead, until it surfaces or until dead entries outnumber the live
    ones; ``list.remove`` instead would be O(n) for each client that goes away.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, ...], int, Request]] = []
        # The number of a request's live entry in the heap; an entry with another number is dead.
        self._live: dict[RequestId, int] = {}
        self._num_pushed = 0

    def __len__(self) -> int:
        """Return how many requests wait."""
        return len(self._live)

    def push(self, request: Request, key: tuple[int, ...]) -> None:
        """Add a request at the place of its key. O(log n)."""
        self._live[request.request_id] = self._num_pushed
        heapq.heappush(self._heap, (key, self._num_pushed, request))
        self._num_pushed += 1

    def peek(self) -> Request | None:
        """Return the first request; None when there is none. Amortised O(log n).

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
        """Take a request out, wherever it stands. Amortised O(log n).

        Raises:
            KeyError: It does not wait here.
        """
        del self._live[request.request_id]
        if len(self._heap) > 2 * len(self._live) + 16:
            self._heap = [
                item for item in self._heap if self._live.get(item[2].request_id) == item[1]
            ]
            heapq.heapify(self._heap)
