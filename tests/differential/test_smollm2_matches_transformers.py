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
LOGITS_TOLERANCE = 2e-3
"""Largest absolute difference of a logit; they spread over about +-20."""


@pytest.fixture(scope="module")
def pair(smollm2_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"gguf_file": smollm2_path.name, "local_files_only": True}
    reference = AutoModelForCausalLM.from_pretrained(
        smollm2_path.parent, dtype=torch.float32, attn_implementation="eager", **source
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(smollm2_path.parent, **source)
    decoder = load_decoder(smollm2_path, read_spec(smollm2_path), torch.float32)
    return reference, tokenizer, decoder


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
