"""A peer for tests: deterministic tokens, faults on demand. Run by ``kvist.bench.drivers.serve``."""

from __future__ import annotations

import os
import time


def next_token(token_ids):
    """Return the token that follows: any function of all tokens before it."""
    return (31 * sum(token_ids) + len(token_ids)) % 97


def continuation(prompt, max_tokens):
    ids = list(prompt)
    for _ in range(max_tokens):
        ids.append(next_token(ids))
    return ids[len(prompt) :]


class Driver:
    def __init__(self, settings):
        self._settings = settings
        if settings.get("fault") == "load":
            raise RuntimeError("no such weights")

    def describe(self):
        return {"fake": "1.0"}

    def generate(self, row, prompts, max_tokens):
        fault = self._settings.get("fault")
        if fault == "die":
            print("a library says something", flush=True)  # noqa: T201  # as libraries do
            os.write(2, b"out of memory\n")
            os._exit(3)
        if fault == "raise":
            raise ValueError("no")
        outputs = []
        for prompt in prompts:
            ids = continuation(prompt, max_tokens - (fault == "short"))
            if fault == "wrong" or (fault == "wrong together" and len(prompts) > 1):
                ids = [(token_id + 1) % 97 for token_id in ids]
            start_s = time.perf_counter()
            outputs.append((ids, [start_s + 0.001 * index for index in range(len(ids))]))
        return outputs[1:] if fault == "lost" else outputs
