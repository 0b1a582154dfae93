"""The dashboard at work: how soon the page shows news, and what watching costs the server and the browser. No model.

Starts a server of its own, whose engine is real but for the runner, which makes tokens up in the time a small model
would take. Its cache is filled with --blocks blocks of made-up prompts before it starts. Then requests come at --rate a
minute, and a page in a headless Chromium watches, pauses, watches again; the CPU time of both is taken each time.

latency     from the moment a client has its whole answer to the moment the page has drawn a document that is younger
server      CPU time of the server's process while the page watches, less that of the pause after, in percent of a core
browser     CPU time of all of Chromium's processes while the page watches, in percent of a core
hold        how long a survey keeps the engine's thread

Ends with one JSON line. With --shots FOLDER it also writes pictures of the page at 390 and 1440 px, light and dark.

    python -m benchmarks.dashboard [--blocks 50000] [--rate 200] [--pairs 6] [--seconds 15] [--shots /tmp/shots]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
from benchmarks.control_plane import machine
from tests.support.browser import chromium, find_chromium
from tests.support.engine_fakes import LETTERS, Parts, make_parts

from kvist.cache.namespaces import Namespace
from kvist.cli.serve import READY
from kvist.config import ServerConfig
from kvist.sched.output import SampledToken, StepResult
from kvist.server.run import serve
from kvist.types import TokenId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.browser import Page

    from kvist.sched.output import StepPlan

BLOCK_SIZE = 16
MAX_CONTEXT = 8192
STEP_S, TOKEN_S = 0.004, 40e-6
WARM_UP_S = 12.0
SETTLE_S = 2.0
TEXT = (
    "the mill turns when the fog comes in from the harbour and the keeper lights a lamp for every boat that has not "
    "come home yet while bells ring over the water and gulls sleep on the pier under ropes and nets"
)
WORDS = TEXT.split()
SYSTEMS = (
    "You keep the lighthouse of a small harbour. Answer sailors briefly and kindly, and never guess a depth.",
    "You are the clerk of the fog mill. Quote the operating manual by section, and say so when it is silent.",
    "Translate what the user writes into plain Swedish. Keep names, numbers and code as they are.",
    "You review changes to a payment service. Look for races, unchecked errors and secrets in logs.",
    "Extract a JSON object with the fields vessel, cargo, berth and eta from each message.",
    "You are a patient tutor of mathematics for children of ten. Ask one question at a time.",
)


class SlowRunner:
    """Answers every plan with letters, as late as a small model would."""

    def run(self, plan: StepPlan, meanwhile: Callable[[], None] | None = None) -> StepResult:
        """Choose a letter for every sequence that is due one."""
        if meanwhile is not None:
            meanwhile()
        num_tokens = sum(len(sequence.token_ids) for sequence in plan.sequences)
        time.sleep(STEP_S + TOKEN_S * num_tokens)
        samples = {}
        for sequence in plan.sequences:
            if sequence.sample is not None:
                place = (sequence.start * 7 + sequence.sample.output_index * 11) % len(LETTERS)
                samples[sequence.request_id] = SampledToken(token_id=TokenId(LETTERS[place]))
        return StepResult(step_index=plan.step_index, samples=samples)


def prose(chance: random.Random, num_words: int) -> str:
    return " ".join(chance.choices(WORDS, k=num_words)).capitalize() + "."


def prompts(seed: int) -> Iterator[str]:
    """Yield prompts as a busy server gets them: a few system prompts, documents below, conversations that go on."""
    chance = random.Random(seed)
    systems = [
        f"system: {text} {prose(random.Random(i), 60 + 50 * i)}\n" for i, text in enumerate(SYSTEMS)
    ]
    documents: list[str] = []
    conversations: list[str] = []
    while True:
        kind = chance.random()
        if kind < 0.5 and conversations:
            index = chance.randrange(max(0, len(conversations) - 40), len(conversations))
            conversations[index] += f"assistant: {prose(chance, 25)}\nuser: {prose(chance, 12)}\n"
            if len(conversations[index]) < MAX_CONTEXT // 2:
                yield conversations[index]
            continue
        if kind < 0.62:
            yield f"system: request {chance.randrange(10**9):09}. {prose(chance, 90)}\nuser: {prose(chance, 20)}\n"
            continue
        system = chance.choices(systems, weights=(8, 6, 4, 3, 2, 1))[0]
        if kind < 0.75 or not documents:
            documents.append(f"{system}document: {prose(chance, 150)}\n")
        base = chance.choice(documents[-12:]) if kind < 0.9 else system
        conversations.append(f"{base}user: {prose(chance, 14)}\n")
        yield conversations[-1]


def fill(parts: Parts, num_blocks: int, tenant: str = "") -> None:
    """Put prompts into the cache until it holds about so many blocks."""
    manager = parts.manager
    own = parts.core._namespace  # noqa: SLF001  # where the engine's own requests look
    namespace = Namespace(model=own.model, tenant=tenant, layout=own.layout)
    for prompt in prompts(seed=1):
        if manager.num_blocks - manager.num_free >= num_blocks:
            return
        token_ids = list(prompt.encode())
        chain = manager.new_chain(namespace, token_ids)
        lease = manager.admit(manager.lookup(chain, len(token_ids) - 1), chain, len(token_ids))
        assert lease is not None
        manager.extend(lease, len(token_ids))
        manager.commit(lease, chain, len(token_ids))
        manager.release(lease)


def run_server(num_blocks: int) -> None:
    """Serve until the parent goes away."""
    parts = make_parts(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        kv_bytes=num_blocks * BLOCK_SIZE * 2 * 30 * 3 * 64 * 2,
        max_context_len=MAX_CONTEXT,
        max_batch_tokens=512,
        reserve_tokens=32,
    )
    parts.core._runner = SlowRunner()  # noqa: SLF001  # the only part that is not real
    fill(parts, int(num_blocks * 0.93))
    with parts.engine as engine:
        serve(engine, ServerConfig(port=0))


@dataclass
class Load:
    """Requests at a steady rate, from a thread of its own."""

    url: str
    rate: float
    finished_at: list[float] = field(default_factory=list)
    """Of each answer, on the monotonic clock."""
    num_errors: int = 0

    def __post_init__(self) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()

    def stop(self) -> None:
        """Send no more, and wait for what was sent."""
        self._stop.set()
        self._thread.join()

    async def _run(self) -> None:
        # Other documents and conversations than those in the cache, below the same system prompts.
        source, chance = prompts(seed=2), random.Random(3)
        async with httpx.AsyncClient(base_url=self.url, timeout=60) as client:
            tasks = set()
            while not self._stop.is_set():
                task = asyncio.create_task(self._send(client, next(source)))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                await asyncio.sleep(chance.expovariate(self.rate / 60))
            await asyncio.gather(*tasks)

    async def _send(self, client: httpx.AsyncClient, prompt: str) -> None:
        body = {
            "model": "fake",
            "prompt": prompt,
            "max_tokens": 24,
            "temperature": 0,
            "ignore_eos": True,
        }
        answer = await client.post("/v1/completions", json=body)
        self.num_errors += answer.status_code != 200
        self.finished_at.append(time.perf_counter())


def cpu_seconds(*roots: int) -> float:
    """Return the CPU time of processes and of all their descendants that live."""
    times, children = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            times[int(folder.name)] = int(fields[11]) + int(fields[12])
            children.setdefault(int(fields[1]), []).append(int(folder.name))
    ticks, stack = 0, list(roots)
    while stack:
        pid = stack.pop()
        ticks += times.get(pid, 0)
        stack += children.get(pid, [])
    return ticks / os.sysconf("SC_CLK_TCK")


def latencies(page: Page, load: Load, since: float, until: float) -> list[float]:
    """Return how long after each answer the page had drawn a document that is younger, in seconds."""
    offset = time.time() - time.perf_counter()
    draws = [(float(now), wall / 1000 - offset) for now, wall in page.evaluate("window.draws")]
    found = []
    for at in load.finished_at:
        shown = [drawn for now, drawn in draws if now >= at]
        if since <= at < until and shown:
            found.append(min(shown) - at)
    return found


WATCH_DRAWS = """
window.draws = [];
new MutationObserver(() => window.draws.push([document.documentElement.dataset.drawn, Date.now()]))
  .observe(document.documentElement, { attributes: true, attributeFilter: ["data-drawn"] });
