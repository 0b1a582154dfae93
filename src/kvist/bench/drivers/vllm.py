"""vLLM on a CPU: its engine stepped by hand, prefix caching on.

What vLLM reads from the environment comes from whoever starts this. Eager by default: compiling takes minutes, and
needs a compiler where that interpreter runs.
"""

from __future__ import annotations

import time
from typing import Any

import vllm


class Driver:
    """One engine, in this process."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._dtype = settings.get("dtype", "float32")
        self._is_eager = settings.get("eager", True)
        self._engine = vllm.LLM(
            model=settings["weights"],
            dtype=self._dtype,
            max_model_len=settings["max_context"],
            max_num_batched_tokens=settings.get("max_step_tokens", 2048),
            max_num_seqs=64,
            enable_prefix_caching=True,
            enforce_eager=self._is_eager,
            disable_log_stats=True,
        ).llm_engine
        self._next_id = 0

    def describe(self) -> dict[str, Any]:
        """Return versions and settings."""
        return {
            "vllm": vllm.__version__,
            "dtype": self._dtype,
            "enforce_eager": self._is_eager,
            "enable_prefix_caching": True,
        }

    def generate(
        self, row: str, prompts: list[list[int]], max_tokens: int
    ) -> list[tuple[list[int], list[float]]]:
        """Generate from all prompts at once."""
        del row
        params = vllm.SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        ids = []
        for prompt in prompts:
            ids.append(str(self._next_id))
            self._engine.add_request(ids[-1], {"prompt_token_ids": prompt}, params)
            self._next_id += 1
        outputs: dict[str, tuple[list[int], list[float]]] = {name: ([], []) for name in ids}
        while self._engine.has_unfinished_requests():
            results = self._engine.step()
            now_s = time.perf_counter()
            for result in results:
                token_ids, times_s = outputs[result.request_id]
                new = list(result.outputs[0].token_ids)[len(token_ids) :]
                token_ids.extend(new)
                times_s.extend([now_s] * len(new))
        return [outputs[name] for name in ids]
