"""Published models by name, so that ``kvist plan`` can answer before anything is fetched.

Responsible for the figures alone. Knows no file and no memory limit. The parameter counts that follow from them are
those of the published checkpoints (tests/unit/model/test_shapes.py).

Source: the ``config.json`` of each model's Hugging Face repository, named beside it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from kvist.errors import ConfigError
from kvist.spec import Activation, LayerSpec, ModelSpec, RopeScaling, RopeSpec


class _Sizes(NamedTuple):
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int
    vocab_size: int


def _model(
    architecture: str,
    sizes: tuple[int, int, int, int, int, int],
    *,
    context: int,
    rope_base: float,
    head_dim: int = 0,
    tied: bool = False,
) -> ModelSpec:
    """Return a specification; ``sizes`` are those of ``_Sizes``, ``head_dim`` 0 means hidden size / heads."""
    named = _Sizes(*sizes)
    head_dim = head_dim or named.hidden_size // named.num_heads
    return ModelSpec(
        architecture=architecture,
        **named._asdict(),
        head_dim=head_dim,
        max_context_len=context,
        ropes=(RopeSpec(base=rope_base, dim=head_dim),),
        layers=(LayerSpec(),) * named.num_layers,
        norm_eps=1e-5 if architecture in ("llama", "mistral") else 1e-6,
        has_qkv_bias=architecture == "qwen2",
        has_qk_norm=architecture == "qwen3",
        has_tied_embeddings=tied,
        attention_scale=head_dim**-0.5,
    )


def _with_llama3_scaling(spec: ModelSpec, factor: float) -> ModelSpec:
    rope = replace(
        spec.ropes[0],
        scaling=RopeScaling.LLAMA3,
        factor=factor,
        original_max_context_len=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    return replace(spec, ropes=(rope,))


def _gemma3(spec: ModelSpec, *, window: int, global_factor: float = 1.0) -> ModelSpec:
    """Add what the family has in common: every sixth layer attends to everything, the others to a window."""
    everywhere = spec.ropes[0]
    if global_factor != 1.0:
        everywhere = replace(everywhere, scaling=RopeScaling.LINEAR, factor=global_factor)
    local = RopeSpec(base=10_000.0, dim=spec.head_dim)
    return replace(
        spec,
        ropes=(everywhere, local),
        layers=tuple(
            LayerSpec(rope_index=1, window=window) if (index + 1) % 6 else LayerSpec()
            for index in range(spec.num_layers)
        ),
        activation=Activation.GELU_TANH,
        has_qk_norm=True,
        has_post_norms=True,
        embedding_scale=math.sqrt(spec.hidden_size),
    )


# Sizes: layers, hidden, heads, KV heads, intermediate, vocabulary.
NAMED_SHAPES: dict[str, ModelSpec] = {
    # meta-llama/Llama-2-*
    "llama-2-7b": _model(
        "llama",
        (32, 4096, 32, 32, 11008, 32000),
        context=4096,
        rope_base=1e4,
    ),
    "llama-2-13b": _model(
        "llama",
        (40, 5120, 40, 40, 13824, 32000),
        context=4096,
        rope_base=1e4,
    ),
    "llama-2-70b": _model(
        "llama",
        (80, 8192, 64, 8, 28672, 32000),
        context=4096,
        rope_base=1e4,
    ),
    # meta-llama/Meta-Llama-3-8B, meta-llama/Llama-3.2-*
    "llama-3-8b": _model(
        "llama",
        (32, 4096, 32, 8, 14336, 128256),
        context=8192,
        rope_base=5e5,
    ),
    "llama-3.2-1b": _with_llama3_scaling(
        _model(
            "llama",
            (16, 2048, 32, 8, 8192, 128256),
            context=131072,
            rope_base=5e5,
            tied=True,
        ),
        factor=32.0,
    ),
    "llama-3.2-3b": _with_llama3_scaling(
        _model(
            "llama",
            (28, 3072, 24, 8, 8192, 128256),
            context=131072,
            rope_base=5e5,
            tied=True,
        ),
        factor=32.0,
    ),
    # mistralai/Mistral-7B-v0.3, which has no sliding window
    "mistral-7b": _model(
        "mistral",
        (32, 4096, 32, 8, 14336, 32768),
        context=32768,
        rope_base=1e6,
    ),
    # Qwen/Qwen2.5-*
    "qwen2.5-0.5b": _model(
        "qwen2", (24, 896, 14, 2, 4864, 151936), context=32768, rope_base=1e6, tied=True
    ),
    "qwen2.5-7b": _model("qwen2", (28, 3584, 28, 4, 18944, 152064), context=131072, rope_base=1e6),
    # Qwen/Qwen3-*
    "qwen3-0.6b": _model(
        "qwen3",
        (28, 1024, 16, 8, 3072, 151936),
        context=40960,
        rope_base=1e6,
        head_dim=128,
        tied=True,
    ),
    "qwen3-4b": _model(
        "qwen3",
        (36, 2560, 32, 8, 9728, 151936),
        context=40960,
        rope_base=1e6,
        head_dim=128,
        tied=True,
    ),
    "qwen3-8b": _model(
        "qwen3", (36, 4096, 32, 8, 12288, 151936), context=40960, rope_base=1e6, head_dim=128
    ),
    "qwen3-14b": _model(
        "qwen3", (40, 5120, 40, 8, 17408, 151936), context=40960, rope_base=1e6, head_dim=128
    ),
    "qwen3-32b": _model(
        "qwen3", (64, 5120, 64, 8, 25600, 151936), context=40960, rope_base=1e6, head_dim=128
    ),
    # HuggingFaceTB/SmolLM2-*
    "smollm2-135m": _model(
        "llama",
        (30, 576, 9, 3, 1536, 49152),
        context=8192,
        rope_base=1e5,
        tied=True,
    ),
    "smollm2-360m": _model(
        "llama",
        (32, 960, 15, 5, 2560, 49152),
        context=8192,
        rope_base=1e5,
        tied=True,
    ),
    "smollm2-1.7b": _model(
        "llama",
        (24, 2048, 32, 32, 8192, 49152),
        context=8192,
        rope_base=1.3e5,
        tied=True,
    ),
    # google/gemma-3-*-it; of the 4B the text decoder alone
    "gemma3-270m": _gemma3(
        _model(
            "gemma3",
            (18, 640, 4, 1, 2048, 262144),
            context=32768,
            rope_base=1e6,
            head_dim=256,
            tied=True,
        ),
        window=512,
    ),
    "gemma3-1b": _gemma3(
        _model(
            "gemma3",
            (26, 1152, 4, 1, 6912, 262144),
            context=32768,
            rope_base=1e6,
            head_dim=256,
            tied=True,
        ),
        window=512,
    ),
    "gemma3-4b": _gemma3(
        _model(
            "gemma3",
            (34, 2560, 8, 4, 10240, 262208),
            context=131072,
            rope_base=1e6,
            head_dim=256,
            tied=True,
        ),
        window=1024,
        global_factor=8.0,
    ),
}


def named_shape(name: str) -> ModelSpec:
    """Return the specification of a published model.

    Raises:
        ConfigError: The name is not in ``NAMED_SHAPES``; the message lists those that are.
    """
    if name not in NAMED_SHAPES:
        raise ConfigError(
            f"[shapes] expected one of {', '.join(NAMED_SHAPES)}, received {name!r}; set --model"
        )
    return NAMED_SHAPES[name]