"""


def take_pictures(url: str, folder: Path) -> None:
    """Write the page in four ways."""
    folder.mkdir(parents=True, exist_ok=True)
    with chromium() as browser:
        for width, height, scale in ((390, 844, 2.0), (1440, 900, 1.0)):
            for scheme in ("light", "dark"):
                page = browser.open(width=width, height=height, scheme=scheme, scale=scale)
                page.go(f"{url}/dashboard")
                page.wait_for("document.documentElement.dataset.drawn")
                tall = page.evaluate("document.documentElement.scrollHeight")
                page.resize(width, tall, scale)
                page.wait_for("document.querySelectorAll('.node').length > 10")
                drawn = page.evaluate("document.documentElement.dataset.drawn")
                page.wait_for(f"document.documentElement.dataset.drawn > {drawn} + 2")
                page.resize(width, page.evaluate("document.documentElement.scrollHeight"), scale)
                drawn = page.evaluate("document.documentElement.dataset.drawn")
                page.wait_for(f"document.documentElement.dataset.drawn > {drawn} + 1")
                page.screenshot(folder / f"dashboard-{width}-{scheme}.png")
                page.close()


def measure(url: str, server: int, arguments: argparse.Namespace) -> dict[str, object]:
    """Return what was found, in windows with and without a watcher that take turns."""
    alone, watched, browsers, waits = [], [], [], []
    load = Load(url, arguments.rate)
    try:
        with chromium() as browser:
            page = browser.open(width=1440, height=900)
            page.go(f"{url}/dashboard")
            page.wait_for("document.documentElement.dataset.drawn")
            page.evaluate(WATCH_DRAWS)
            pause = "document.getElementById('pause').click()"
            time.sleep(WARM_UP_S)
            for _ in range(arguments.pairs):
                since = time.perf_counter()
                before = cpu_seconds(server), cpu_seconds(browser.process.pid)
                time.sleep(arguments.seconds)
                spent = time.perf_counter() - since
                watched.append(100 * (cpu_seconds(server) - before[0]) / spent)
                browsers.append(100 * (cpu_seconds(browser.process.pid) - before[1]) / spent)
                until = time.perf_counter()
                time.sleep(SETTLE_S)
                waits += latencies(page, load, since, until)
                page.evaluate(pause)
                time.sleep(SETTLE_S)
                since, quiet = time.perf_counter(), cpu_seconds(server)
                time.sleep(arguments.seconds)
                alone.append(100 * (cpu_seconds(server) - quiet) / (time.perf_counter() - since))
                page.evaluate(pause)
                time.sleep(SETTLE_S)
            problems = page.problems()
    finally:
        load.stop()
    overheads = [on - off for on, off in zip(watched, alone, strict=True)]
    return {
        "num_requests": len(load.finished_at),
        "num_errors": load.num_errors,
        "num_shown": len(waits),
        "num_shown_after_1_s": sum(wait > 1.0 for wait in waits),
        "latency_s": spread(waits, 3),
        "server_alone_percent": spread(alone, 1),
        "server_watched_percent": spread(watched, 1),
        "server_overhead_percent": spread(overheads, 1),
        "browser_percent": spread(browsers, 1),
        "page_problems": problems,
    }


def spread(samples: list[float], digits: int) -> dict[str, float]:
    """Return median, least and most."""
    found = {"median": statistics.median(samples), "min": min(samples), "max": max(samples)}
    return {name: round(value, digits) for name, value in found.items()}


def survey_holds(num_blocks: int) -> dict[str, float]:
    """Return how long a survey of a full cache takes the thread that makes it, in milliseconds of its CPU time."""
    parts = make_parts(num_blocks=num_blocks, block_size=BLOCK_SIZE)
    fill(parts, int(num_blocks * 0.93))
    samples = []
    for _ in range(20):
        start = time.thread_time_ns()
        parts.manager.survey()
        samples.append((time.thread_time_ns() - start) / 1e6)
    return {"median_ms": round(statistics.median(samples), 2), "max_ms": round(max(samples), 2)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--blocks", type=int, default=50_000)
    parser.add_argument("--rate", type=float, default=200.0, help="requests a minute")
    parser.add_argument(
        "--seconds", type=float, default=15.0, help="of each window; 0: pictures only"
    )
    parser.add_argument(
        "--pairs", type=int, default=6, help="windows with a watcher, and as many without"
    )
    parser.add_argument("--shots", type=Path, help="write pictures of the page into this folder")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        run_server(arguments.blocks)
        return 0
    if find_chromium() is None:
        raise SystemExit(
            "no Chromium is here; install one (on Debian: chromium), or set KVIST_TEST_CHROMIUM"
        )
    command = [sys.executable, __file__, "--serve", "--blocks", str(arguments.blocks)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            if not line.startswith(READY):
                raise SystemExit(f"the server did not start: {line!r}")
            url = line.removeprefix(READY).strip()
            results = measure(url, server.pid, arguments) if arguments.seconds else {}
            if arguments.shots:
                load = Load(url, arguments.rate)
                try:
                    time.sleep(0 if arguments.seconds else 3 * WARM_UP_S)
                    take_pictures(url, arguments.shots)
                finally:
                    load.stop()
        finally:
            server.terminate()
    print(
        json.dumps(
            {
                "benchmark": "dashboard",
                "machine": machine(),
                "num_blocks": arguments.blocks,
                "requests_per_minute": arguments.rate,
                "hold": survey_holds(arguments.blocks) if arguments.seconds else None,
                **results,
            }
        )
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
