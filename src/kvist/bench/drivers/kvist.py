"""Kvist in process: the Python engine without its server, for what HTTP costs."""

from __future__ import annotations

import threading
import time
from typing import Any

import kvist


class Driver:
    """One engine."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._options = settings["options"]
        self._engine = kvist.Engine.from_pretrained(**self._options)

    def describe(self) -> dict[str, Any]:
        """Return the version and what was asked for."""
        return {"kvist": kvist.__version__, "options": self._options}

    def generate(
        self, row: str, prompts: list[list[int]], max_tokens: int
    ) -> list[tuple[list[int], list[float]]]:
        """Generate from all prompts at once."""
        del row
        outputs: list[tuple[list[int], list[float]]] = [([], []) for _ in prompts]
        streams = [
            self._engine.stream(prompt, max_tokens=max_tokens, temperature=0, ignore_eos=True)
            for prompt in prompts
        ]
        readers = [
            threading.Thread(target=_read, args=(stream, *output))
            for stream, output in zip(streams, outputs, strict=True)
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        return outputs


def _read(
    stream: Any, token_ids: list[int], times_s: list[float]
) -> None:  # Any: an iterator of chunks
    for chunk in stream:
        token_ids.extend(chunk.token_ids)
        times_s.extend([time.perf_counter()] * len(chunk.token_ids))
