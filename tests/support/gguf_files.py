"""Write tiny GGUF files from transformers models, the way llama.cpp's converter lays them out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gguf
import numpy as np

from kvist.model.layout import PartKind, parts_of
from kvist.model.loader import _decoder_name

if TYPE_CHECKING:
    from pathlib import Path

    from kvist.spec import ModelSpec


def write_gguf(
    path: Path,
    reference: Any,
    spec: ModelSpec,
    quantization: str = "F32",
    extra: dict[str, Any] | None = None,
    factors: np.ndarray | None = None,
) -> Path:
    """Write the reference's weights; matrices whose rows allow it are quantised, everything else stays float32.

    Llama-family query and key rows are interleaved and Gemma's norms get their one, as in real files.
    """
    writer = gguf.GGUFWriter(path, spec.architecture)
    writer.add_block_count(spec.num_layers)
    writer.add_context_length(spec.max_context_len)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_rope_freq_base(spec.ropes[0].base)
    windows = {layer.window for layer in spec.layers if layer.window is not None}
    if windows:
        writer.add_sliding_window(windows.pop())
    for key, value in (extra or {}).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](f"{spec.architecture}.{key}", value)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", factors)
    state = {_decoder_name(name, spec): value for name, value in reference.state_dict().items()}
    for part in parts_of(spec):
        values = state[part.hf_name].float().numpy()
        if part.kind is PartKind.NORM and spec.architecture == "gemma3":
            values = values + 1.0
        if spec.architecture == "llama" and part.kind in (PartKind.QUERY, PartKind.KEY):
            halves = values.reshape(-1, 2, spec.head_dim // 2, *values.shape[1:])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        values = np.ascontiguousarray(values)
        kind = gguf.GGMLQuantizationType[quantization]
        if values.ndim == 2 and values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0:
            writer.add_tensor(part.gguf_name, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(part.gguf_name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
