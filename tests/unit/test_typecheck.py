"""Values of the wrong type are refused where they are given, by name, and never reach an engine."""

from __future__ import annotations

import numpy as np
import pytest

from kvist.config import EngineConfig, ServerConfig
from kvist.errors import ConfigError, InvalidSamplingParams
from kvist.types import SamplingParams


@pytest.mark.parametrize(
    "option",
    [
        {"memory_gib": "2"},
        {"memory_gib": True},
        {"threads": 2.5},
        {"threads": "2"},
        {"block_size": 64.0},
        {"max_context": "9"},
        {"max_queue": None},
        {"model": 3},
        {"prefix_cache": True},
    ],
    ids=str,
)
def test_engine_options_of_the_wrong_type_are_refused_by_name(option):
    (name,) = option
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} must be"):
        EngineConfig.from_options(**option)


@pytest.mark.parametrize("option", [{"port": "80"}, {"api_key": "secret"}, {"host": None}], ids=str)
def test_server_options_of_the_wrong_type_are_refused_by_name(option):
    (name,) = option
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} must be"):
        ServerConfig(**option)


@pytest.mark.parametrize(
    "parameter",
    [
        {"max_tokens": 2.5},
        {"max_tokens": "3"},
        {"max_tokens": True},
        {"n": 1.5},
        {"n": 2.0},
        {"top_k": 1.5},
        {"temperature": None},
        {"temperature": "0"},
        {"seed": 1.5},
        {"stop": "ab"},
        {"stop": (1,)},
        {"stop": (b"a",)},
        {"stop_token_ids": 5},
        {"stop_token_ids": (1.5,)},
        {"logit_bias": {"a": 1}},
        {"logit_bias": {1.5: 1}},
        {"logit_bias": [1]},
        {"logprobs": True},
        {"ignore_eos": "no"},
        {"top_p": "x"},
    ],
    ids=str,
)
def test_sampling_parameters_of_the_wrong_type_are_refused_by_name(parameter):
    (name,) = parameter
    with pytest.raises(InvalidSamplingParams, match=f"{name} must be") as caught:
        SamplingParams(**parameter)
    assert caught.value.param == name


def test_numbers_of_numpy_and_lists_are_taken():
    params = SamplingParams(
        max_tokens=np.int64(3),
        temperature=np.float32(0.5),
        top_p=1,
        stop=["a"],
        stop_token_ids=[np.int32(1)],
        logit_bias={np.int64(1): 2},
    )
    assert params.max_tokens == 3
    assert EngineConfig.from_options(memory_gib=2).cache.memory_gib == 2


@pytest.mark.parametrize("option", [{"memory_gib": 1e300}, {"threads": 100_000_000}], ids=str)
def test_sizes_beyond_any_machine_are_refused(option):
    with pytest.raises(ConfigError, match="must be"):
        EngineConfig.from_options(**option)
