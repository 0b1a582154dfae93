"""GGUF files against the transformers models they were written from."""

from __future__ import annotations

from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from tests.support.decoding import generate_greedily, run_decoder
from tests.support.gguf_files import write_gguf
from tests.support.tiny_models import (
    TINY_MODELS,
    build_reference,
    random_prompt,
    reference_greedy,
    reference_logits,
)

from kvist.model.loader import load_decoder
from kvist.model.rotary import frequencies_of
from kvist.model.spec_readers import read_spec, spec_from_hf_config
from kvist.spec import RopeScaling

LOGITS_TOLERANCE = 5e-5
PROMPT = random_prompt(41)
BY_NAME = {model.name: model for model in TINY_MODELS}
EXTRA = {
    "llama-linear": {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    "llama-yarn": {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 16,
    },
    "gemma3": {"attention.sliding_window_pattern": 2},
    "gemma3-options": {
        "final_logit_softcapping": 3.0,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 8.0,
    },
}


def _pair(name, path, **options):
    reference = build_reference(BY_NAME[name])
    spec = spec_from_hf_config(reference.config.to_dict())
    write_gguf(path, reference, spec, extra=EXTRA.get(name), **options)
    return reference, spec


@pytest.mark.parametrize(
    "name",
    [
        "llama-gqa", "llama-mqa-tied", "llama-biases", "llama-head-dim", "llama-linear", "llama-yarn", "qwen2",
        "qwen3", "gemma3", "gemma3-options",
    ],
)  # fmt: skip
def test_unquantised_file_gives_the_same_logits_and_tokens(name, tmp_path):
    path = tmp_path / "model.gguf"
    reference, spec = _pair(name, path)
    read = read_spec(path)
    if name.startswith(
        "gemma3"
    ):  # the header cannot say that this test's attention scale is unusual
        assert read.attention_scale == spec.head_dim**-0.5
        read = replace(read, attention_scale=spec.attention_scale)
    decoder = load_decoder(path, read, torch.float32)
    difference = (run_decoder(decoder, PROMPT) - reference_logits(reference, PROMPT)).abs().max()
    assert float(difference) < LOGITS_TOLERANCE
    assert generate_greedily(decoder, PROMPT, 16) == reference_greedy(reference, PROMPT, 16)


def test_frequency_factors_reproduce_the_llama3_ramp(tmp_path):
    path = tmp_path / "model.gguf"
    reference = build_reference(BY_NAME["llama-llama3"])
    spec = spec_from_hf_config(reference.config.to_dict())
    plain = replace(spec.ropes[0], scaling=RopeScaling.NONE)
    factors = (frequencies_of(plain) / frequencies_of(spec.ropes[0])).numpy().astype(np.float32)
    write_gguf(path, reference, spec, factors=factors)
    read = read_spec(path)
    assert read.ropes[0].scaling is RopeScaling.FACTORS
    decoder = load_decoder(path, read, torch.float32)
    difference = (run_decoder(decoder, PROMPT) - reference_logits(reference, PROMPT)).abs().max()
    assert float(difference) < LOGITS_TOLERANCE


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_tensors_are_what_the_gguf_package_makes_of_them(kind, tmp_path):
    """The reference gets the rounded weights, so that the whole path is compared, not the rounding error."""
    path = tmp_path / "model.gguf"
    reference, _ = _pair("llama-gqa", path, quantization=kind)
    quantization = gguf.GGMLQuantizationType[kind]
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.dim() == 2:
                # Rows of q and k are permuted in the file, which changes nothing: quantisation is row by row.
                packed = gguf.quantize(parameter.numpy(), quantization)
                parameter.copy_(torch.from_numpy(gguf.dequantize(packed, quantization).copy()))
    decoder = load_decoder(path, read_spec(path), torch.float32)
    difference = (run_decoder(decoder, PROMPT) - reference_logits(reference, PROMPT)).abs().max()
    assert float(difference) < LOGITS_TOLERANCE
