"""From a checkpoint's own description to a ``ModelSpec``: Hugging Face ``config.json`` and GGUF metadata.

Responsible for the vocabulary of both formats, old names and new, and for refusing by name whatever this engine would
compute differently from what the file asks for. Knows no tensor library and reads no weights, except the frequency
factors that some GGUF files keep in a tensor.

Sources: the configuration classes of transformers 4.30 to 5.24; the key list of the ``gguf`` package and the way
llama.cpp reads it.
"""

from __future__ import annotations

import json
import math
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvist.errors import ConfigError, ModelLoadError
from kvist.model.fields import MAX_DIMENSION, Fields
from kvist.model.gguf_file import read_gguf
from kvist.spec import Activation, LayerSpec, ModelSpec, RopeScaling, RopeSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from kvist.model.gguf_file import GGUFFile

MAX_LAYERS = 1024
"""Upper bound of the layer count read from a file."""

_HF_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma3", "gemma3_text")
_GGUF_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3")
_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}
_ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_MAX_JSON_BYTES = 64 * 1024 * 1024
_FULL, _SLIDING = "full_attention", "sliding_attention"
_GEMMA3_PATTERN = 6  # every sixth layer attends to everything
_GEMMA3_LOCAL_BASE = 10_000.0
_GEMMA3_27B_LAYERS = 62

_GEMMA3_DEFAULTS: dict[str, Any] = {  # Any: values of a JSON file
    "vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072,
    "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "sliding_window": 4096,
    "tie_word_embeddings": True,
}  # fmt: skip
"""What a Gemma 3 configuration means by leaving an entry out; published multimodal ones leave out most."""


@contextmanager
def _located(where: str) -> Iterator[None]:
    """Say which file was wrong when the parts of a specification do not fit together."""
    try:
        yield
    except ConfigError as error:
        raise ModelLoadError(f"[spec] {where}: {error}") from error


def read_spec(path: Path) -> ModelSpec:
    """Return the decoder that a checkpoint describes: a ``.gguf`` file, or a folder with a ``config.json``.

    Raises:
        ModelLoadError: Neither is there, or it cannot be read, or what it describes is not supported.
    """
    if path.is_file():
        return spec_from_gguf(read_gguf(path))
    file = path / "config.json"
    return spec_from_hf_config(read_json(file), str(file))


def read_json(path: Path) -> dict[str, Any]:  # Any: as parsed
    """Return the group of entries in a JSON file.

    Raises:
        ModelLoadError: The file is missing, larger than any such file (64 MiB), or does not hold a JSON object.
    """
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ModelLoadError(f"[spec] {path}: larger than {_MAX_JSON_BYTES} bytes")
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"[spec] {path}: cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ModelLoadError(f"[spec] {path}: should hold a JSON object")
    return values


# ---- Hugging Face ---------------------------------------------------------------------------------------------------


def spec_from_hf_config(config: Mapping[str, Any], where: str = "config.json") -> ModelSpec:
    """Return the decoder that a Hugging Face configuration describes.

    Args:
        config: The parsed ``config.json``.
        where: Name of the file, for messages.

    Returns:
        The specification. For a multimodal Gemma 3 it describes the text decoder alone. With ``dynamic`` and
        ``longrope`` scaling, ``max_context_len`` is the original context: beyond it, these change the frequencies of
        positions that are cached already.

    Raises:
        ModelLoadError: The family, or an option that would change the result, is not supported; or an entry is missing
            or out of range. The message names it.
    """
    family = Fields(config, where).text("model_type")
    if family not in _HF_FAMILIES:
        raise ModelLoadError(
            f"[spec] {where}: model_type {family!r} is not supported, expected one of {', '.join(_HF_FAMILIES)}"
        )
    _refuse_hf_options(Fields(config, where))
    if family == "gemma3":
        text = config.get("text_config")
        if not isinstance(text, dict):
            raise ModelLoadError(
                f"[spec] {where}: text_config should be a group of entries, received {text!r}"
            )
        where = f"{where}: text_config"
        _refuse_hf_options(Fields(text, where))
        config = {"tie_word_embeddings": config.get("tie_word_embeddings")} | text
    if family.startswith("gemma3"):
        family = "gemma3"
        config = _GEMMA3_DEFAULTS | {k: v for k, v in config.items() if v is not None}
    with _located(where):
        return _hf_spec(family, Fields(config, where))


