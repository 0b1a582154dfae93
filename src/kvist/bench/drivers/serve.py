"""Run one peer in a process of its own, told what to do by JSON lines on stdin, answering with JSON lines on stdout.

Run by path in the interpreter that has the peer (``python serve.py openvino``), so neither this file nor a driver
imports Kvist, but for the one that runs it. A driver is a file that defines ``Driver``:

    Driver(settings)              loads; ``settings`` has ``weights`` (a path), ``threads``, ``max_context`` and options
    describe() -> dict            versions and settings, for the report
    generate(row, prompts, max_tokens) -> list of (token_ids, times_s)
                                  greedy, end tokens ignored, all prompts at once; a clock reading after each token

Requests:  {"op": "load", "settings": {...}}
           {"op": "generate", "row": ..., "prompts": [[id, ...], ...], "max_tokens": n}
Answers:   {"ok": true, ...} or {"ok": false, "error": "..."}; the end of stdin ends the process.

What libraries print goes to stderr: stdout is the protocol's alone.
"""

from __future__ import annotations

import importlib.util
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Serve one peer until stdin ends."""
    # The interpreter put this folder first, where a driver would hide the library it drives.
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != HERE]
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    path = HERE / f"{sys.argv[1]}.py" if "/" not in sys.argv[1] else Path(sys.argv[1])
    server = Server(path, answers)
    for line in sys.stdin:
        server.answer(line)


class Server:
    """Turns lines into calls of a driver, and results into lines."""

    def __init__(self, path: Path, answers: IO[str]) -> None:
        self._path = path
        self._answers = answers
        self._driver: Any = None  # Any: whatever class the file defines

    def answer(self, line: str) -> None:
        """Do what one line asks and write the line that answers it."""
        request = json.loads(line)
        try:
            answer = {"ok": True, **getattr(self, "_" + request.pop("op"))(**request)}
        except Exception as error:  # noqa: BLE001  # the boundary of the process: the harness reports it
            answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        self._answers.write(json.dumps(answer) + "\n")
        self._answers.flush()

    def _load(self, settings: dict[str, Any]) -> dict[str, Any]:
        spec = importlib.util.spec_from_file_location("driver", self._path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        start_s = time.perf_counter()
        self._driver = module.Driver(settings)
        return {"describes": self._driver.describe(), "load_s": time.perf_counter() - start_s}

    def _generate(self, row: str, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        cpu_s = _cpu_s()
        start_s = time.perf_counter()
        outputs = self._driver.generate(row, prompts, max_tokens)
        return {
            "outputs": [
                {
                    "token_ids": [int(token_id) for token_id in token_ids],
                    "times_s": [time_s - start_s for time_s in times_s],
                }
                for token_ids, times_s in outputs
            ],
            "cpu_s": _cpu_s() - cpu_s,
        }

    def _rank(self, prompt: list[int], max_tokens: int, num_candidates: int) -> dict[str, Any]:
        return {"candidates": self._driver.rank(prompt, max_tokens, num_candidates)}

    def _export(self, folder: str) -> dict[str, Any]:
        self._driver.export(folder)
        return {}


def _cpu_s() -> float:
    """Return the CPU time of this process and its ended children, all threads."""
    times = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in times)


if __name__ == "__main__":
    main()
