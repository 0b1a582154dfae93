from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from tests.unit.sched.test_request import make_request

from kvist.cache.hash import BlockHasher, TokenChain
from kvist.cache.namespaces import Namespace
from kvist.sched import policy
from kvist.sched.queue import ParkedGroup, WaitingQueue
from kvist.types import RequestId

if TYPE_CHECKING:
    from kvist.sched.request import Request

GROUP = ParkedGroup(0, b"block 0")


class Waiting:
    """A queue with requests that are named by single letters."""

    def __init__(self, schedule: str = "fcfs", max_overtakes: int = 64) -> None:
        self.policy = policy.get(schedule)
        self.queue = WaitingQueue(self.policy, max_overtakes)
        self.requests: dict[str, Request] = {}

    def push(self, name: str, *, priority: int = 0, hits: int = 0, tenant: str = "") -> Request:
        request = make_request()
        request.request_id = RequestId(name)
        request.arrival_index = len(self.requests)
        request.priority = priority
        request.num_expected_hit_tokens = hits
        request.namespace = Namespace(model="m", tenant=tenant)
        request.chain = TokenChain(
            BlockHasher(bytes(32)), request.namespace, 2, request.prompt_token_ids
        )
        self.requests[name] = request
        self.policy.arrive(request)
        self.queue.push(request)
        return request

    def start(self, names: str) -> None:
        for name in names:
            self.queue.start(self.requests[name])

    def first(self) -> str | None:
        candidate = self.queue.peek()
        return None if candidate is None else candidate.request.request_id

    def start_all(self) -> str:
        names = ""
        while (name := self.first()) is not None:
            names += name
            self.start(name)
        return names

    def overtakes(self) -> dict[str, int]:
        return {request.request_id: n for request, n in self.queue.overtakes().items()}


def test_gives_requests_in_order_of_arrival_where_keys_are_equal() -> None:
    waiting = Waiting("shortest")
    for name in "abc":
        waiting.push(name)
    assert len(waiting.queue) == 3
    assert [request.request_id for request in waiting.queue] == ["a", "b", "c"]
    assert waiting.start_all() == "abc"
    assert len(waiting.queue) == 0


def test_gives_the_smallest_key_first() -> None:
    waiting = Waiting("prefix")
    waiting.push("a", hits=1)
    waiting.push("b", hits=3)
    waiting.push("c", hits=2)
    assert waiting.start_all() == "bca"


def test_a_lower_priority_goes_before_everything_else() -> None:
    waiting = Waiting("shortest")
    waiting.push("a", priority=1, hits=3)
    waiting.push("b", priority=0)
    waiting.push("c", priority=-1)
    assert waiting.start_all() == "cba"


def test_preempted_requests_go_first_by_arrival_and_are_urgent() -> None:
    waiting = Waiting("prefix")
    a, b = waiting.push("a"), waiting.push("b")
    waiting.start("ab")
    waiting.push("c", hits=9, priority=-5)
    waiting.queue.push_resumed(b)
    waiting.queue.push_resumed(a)
    candidate = waiting.queue.peek()
    assert candidate == (a, True)
    assert waiting.start_all() == "abc"


def test_removes_from_the_middle() -> None:
    waiting = Waiting()
    for name in "abc":
        waiting.push(name)
    waiting.queue.remove(waiting.requests["b"])
    assert len(waiting.queue) == 2
    with pytest.raises(KeyError):
        waiting.queue.remove(waiting.requests["b"])
    assert waiting.start_all() == "ac"


def test_dead_entries_never_outnumber_the_living_by_much() -> None:
    """Clients that come and go while the head is stuck must not grow the heap."""
    waiting = Waiting()
    waiting.push("stuck")
    (lane,) = waiting.queue._lanes.values()
    for index in range(1000):
        request = waiting.push(str(index))
        waiting.queue.remove(request)
        assert len(lane.heap._items) <= 2 * len(waiting.queue) + 17
    assert waiting.first() == "stuck"


def test_lanes_that_ran_empty_never_outnumber_the_others_by_much() -> None:
    waiting = Waiting("fair")
    waiting.push("stuck")
    for index in range(1000):
        request = waiting.push(str(index), tenant=str(index))
        waiting.queue.remove(request)
        waiting.policy.leave(request)
        assert len(waiting.queue._order) <= 2 * 2 + 16
    assert waiting.first() == "stuck"


