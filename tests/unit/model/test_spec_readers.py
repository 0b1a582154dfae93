from __future__ import annotations

import json
from dataclasses import replace

import pytest
from gguf import GGUFWriter

from kvist.errors import ModelLoadError
from kvist.model.shapes import named_shape
from kvist.model.spec_readers import read_spec, spec_from_hf_config
from kvist.spec import Activation, LayerSpec, RopeScaling, RopeSpec

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
LLAMA3_SCALING = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def _llama(**changes):
    return spec_from_hf_config(LLAMA | changes)


def test_old_llama_configuration_is_the_published_shape():
    """Configurations of 2023 name neither the KV heads nor the rotary embedding."""
    assert _llama() == named_shape("llama-2-7b")


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3_SCALING},
        {"rope_parameters": {**LLAMA3_SCALING, "rope_theta": 500000.0}},
    ],
    ids=["names before transformers 5", "names since"],
)
def test_old_and_new_rope_entries_mean_the_same(rope):
    sizes = {
        "hidden_size": 2048, "num_hidden_layers": 16, "num_key_value_heads": 8, "intermediate_size": 8192,
        "vocab_size": 128256, "max_position_embeddings": 131072, "tie_word_embeddings": True,
    }  # fmt: skip
    assert _llama(**sizes, **rope) == named_shape("llama-3.2-1b")


def test_type_is_accepted_for_rope_type():
    spec = _llama(rope_scaling={"type": "linear", "factor": 2.0})
    assert spec.ropes == (RopeSpec(base=10000.0, dim=128, scaling=RopeScaling.LINEAR, factor=2.0),)


def test_yarn_extends_the_context_by_its_factor():
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    spec = _llama(rope_scaling=scaling)
    assert spec.max_context_len == 16384
    assert spec.ropes[0].attention_factor == pytest.approx(1.1386, abs=1e-4)


def test_longrope_keeps_to_the_original_context():
    factors = {"short_factor": [1.0] * 64, "long_factor": [4.0] * 64}
    scaling = {"type": "longrope", "original_max_position_embeddings": 1024, **factors}
    spec = _llama(rope_scaling=scaling)
    assert spec.max_context_len == 1024
    assert spec.ropes[0].factors == (1.0,) * 64


