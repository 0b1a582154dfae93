"""A real server under a memory limit and random clients for a long time: does it stay flat, and does it only say 429?

Starts `kvist serve` with a limit on its address space (`ulimit -v`), a small queue and little KV memory. Each client
sends random requests for --minutes: whole answers, streams read to the end, streams dropped half-way, prompts with and
without a common beginning, with and without max_tokens. The queue is shorter than the clients are many, so some are
refused. Samples the server's resident memory every second; drift is the mean of the last tenth after warm-up against
that of the first tenth. Ends with one JSON line; exit code 1 if there was any error but 429 or the server died.

    python -m benchmarks.soak [--minutes 30] [--clients 64] [--memory-limit-gib 8]
    python -m benchmarks.soak --minutes 1 --clients 16        # a smoke run
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from benchmarks.control_plane import machine

from kvist.cli.serve import READY
from kvist.spec import GIB

START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 20.0
REQUEST_TIMEOUT_S = 300.0
SAMPLE_INTERVAL_S = 1.0
WORDS = [
    "the",
    "river",
    "runs",
    "past",
    "old",
    "mills",
    "and",
    "under",
    "a",
    "stone",
    "bridge",
    "where",
    "boats",
    "wait",
    "for",
    "rain",
    "in",
    "spring",
]


@dataclass
class Tally:
    """What the clients saw."""

    outcomes: Counter[str] = field(default_factory=Counter)
    """Requests by outcome; those beginning with "error" must not be."""
    num_output_tokens: int = 0


def start_server(arguments: argparse.Namespace, log: object) -> tuple[subprocess.Popen[bytes], str]:
    """Return the server's process and address once it is ready."""
    limit = int(arguments.memory_limit_gib * GIB)

    def limit_memory() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    command = [
        sys.executable, "-m", "kvist", "serve", "--port", "0", "--model", arguments.model,
        "--memory-gib", str(arguments.kv_gib), "--max-context", str(arguments.max_context),
        "--max-queue", str(max(1, arguments.clients // 4)), "--max-running", "16",
    ]  # fmt: skip
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=log,  # type: ignore[call-overload]  # a temporary file
        preexec_fn=limit_memory,  # noqa: PLW1509  # no threads yet
        start_new_session=True,
    )
    assert process.stdout is not None
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        line = process.stdout.readline().decode()
        if line.startswith(READY):
            return process, line.removeprefix(READY).strip()
        if not line:
            break
    process.kill()
    raise SystemExit(f"the server did not become ready (exit code {process.wait()})")


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def random_body(rng: random.Random, model: str, max_context: int) -> dict[str, object]:
    """Return a random completion request, some with a prompt in common."""
    own = rng.choices(WORDS, k=rng.randrange(1, max_context // 4))
    shared = WORDS * (max_context // 8 // len(WORDS)) if rng.random() < 0.5 else []
    body: dict[str, object] = {
        "model": model,
        "prompt": " ".join(shared + own),
        "temperature": rng.choice((0, 0.8)),
        "seed": rng.randrange(1000),
    }
    if rng.random() < 0.9:
        body["max_tokens"] = rng.randrange(1, 48)
    return body


async def send(
    client: httpx.AsyncClient, rng: random.Random, arguments: argparse.Namespace, tally: Tally
) -> str:
    """Send one random request; return its outcome."""
    body = random_body(rng, arguments.model, arguments.max_context)
    is_stream = rng.random() < 0.6
    drop_after = rng.randrange(1, 12) if is_stream and rng.random() < 0.3 else None
    if "max_tokens" not in body and drop_after is None:
        # Nobody reads up to the context limit.
        is_stream, drop_after = True, rng.randrange(1, 12)
    try:
        if not is_stream:
            response = await client.post("/v1/completions", json=body)
            if response.status_code == 200:
                tally.num_output_tokens += response.json()["usage"]["completion_tokens"]
            return status_of(response)
        async with client.stream(
            "POST", "/v1/completions", json=body | {"stream": True}
        ) as response:
            if response.status_code != 200:
                await response.aread()
                return status_of(response)
            return await read_stream(response, drop_after, tally)
    except httpx.HTTPError as error:
        return f"error: {type(error).__name__}"


async def read_stream(response: httpx.Response, drop_after: int | None, tally: Tally) -> str:
    """Read a stream to its end, or so many events of it; return its outcome."""
    num_events = 0
    async for line in response.aiter_lines():
        if line.startswith("data: [DONE]"):
            return "streamed"
        if line.startswith("data: "):
            if "error" in json.loads(line.removeprefix("data: ")):
                return "error in a stream"
            num_events += 1
            tally.num_output_tokens += 1
            if num_events == drop_after:
                return "dropped by the client"
    return "error: a stream without an end"


def status_of(response: httpx.Response) -> str:
    """Name the outcome of a response that is no stream."""
    if response.status_code == 200:
        return "answered"
    if response.status_code == 429:
        return "429" if "retry-after" in response.headers else "error: 429 without Retry-After"
    return f"error: status {response.status_code}"


async def be_a_client(
    url: str, seed: int, end_s: float, arguments: argparse.Namespace, tally: Tally
) -> None:
    """Send requests until the time is over."""
    rng = random.Random(seed)
    limits = httpx.Limits(max_connections=1)
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_TIMEOUT_S, limits=limits) as client:
        while time.monotonic() < end_s:
            outcome = await send(client, rng, arguments, tally)
            tally.outcomes[outcome] += 1
            if outcome == "429":
                await asyncio.sleep(rng.random())
            elif outcome.startswith("error"):
                await asyncio.sleep(0.5)


async def sample_memory(process: subprocess.Popen[bytes], end_s: float) -> list[int]:
    """Return the server's resident memory, once a second until the time is over or it has died."""
    samples = []
    while time.monotonic() < end_s and process.poll() is None:
        samples.append(resident_bytes(process.pid))
        await asyncio.sleep(SAMPLE_INTERVAL_S)
    return samples


async def soak(
    url: str, process: subprocess.Popen[bytes], arguments: argparse.Namespace
) -> tuple[Tally, list[int]]:
    tally = Tally()
    end_s = time.monotonic() + 60 * arguments.minutes
    clients = [
        be_a_client(url, arguments.seed + index, end_s, arguments, tally)
        for index in range(arguments.clients)
    ]
    samples, *_ = await asyncio.gather(sample_memory(process, end_s), *clients)
    return tally, samples


def drift_of(samples: list[int], warm_up_fraction: float) -> float | None:
    """Return the growth from the first to the last tenth after warm-up; None of too few samples."""
    flat = samples[int(len(samples) * warm_up_fraction) :]
    tenth = len(flat) // 10
    if tenth == 0:
        return None
    return statistics.mean(flat[-tenth:]) / statistics.mean(flat[:tenth]) - 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument(
        "--memory-limit-gib", type=float, default=8.0, help="address space of the server"
    )
    parser.add_argument("--kv-gib", type=float, default=0.25, help="KV memory of the server")
    parser.add_argument("--max-context", type=int, default=512)
    parser.add_argument("--warm-up-fraction", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process, url = start_server(arguments, log)
        try:
            tally, samples = asyncio.run(soak(url, process, arguments))
            has_died = process.poll() is not None
            stats = None if has_died else httpx.get(f"{url}/v1/cache/stats", timeout=30.0).json()
            process.send_signal(signal.SIGTERM)
            exit_code = process.wait(STOP_TIMEOUT_S)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        log.seek(0)
        words = log.read()
    errors = {name: count for name, count in tally.outcomes.items() if name.startswith("error")}
    drift = drift_of(samples, arguments.warm_up_fraction)
    document = {
        "benchmark": "soak",
        "minutes": arguments.minutes,
        "clients": arguments.clients,
        "memory_limit_gib": arguments.memory_limit_gib,
        "outcomes": dict(tally.outcomes),
        "errors": errors,
        "output_tokens": tally.num_output_tokens,
        "rss_mib": {
            "first": samples[0] / 2**20,
            "max": max(samples) / 2**20,
            "last": samples[-1] / 2**20,
            "every_minute": [round(value / 2**20, 1) for value in samples[::60]],
        },
        "drift_after_warm_up": drift,
        "has_died": has_died,
        "exit_code": exit_code,
        "server_stats": stats,
        "machine": machine(),
    }
    for name, count in tally.outcomes.most_common():
        print(f"{count:8} {name}")
    shown = "too few samples" if drift is None else f"{drift:+.2%}"
    print(
        f"resident memory {samples[0] / 2**20:.0f} -> {samples[-1] / 2**20:.0f} MiB, drift after warm-up {shown}"
    )
    if errors or has_died:
        print(f"the server's last words: {words[-2000:]}")
    print(json.dumps(document))
    return 1 if errors or has_died or exit_code != 0 else 0


if __name__ == "__main__":
    sys.exit(main())