def test_looks_past_what_is_set_aside_until_it_is_restored() -> None:
    waiting = Waiting()
    for name in "abc":
        waiting.push(name)
    waiting.queue.set_aside(waiting.requests["a"])
    waiting.queue.rekey(waiting.requests["a"])
    assert waiting.first() == "b"
    waiting.queue.set_aside(waiting.requests["b"])
    waiting.queue.remove(waiting.requests["b"])
    waiting.queue.restore()
    assert waiting.start_all() == "ac"


# --- the bound on overtakes


def test_a_request_overtaken_often_enough_is_a_barrier() -> None:
    waiting = Waiting("prefix", max_overtakes=2)
    waiting.push("a", hits=0)
    waiting.push("b", hits=5)
    waiting.push("c", hits=6)
    waiting.push("d", hits=7)
    waiting.start("d")
    assert waiting.queue.peek() == (waiting.requests["c"], False)
    waiting.start("c")
    assert waiting.overtakes() == {"a": 2, "b": 2}
    assert waiting.queue.peek() == (waiting.requests["a"], True)
    waiting.start("a")
    assert waiting.queue.peek() == (waiting.requests["b"], True)


def test_a_request_that_goes_hands_its_count_to_the_older_ones_only() -> None:
    waiting = Waiting("prefix", max_overtakes=9)
    for name in "abcde":
        waiting.push(name)
    waiting.start("c")
    assert waiting.overtakes() == {"a": 1, "b": 1, "d": 0, "e": 0}
    waiting.start("e")
    assert waiting.overtakes() == {"a": 2, "b": 2, "d": 1}
    waiting.queue.remove(waiting.requests["b"])
    assert waiting.overtakes() == {"a": 2, "d": 1}
    waiting.queue.remove(waiting.requests["a"])
    assert waiting.overtakes() == {"d": 1}
    waiting.start("d")
    assert waiting.overtakes() == {}


def test_without_overtakes_everybody_keeps_the_order_of_arrival() -> None:
    waiting = Waiting("prefix", max_overtakes=0)
    for index, name in enumerate("abcd"):
        waiting.push(name, hits=index, priority=-index)
    assert waiting.start_all() == "abcd"


def test_a_barrier_that_was_set_aside_before_still_lets_nobody_pass() -> None:
    waiting = Waiting("prefix", max_overtakes=1)
    waiting.push("a")
    waiting.push("b", hits=1)
    waiting.push("c", hits=2)
    waiting.queue.set_aside(waiting.requests["a"])
    waiting.start("c")
    assert waiting.queue.peek() is None
    waiting.queue.restore()
    assert waiting.first() == "a"


def test_a_parked_barrier_lets_others_pass_but_for_the_next_one_overtaken_as_often() -> None:
    waiting = Waiting("prefix", max_overtakes=1)
    waiting.push("a")
    waiting.push("b", hits=1)
    waiting.push("c", hits=2)
    waiting.push("d", hits=3)
    waiting.start("d")
    waiting.queue.park(waiting.requests["a"], GROUP)
    assert waiting.first() == "b"
    waiting.start("b")
    waiting.start("c")
    assert waiting.queue.peek() is None
    waiting.queue.unpark(GROUP)
    assert waiting.first() == "a"


def test_other_lanes_count_from_when_a_request_is_the_oldest_of_its_own() -> None:
    waiting = Waiting("fair", max_overtakes=2)
    for name in "abc":
        waiting.push(name, tenant="x")
    for name in "defg":
        waiting.push(name, tenant="y")
    waiting.policy.charge(waiting.requests["a"], 100)
    assert waiting.first() == "d"
    waiting.start("de")
    assert waiting.overtakes() == {"a": 2, "b": 0, "c": 0, "f": 0, "g": 0}
    assert waiting.queue.peek() == (waiting.requests["a"], True)
    waiting.start("a")
    # `b` was overtaken too, but only behind `a`: the flood of one tenant must not stop all others.
    assert waiting.overtakes() == {"b": 0, "c": 0, "f": 0, "g": 0}
    assert waiting.first() == "f"


def test_an_older_request_of_another_lane_overtakes_nobody() -> None:
    waiting = Waiting("fair", max_overtakes=1)
    waiting.push("a", tenant="x")
    waiting.push("b", tenant="y")
    waiting.start("a")
    assert waiting.overtakes() == {"b": 0}