def test_gemma3_multimodal_configuration_may_leave_out_what_is_usual():
    """The 4B's configuration gives six entries; the others are the family's defaults."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": text,
        "vision_config": {"hidden_size": 1152},
    }
    assert spec_from_hf_config(config) == named_shape("gemma3-4b")


def test_gemma3_rope_per_layer_type():
    config = {
        "model_type": "gemma3_text",
        "hidden_size": 640,
        "num_hidden_layers": 18,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "intermediate_size": 2048,
        "vocab_size": 262144,
        "max_position_embeddings": 32768,
        "sliding_window": 512,
        "layer_types": [
            "full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(18)
        ],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }
    assert spec_from_hf_config(config) == named_shape("gemma3-270m")


def test_qwen2_window_needs_its_switch():
    config = LLAMA | {"model_type": "qwen2", "sliding_window": 512, "max_window_layers": 30}
    off = spec_from_hf_config(config | {"use_sliding_window": False})
    on = spec_from_hf_config(config | {"use_sliding_window": True})
    assert {layer.window for layer in off.layers} == {None}
    assert [layer.window for layer in on.layers] == [None] * 30 + [512] * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mixtral"}, r"model_type 'mixtral' is not supported, expected one of llama, "),
        ({"model_type": None}, r"model_type is missing"),
        ({"quantization_config": {"quant_method": "awq"}}, r"'awq' are not supported"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, r"'bitsandbytes' are not"),
        ({"num_local_experts": 8}, r"mixture of experts"),
        ({"hidden_act": "relu2"}, r"hidden_act 'relu2' is not supported, expected one of silu, "),
        ({"rope_scaling": {"type": "mrope"}}, r"rope_type 'mrope' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, r"rope_scaling: factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": -1}}, r"factor should be a finite number > 0"),
        ({"rope_scaling": {"type": "longrope"}}, r"short_factor should be a list of 64 numbers"),
        ({"rope_parameters": {"full_attention": {}}}, r"per layer type are not supported for llama"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor is not supported"),
        ({"architectures": ["LlamaForSequenceClassification"]}, r"no language-model head"),
        ({"hidden_size": None}, r"hidden_size is missing"),
        ({"hidden_size": "big"}, r"hidden_size should be a whole number"),
        ({"hidden_size": -4}, r"hidden_size should be a whole number in"),
        ({"hidden_size": True}, r"hidden_size should be a whole number"),
        ({"vocab_size": 10**15}, r"vocab_size should be a whole number in"),
        ({"num_hidden_layers": 10**6}, r"num_hidden_layers should be at most 1024"),
        ({"num_key_value_heads": 5}, r"num_heads must be a multiple of num_kv_heads"),
        ({"head_dim": 7}, r"head_dim should be even"),
        ({"rms_norm_eps": float("nan")}, r"rms_norm_eps should be a finite number"),
        ({"attention_bias": "yes"}, r"attention_bias should be true or false"),
        ({"model_type": "qwen2", "layer_types": ["linear_attention"] * 32}, r"linear_attention not supported"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, r"a list of 32 values"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, r"use_bidirectional"),
        ({"model_type": "gemma3"}, r"text_config should be a group"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused_by_name(changes, message):
    with pytest.raises(ModelLoadError, match=message):
        _llama(**changes)


@pytest.mark.parametrize("content", ["", "[]", "{", "\x00", "[" * 100_000])
def test_malformed_config_file_is_refused(content, tmp_path):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        read_spec(tmp_path)


def test_folder_without_config_is_refused(tmp_path):
    with pytest.raises(ModelLoadError, match=r"config\.json: cannot be read"):
        read_spec(tmp_path)


def test_config_file_is_read_from_its_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_spec(tmp_path) == named_shape("llama-2-7b")


def _gguf(path, architecture="llama", embedding=(32, 64), **entries):
    import numpy as np

    defaults = {
        "block_count": 6, "context_length": 512, "embedding_length": 64, "feed_forward_length": 96,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5,
    }  # fmt: skip
    writer = GGUFWriter(path, architecture)
    for key, value in (defaults | entries).items():
        add = {
            bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
            list: writer.add_array,
        }[type(value)]  # fmt: skip
        add(f"{architecture}.{key}", value)
    if embedding is not None:
        writer.add_tensor("token_embd.weight", np.zeros(embedding, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_sizes(tmp_path):
    spec = read_spec(_gguf(tmp_path / "m.gguf", **{"rope.freq_base": 5e5}))
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (6, 4, 2, 16)
    assert (spec.vocab_size, spec.hidden_size, spec.max_context_len) == (32, 64, 512)
    assert spec.ropes == (RopeSpec(base=5e5, dim=16),)
    assert spec.has_tied_embeddings
    assert spec.layers == (LayerSpec(),) * 6


def test_gguf_sizes_per_layer_may_be_equal_only(tmp_path):
    equal = {"attention.head_count_kv": [2] * 6}
    assert read_spec(_gguf(tmp_path / "equal.gguf", **equal)).num_kv_heads == 2
    different = {"attention.head_count_kv": [2] * 5 + [1]}
    with pytest.raises(ModelLoadError, match=r"head_count_kv differs from layer to layer"):
        read_spec(_gguf(tmp_path / "different.gguf", **different))


def test_gguf_window_of_a_mistral_is_on_every_layer(tmp_path):
    spec = read_spec(_gguf(tmp_path / "m.gguf", **{"attention.sliding_window": 128}))
    assert spec.layers == (LayerSpec(window=128),) * 6


def test_gguf_gemma3_pattern_and_activation(tmp_path):
    window = {"attention.sliding_window": 128}
    spec = read_spec(_gguf(tmp_path / "m.gguf", "gemma3", **window))
    assert [layer.window for layer in spec.layers] == [128] * 5 + [None]
    assert spec.activation is Activation.GELU_TANH
    assert spec.embedding_scale == 8.0
    explicit = window | {"attention.sliding_window_pattern": [True, False] * 3}
    spec = read_spec(_gguf(tmp_path / "e.gguf", "gemma3", **explicit))
    assert [layer.window for layer in spec.layers] == [128, None] * 3


def test_gguf_yarn(tmp_path):
    scaling = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 512,
    }
    spec = read_spec(_gguf(tmp_path / "m.gguf", **scaling))
    assert spec.max_context_len == 2048
    plain = replace(spec.ropes[0], attention_factor=1.0)
    assert plain == RopeSpec(
        base=1e4, dim=16, scaling=RopeScaling.YARN, factor=4.0, original_max_context_len=512
    )


@pytest.mark.parametrize(
    ("architecture", "entries", "message"),
    [
        ("mamba", {}, r"general\.architecture 'mamba' is not supported, expected one of llama, "),
        ("llama", {"expert_count": 8}, r"mixture of experts"),
        (
            "llama",
            {"attention.key_length": 16, "attention.value_length": 8},
            r"value_length 8 differs",
        ),
        ("llama", {"rope.dimension_count": 8}, r"rope\.dimension_count 8 differs"),
        ("llama", {"rope.scaling.type": "longrope"}, r"rope\.scaling\.type 'longrope'"),
        ("llama", {"attention.scale": 0.5}, r"attention\.scale is not supported"),
        ("llama", {"attention.causal": False}, r"without causality"),
        ("llama", {"block_count": 100_000}, r"block_count should be at most 1024"),
        ("llama", {"block_count": "six"}, r"llama\.block_count should be a whole number"),
        ("qwen2", {"attention.sliding_window": 128}, r"does not say which layers"),
        ("gemma3", {}, r"gemma3\.attention\.sliding_window is missing"),
        ("llama", {"attention.head_count_kv": 3}, r"must be a multiple"),
    ],
)
def test_gguf_entries_that_are_not_understood_are_refused(architecture, entries, message, tmp_path):
    with pytest.raises(ModelLoadError, match=message):
        read_spec(_gguf(tmp_path / "m.gguf", architecture, **entries))


def test_gguf_without_embedding_is_refused(tmp_path):
    with pytest.raises(ModelLoadError, match=r"token_embd\.weight is missing"):
        read_spec(_gguf(tmp_path / "m.gguf", embedding=None))


@pytest.mark.parametrize(
    "changes",
    [
        {"rms_norm_eps": 10**400},
        {"architectures": 5},
        {"architectures": [["LlamaForCausalLM"]]},
        {"rope_scaling": {"rope_type": "yarn", "factor": 1e308}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 1e30}},
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [10**400] * 64}},
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": "x"},
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": -1},
    ],
    ids=str,
)  # fmt: skip
def test_entries_beyond_what_numbers_can_be_are_refused(changes):
    with pytest.raises(ModelLoadError):
        _llama(**changes)


def test_longrope_from_a_context_of_one_has_no_temperature():
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 64, "factor": 2.0}
    spec = _llama(max_position_embeddings=1, rope_scaling=factors)
    assert spec.ropes[0].attention_factor == 1.0
