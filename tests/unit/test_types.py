"""Sampling parameters are refused at construction, with the name of the parameter."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvist.errors import InvalidSamplingParams, RequestError
from kvist.types import MAX_STOP_LEN, SamplingParams


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("max_tokens", -1),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", -1),
        ("seed", 2**63),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", -2.5),
        ("frequency_penalty", 2.5),
        ("logit_bias", {3: 101.0}),
        ("logit_bias", {3: math.nan}),
        ("logprobs", 21),
        ("logprobs", -1),
        ("stop", ("",)),
        ("stop", tuple("abcdefghijklmnopq")),
        # Half a megabyte of stop string stopped the engine thread for a second and took 200 MB.
        ("stop", ("ok", "x" * (MAX_STOP_LEN + 1))),
        ("n", 0),
        ("n", 129),
    ],
)
def test_out_of_range_values_are_refused_by_name(name: str, bad: object) -> None:
    with pytest.raises(InvalidSamplingParams, match=rf"\[sampling\] {name} must be") as caught:
        SamplingParams(**{name: bad})
    assert caught.value.param == name
    assert caught.value.code == "invalid_value"
    assert isinstance(caught.value, RequestError)


@pytest.mark.parametrize(
    "good",
    [
        {},
        {"max_tokens": 0},
        {"stop": ("x" * MAX_STOP_LEN,) * 16},
        {"temperature": 0.0, "top_p": 1.0, "min_p": 1.0, "seed": 0, "logprobs": 0},
        {"temperature": 2.0, "top_k": 10**9, "seed": 2**63 - 1, "logprobs": 20, "n": 128},
    ],
)
def test_boundary_values_are_accepted(good: dict[str, Any]) -> None:
    params = SamplingParams(**good)
    assert params.is_greedy == (good.get("temperature") == 0.0)


def test_history_is_needed_only_for_penalties() -> None:
    assert not SamplingParams().needs_history
    for penalty in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert SamplingParams(**{penalty: 0.5}).needs_history


def test_request_error_carries_its_own_code() -> None:
    error = RequestError("[x] y", param="p", code="special")
    assert (str(error), error.param, error.code) == ("[x] y", "p", "special")
    assert RequestError("[x] y").code == "invalid_request"
