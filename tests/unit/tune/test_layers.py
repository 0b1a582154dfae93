"""The search for a codec for each layer."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from kvist.tune.layers import LayerCosts, search

COSTS = LayerCosts(
    kl={"int3": [9.0, 1.0, 2.0, 3.0], "int4": [2.0, 0.5, 0.75, 0.5], "int8": [0.5, 0.0, 0.0, 0.0]},
    bits={"int3": 3.0, "int4": 4.0, "int8": 8.0},
)


def test_bits_are_a_mean_and_costs_a_sum() -> None:
    codecs = ["int8", "int3", "int4", "int3"]
    assert COSTS.bits_of(codecs) == 4.5
    assert COSTS.kl_of(codecs) == 0.5 + 1.0 + 0.75 + 3.0


def test_layers_by_lot_cost_in_between() -> None:
    assert COSTS.kl_of_any(3.0) == 15.0
    assert COSTS.kl_of_any(4.0) == 3.75
    assert COSTS.kl_of_any(3.5) == (15.0 + 3.75) / 2
    assert COSTS.kl_of_any(5.0) == 3.75 - (3.75 - 0.5) / 4
    assert COSTS.kl_of_any(9.0) == 0.5


def test_bits_go_where_they_gain_most() -> None:
    # Seven for the first layer's bit, then 2.5, 1.25 and 0.5.
    assert search(COSTS, max_bits=3.0) == ["int3"] * 4
    assert search(COSTS, max_bits=3.25) == ["int4", "int3", "int3", "int3"]
    assert search(COSTS, max_bits=3.6) == ["int4", "int3", "int3", "int4"]
    assert search(COSTS, max_bits=4.0) == ["int4"] * 4
    assert search(COSTS, max_bits=100.0) == ["int8"] * 4


def test_the_search_ends_where_the_loss_is_kept() -> None:
    assert search(COSTS, max_kl=15.0) == ["int3"] * 4
    assert search(COSTS, max_kl=14.9) == ["int4", "int3", "int3", "int3"]
    assert search(COSTS, max_kl=0.1) == ["int8"] * 4


def test_what_gains_nothing_is_not_bought() -> None:
    costs = LayerCosts(kl={"int3": [1.0, 1.0], "int4": [1.0, 2.0]}, bits={"int3": 3, "int4": 4})
    assert search(costs, max_kl=0.0) == ["int3", "int3"]
    assert search(LayerCosts(kl={"int4": [1.0]}, bits={"int4": 4}), max_kl=0.0) == ["int4"]


@pytest.mark.parametrize("seed", range(5))
def test_of_two_codecs_no_other_choice_of_as_many_bits_costs_less(seed: int) -> None:
    random = np.random.default_rng(seed)
    large = random.uniform(0.0, 1.0, 6)
    costs = LayerCosts(
        kl={"int3": (large + random.uniform(0.0, 3.0, 6)).tolist(), "int4": large.tolist()},
        bits={"int3": 3.0, "int4": 4.0},
    )
    for count in range(7):
        found = search(costs, max_bits=3.0 + count / 6)
        assert found.count("int4") == count
        least = min(
            costs.kl_of(["int4" if i in chosen else "int3" for i in range(6)])
            for chosen in itertools.combinations(range(6), count)
        )
        assert math.isclose(costs.kl_of(found), least)
