"""What a decode step costs outside the kernels: scheduling, arrays, sampling, text, and the way to the client.

One stream, or several, decode greedily. A step lasts from one call of the native step to the next; less the time from
the first kernel to the last in between, that is what it costs outside the kernels. Measured the same way in three
places:

    core     the step loop's body alone, driven by this thread
    engine   the engine's own thread, with readers on an event loop in this process
    server   the same behind HTTP, with a client in another process that reads the streamed answers

What is done while kernels run (text, streams, the event loop) takes time from them on the same cores: that shows in the
kernels' time of a step, which is printed too. Ends with one JSON line for each place.

    python -m benchmarks.step_overhead [--at core,engine,server] [--streams 1] [--context 512] [--steps 300]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import sys
import threading
import time
from http.client import HTTPConnection
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.control_plane import machine
from benchmarks.native_model import load_native

from kvist.config import ServerConfig
from kvist.engine.async_engine import AsyncEngine
from kvist.engine.build import assemble
from kvist.engine.core import RequestGroup
from kvist.errors import KernelUnavailable
from kvist.model.tokenizer import load_tokenizer
from kvist.server.run import serve
from kvist.types import SamplingParams, TokenId

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvist.engine.core import EngineCore
    from kvist.model.native_decoder import NativeDecoder, StepScores, StepSequence
    from kvist.server.run import RunningServer
    from kvist.storage.arena import BlockArena

WARM_UP = 20
"""Steps before those that are measured."""


class Mark(NamedTuple):
    """One call of the native step."""

    called_s: float
    """When it was called."""
    kernels_s: float
    """How long kernels had run by then, since the start."""
    begun_s: float
    """When it began: the time between was the probe's own."""


class Probe:
    """Stands before a decoder's step and notes when each one is called, and how long kernels have run by then.

    Args:
        decoder: Its ``step`` is replaced.
        num_streams: Steps of another number of sequences, or of more than a token of one, are not measured.
    """

    def __init__(self, decoder: NativeDecoder, num_streams: int) -> None:
        self._decoder = decoder
        self._step = decoder.step
        self._num_streams = num_streams
        self._marks: list[Mark] = []
        decoder.step = self.step

    def step(
        self, sequences: list[StepSequence], arena: BlockArena, meanwhile: Callable[[], None] | None
    ) -> StepScores:
        """Do as the decoder's."""
        called_s = time.perf_counter()
        if len(sequences) == self._num_streams and all(len(s.token_ids) == 1 for s in sequences):
            kernels_s = sum(self._decoder.phase_seconds().values())
            self._marks.append(Mark(called_s, kernels_s, time.perf_counter()))
        return self._step(sequences, arena, meanwhile)

    def take(self) -> tuple[list[float], list[float]]:
        """Return the microseconds of each step since the last call, and those in its kernels."""
        marks, self._marks = self._marks[WARM_UP:], []
        pairs = list(pairwise(marks))
        return (
            [1e6 * (after.called_s - before.begun_s) for before, after in pairs],
            [1e6 * (after.kernels_s - before.kernels_s) for before, after in pairs],
        )


class Work:
    """The streams that are decoded."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        length = arguments.context
        self.prompts = [
            tuple(TokenId(1000 + (i + 31 * stream) % 20000) for i in range(length))
            for stream in range(arguments.streams)
        ]
        self.params = SamplingParams(
            temperature=0, max_tokens=arguments.steps + WARM_UP + 2, ignore_eos=True
        )


def run_core(core: EngineCore, work: Work) -> None:
    """Step the core until all streams have ended."""
    for index, prompt in enumerate(work.prompts):
        core.add(RequestGroup(request_id=f"s{index}", prompt_token_ids=prompt, params=work.params))
    while core.has_work:
        core.compute(core.take_outputs)
    core.take_outputs()


def run_engine(engine: AsyncEngine, work: Work) -> None:
    """Read all streams on one event loop."""

    async def read(prompt: Sequence[TokenId]) -> None:
        async for _ in engine.submit(prompt, work.params):
            pass

    async def read_all() -> None:
        await asyncio.gather(*map(read, work.prompts))

    asyncio.run(read_all())


def run_server(engine: AsyncEngine, work: Work) -> None:
    """Serve on a free port until a client in another process has read all streams."""
    bodies = [
        json.dumps(
            {
                "model": engine.model_name,
                "prompt": prompt,
                "max_tokens": work.params.max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
        )
        for prompt in work.prompts
    ]

    def follow(server: RunningServer, client: multiprocessing.Process) -> None:
        client.join()
        server.stop()

    def begin(server: RunningServer) -> None:
        spawn = multiprocessing.get_context("spawn")
        client = spawn.Process(target=read_streams, args=(server.port, bodies))
        client.start()
        threading.Thread(target=follow, args=(server, client)).start()

    serve(engine, ServerConfig(port=0), begin)


def read_streams(port: int, bodies: Sequence[str]) -> None:
    """Post each body on a connection of its own, and read the answers as they come."""

    def read(body: str) -> None:
        connection = HTTPConnection("127.0.0.1", port)
        connection.request(
            "POST", "/v1/completions", body=body, headers={"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        while answer.read1():
            pass
        connection.close()

    readers = [threading.Thread(target=read, args=(body,)) for body in bodies]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--weights", default="auto", help="as kvist serve --weights")
    parser.add_argument("--at", default="core,engine,server", help="places, in this order")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--context", type=int, default=512, help="prompt tokens of each stream")
    parser.add_argument("--steps", type=int, default=300, help="decode steps measured")
    arguments = parser.parse_args()
    places = arguments.at.split(",")
    if not set(places) <= {"core", "engine", "server"}:
        parser.error(f"--at takes core, engine and server, received {arguments.at}")
    try:
        path, plan, decoder = load_native(arguments.model, arguments.weights)
    except KernelUnavailable as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    tokenizer = load_tokenizer(path)
    probe, work = Probe(decoder, arguments.streams), Work(arguments)
    for place in places:
        core = assemble(plan, decoder, tokenizer, "benchmark")
        if place == "core":
            run_core(core, work)
            core.close()
        else:
            run: Callable[[AsyncEngine, Work], None] = (
                run_engine if place == "engine" else run_server
            )
            with AsyncEngine(core, tokenizer, plan) as engine:
                run(engine, work)
        step_us, kernels_us = probe.take()
        figures = {
            "step_us": summary(step_us),
            "kernels_us": summary(kernels_us),
            "outside_kernels_us": summary(
                [step - kernels for step, kernels in zip(step_us, kernels_us, strict=True)]
            ),
        }
        for name, values in figures.items():
            row = "  ".join(f"{key} {value:8.1f}" for key, value in values.items())
            print(f"{place:8} {name:20} {row}")
        document = {
            "benchmark": "step_overhead",
            "at": place,
            "streams": arguments.streams,
            "context": arguments.context,
            "steps": len(step_us),
            **figures,
            "plan": plan.one_line(),
            "machine": machine(),
        }
        print(json.dumps(document))
    return 0


def summary(values: list[float]) -> dict[str, float]:
    """Return median, 10th and 90th percentile."""
    deciles = statistics.quantiles(values, n=10)
    return {"median": statistics.median(values), "p10": deciles[0], "p90": deciles[-1]}


if __name__ == "__main__":
    sys.exit(main())