def test_of_several_barriers_the_oldest_goes_first() -> None:
    waiting = Waiting("fair", max_overtakes=1)
    waiting.push("a", tenant="x")
    waiting.push("b", tenant="y")
    waiting.push("c", tenant="z")
    waiting.start("c")
    assert waiting.start_all() == "ab"


@pytest.mark.parametrize("max_overtakes", [0, 1, 3, 100])
def test_counts_like_going_through_all_requests(max_overtakes: int) -> None:
    generator = random.Random(max_overtakes)
    waiting = Waiting("prefix", max_overtakes)
    counts: dict[str, int] = {}
    for index in range(1500):
        if generator.random() < 0.5 or not counts:
            waiting.push(str(index), hits=generator.randrange(20))
            counts[waiting.queue._lanes[None].youngest.request.request_id] = 0
        elif generator.random() < 0.2:
            name = generator.choice(list(counts))
            waiting.queue.remove(waiting.requests[name])
            del counts[name]
        else:
            name = waiting.first()
            due = [other for other, count in counts.items() if count >= max_overtakes]
            hits = {n: waiting.requests[n].num_expected_hit_tokens for n in counts}
            assert name == (due[0] if due else min(counts, key=lambda n: -hits[n]))
            waiting.queue.start(waiting.requests[name])
            del counts[name]
            arrival = waiting.requests[name].arrival_index
            for other in counts:
                counts[other] += waiting.requests[other].arrival_index < arrival
        assert waiting.overtakes() == counts


# --- parking and families


def test_parked_requests_are_looked_past_until_their_group_is_unparked() -> None:
    waiting = Waiting()
    for name in "abcd":
        waiting.push(name)
    waiting.queue.park(waiting.requests["a"], GROUP)
    waiting.queue.park(waiting.requests["c"], GROUP)
    assert waiting.queue.groups == (GROUP,)
    assert [r.request_id for r in waiting.queue.parked(GROUP)] == ["a", "c"]
    assert (waiting.queue.num_parked, len(waiting.queue)) == (2, 4)
    assert waiting.first() == "b"
    waiting.queue.remove(waiting.requests["c"])
    waiting.queue.unpark(GROUP)
    assert waiting.start_all() == "abd"


def test_the_last_parked_request_takes_its_group_along() -> None:
    waiting = Waiting()
    waiting.push("a")
    waiting.queue.park(waiting.requests["a"], GROUP)
    waiting.queue.remove(waiting.requests["a"])
    assert waiting.queue.groups == ()


def test_a_rekeyed_parked_request_stays_parked() -> None:
    waiting = Waiting("prefix")
    waiting.push("a")
    waiting.push("b")
    waiting.queue.park(waiting.requests["b"], GROUP)
    waiting.requests["b"].num_expected_hit_tokens = 3
    waiting.queue.rekey(waiting.requests["b"])
    assert waiting.first() == "a"
    waiting.queue.unpark(GROUP)
    assert waiting.first() == "b"


def test_published_blocks_make_those_stale_that_begin_with_the_same_block() -> None:
    waiting = Waiting("shortest")
    a, b = waiting.push("a"), waiting.push("b")
    waiting.push("c", tenant="other")
    assert waiting.queue.take_stale() is None
    waiting.queue.mark_stale(b"nobody begins with it")
    assert waiting.queue.take_stale() is None
    waiting.queue.mark_stale(a.chain.block_hash(0))
    assert waiting.queue.take_stale() is a
    waiting.queue.mark_stale(a.chain.block_hash(0))
    # The least recently looked up one first, and each once.
    assert waiting.queue.take_stale() is b
    assert waiting.queue.take_stale() is a
    assert waiting.queue.take_stale() is None
    waiting.queue.mark_stale(a.chain.block_hash(0))
    waiting.start("ab")
    assert waiting.queue.take_stale() is None


def test_a_family_that_shrinks_while_it_is_stale_asks_nobody_twice() -> None:
    waiting = Waiting("shortest")
    a, b, c = (waiting.push(name) for name in "abc")
    waiting.queue.mark_stale(a.chain.block_hash(0))
    assert waiting.queue.take_stale() is a
    waiting.queue.remove(b)
    assert waiting.queue.take_stale() is c
