"""``kvist chat``: a conversation with a model in the terminal.

Each turn sends the whole history through the chat template; the cache makes that cheap, and the line below each answer
shows it.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from kvist.cli.console import note, note_console
from kvist.cli.models import running_engine
from kvist.cli.options import SINGLE_TENANT, takes_options
from kvist.cli.turn import run_turn
from kvist.config import EngineConfig
from kvist.errors import RequestError
from kvist.types import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvist.engine.async_engine import AsyncEngine
    from kvist.types import OutputChunk

HELP = """/reset            forget the conversation, keep the system message
/system TEXT      set the system message and start again; without TEXT, remove it
/stats            show what the cache has saved so far
/quit             leave (so does Ctrl-D)"""
"""What ``/help`` shows."""


@dataclass(slots=True)
class Conversation:
    """The messages so far, as the chat template wants them."""

    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def with_user(self, text: str) -> list[dict[str, str]]:
        """Return the messages to send for a new user text; the conversation itself does not change."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.messages, {"role": "user", "content": text}]

    def add(self, user: str, assistant: str) -> None:
        """Append one finished turn."""
        self.messages.append({"role": "user", "content": user})
        self.messages.append({"role": "assistant", "content": assistant})


@takes_options
def chat(
    *,
    system: Annotated[str | None, typer.Option(help="system message", show_default=False)] = None,
    config: Annotated[EngineConfig, SINGLE_TENANT],
    sampling: SamplingParams,
) -> None:
    """Talk with a model; /help lists the commands. Piped input is answered line by line."""
    # A conversation has one answer per turn; several would leave no single history to go on with.
    if sampling.n != 1:
        raise RequestError(
            "[chat] --n must be 1 in a conversation; use `kvist generate --n`", param="n"
        )
    with running_engine(config) as engine:
        if sys.stdin.isatty():
            note(f"{config.model.model}: /help lists the commands, Ctrl-D leaves")
        session = Session(engine, sampling, Conversation(system=system))
        for line in _lines():
            if not session.handle(line):
                break


class Session:
    """One conversation with one engine.

    Args:
        engine: A started engine; the caller closes it.
        sampling: Used for every turn.
        conversation: Changed by each turn.
    """

    def __init__(
        self, engine: AsyncEngine, sampling: SamplingParams, conversation: Conversation
    ) -> None:
        self._engine = engine
        self._sampling = sampling
        self._conversation = conversation

    def handle(self, line: str) -> bool:
        """Carry out one line of input: a command or a message. Return False when the user wants to leave."""
        command, _, rest = line.strip().partition(" ")
        match command:
            case "":
                pass
            case "/quit" | "/exit":
                return False
            case "/help":
                note(HELP)
            case "/reset":
                self._conversation.messages.clear()
                note("conversation forgotten; what the cache knows of it can still be reused")
            case "/system":
                self._conversation.system = rest.strip() or None
                self._conversation.messages.clear()
                note("system message set" if rest.strip() else "system message removed")
            case "/stats":
                self._show_stats()
            case _ if command.startswith("/"):
                note(f"unknown command {command}; /help lists the commands", style="yellow")
            case _:
                self._answer(line.strip())
        return True

    def _answer(self, text: str) -> None:
        try:
            token_ids = self._engine.tokenizer.encode_chat(self._conversation.with_user(text))
            turn = run_turn(self._engine, token_ids, self._sampling, _print_chunk)
        except RequestError as error:
            # The conversation goes on: the user can /reset or say something shorter.
            note(str(error), style="red")
            return
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            if not sys.stdin.isatty():
                raise
            note("answer stopped; not kept in the conversation")
            return
        sys.stdout.write("\n")
        sys.stdout.flush()
        self._conversation.add(text, turn.texts[0])
        note(turn.summary())

    def _show_stats(self) -> None:
        stats = self._engine.stats()
        for name, value in dataclasses.asdict(stats.cache).items():
            note(f"{name}: {value}")


def _lines() -> Iterator[str]:
    """Yield what the user types, or the lines of a pipe."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    console = note_console()
    while True:
        try:
            yield console.input("[bold]> [/]")
        except EOFError:
            sys.stderr.write("\n")
            return


def _print_chunk(chunk: OutputChunk) -> None:
    sys.stdout.write(chunk.text)
    sys.stdout.flush()
