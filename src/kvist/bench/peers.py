"""Who is measured: peers in processes of their own, and servers by URL.

Responsible for asking one peer for one batch and getting outputs with times back. Knows nothing of rows, runs or
results.

A driver is a file of ``kvist.bench.drivers`` (or any other), run by path in the interpreter that has the peer's
library; its process loads once and sleeps on its stdin while others are measured. Its times are taken in that process.
A server's times are taken here, at the client, HTTP included.
"""

from __future__ import annotations

import asyncio
import json
import queue
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol, Self

import httpx

from kvist.bench.work import Output
from kvist.envvars import child_environment
from kvist.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvist.bench.work import Batch, Prompt

SERVE = Path(__file__).parent / "drivers" / "serve.py"
TIMEOUT_S = 900.0
"""For one batch, or for loading."""
STOP_TIMEOUT_S = 20.0
STDERR_TAIL_CHARS = 1500


class Peer(Protocol):
    """Somebody who can be asked."""

    name: str
    """Column of the table."""
    family: str
    """Peers of one family are settings of the same engine; its best one counts in each row."""
    is_kvist: bool

    @property
    def describes(self) -> Mapping[str, Any]:  # Any: JSON values
        """Versions and settings, for the report."""

    def run(self, row: str, batch: Batch) -> list[Output]:
        """Generate from all prompts of the batch at once, greedily, end tokens ignored.

        Raises:
            BenchError: The peer died, refused, or said something that is no answer.
        """

    def close(self) -> None:
        """End what was started. Idempotent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverSettings:
    """How to start a driver."""

    name: str
    family: str
    driver: str
    """Name of a file of ``kvist.bench.drivers``, or path of another."""
    python: str
    """Path of the interpreter that has the library."""
    settings: Mapping[str, Any]  # Any: JSON values
    """Passed to the driver as it loads."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """On top of this process's own."""
    is_kvist: bool = False


