from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from tests.unit.sched.test_request import make_request

from kvist.sched.queue import WaitingQueue
from kvist.types import RequestId

if TYPE_CHECKING:
    from kvist.sched.request import Request


def queued(name: str) -> Request:
    request = make_request()
    request.request_id = RequestId(name)
    return request


def take_all(queue: WaitingQueue) -> str:
    names = []
    while (request := queue.peek()) is not None:
        queue.remove(request)
        names.append(request.request_id)
    return "".join(names)


def test_gives_requests_in_the_order_of_their_keys() -> None:
    queue = WaitingQueue()
    for name, key in (("c", 3), ("a", 1), ("b", 2)):
        queue.push(queued(name), (key,))
    assert len(queue) == 3
    assert take_all(queue) == "abc"
    assert len(queue) == 0


def test_equal_keys_keep_the_order_of_pushing() -> None:
    queue = WaitingQueue()
    for name in "abc":
        queue.push(queued(name), (0,))
    assert take_all(queue) == "abc"


def test_removes_from_the_middle() -> None:
    queue = WaitingQueue()
    requests = [queued(name) for name in "abc"]
    for index, request in enumerate(requests):
        queue.push(request, (index,))
    queue.remove(requests[1])
    assert len(queue) == 2
    with pytest.raises(KeyError):
        queue.remove(requests[1])
    assert take_all(queue) == "ac"


def test_a_request_removed_and_pushed_again_counts_once_and_stands_at_its_new_place() -> None:
    queue = WaitingQueue()
    a, b = queued("a"), queued("b")
    queue.push(a, (1,))
    queue.push(b, (2,))
    queue.remove(a)
    queue.push(a, (3,))
    assert len(queue) == 2
    assert take_all(queue) == "ba"


def test_dead_entries_never_outnumber_the_living_by_much() -> None:
    """Clients that come and go while the head is stuck must not grow the heap."""
    queue = WaitingQueue()
    queue.push(queued("stuck"), (0,))
    for index in range(1000):
        request = queued(str(index))
        queue.push(request, (index + 1,))
        queue.remove(request)
        assert len(queue._heap) <= 2 * len(queue) + 17
    assert take_all(queue) == "stuck"


def test_behaves_like_a_sorted_list() -> None:
    generator = random.Random(0)
    queue, model = WaitingQueue(), {}
    for index in range(3000):
        if generator.random() < 0.55 or not model:
            request = queued(str(index))
            model[request] = ((generator.randrange(20),), index)
            queue.push(request, model[request][0])
        elif generator.random() < 0.5:
            request = generator.choice(list(model))
            queue.remove(request)
            del model[request]
        else:
            request = min(model, key=model.__getitem__)
            assert queue.peek() is request
            queue.remove(request)
            del model[request]
        assert len(queue) == len(model)
