from __future__ import annotations

import pytest

from kvist.errors import ConfigError
from kvist.model.shapes import NAMED_SHAPES, named_shape
from kvist.spec import GIB, KVSpec

PUBLISHED_PARAMETERS = {
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "gemma3-270m": 268_098_176,
    "gemma3-1b": 999_885_952,
    # the checkpoint, less its vision tower and projector
    "gemma3-4b": 4_300_079_472 - 416_866_032 - 2_950_272,
}


def test_table_covers_every_shape():
    assert set(PUBLISHED_PARAMETERS) == set(NAMED_SHAPES)


@pytest.mark.parametrize("name", NAMED_SHAPES)
def test_parameters_are_those_of_the_published_checkpoint(name):
    assert named_shape(name).num_parameters == PUBLISHED_PARAMETERS[name]


def test_llama_2_7b_keeps_one_gib_for_2048_tokens_in_16_bits():
    spec = named_shape("llama-2-7b")
    kv = KVSpec(num_layers=spec.num_layers, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim)
    assert kv.token_bytes * 2048 == GIB


def test_gemma3_windows_five_layers_of_six():
    spec = named_shape("gemma3-1b")
    assert sum(layer.window is None for layer in spec.layers) == 26 // 6
    assert all((layer.window is None) == (layer.rope_index == 0) for layer in spec.layers)


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ConfigError, match=r"expected one of llama-2-7b, .*received 'gpt-5'"):
        named_shape("gpt-5")
