"""The real SmolLM2 through the whole engine, against transformers on the same file."""

from __future__ import annotations

import pytest
import torch

from kvist.config import EngineConfig
from kvist.engine.api import Engine
from kvist.engine.build import assemble, build_engine
from kvist.model.loader import load_decoder
from kvist.model.tokenizer import load_tokenizer
from kvist.plan import Hardware, detect_hardware, read_spec, resolve
from kvist.spec import GIB

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

NUM_OUTPUT = 64
DOCUMENT = """\
The lighthouse at Sandvik was built in 1874 after the schooner Elida ran aground on the outer skerries. It stands 23
metres above the sea, and its lamp, first fed with rapeseed oil and later with paraffin, could be seen from 15 nautical
miles. The keeper lived with his family in the red house below the tower. Every evening he climbed 96 steps, wound the
clockwork that turned the lens, and trimmed the wick; every morning he drew the curtains, so that the sun would not set
the house on fire through the lens. In 1931 the lamp was electrified, and in 1967 the last keeper, Harald Lund, locked
the door behind him. Today a small society looks after the place. Visitors may climb the tower on Sundays from May to
September, if the wind is below 12 metres per second.
"""
PROMPTS = [
    "A",
    "Hello, my name is",
    "The capital of Norway is",
    "def fibonacci(n):\n",
    "1, 1, 2, 3, 5, 8,",
    "Water boils at a temperature of",
    "Once upon a time there was a stove that",
    "List three things that float on water:\n1.",
    "Der Zug nach Hamburg f\u00e4hrt um",
    '{"name": "kettle", "colour":',
    "Translate to French: The bridge is closed today.\n",
    "The difference between a queue and a stack is that",
    DOCUMENT + "Question: When was the lighthouse built?\nAnswer:",
    DOCUMENT + "Question: Who was the last keeper?\nAnswer:",
    DOCUMENT + "Question: Why did the keeper draw the curtains?\nAnswer:",
    DOCUMENT * 2 + "In short:",
    "<|im_start|>user\nWhat is a prompt cache?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nName a colour.<|im_end|>\n<|im_start|>assistant\n",
    "\u2603 \U0001f6b2 and other symbols",
    DOCUMENT[: len(DOCUMENT) // 2],
]


@pytest.fixture(scope="module")
def reference(smollm2_path):
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    torch.set_num_threads(detect_hardware().cpus)
    config = AutoConfig.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    # What from_pretrained(gguf_file=...) does, without the package that it asks for to spread a model over devices.
    loaded = load_gguf_checkpoint(str(smollm2_path), return_tensors=True, model_to_load=model)
    keys = model.load_state_dict(loaded["tensors"], strict=False)
    assert not keys.unexpected_keys
    assert set(keys.missing_keys) <= {"lm_head.weight"}
    model.tie_weights()
    return model.eval()


@torch.inference_mode()
def choices_along(model, prompt: tuple[int, ...], output: tuple[int, ...]) -> list[int]:
    """Return the token transformers chooses after the prompt and after each output token, in one pass.

    Equal to ``output`` exactly when transformers, left alone, would have written it: by induction each token is the
    greedy choice after the same tokens.
    """
    ids = torch.tensor([prompt + output[:-1]])
    logits = model(ids, use_cache=False, logits_to_keep=len(output)).logits
    return logits[0].argmax(dim=-1).tolist()


@torch.inference_mode()
def generated(model, prompt: tuple[int, ...]) -> list[int]:
    """Return what transformers' own generation loop writes."""
    ids = torch.tensor([prompt])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NUM_OUTPUT,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def answers(smollm2_path):
    """Return what Kvist writes for the prompts, in one batch, with float32 weights and KV."""
    with Engine.from_pretrained(
        str(smollm2_path), dtype="float32", kv_cache_dtype="float32", memory_gib=0.5
    ) as engine:
        results = engine.generate(PROMPTS, temperature=0, max_tokens=NUM_OUTPUT, ignore_eos=True)
        stats = engine.stats()
    # The comparison is worth little unless blocks were shared and copied on the way.
    assert stats.cache.num_hit_tokens > 500
    assert stats.cache.num_partial_copies > 0
    return results


@pytest.mark.parametrize("index", range(len(PROMPTS)))
def test_token_for_token(reference, answers, index):
    result = answers[index]
    assert len(result.token_ids) == NUM_OUTPUT
    expected = choices_along(reference, result.prompt_token_ids, result.token_ids)
    assert list(result.token_ids) == expected


def test_same_as_the_generation_loop(reference, answers):
    result = answers[1]
    assert list(result.token_ids) == generated(reference, result.prompt_token_ids)


def test_plan_is_what_the_engine_allocates(smollm2_path):
    """Weights and KV memory are within 1 % of the estimate that was made from the header alone."""
    spec = read_spec(smollm2_path)
    config = EngineConfig.from_options(model=str(smollm2_path), dtype="float32", memory_gib=0.25)
    plan = resolve(config, spec, Hardware(cpus=1, available_bytes=4 * GIB))
    decoder = load_decoder(smollm2_path, spec, torch.float32)
    core = assemble(plan, decoder, load_tokenizer(smollm2_path), "test")
    allocated = core._runner._arena.num_bytes + decoder.num_bytes
    assert abs(allocated - (plan.kv_bytes + plan.weight_bytes)) < 0.01 * allocated


def test_engine_is_named_after_the_file_and_uses_the_planned_threads(smollm2_path):
    config = EngineConfig.from_options(model=str(smollm2_path), memory_gib=0.25, threads=1)
    engine = build_engine(config)
    try:
        assert engine.model_name == smollm2_path.stem
        assert torch.get_num_threads() == engine.plan.threads == 1
        assert not engine.is_running
    finally:
        engine.close()
        torch.set_num_threads(detect_hardware().cpus)


def test_chat_ends_by_itself(smollm2_path):
    with Engine.from_pretrained(str(smollm2_path), memory_gib=0.25) as engine:
        messages = [{"role": "user", "content": "Say only the word yes."}]
        result = engine.chat(messages, temperature=0, max_tokens=40)
    assert result.finish_reason.value == "stop"
    assert result.text
    assert "<|im_end|>" not in result.text
