"""OpenVINO GenAI: continuous batching with its prefix cache, from a GGUF file or a folder with an exported model.

The pipeline is stepped by hand, which gives the time of every token without a callback between them.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import openvino
import openvino_genai

CACHE_GB = 2
MAX_STEP_TOKENS = 2048
"""Measured best for a prompt of 2k tokens: in one step, not cut into the default of 256."""


class Driver:
    """One pipeline."""

    def __init__(self, settings: dict[str, Any]) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.enable_prefix_caching = True
        scheduler.dynamic_split_fuse = settings.get("split_fuse", True)
        scheduler.max_num_batched_tokens = settings.get("max_step_tokens", MAX_STEP_TOKENS)
        scheduler.max_num_seqs = 64
        self._properties = {
            "INFERENCE_NUM_THREADS": settings["threads"],
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
            "KV_CACHE_PRECISION": settings.get("kv_precision", "u8"),
            **settings.get("properties", {}),
        }
        self._step_tokens = scheduler.max_num_batched_tokens
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(
            settings["weights"], scheduler, "CPU", self._properties
        )
        self._next_id = 0

    def describe(self) -> dict[str, Any]:
        """Return versions and settings."""
        return {
            "openvino_genai": openvino_genai.__version__,
            "properties": {name: str(value) for name, value in self._properties.items()},
            "max_num_batched_tokens": self._step_tokens,
            "enable_prefix_caching": True,
            "cache_size": CACHE_GB,
        }

    def generate(
        self, row: str, prompts: list[list[int]], max_tokens: int
    ) -> list[tuple[list[int], list[float]]]:
        """Generate from all prompts at once."""
        del row
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.ignore_eos = True
        config.do_sample = False
        handles = []
        for prompt in prompts:
            ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
            handles.append(self._pipeline.add_request(self._next_id, ids, config))
            self._next_id += 1
        outputs: list[tuple[list[int], list[float]]] = [([], []) for _ in prompts]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            now_s = time.perf_counter()
            for handle, (token_ids, times_s) in zip(handles, outputs):
                while handle.can_read():
                    for output in handle.read().values():
                        token_ids.extend(output.generated_ids)
                        times_s.extend([now_s] * len(output.generated_ids))
        return outputs
