"""Byte sizes of KV blocks and parameter counts against figures worked out by hand."""

from __future__ import annotations

import pytest

from kvist.errors import ConfigError
from kvist.spec import CODEC_BITS, KVSpec, LayerSpec, ModelSpec, RopeSpec


def llama_like(**changes: object) -> ModelSpec:
    values: dict[str, object] = {
        "architecture": "llama",
        "num_layers": 30,
        "hidden_size": 576,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 64,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "max_context_len": 8192,
        "ropes": (RopeSpec(base=100000.0, dim=64),),
        "layers": (LayerSpec(),) * 30,
        "has_tied_embeddings": True,
    }
    return ModelSpec(**(values | changes))


def test_smollm2_kv_token_is_23040_bytes_at_16_bit() -> None:
    spec = KVSpec(num_layers=30, num_kv_heads=3, head_dim=64, block_size=64, codec="raw16")
    assert spec.token_bytes == 23_040
    assert spec.block_bytes == 23_040 * 64


def test_float32_takes_twice_the_bytes() -> None:
    narrow = KVSpec(num_layers=2, num_kv_heads=1, head_dim=8, codec="raw16")
    wide = KVSpec(num_layers=2, num_kv_heads=1, head_dim=8, codec="float32")
    assert wide.block_bytes == 2 * narrow.block_bytes


@pytest.mark.parametrize(
    ("head_dim", "row_bytes"), [(8, 10), (64, 66), (65, 69), (80, 84), (128, 132), (256, 264)]
)
def test_int8_takes_a_byte_a_value_and_two_for_each_64(head_dim: int, row_bytes: int) -> None:
    spec = KVSpec(num_layers=30, num_kv_heads=3, head_dim=head_dim, block_size=16, codec="int8")
    assert spec.row_bytes == row_bytes
    assert spec.block_bytes == 16 * 30 * 2 * 3 * row_bytes


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (63, 1), (64, 1), (65, 2)])
def test_num_blocks_rounds_up(tokens: int, blocks: int) -> None:
    assert (
        KVSpec(num_layers=1, num_kv_heads=1, head_dim=8, block_size=64).num_blocks_for(tokens)
        == blocks
    )


def test_unknown_codec_is_refused_with_the_flag() -> None:
    with pytest.raises(ConfigError, match=r"codec must be one of .*'int2'.*--kv-cache-dtype"):
        KVSpec(num_layers=1, num_kv_heads=1, head_dim=8, codec="int2")
    assert "raw16" in CODEC_BITS


def test_smollm2_parameter_count() -> None:
    assert llama_like().num_parameters == 134_515_008


def test_biases_norms_and_untied_embeddings_are_counted() -> None:
    base = llama_like().num_parameters
    assert llama_like(has_tied_embeddings=False).num_parameters - base == 49152 * 576
    assert llama_like(has_qkv_bias=True).num_parameters - base == 30 * 64 * 15
    assert llama_like(has_output_bias=True).num_parameters - base == 30 * 576
    assert llama_like(has_mlp_bias=True).num_parameters - base == 30 * (2 * 1536 + 576)
    assert llama_like(has_qk_norm=True).num_parameters - base == 30 * 2 * 64
    assert llama_like(has_post_norms=True).num_parameters - base == 30 * 2 * 576


def test_inconsistent_shapes_are_refused() -> None:
    with pytest.raises(ConfigError, match="one LayerSpec per layer, received 2"):
        llama_like(layers=(LayerSpec(),) * 2)
    with pytest.raises(ConfigError, match="multiple of num_kv_heads"):
        llama_like(num_heads=10)
