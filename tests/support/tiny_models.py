"""Tiny transformers models with random weights, one per family and option, to compare with."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

_SIZES = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class TinyModel:
    """One row of the table: a family and what differs from the common sizes."""

    name: str
    family: str
    options: dict[str, Any] = field(default_factory=dict)


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


_LLAMA3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
}  # fmt: skip
_GEMMA3 = {
    "head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 8, "num_key_value_heads": 1,
    "num_hidden_layers": 4,
}  # fmt: skip

TINY_MODELS = (
    TinyModel("llama-gqa", "llama"),
    TinyModel("llama-mha", "llama", {"num_key_value_heads": 4}),
    TinyModel("llama-mqa-tied", "llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    TinyModel("llama-biases", "llama", {"attention_bias": True, "mlp_bias": True}),
    TinyModel("llama-head-dim", "llama", {"head_dim": 32, "rms_norm_eps": 1e-2}),
    TinyModel("llama-gelu", "llama", {"hidden_act": "gelu"}),
    TinyModel("llama-linear", "llama", _rope("linear", factor=4.0)),
    TinyModel("llama-llama3", "llama", _rope("llama3", **_LLAMA3)),
    TinyModel("llama-dynamic", "llama", _rope("dynamic", factor=4.0)),
    TinyModel(
        "llama-yarn", "llama", _rope("yarn", factor=4.0, original_max_position_embeddings=16)
    ),
    TinyModel(
        "llama-yarn-options",
        "llama",
        _rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=16,
            attention_factor=1.3,
            beta_fast=8.0,
            beta_slow=2.0,
            truncate=False,
        ),
    ),
    TinyModel(
        "llama-longrope",
        "llama",
        _rope(
            "longrope",
            original_max_position_embeddings=128,
            short_factor=[1.0 + 0.25 * index for index in range(8)],
            long_factor=[4.0] * 8,
        ),
    ),
    TinyModel("mistral-window", "mistral", {"sliding_window": 8}),
    TinyModel("mistral-full", "mistral", {"sliding_window": None}),
    TinyModel("qwen2", "qwen2", {"tie_word_embeddings": True}),
    TinyModel(
        "qwen2-window",
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    TinyModel("qwen3", "qwen3", {"head_dim": 32}),
    TinyModel(
        "qwen3-options",
        "qwen3",
        {
            "head_dim": 16,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 2,
        },
    ),
    TinyModel("smollm3", "smollm3", {"no_rope_layer_interval": 2}),
    TinyModel(
        "smollm3-window",
        "smollm3",
        {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 8},
    ),
    TinyModel("gemma3", "gemma3_text", {**_GEMMA3, "sliding_window_pattern": 2}),
    TinyModel(
        "gemma3-options",
        "gemma3_text",
        {
            **_GEMMA3,
            "final_logit_softcapping": 3.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    TinyModel("gemma3-multimodal", "gemma3", _GEMMA3),
)


def build_reference(model: TinyModel) -> Any:
    """Return the transformers model, float32, eager attention, every weight random and far from its neutral value."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    options = {**_SIZES, **model.options}
    if model.family == "gemma3":
        vision = {
            "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
            "image_size": 28, "patch_size": 14,
        }  # fmt: skip
        config = AutoConfig.for_model("gemma3", text_config=options, vision_config=vision)
        config._attn_implementation = "eager"
        reference = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    else:
        config = AutoConfig.for_model(model.family, **options)
        reference = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm = name.endswith(("norm.weight", "layernorm.weight"))
            if is_norm:
                parameter.add_(0.3 * noise)
            else:
                parameter.copy_(noise * (0.15 if parameter.dim() > 1 else 0.3))
    return reference.eval()


@torch.inference_mode()
def reference_logits(reference: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """Return the logits at every position, (T, V)."""
    ids = torch.tensor([list(token_ids)])
    return reference(input_ids=ids, use_cache=False).logits[0].float()


def reference_greedy(reference: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Return ``num_tokens`` greedy tokens, everything recomputed for each."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        token_ids.append(int(reference_logits(reference, token_ids)[-1].argmax()))
    return token_ids[len(prompt) :]


def random_prompt(num_tokens: int, vocab_size: int = 160, seed: int = 0) -> list[int]:
    """Return token ids drawn with a generator of their own."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size, (num_tokens,), generator=generator).tolist()


def save(reference: Any, folder: Path, **options: Any) -> Path:
    """Write the model as transformers does; return the folder."""
    reference.save_pretrained(folder, **options)
    return folder