class DriverPeer:
    """A peer behind a driver process. A context manager."""

    def __init__(self, settings: DriverSettings) -> None:
        self.name = settings.name
        self.family = settings.family
        self.is_kvist = settings.is_kvist
        self._answers: queue.Queue[str] = queue.Queue()
        self._stderr: IO[str] = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  # closed in close
        try:
            self._process = subprocess.Popen(  # noqa: S603  # an interpreter that the user named
                [settings.python, str(SERVE), settings.driver],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                encoding="utf-8",
                env=child_environment(**settings.environment),
                start_new_session=True,
            )
        except OSError as error:
            self._stderr.close()
            raise BenchError(
                f"[bench] cannot run {settings.python} for {self.name}: {error.strerror}"
            ) from error
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            answer = self._ask(op="load", settings=dict(settings.settings))
        except BaseException:
            self.close()
            raise
        self._describes: dict[str, Any] = {**answer["describes"], "load_s": answer["load_s"]}

    @property
    def describes(self) -> Mapping[str, Any]:  # Any: JSON values
        """What the driver says of itself."""
        return self._describes

    def run(self, row: str, batch: Batch) -> list[Output]:
        """See ``Peer.run``."""
        answer = self._ask(
            op="generate", row=row, prompts=list(batch.prompts), max_tokens=batch.max_tokens
        )
        try:
            outputs = [
                Output(
                    num_tokens=len(output["token_ids"]),
                    token_ids=tuple(output["token_ids"]),
                    text=None,
                    first_s=output["times_s"][0],
                    last_s=output["times_s"][-1],
                )
                for output in answer["outputs"]
            ]
        except (KeyError, IndexError, TypeError) as error:
            raise BenchError(f"[bench] {self.name} answered without tokens or times") from error
        if len(outputs) != len(batch.prompts):
            raise BenchError(
                f"[bench] {self.name} was asked {len(batch.prompts)} prompts and answered {len(outputs)}"
            )
        return outputs

    def rank(self, prompt: Prompt, max_tokens: int, num_candidates: int) -> list[list[int]]:
        """Make a driver that can do so return the likeliest tokens after a prompt, step by step along the likeliest."""
        answer = self._ask(
            op="rank", prompt=prompt, max_tokens=max_tokens, num_candidates=num_candidates
        )
        return answer["candidates"]  # type: ignore[no-any-return]  # a JSON array

    def export(self, folder: Path) -> None:
        """Make a driver that can write its model to a folder do so."""
        self._ask(op="export", folder=str(folder))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        # It may be gone, with a request on its way to it.
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._stderr.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> None:
        """Move lines to the queue, where waiting for them can end; an empty line is the end."""
        assert self._process.stdout is not None
        with self._process.stdout as stdout:
            for line in stdout:
                self._answers.put(line)
        self._answers.put("")

    def _ask(self, **request: Any) -> dict[str, Any]:  # noqa: ANN401  # JSON values
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._answers.get(timeout=TIMEOUT_S)
        except OSError:
            line = ""
        except queue.Empty:
            raise BenchError(
                f"[bench] {self.name} did not answer within {TIMEOUT_S:.0f} s"
            ) from None
        if not line:
            code = self._process.wait()
            raise BenchError(
                f"[bench] {self.name} died with exit code {code}; its last words: {self._tail()}"
            )
        try:
            answer = json.loads(line)
        except ValueError:
            raise BenchError(
                f"[bench] {self.name} answered what is no JSON: {line[:80]!r}"
            ) from None
        if not answer.get("ok"):
            raise BenchError(f"[bench] {self.name} failed: {answer.get('error')}")
        return answer  # type: ignore[no-any-return]  # a JSON object

    def _tail(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read()[-STDERR_TAIL_CHARS:].strip() or "(none)"


class ServerPeer:
    """A server with OpenAI's completions endpoint that takes token ids and ``ignore_eos``. A context manager."""

    def __init__(
        self, name: str, url: str, *, family: str | None = None, is_kvist: bool = False
    ) -> None:
        self.name = name
        self.family = family or name
        self.is_kvist = is_kvist
        self._url = url.rstrip("/").removesuffix("/v1")
        self._runner = asyncio.Runner()
        # As many connections as requests: none waits for another one's.
        self._http = httpx.AsyncClient(
            base_url=self._url, timeout=TIMEOUT_S, limits=httpx.Limits(max_connections=None)
        )
        self._model = ""
        try:
            self._runner.run(self._find_model())
        except BaseException:
            self.close()
            raise

    @property
    def describes(self) -> Mapping[str, Any]:  # Any: JSON values
        """The address and the model."""
        return {"url": self._url, "model": self._model}

    def run(self, row: str, batch: Batch) -> list[Output]:
        """See ``Peer.run``."""
        del row
        return self._runner.run(self._run(batch))

    def close(self) -> None:
        """Close the connections."""
        self._runner.run(self._http.aclose())
        self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _find_model(self) -> None:
        try:
            response = await self._http.get("/v1/models")
            self._model = response.raise_for_status().json()["data"][0]["id"]
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise BenchError(
                f"[bench] {self.name}: {self._url} is no server with an OpenAI API: {error!r}"
            ) from error

    async def _run(self, batch: Batch) -> list[Output]:
        try:
            async with asyncio.TaskGroup() as group:
                start_s = time.perf_counter()
                tasks = [
                    group.create_task(self._complete(prompt, batch.max_tokens, start_s))
                    for prompt in batch.prompts
                ]
        except* httpx.HTTPError as errors:
            raise BenchError(f"[bench] {self.name} failed: {errors.exceptions[0]!r}") from errors
        except* BenchError as errors:
            raise BenchError(str(errors.exceptions[0])) from errors
        return [task.result() for task in tasks]

    async def _complete(self, prompt: Prompt, max_tokens: int, start_s: float) -> Output:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        parts: list[str] = []
        times_s: list[float] = []
        usage: dict[str, Any] | None = None  # Any: JSON values
        async with self._http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                text = (await response.aread()).decode(errors="replace")
                raise BenchError(
                    f"[bench] {self.name} answered {response.status_code}: {text[:300]}"
                )
            async for line in response.aiter_lines():
                now_s = time.perf_counter()
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                usage = event.get("usage") or usage
                text = "".join(choice["text"] for choice in event.get("choices", []))
                if text:
                    parts.append(text)
                    times_s.append(now_s - start_s)
        if usage is None or not times_s:
            raise BenchError(f"[bench] {self.name} ended a stream without text or without usage")
        details = usage.get("prompt_tokens_details") or {}
        return Output(
            num_tokens=usage["completion_tokens"],
            token_ids=None,
            text="".join(parts),
            first_s=times_s[0],
            last_s=times_s[-1],
            num_cached_tokens=details.get("cached_tokens"),
        )
