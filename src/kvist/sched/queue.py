"""The waiting queue: requests without blocks, in the order in which they are to start.

Responsible for order, for removal, and for how often one request may be overtaken. Knows neither blocks nor budgets.
The bound on its length is the scheduler's, since a preempted request must always find room.

    preempted requests, by arrival       always first
    a request overtaken often enough     then; nobody who came later starts before it (a barrier)
    lanes, by virtual time               then; inside a lane by (priority, the policy's key, arrival)

Invariants:
    1. Of the requests of its own lane, at most ``max_overtakes`` that arrived later start before a request, beside
       those that start while it is parked: it waits for its own blocks then, which a running request computes.
    2. Of other lanes, at most so many start before it from the moment it is the oldest of its lane.

Counting overtakes. A start overtakes everybody older in the lane, who may be a thousand. They are a prefix of the lane
in order of arrival, so it is enough to note the start at the last of them: the requests that overtook one are the notes
from it to the end of the list. A request that leaves hands its notes to the one before it, since they count for all of
those. The oldest has the sum of all notes, which is the largest, and so only the oldest has to be looked at.

      oldest [notes 0] <-> [notes 2] <-> [notes 0] <-> [notes 1] youngest       overtaken: 3, 3, 1, 1
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvist.cache.namespaces import Namespace
    from kvist.sched.policy import SchedulingPolicy
    from kvist.sched.request import Request


class Candidate(NamedTuple):
    """The request that stands first."""

    request: Request
    is_urgent: bool
    """Whether nobody may start before it: it was preempted, or overtaken often enough."""


class ParkedGroup(NamedTuple):
    """Requests that wait for one block which a running request computes."""

    block_index: int
    """Index of the block in each of their sequences."""
    key: bytes
    """What ``cache.pending.pending_key`` says of it."""


class _Place:
    """Where one request waits."""

    __slots__ = ("entry", "group", "is_aside", "lane", "notes", "older", "request", "younger")

    def __init__(self, request: Request, lane: _Lane | None) -> None:
        self.request = request
        self.lane = lane
        """None: it was preempted."""
        self.entry = -1
        """Number of its live entry in a heap; entries with another number are dead."""
        self.group: ParkedGroup | None = None
        self.is_aside = False
        self.older: _Place | None = None
        self.younger: _Place | None = None
        self.notes = 0

    @property
    def is_ready(self) -> bool:
        return self.group is None and not self.is_aside


class _Heap:
    """Places by key. Entries of those that left stay, dead, until they surface or outnumber the live ones.

    ``list.remove`` instead would be O(n) for each client that goes away.
    """

    def __init__(self) -> None:
        self._items: list[tuple[tuple[int, ...], int, _Place]] = []
        self._num_live = 0
        self._num_pushed = 0

    def __len__(self) -> int:
        return self._num_live

    def push(self, place: _Place, key: tuple[int, ...]) -> None:
        """Add a place. O(log n)."""
        self._num_pushed += 1
        self._num_live += 1
        place.entry = self._num_pushed
        heapq.heappush(self._items, (key, self._num_pushed, place))

    def discard(self, place: _Place) -> None:
        """Take a place out, if it is in. Amortised O(log n)."""
        if place.entry == -1:
            return
        place.entry = -1
        self._num_live -= 1
        if len(self._items) > 2 * self._num_live + 16:
            self._items = [item for item in self._items if item[2].entry == item[1]]
            heapq.heapify(self._items)

    def take_first(self, place: _Place) -> tuple[int, ...] | None:
        """Take out a place that stands first, and return its key; None: it does not, and stays. O(log n)."""
        if not self._items or self._items[0][2] is not place or place.entry != self._items[0][1]:
            return None
        place.entry = -1
        self._num_live -= 1
        return heapq.heappop(self._items)[0]

    def first(self) -> _Place | None:
        """Return the place with the smallest key; None when there is none. Amortised O(log n)."""
        while self._items:
            _, entry, place = self._items[0]
            if place.entry == entry:
                return place
            heapq.heappop(self._items)
        return None


class _Lane:
    """Requests that wait for the first time, by key and by arrival."""

    def __init__(self, name: Namespace | None) -> None:
        self.name = name
        self.heap = _Heap()
        self.is_listed = False
        """Whether the queue's heap of lanes has an entry for it."""
        self.oldest: _Place | None = None
        self.youngest: _Place | None = None
        self.num_notes = 0
        """Sum of all notes: how often the oldest was overtaken by requests of the lane."""
        self.num_passes = 0
        """How often the oldest was overtaken by requests of other lanes, since it is the oldest."""

    def append(self, place: _Place) -> None:
        place.older = self.youngest
        if self.youngest is None:
            self.oldest = place
        else:
            self.youngest.younger = place
        self.youngest = place

    def unlink(self, place: _Place, *, num_overtakes: int) -> None:
        """Take a place out of the order of arrival.

        Args:
            place: One of the lane's.
            num_overtakes: 1 when its request starts, which overtakes all older ones; 0 when it just goes.
        """
        older, younger = place.older, place.younger
        if older is None:
            self.oldest = younger
            self.num_notes -= place.notes
            self.num_passes = 0
        else:
            older.younger = younger
            older.notes += place.notes + num_overtakes
            self.num_notes += num_overtakes
        if younger is None:
            self.youngest = older
        else:
            younger.older = older

    def counts(self) -> Iterator[tuple[_Place, int]]:
        """Yield the places, oldest first, with how often each was overtaken."""
        count = self.num_notes
        place = self.oldest
        while place is not None:
            yield place, count + (self.num_passes if place is self.oldest else 0)
            count -= place.notes
            place = place.younger


