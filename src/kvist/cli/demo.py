"""``kvist demo``: what the prompt cache is worth, shown with a real server, a real model and a long document.

Every figure is measured at the client over HTTP. The steps, in order, on a fresh server:

    cold     the document and a first question: everything is computed
    warm     the same document, two new questions: only the question is computed
    fork     the document with a note put into its middle: the first half is reused
    fan-out  the document and eight questions at once
"""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from kvist.cli.child_server import child_server
from kvist.cli.console import note, note_console, print_json, result_console, working
from kvist.cli.models import ensure_available
from kvist.cli.options import SINGLE_TENANT, takes_options
from kvist.cli.turn import format_seconds
from kvist.config import EngineConfig
from kvist.errors import RequestError

if TYPE_CHECKING:
    from rich.console import Console

    from kvist.cli.client import Answer, Client

SHIPPED_DOCUMENT = "demo_document.txt"

QUESTIONS = (
    "How many litres does the settling tank hold?",
    "How much does the mill weigh?",
    "What is the name of the machine?",
)
"""About the shipped document: cold, warm, warm."""

FANOUT_QUESTIONS = (
    "Who was the founder of the works?",
    "With what is the governor sealed?",
    "What are the sails made of?",
    "Where is Ida Brannock's first mill?",
    "How many combs does the drum carry?",
    "What does the red lever do?",
    "What should the keeper do if there is ice?",
    "Why should you not use vinegar?",
)
"""About the shipped document, all at once."""

GENERAL_QUESTIONS = (
    "What is this document about?",
    "What does the document begin with?",
    "What does the document end with?",
)
"""About a document of the user's own: cold, warm, warm."""

GENERAL_FANOUT_QUESTIONS = (
    "What is the main point of this document?",
    "Who is this document written for?",
    "Name one fact from this document.",
    "Name one number from this document.",
    "Name one person or thing in this document.",
    "What would be a good title for this document?",
    "What should a reader remember?",
    "Write one question that this document answers.",
)
"""About a document of the user's own, all at once."""

FORK_NOTE = "A note in pencil: the spare key hangs behind the kitchen clock."
FORK_QUESTION = "Where does the spare key hang?"

MIN_MAX_TOKENS = 2
"""One token gives no speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One row of the table: the answers of one step."""

    name: str
    questions: tuple[str, ...]
    answers: tuple[Answer, ...]
    wall_s: float
    """From the first request sent to the last answer ended."""

    @property
    def ttft_s(self) -> float:
        """Median over the answers."""
        return statistics.median(answer.ttft_s for answer in self.answers)

    @property
    def num_prompt_tokens(self) -> int:
        """Sum over the answers."""
        return sum(answer.num_prompt_tokens for answer in self.answers)

    @property
    def num_cached_tokens(self) -> int:
        """Sum over the answers."""
        return sum(answer.num_cached_tokens for answer in self.answers)

    @property
    def num_output_tokens(self) -> int:
        """Sum over the answers."""
        return sum(answer.num_output_tokens for answer in self.answers)

    @property
    def output_tokens_per_s(self) -> float | None:
        """One answer: its speed after the first token. Several: all their tokens over the wall time."""
        if len(self.answers) == 1:
            return self.answers[0].output_tokens_per_s
        return self.num_output_tokens / self.wall_s


@takes_options
def demo(
    *,
    document: Annotated[
        Path | None,
        typer.Option(help="text to ask about; default: the shipped manual", show_default=False),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(help="output tokens of each answer at most", min=MIN_MAX_TOKENS)
    ] = 40,
    port: Annotated[
        int, typer.Option(help="port of the server; 0 picks a free one", max=65535, min=0)
    ] = 0,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="print the numbers as one line of JSON; the table goes to stderr"
        ),
    ] = False,
    config: Annotated[EngineConfig, SINGLE_TENANT],
) -> None:
    """Start a real server, ask about a long document, and show what the cache saves."""
    text = _read_document(document)
    ensure_available(config.model.model)
    start_s = time.monotonic()
    note(f"starting kvist serve --model {config.model.model}")
    with child_server(config, port) as url:
        note(f"ready at {url} after {time.monotonic() - start_s:.1f} s")
        is_own = document is not None
        questions = GENERAL_QUESTIONS if is_own else QUESTIONS
        fanout = GENERAL_FANOUT_QUESTIONS if is_own else FANOUT_QUESTIONS
        steps = asyncio.run(_run_steps(url, Script(text, questions, fanout, max_tokens)))
    console = note_console() if as_json else result_console()
    _show(console, steps, num_document_bytes=len(text.encode()))
    note(f"server ended; {time.monotonic() - start_s:.0f} s in all")
    if as_json:
        print_json(_document(config.model.model, steps, num_document_bytes=len(text.encode())))


@dataclass(frozen=True, slots=True)
class Script:
    """What the demo asks."""

    document: str
    questions: tuple[str, ...]
    """Cold, warm, warm."""
    fanout_questions: tuple[str, ...]
    max_tokens: int


async def _run_steps(url: str, script: Script) -> list[Step]:
    from kvist.cli.client import Client  # noqa: PLC0415  # 0.2 s that other commands need not wait for

    cold, *warm = script.questions
    async with Client(url) as client:
        await client.warm_up()
        asker = _Asker(client, script.max_tokens)
        return [
            await asker.step("cold", script.document, cold),
            *[await asker.step("warm", script.document, question) for question in warm],
            await asker.step("fork", forked(script.document), FORK_QUESTION),
            await asker.step("fan-out", script.document, *script.fanout_questions),
        ]


