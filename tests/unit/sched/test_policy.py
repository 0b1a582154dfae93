from __future__ import annotations

import dataclasses

import pytest
from tests.unit.sched.test_request import make_request

from kvist.config import SchedulerConfig
from kvist.errors import ConfigError
from kvist.sched import policy


def test_fcfs_orders_by_arrival() -> None:
    fcfs = policy.get("fcfs")
    first, second = make_request(), make_request()
    first.arrival_index, second.arrival_index = 3, 4
    assert fcfs.name == "fcfs"
    assert fcfs.key(first) < fcfs.key(second)


def test_an_unknown_policy_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"--schedule must be one of fcfs, received 'lifo'"):
        policy.get("lifo")


def test_every_choice_of_the_option_is_a_policy() -> None:
    (schedule,) = (f for f in dataclasses.fields(SchedulerConfig) if f.name == "schedule")
    assert set(schedule.metadata["choices"]) == set(policy.POLICIES)
    assert all(policy.get(name).name == name for name in policy.POLICIES)