def _refuse_hf_options(fields: Fields) -> None:
    """Refuse entries that change the computation in a way that is not implemented."""
    quantization = fields.group("quantization_config")
    if quantization is not None:
        raise ModelLoadError(
            f"[spec] {fields.where}: weights quantised with "
            f"{quantization.text('quant_method', 'an unnamed method')!r} are not supported; "
            "use the original checkpoint or a GGUF file"
        )
    for key in ("num_local_experts", "num_experts", "n_routed_experts"):
        if fields.has(key):
            raise ModelLoadError(
                f"[spec] {fields.where}: mixture of experts ({key}) is not supported"
            )
    if fields.get("use_bidirectional_attention"):
        raise ModelLoadError(
            f"[spec] {fields.where}: use_bidirectional_attention is not supported, the decoder is causal"
        )
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise ModelLoadError(f"[spec] {fields.where}: partial_rotary_factor is not supported")
    heads = fields.texts("architectures") or ["ForCausalLM"]
    if not any(head.endswith(("ForCausalLM", "ForConditionalGeneration")) for head in heads):
        raise ModelLoadError(
            f"[spec] {fields.where}: architectures {heads} has no language-model head; "
            "expected a ...ForCausalLM checkpoint"
        )


def _hf_spec(family: str, fields: Fields) -> ModelSpec:
    is_gemma = family == "gemma3"
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    head_dim = _even(fields, "head_dim", hidden_size // num_heads)
    has_bias = fields.flag("attention_bias", default=False)
    num_layers = _num_layers(fields, "num_hidden_layers")
    kinds = _hf_layer_kinds(family, fields, num_layers)
    ropes, max_context_len = _hf_ropes(family, fields, head_dim, kinds)
    window = _hf_window(family, fields, kinds)
    scale_dim = fields.number("query_pre_attn_scalar") if is_gemma else head_dim
    spec = ModelSpec(
        architecture="llama" if family == "smollm3" else family,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size"),
        vocab_size=fields.integer("vocab_size"),
        max_context_len=max_context_len,
        ropes=ropes,
        layers=tuple(
            LayerSpec(
                rope_index=len(ropes) - 1 if kind == _SLIDING else 0,
                window=window if kind == _SLIDING else None,
            )
            for kind in kinds
        ),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        activation=_activation(fields, "hidden_activation" if is_gemma else "hidden_act"),
        has_qkv_bias=family == "qwen2" or has_bias,
        has_output_bias=family != "qwen2" and has_bias,
        has_mlp_bias=fields.flag("mlp_bias", default=False),
        has_qk_norm=family in ("qwen3", "gemma3"),
        has_post_norms=is_gemma,
        has_tied_embeddings=fields.flag("tie_word_embeddings", default=family == "smollm3"),
        embedding_scale=math.sqrt(hidden_size) if is_gemma else 1.0,
        attention_scale=scale_dim**-0.5,
        attention_softcap=fields.optional_number("attn_logit_softcapping") if is_gemma else None,
        logit_softcap=fields.optional_number("final_logit_softcapping") if is_gemma else None,
    )
    return _without_rope(spec, fields) if family == "smollm3" else spec


def _even(fields: Fields, key: str, default: int) -> int:
    head_dim = fields.integer(key, default)
    if head_dim % 2:
        raise ModelLoadError(
            f"[spec] {fields.where}: {key} should be even for a rotary embedding, received {head_dim}"
        )
    return head_dim


def _num_layers(fields: Fields, key: str) -> int:
    num_layers = fields.integer(key)
    if num_layers > MAX_LAYERS:
        raise ModelLoadError(
            f"[spec] {fields.where}: {key} should be at most {MAX_LAYERS}, received {num_layers}"
        )
    return num_layers


def _activation(fields: Fields, key: str) -> Activation:
    name = fields.text(key, "silu")
    if name not in _ACTIVATIONS:
        raise ModelLoadError(
            f"[spec] {fields.where}: {key} {name!r} is not supported, expected one of {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[name]


def _hf_layer_kinds(family: str, fields: Fields, num_layers: int) -> list[str]:
    """Return ``full_attention`` or ``sliding_attention`` for each layer."""
    kinds = fields.items("layer_types", num_layers)
    if kinds is not None and family != "llama":
        unknown = sorted({str(kind) for kind in kinds} - {_FULL, _SLIDING})
        if unknown:
            raise ModelLoadError(
                f"[spec] {fields.where}: layer_types {', '.join(unknown)} not supported, "
                f"expected {_FULL} or {_SLIDING}"
            )
        return kinds
    if family == "gemma3":
        pattern = fields.integer("sliding_window_pattern", _GEMMA3_PATTERN)
        return [_SLIDING if (index + 1) % pattern else _FULL for index in range(num_layers)]
    if family == "mistral":
        return [_SLIDING if fields.has("sliding_window") else _FULL] * num_layers
    if family in ("qwen2", "qwen3") and fields.flag("use_sliding_window", default=False):
        # 28 is the families' default; 0 is meaningful, and no size.
        first = (
            0 if fields.get("max_window_layers") == 0 else fields.integer("max_window_layers", 28)
        )
        return [_SLIDING if index >= first else _FULL for index in range(num_layers)]
    if family == "smollm3" and fields.flag("use_sliding_window", default=False):
        has_window = fields.has("sliding_window")
        return [
            _SLIDING if has_window and not has_rope else _FULL
            for has_rope in _rope_flags(fields, num_layers)
        ]
    return [_FULL] * num_layers


def _hf_window(family: str, fields: Fields, kinds: list[str]) -> int | None:
    """Return the sliding window of the layers that have one; None when none has."""
    if _SLIDING not in kinds:
        return None
    is_optional = family in ("qwen2", "qwen3", "smollm3")
    if is_optional and not fields.flag("use_sliding_window", default=False):
        return None
    return fields.integer("sliding_window")


def _rope_flags(fields: Fields, num_layers: int) -> list[bool]:
    """Return, for each layer of a SmolLM3, whether it has a rotary embedding."""
    flags = fields.items("no_rope_layers", num_layers)  # 1 means that the layer has one
    if flags is not None:
        return [bool(flag) for flag in flags]
    interval = fields.integer("no_rope_layer_interval", 4)
    return [(index + 1) % interval != 0 for index in range(num_layers)]


def _without_rope(spec: ModelSpec, fields: Fields) -> ModelSpec:
    layers = (
        layer if has_rope else replace(layer, rope_index=None)
        for layer, has_rope in zip(spec.layers, _rope_flags(fields, spec.num_layers), strict=True)
    )
    return replace(spec, layers=tuple(layers))


def _hf_ropes(
    family: str, fields: Fields, head_dim: int, kinds: list[str]
) -> tuple[tuple[RopeSpec, ...], int]:
    """Return the rotary embeddings (full attention first, sliding last) and the context they serve."""
    max_context_len = fields.integer("max_position_embeddings")
    base = fields.number("rope_theta", {"smollm3": 2e6, "gemma3": 1e6}.get(family, 1e4))
    parameters = fields.group("rope_scaling") or fields.group("rope_parameters")
    local: Fields | None = None
    local_base = fields.number("rope_local_base_freq", _GEMMA3_LOCAL_BASE)
    if parameters is not None and (parameters.has(_FULL) or parameters.has(_SLIDING)):
        if family != "gemma3":
            raise ModelLoadError(
                f"[spec] {fields.where}: rope_parameters per layer type are not supported for {family}"
            )
        local = parameters.group(_SLIDING)
        parameters = parameters.group(_FULL)
    rope, limit = _hf_rope(parameters, fields, base, head_dim)
    if family != "gemma3" or _SLIDING not in kinds:
        return (rope,), limit
    local_rope, local_limit = _hf_rope(local, fields, local_base, head_dim)
    return (rope, local_rope), min(limit, max(local_limit, max_context_len))


def _hf_rope(
    parameters: Fields | None, model: Fields, base: float, head_dim: int
) -> tuple[RopeSpec, int]:
    """Return one rotary embedding and the context up to which its frequencies are constant."""
    max_context_len = model.integer("max_position_embeddings")
    if parameters is None:
        return RopeSpec(base=base, dim=head_dim), max_context_len
    base = parameters.number("rope_theta", base)
    kind = parameters.text("rope_type", parameters.text("type", "default"))
    if parameters.number("partial_rotary_factor", 1.0) != 1.0:
        raise ModelLoadError(f"[spec] {parameters.where}: partial_rotary_factor is not supported")
    if kind not in _ROPE_TYPES:
        raise ModelLoadError(
            f"[spec] {parameters.where}: rope_type {kind!r} is not supported, "
            f"expected one of {', '.join(_ROPE_TYPES)}"
        )
    rope = RopeSpec(base=base, dim=head_dim)
    # A value beside the scaling group wins over the one inside, as in transformers.
    original = model.integer(
        "original_max_position_embeddings",
        parameters.integer("original_max_position_embeddings", max_context_len),
    )
    if kind == "yarn":
        rope = _hf_yarn(parameters, rope, original, max_context_len)
        return rope, _stretched_context(parameters, rope.factor, original, max_context_len)
    if kind == "longrope":
        return _hf_longrope(parameters, rope, original, max_context_len), original
    if kind == "llama3":
        rope = replace(
            rope,
            scaling=RopeScaling.LLAMA3,
            factor=parameters.number("factor"),
            original_max_context_len=original,
            low_freq_factor=parameters.number("low_freq_factor"),
            high_freq_factor=parameters.number("high_freq_factor"),
        )
    elif kind != "default":
        rope = replace(rope, scaling=RopeScaling(kind), factor=parameters.number("factor"))
    return rope, max_context_len


def _hf_yarn(parameters: Fields, plain: RopeSpec, original: int, max_context_len: int) -> RopeSpec:
    factor = parameters.number("factor", max_context_len / original)
    attention_factor = parameters.optional_number("attention_factor")
    if attention_factor is None:
        attention_factor = yarn_attention_factor(factor)
        # DeepSeek's refinement: the logits' own correction is divided out again.
        if parameters.get("mscale") and parameters.get("mscale_all_dim"):
            attention_factor = yarn_attention_factor(factor, parameters.number("mscale"))
            attention_factor /= yarn_attention_factor(factor, parameters.number("mscale_all_dim"))
    return replace(
        plain,
        scaling=RopeScaling.YARN,
        factor=factor,
        original_max_context_len=original,
        beta_fast=parameters.number("beta_fast", 32.0),
        beta_slow=parameters.number("beta_slow", 1.0),
        attention_factor=attention_factor,
        truncate=parameters.flag("truncate", default=True),
    )


def _hf_longrope(
    parameters: Fields, plain: RopeSpec, original: int, max_context_len: int
) -> RopeSpec:
    factor = parameters.number("factor", max_context_len / original)
    attention_factor = 1.0
    if factor > 1.0 and original > 1:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original))
    return replace(
        plain,
        scaling=RopeScaling.FACTORS,
        original_max_context_len=original,
        attention_factor=parameters.number("attention_factor", attention_factor),
        factors=parameters.numbers("short_factor", plain.dim // 2),
    )


def _stretched_context(fields: Fields, factor: float, original: int, max_context_len: int) -> int:
    """Return the context that YaRN reaches, never less than what the file says."""
    stretched = factor * original
    if stretched > MAX_DIMENSION:
        raise ModelLoadError(
            f"[spec] {fields.where}: a context of {original} stretched {factor:g} times is more than {MAX_DIMENSION}"
        )
    return max(max_context_len, int(stretched))


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's temperature as a multiplier of cos and sin (Peng et al. 2023, section 3.4)."""
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


# ---- GGUF -----------------------------------------------------------------------------------------------------------


def spec_from_gguf(file: GGUFFile) -> ModelSpec:
    """Return the decoder that a GGUF file describes.

    Biases, QK-norm and tied embeddings follow from which tensors are there, as in llama.cpp.

    Raises:
        ModelLoadError: The architecture, or an option that would change the result, is not supported; or an entry is
            missing or out of range. The message names it.
    """
    where = str(file.path)
    general = Fields(file.metadata, where)
    family = general.text("general.architecture")
    if family not in _GGUF_FAMILIES:
        raise ModelLoadError(
            f"[spec] {where}: general.architecture {family!r} is not supported, "
            f"expected one of {', '.join(_GGUF_FAMILIES)}"
        )
    fields = Fields(file.metadata, where, f"{family}.")
    _refuse_gguf_options(fields)
    with _located(where):
        return _gguf_spec(family, file, fields)


def _gguf_spec(family: str, file: GGUFFile, fields: Fields) -> ModelSpec:
    is_gemma = family == "gemma3"
    hidden_size = fields.integer("embedding_length")
    num_heads = _uniform(fields, "attention.head_count")
    head_dim = _even(fields, "attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if fields.integer(key, head_dim) != head_dim:
            raise ModelLoadError(
                f"[spec] {fields.where}: {family}.{key} {fields.get(key)} differs from the head dimension {head_dim}, "
                "which is not supported"
            )
    num_layers = _num_layers(fields, "block_count")
    ropes, max_context_len = _gguf_ropes(file, fields, head_dim, has_local_rope=is_gemma)
    names = file.tensors
    scale_dim = float(head_dim)
    if is_gemma and num_layers == _GEMMA3_27B_LAYERS:
        scale_dim = hidden_size / num_heads  # the one size trained so; the header does not say it
    return ModelSpec(
        architecture="llama" if family == "mistral" else family,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=_uniform(fields, "attention.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate_size=_uniform(fields, "feed_forward_length"),
        vocab_size=_gguf_vocab_size(file),
        max_context_len=max_context_len,
        ropes=ropes,
        layers=_gguf_layers(family, fields, num_layers),
        norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        activation=Activation.GELU_TANH if is_gemma else Activation.SILU,
        has_qkv_bias="blk.0.attn_q.bias" in names,
        has_output_bias="blk.0.attn_output.bias" in names,
        has_mlp_bias="blk.0.ffn_down.bias" in names,
        has_qk_norm="blk.0.attn_q_norm.weight" in names,
        has_post_norms=is_gemma,
        has_tied_embeddings="output.weight" not in names,
        embedding_scale=math.sqrt(hidden_size) if is_gemma else 1.0,
        attention_scale=scale_dim**-0.5,
        attention_softcap=fields.optional_number("attn_logit_softcapping"),
        logit_softcap=fields.optional_number("final_logit_softcapping"),
    )


def _refuse_gguf_options(fields: Fields) -> None:
    if fields.get("expert_count"):
        raise ModelLoadError(
            f"[spec] {fields.where}: mixture of experts (expert_count) is not supported"
        )
    for key in ("logit_scale", "residual_scale", "embedding_scale", "attention.scale"):
        if fields.get(key):
            raise ModelLoadError(f"[spec] {fields.where}: {key} is not supported")
    if not fields.flag("attention.causal", default=True):
        raise ModelLoadError(f"[spec] {fields.where}: attention without causality is not supported")


def _gguf_vocab_size(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or not embedding.shape:
        raise ModelLoadError(f"[spec] {file.path}: tensor token_embd.weight is missing")
    return embedding.shape[0]


def _uniform(fields: Fields, key: str, default: int | None = None) -> int:
    """Return a size that GGUF may give once or per layer; different sizes per layer are refused."""
    value = fields.get(key)
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise ModelLoadError(
                f"[spec] {fields.where}: {key} differs from layer to layer, which is not supported"
            )
        return Fields({key: value[0]}, fields.where).integer(key)
    return fields.integer(key, default)


def _gguf_layers(family: str, fields: Fields, num_layers: int) -> tuple[LayerSpec, ...]:
    has_window = fields.has("attention.sliding_window")
    if family == "gemma3":
        window = fields.integer("attention.sliding_window")
        pattern = fields.get("attention.sliding_window_pattern")
        if not isinstance(pattern, list):
            period = fields.integer("attention.sliding_window_pattern", _GEMMA3_PATTERN)
            pattern = [(index + 1) % period != 0 for index in range(num_layers)]
        if len(pattern) != num_layers:
            raise ModelLoadError(
                f"[spec] {fields.where}: attention.sliding_window_pattern should have {num_layers} values, "
                f"received {len(pattern)}"
            )
        return tuple(
            LayerSpec(rope_index=1, window=window) if is_local else LayerSpec()
            for is_local in pattern
        )
    if not has_window:
        return (LayerSpec(),) * num_layers
    window = fields.integer("attention.sliding_window")
    if family.startswith("qwen") and window < fields.integer("context_length"):
        raise ModelLoadError(
            f"[spec] {fields.where}: attention.sliding_window {window} for {family} does not say which layers have it; "
            "use the original checkpoint"
        )
    return (LayerSpec(window=window),) * num_layers


def _gguf_ropes(
    file: GGUFFile, fields: Fields, head_dim: int, *, has_local_rope: bool
) -> tuple[tuple[RopeSpec, ...], int]:
    max_context_len = fields.integer("context_length")
    rope = RopeSpec(base=fields.number("rope.freq_base", 10_000.0), dim=head_dim)
    local = RopeSpec(base=fields.number("rope.freq_base_swa", _GEMMA3_LOCAL_BASE), dim=head_dim)
    kind = fields.text("rope.scaling.type", "none")
    factor = 1.0
    if fields.get("rope.scaling.factor"):  # 0 stands for "no scaling"
        factor = fields.number("rope.scaling.factor")
    elif fields.get("rope.scale_linear"):  # the name before August 2023
        kind, factor = "linear", fields.number("rope.scale_linear")
    if kind == "linear" and factor != 1.0:
        rope = replace(rope, scaling=RopeScaling.LINEAR, factor=factor)
    elif kind == "yarn":
        original = fields.integer("rope.scaling.original_context_length", max_context_len)
        rope = replace(
            rope,
            scaling=RopeScaling.YARN,
            factor=factor,
            original_max_context_len=original,
            beta_fast=fields.number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=fields.number("rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=fields.number("rope.scaling.attn_factor", 1.0)
            * yarn_attention_factor(factor),
        )
        max_context_len = _stretched_context(fields, factor, original, max_context_len)
    elif kind not in ("none", "linear"):
        raise ModelLoadError(
            f"[spec] {fields.where}: rope.scaling.type {kind!r} is not supported, expected none, linear or yarn"
        )
    if "rope_freqs.weight" in file.tensors:
        rope = _with_factors(file, rope)
    return ((rope, local) if has_local_rope else (rope,)), max_context_len


def _with_factors(file: GGUFFile, rope: RopeSpec) -> RopeSpec:
    """Return the rotary embedding with the divisors that the file keeps in a tensor (Llama 3.1's ramp, for example)."""
    tensor = file.tensors["rope_freqs.weight"]
    if tensor.num_elements != rope.dim // 2:
        raise ModelLoadError(
            f"[spec] {file.path}: rope_freqs.weight should have {rope.dim // 2} values, received {tensor.num_elements}"
        )
    if rope.scaling is not RopeScaling.NONE:
        raise ModelLoadError(
            f"[spec] {file.path}: rope_freqs.weight together with {rope.scaling.value} scaling is not supported"
        )
    factors = file.dequantize(tensor.name).reshape(-1).tolist()
    checked = Fields({tensor.name: factors}, str(file.path)).numbers(tensor.name, len(factors))
    return replace(rope, scaling=RopeScaling.FACTORS, factors=checked)