class _Asker:
    """Runs the steps one after the other, and says so."""

    def __init__(self, client: Client, max_tokens: int) -> None:
        self._client = client
        self._max_tokens = max_tokens

    async def step(self, name: str, document: str, *questions: str) -> Step:
        what = questions[0] if len(questions) == 1 else f"{len(questions)} questions at once"
        conversations = [messages_for(document, question) for question in questions]
        with working(f"{name}: {what}"):
            start_s = time.perf_counter()
            answers = await self._client.ask_all(conversations, self._max_tokens)
            wall_s = time.perf_counter() - start_s
        step = Step(name=name, questions=questions, answers=tuple(answers), wall_s=wall_s)
        note(
            f"{name}: {what} {format_seconds(step.ttft_s)} to the first text, "
            f"{step.num_cached_tokens:,} of {step.num_prompt_tokens:,} tokens reused"
        )
        return step


def messages_for(document: str, question: str) -> list[dict[str, str]]:
    """Return the conversation that asks one question; the document comes first, so that all of them share it."""
    return [
        {
            "role": "system",
            "content": f"Answer the question in one short sentence, from this document.\n\n{document}",
        },
        {"role": "user", "content": question},
    ]


def forked(document: str) -> str:
    """Return the document with a note between the two paragraphs nearest to its middle."""
    paragraphs = document.split("\n\n")
    ends = [0]
    for paragraph in paragraphs:
        ends.append(ends[-1] + len(paragraph) + 2)
    middle = min(range(len(ends)), key=lambda index: abs(ends[index] - len(document) / 2))
    return "\n\n".join([*paragraphs[:middle], FORK_NOTE, *paragraphs[middle:]])


def _read_document(path: Path | None) -> str:
    if path is None:
        shipped = resources.files("kvist.cli").joinpath(SHIPPED_DOCUMENT)
        return shipped.read_text(encoding="utf-8")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"[demo] --document must be UTF-8 text: {error}", param="document"
        ) from error
    if not text.strip():
        raise RequestError(f"[demo] --document {path} is empty", param="document")
    return text


def _show(console: Console, steps: list[Step], *, num_document_bytes: int) -> None:
    table = Table(
        box=SIMPLE,
        show_edge=False,
        padding=(0, 1, 0, 0),
        title=f"one document of {num_document_bytes / 1000:.0f} kB, asked over HTTP",
        title_justify="left",
    )
    table.add_column("step", no_wrap=True)
    for name in ("TTFT", "vs cold", "prompt", "reused", "computed", "output", "tokens/s"):
        table.add_column(name, justify="right")
    cold_s = steps[0].ttft_s
    for step in steps:
        speed = step.output_tokens_per_s
        count = len(step.answers)
        table.add_row(
            step.name if count == 1 else f"{step.name} x{count}",
            format_seconds(step.ttft_s),
            "" if step is steps[0] else f"{cold_s / step.ttft_s:.1f}x",
            f"{step.num_prompt_tokens:,}",
            f"{step.num_cached_tokens:,}",
            f"{step.num_prompt_tokens - step.num_cached_tokens:,}",
            str(step.num_output_tokens),
            "-" if speed is None else f"{speed:.1f}",
        )
    console.print()
    console.print(table)
    last = steps[-1]
    console.print(
        f"{len(last.answers)} answers at once took {last.wall_s:.2f} s; their TTFT is the median, tokens are sums.",
        style="dim",
    )
    console.print()
    for step in steps:
        for question, answer in zip(step.questions, step.answers, strict=True):
            text = " ".join(answer.text.split())
            console.print(Text.assemble((f"{step.name}: {question} ", "bold"), text))
    console.print(
        "A model of this size often answers wrongly, with or without a cache.",
        style="dim",
    )


def _document(
    model: str, steps: list[Step], *, num_document_bytes: int
) -> dict[str, Any]:  # Any: JSON values
    cold, warm, fork, fanout = steps[0], steps[1], steps[-2], steps[-1]
    return {
        "model": model,
        "document_bytes": num_document_bytes,
        "cold_ttft_s": cold.ttft_s,
        "cold_prompt_tokens": cold.num_prompt_tokens,
        "warm_ttft_s": warm.ttft_s,
        "warm_reused_tokens": warm.num_cached_tokens,
        "warm_computed_tokens": warm.num_prompt_tokens - warm.num_cached_tokens,
        "warm_speedup": cold.ttft_s / warm.ttft_s,
        "fork_ttft_s": fork.ttft_s,
        "fork_reused_tokens": fork.num_cached_tokens,
        "fanout_wall_s": fanout.wall_s,
        "fanout_output_tokens_per_s": fanout.output_tokens_per_s,
        "steps": [
            {
                "name": step.name,
                "ttft_s": [answer.ttft_s for answer in step.answers],
                "wall_s": step.wall_s,
                "prompt_tokens": [answer.num_prompt_tokens for answer in step.answers],
                "reused_tokens": [answer.num_cached_tokens for answer in step.answers],
                "output_tokens": [answer.num_output_tokens for answer in step.answers],
                "answers": [answer.text for answer in step.answers],
            }
            for step in steps
        ],
    }
