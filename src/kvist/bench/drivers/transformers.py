"""transformers: float32, a dynamic cache that keeps the prefix of the request before, batches of equal lengths.

Also the reference of the benchmark. Reads a GGUF file with transformers' own reader, or a folder.
"""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache


class Driver:
    """One model and, for each row, the cache of its latest request."""

    def __init__(self, settings: dict[str, Any]) -> None:
        torch.set_num_threads(settings["threads"])
        torch.set_grad_enabled(False)
        self._path = Path(settings["weights"])
        self._model = _load_file(self._path) if self._path.is_file() else _load_folder(self._path)
        self._caches: dict[str, tuple[list[int], Any]] = {}

    def describe(self) -> dict[str, Any]:
        """Return versions and settings."""
        return {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "dtype": "float32",
            "attention": "sdpa",
        }

    def generate(
        self, row: str, prompts: list[list[int]], max_tokens: int
    ) -> list[tuple[list[int], list[float]]]:
        """Generate from all prompts at once if they have one length, else one after the other."""
        if len({len(prompt) for prompt in prompts}) > 1:
            return [self.generate(row, [prompt], max_tokens)[0] for prompt in prompts]
        held, cache = self._caches.pop(row, ([], DynamicCache()))
        shared = min([_common_len(held, prompt) for prompt in prompts])
        shared = min(shared, len(prompts[0]) - 1)
        if shared < cache.get_seq_length():
            cache.crop(shared - cache.get_seq_length())
        batch_cache = cache
        if len(prompts) > 1:
            batch_cache = copy.deepcopy(cache)
            batch_cache.batch_repeat_interleave(len(prompts))
        latest = torch.tensor([prompt[shared:] for prompt in prompts])
        outputs: list[tuple[list[int], list[float]]] = [([], []) for _ in prompts]
        for _ in range(max_tokens):
            result = self._model(
                input_ids=latest, past_key_values=batch_cache, use_cache=True, logits_to_keep=1
            )
            latest = result.logits[:, -1].argmax(dim=-1, keepdim=True)
            now_s = time.perf_counter()
            for (token_ids, times_s), token_id in zip(outputs, latest[:, 0].tolist()):
                token_ids.append(token_id)
                times_s.append(now_s)
        if len(prompts) == 1:
            self._caches[row] = ([*prompts[0], *outputs[0][0][:-1]], cache)
        else:
            self._caches[row] = (prompts[0][:shared], cache)
        return outputs

    def rank(self, prompt: list[int], max_tokens: int, num_candidates: int) -> list[list[int]]:
        """Return the likeliest tokens after the prompt, the likeliest first, and after that one, and so on."""
        held, cache = self._caches.pop("rank", ([], DynamicCache()))
        shared = min(_common_len(held, prompt), len(prompt) - 1)
        if shared < cache.get_seq_length():
            cache.crop(shared - cache.get_seq_length())
        latest = torch.tensor([prompt[shared:]])
        candidates: list[list[int]] = []
        for _ in range(max_tokens):
            result = self._model(
                input_ids=latest, past_key_values=cache, use_cache=True, logits_to_keep=1
            )
            candidates.append(result.logits[0, -1].topk(num_candidates).indices.tolist())
            latest = torch.tensor([candidates[-1][:1]])
        self._caches["rank"] = ([*prompt, *(ids[0] for ids in candidates[:-1])], cache)
        return candidates

    def export(self, folder: str) -> None:
        """Write the model and its tokeniser as a folder."""
        self._model.save_pretrained(folder)
        source = {"gguf_file": self._path.name} if self._path.is_file() else {}
        parent = self._path.parent if self._path.is_file() else self._path
        AutoTokenizer.from_pretrained(parent, local_files_only=True, **source).save_pretrained(
            folder
        )


def _load_folder(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, local_files_only=True, attn_implementation="sdpa"
    ).eval()


def _load_file(path: Path) -> Any:
    """Read a GGUF file; ``from_pretrained(gguf_file=...)`` would need accelerate."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint  # noqa: PLC0415  # may move

    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    outcome = model.load_state_dict(tensors, strict=False)
    if outcome.unexpected_keys or not set(outcome.missing_keys) <= {"lm_head.weight"}:
        raise RuntimeError(f"{path} and its configuration do not fit: {outcome}")
    model.tie_weights()
    return model


def _common_len(left: list[int], right: list[int]) -> int:
    length = 0
    for a, b in zip(left, right):
        if a != b:
            break
        length += 1
    return length
