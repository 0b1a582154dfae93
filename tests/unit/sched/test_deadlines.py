from __future__ import annotations

from tests.unit.sched.test_request import make_request

from kvist.sched.deadlines import Deadlines


def test_gives_what_has_expired_earliest_first_and_once() -> None:
    deadlines = Deadlines()
    a, b, c = (make_request() for _ in range(3))
    for index, (request, at) in enumerate(((a, 30), (b, 10), (c, 20))):
        request.arrival_index = index
        deadlines.add(request, at)
    assert deadlines.take_expired(9) == []
    assert deadlines.take_expired(20) == [b, c]
    assert deadlines.take_expired(20) == []
    deadlines.discard(a)
    deadlines.discard(b)
    assert deadlines.take_expired(99) == []


def test_what_left_in_time_does_not_pile_up() -> None:
    deadlines = Deadlines()
    for index in range(1000):
        request = make_request()
        request.arrival_index = index
        deadlines.add(request, 10**9)
        deadlines.discard(request)
        assert len(deadlines._heap) <= 17