class _Family:
    """Waiting requests whose first block is the same: what one computes of it may serve the others."""

    def __init__(self) -> None:
        self.members: OrderedDict[Request, None] = OrderedDict()
        """Least recently looked up first."""
        self.num_stale = 0
        """Members, from the front, that blocks were published for since they were looked up."""


class WaitingQueue:
    """Requests in the order in which they are to start.

    Args:
        policy: Lanes and keys.
        max_overtakes: See inv. 1 and 2; 0 keeps everybody in order of arrival.

    Complexity: every operation is amortised O(log requests) unless it says otherwise; under a policy with several
        lanes, a start is O(lanes).
    """

    def __init__(self, policy: SchedulingPolicy, max_overtakes: int) -> None:
        self._policy = policy
        self._max_overtakes = max_overtakes
        self._places: dict[Request, _Place] = {}
        self._resumed = _Heap()
        self._lanes: dict[Namespace | None, _Lane] = {}
        # Lanes with something in their heap, and some without, by virtual time as it was when they were listed. Virtual
        # time never falls, so an entry that is out of date stands too early and is put right when it surfaces.
        self._order: list[tuple[int, int, _Lane]] = []
        self._num_listed = 0
        self._due: dict[_Lane, None] = {}
        # With their keys, unless those have to be asked for again.
        self._aside: dict[_Place, tuple[int, ...] | None] = {}
        self._parked: dict[ParkedGroup, dict[Request, None]] = {}
        self._families: dict[bytes, _Family] = {}
        self._stale: dict[_Family, None] = {}

    def __len__(self) -> int:
        """Return how many requests wait, parked ones included."""
        return len(self._places)

    @property
    def has_parked(self) -> bool:
        """Whether a request waits for blocks in flight."""
        return bool(self._parked)

    @property
    def num_parked(self) -> int:
        """Requests that wait for blocks in flight. O(groups)."""
        return sum(map(len, self._parked.values()))

    def push(self, request: Request) -> None:
        """Add a request that waits for the first time; it must have arrived after all others."""
        name = self._policy.lane(request)
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = _Lane(name)
        place = self._places[request] = _Place(request, lane)
        lane.append(place)
        self._offer(place)
        self._check_due(lane)
        if self._policy.is_cache_aware and request.chain.num_full_blocks:
            identity = request.chain.block_hash(0)
            self._families.setdefault(identity, _Family()).members[request] = None

    def push_resumed(self, request: Request) -> None:
        """Add a request that was preempted."""
        place = self._places[request] = _Place(request, None)
        self._offer(place)

    def start(self, request: Request) -> None:
        """Take a request out because it starts: it overtakes whoever arrived before it and still waits.

        Raises:
            KeyError: It does not wait here.
        """
        lane = self._places[request].lane
        self._take_out(request, num_overtakes=1)
        if lane is None:
            return
        for other in self._lanes.values():
            if other is lane or other.oldest is None:
                continue
            if other.oldest.request.arrival_index < request.arrival_index:
                other.num_passes += 1
                self._check_due(other)

    def remove(self, request: Request) -> None:
        """Take a request out because it has ended.

        Raises:
            KeyError: It does not wait here.
        """
        self._take_out(request, num_overtakes=0)

    def peek(self) -> Candidate | None:
        """Return the request that is to start next, of those neither set aside nor parked; None when there is none.

        Complexity: amortised O(log requests), and O(parked requests) that were overtaken often enough.
        """
        place = self._resumed.first()
        if place is None and self._due:
            place = self._barrier()
        if place is not None:
            # A barrier that was set aside before it became one still lets nobody pass.
            return None if place.is_aside else Candidate(place.request, is_urgent=True)
        while self._order:
            time, _, lane = self._order[0]
            place = lane.heap.first()
            if place is None:
                heapq.heappop(self._order)
                lane.is_listed = False
            elif time == self._policy.virtual_time(lane.name):
                return Candidate(place.request, is_urgent=False)
            else:
                heapq.heappop(self._order)
                self._list(lane)
        return None

    def set_aside(self, request: Request) -> None:
        """Look past a request until ``restore``."""
        place = self._places[request]
        heap = self._heap_of(place)
        place.is_aside = True
        # Most often it stands first; its key is then kept.
        self._aside[place] = key = heap.take_first(place)
        if key is None:
            heap.discard(place)

    def restore(self) -> None:
        """Put everything that was set aside back in its place."""
        for place, key in self._aside.items():
            place.is_aside = False
            lane = place.lane
            if key is None or lane is None:
                self._offer(place)
                continue
            lane.heap.push(place, key)
            if not lane.is_listed:
                self._list(lane)
        self._aside.clear()

    def rekey(self, request: Request) -> None:
        """Give a request the place that its key means now."""
        place = self._places[request]
        self._heap_of(place).discard(place)
        if place.is_ready:
            self._offer(place)
        elif place.is_aside:
            self._aside[place] = None

    def overtakes(self) -> dict[Request, int]:
        """Return how often each request was overtaken, as far as it counts (inv. 1 and 2). O(requests)."""
        return {
            place.request: count for lane in self._lanes.values() for place, count in lane.counts()
        }

    def __iter__(self) -> Iterator[Request]:
        return iter(self._places)

    # ---- requests whose blocks are in flight ---------------------------------------------------------------------

    def park(self, request: Request, group: ParkedGroup) -> None:
        """Look past a request until its group is unparked."""
        place = self._places[request]
        self._heap_of(place).discard(place)
        place.group = group
        self._parked.setdefault(group, {})[request] = None

    def unpark(self, group: ParkedGroup) -> None:
        """Offer the requests of a group again. O(requests of the group, each O(log requests))."""
        for request in self._parked.pop(group):
            place = self._places[request]
            place.group = None
            self._offer(place)

    @property
    def groups(self) -> tuple[ParkedGroup, ...]:
        """The blocks that parked requests wait for, in the order of parking. O(groups)."""
        return tuple(self._parked)

    def parked(self, group: ParkedGroup) -> Iterator[Request]:
        """Yield the requests that wait for a block, in the order of parking."""
        return iter(self._parked[group])

    # ---- keys that follow the cache ------------------------------------------------------------------------------

    def mark_stale(self, first_block: bytes) -> None:
        """Note that blocks below a first block were published: requests that begin with it may hit more. O(1)."""
        family = self._families.get(first_block)
        if family is not None:
            family.num_stale = len(family.members)
            self._stale[family] = None

    def take_stale(self) -> Request | None:
        """Return a request whose key may have changed and note that it was looked at; None when there is none. O(1)."""
        while self._stale:
            family = next(iter(self._stale))
            if family.num_stale > 0 and family.members:
                family.num_stale -= 1
                request = next(iter(family.members))
                family.members.move_to_end(request)
                return request
            del self._stale[family]
        return None

    # ---- private -------------------------------------------------------------------------------------------------

    def _heap_of(self, place: _Place) -> _Heap:
        return self._resumed if place.lane is None else place.lane.heap

    def _offer(self, place: _Place) -> None:
        request, lane = place.request, place.lane
        if lane is None:
            self._resumed.push(place, (request.arrival_index,))
            return
        key = (request.priority, *self._policy.key(request), request.arrival_index)
        lane.heap.push(place, key)
        if not lane.is_listed:
            self._list(lane)

    def _list(self, lane: _Lane) -> None:
        lane.is_listed = True
        self._num_listed += 1
        entry = (self._policy.virtual_time(lane.name), self._num_listed, lane)
        heapq.heappush(self._order, entry)
        # Entries of lanes that ran empty stay until they surface, as in _Heap.
        if len(self._order) > 2 * len(self._lanes) + 16:
            for _, _, listed in self._order:
                listed.is_listed = len(listed.heap) > 0
            self._order = [item for item in self._order if item[2].is_listed]
            heapq.heapify(self._order)

    def _take_out(self, request: Request, *, num_overtakes: int) -> None:
        place = self._places.pop(request)
        self._heap_of(place).discard(place)
        self._aside.pop(place, None)
        if place.group is not None:
            members = self._parked[place.group]
            del members[request]
            if not members:
                del self._parked[place.group]
        if place.lane is None:
            return
        place.lane.unlink(place, num_overtakes=num_overtakes)
        self._check_due(place.lane)
        if place.lane.oldest is None:
            del self._lanes[place.lane.name]
        if self._policy.is_cache_aware and request.chain.num_full_blocks:
            identity = request.chain.block_hash(0)
            family = self._families[identity]
            del family.members[request]
            if not family.members:
                del self._families[identity]
                self._stale.pop(family, None)

    def _check_due(self, lane: _Lane) -> None:
        """Note whether the oldest of a lane was overtaken often enough."""
        if lane.oldest is not None and lane.num_notes + lane.num_passes >= self._max_overtakes:
            self._due[lane] = None
        else:
            self._due.pop(lane, None)

    def _barrier(self) -> _Place | None:
        """Return the oldest request that was overtaken often enough and is not parked."""
        barriers = [place for lane in self._due if (place := self._barrier_of(lane)) is not None]
        return min(barriers, key=lambda place: place.request.arrival_index, default=None)

    def _barrier_of(self, lane: _Lane) -> _Place | None:
        for place, count in lane.counts():
            if count < self._max_overtakes:
                return None
            if place.group is None:
                return place
        return None
