"""The real SmolLM2-135M-Instruct against transformers' own reading of the same GGUF file, in float32."""

from __future__ import annotations

import pytest
import torch
from tests.support.decoding import generate_greedily, run_decoder
from tests.support.tiny_models import reference_logits

from kvist.model.loader import load_decoder
from kvist.model.shapes import named_shape
from kvist.model.spec_readers import read_spec

pytestmark = pytest.mark.model

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "<|im_start|>user\nName three rivers in Europe.<|im_end|>\n<|im_start|>assistant\n",
)
NUM_TOKENS = 16
LOGITS_TOLERANCE = 5e-4
"""Largest absolute difference of a logit. Measured: 5.4e-5; the logits spread over about +-20."""


@pytest.fixture(scope="module")
def pair(smollm2_path):
    return (
        *_reference(smollm2_path),
        load_decoder(smollm2_path, read_spec(smollm2_path), torch.float32),
    )


def _reference(path):
    """Read the file with transformers' own GGUF code; ``from_pretrained(gguf_file=...)`` would need accelerate."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    source = {"gguf_file": path.name, "local_files_only": True}
    config = AutoConfig.from_pretrained(path.parent, **source)
    reference = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    loaded = load_gguf_checkpoint(path, return_tensors=True, model_to_load=reference)["tensors"]
    outcome = reference.load_state_dict(loaded, strict=False)
    assert outcome.unexpected_keys == []
    assert set(outcome.missing_keys) <= {"lm_head.weight"}
    reference.tie_weights()
    return reference, AutoTokenizer.from_pretrained(path.parent, **source)


def test_spec_is_the_published_shape(pair):
    spec, shape = pair[2].spec, named_shape("smollm2-135m")
    assert spec.norm_eps == pytest.approx(shape.norm_eps)
    assert spec.num_parameters == shape.num_parameters
    assert (spec.ropes, spec.layers) == (shape.ropes, shape.layers)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_logits_and_greedy_tokens_agree(pair, prompt, record_property):
    reference, tokenizer, decoder = pair
    token_ids = tokenizer(prompt)["input_ids"]
    output = generate_greedily(decoder, token_ids, NUM_TOKENS, block_size=64)
    # One pass over prompt and output answers for every step: position i predicts token i + 1.
    whole = token_ids + output
    expected = reference_logits(reference, whole)
    difference = float((run_decoder(decoder, whole, block_size=64) - expected).abs().max())
    record_property("max_logit_difference", difference)
    assert expected[len(token_ids) - 1 : -1].argmax(-1).tolist() == output
    assert difference < LOGITS_TOLERANCE
