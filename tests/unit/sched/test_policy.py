from __future__ import annotations

import dataclasses

import pytest
from tests.unit.sched.test_request import make_request

from kvist.cache.namespaces import Namespace
from kvist.config import SchedulerConfig
from kvist.errors import ConfigError
from kvist.sched import policy


def request_of(tenant: str = "", *, arrival_index: int = 0, hits: int = 0):
    request = make_request()
    request.namespace = Namespace(model="m", tenant=tenant)
    request.arrival_index = arrival_index
    request.num_expected_hit_tokens = hits
    return request


@pytest.mark.parametrize("name", ["fcfs", "fair", "static"])
def test_some_order_by_arrival(name: str) -> None:
    chosen = policy.get(name)
    assert chosen.key(request_of(arrival_index=3)) < chosen.key(request_of(arrival_index=4))


def test_shortest_orders_by_what_is_left_to_compute() -> None:
    shortest = policy.get("shortest")
    assert shortest.key(request_of(hits=2)) < shortest.key(request_of(hits=1))
    assert shortest.key(request_of(hits=2)) == (make_request().num_tokens - 2,)


def test_prefix_orders_by_what_is_cached() -> None:
    prefix = policy.get("prefix")
    assert prefix.key(request_of(hits=2)) < prefix.key(request_of(hits=1))


@pytest.mark.parametrize("name", [name for name in policy.POLICIES if name != "fair"])
def test_all_but_fair_keep_one_lane_and_no_account(name: str) -> None:
    chosen = policy.get(name)
    request = request_of("x")
    chosen.arrive(request)
    chosen.charge(request, 5)
    chosen.leave(request)
    assert chosen.lane(request) is None
    assert chosen.virtual_time(None) == 0


def test_fair_charges_the_namespace() -> None:
    fair = policy.get("fair")
    x, y = request_of("x"), request_of("y")
    fair.arrive(x)
    fair.arrive(y)
    fair.charge(x, 5)
    assert fair.virtual_time(fair.lane(x)) == 5
    assert fair.virtual_time(fair.lane(y)) == 0
    assert fair.virtual_time(None) == 0


def test_fair_saves_nothing_up_for_the_idle() -> None:
    fair = policy.get("fair")
    x, y = request_of("x"), request_of("y")
    fair.arrive(x)
    fair.charge(x, 500)
    fair.arrive(y)
    assert fair.virtual_time(fair.lane(y)) == 500


def test_fair_forgives_nothing_for_a_pause_while_others_work() -> None:
    fair = policy.get("fair")
    x, y = request_of("x"), request_of("y")
    fair.arrive(x)
    fair.arrive(y)
    fair.arrive(y)
    fair.charge(y, 500)
    fair.leave(y)
    fair.leave(y)
    fair.charge(x, 100)
    fair.arrive(y)
    assert fair.virtual_time(fair.lane(y)) == 500


def test_fair_forgets_accounts_that_tell_nobody_apart() -> None:
    fair = policy.get("fair")
    x, y = request_of("x"), request_of("y")
    fair.arrive(x)
    fair.arrive(y)
    fair.charge(x, 100)
    fair.charge(y, 50)
    fair.leave(y)
    assert len(fair._times) == 1
    fair.leave(x)
    assert not fair._times


def test_an_unknown_policy_names_the_known_ones() -> None:
    known = "fcfs, shortest, prefix, fair, static"
    with pytest.raises(ConfigError, match=rf"--schedule must be one of {known}, received 'lifo'"):
        policy.get("lifo")


def test_every_choice_of_the_option_is_a_policy() -> None:
    (schedule,) = (f for f in dataclasses.fields(SchedulerConfig) if f.name == "schedule")
    assert schedule.metadata["choices"] == tuple(policy.POLICIES)
    assert all(policy.get(name).name == name for name in policy.POLICIES)
