"""``kvist generate``: continue one prompt, streaming."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvist.cli.console import EXIT_USAGE, fail, note, print_json
from kvist.cli.models import running_engine
from kvist.cli.options import SINGLE_TENANT, takes_options
from kvist.cli.turn import Turn, run_turn
from kvist.config import EngineConfig
from kvist.types import SamplingParams

if TYPE_CHECKING:
    from kvist.types import OutputChunk


@takes_options
def generate(
    *,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="text to continue; - reads it from stdin")
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="file with the text to continue", show_default=False)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="print text, token ids and usage as JSON, unstreamed")
    ] = False,
    config: Annotated[EngineConfig, SINGLE_TENANT],
    sampling: SamplingParams,
) -> None:
    """Continue a text, just as it stands (no chat template; see `kvist chat`)."""
    text = _read_prompt(prompt, prompt_file)
    with running_engine(config) as engine:
        token_ids = engine.tokenizer.encode(text, add_special_tokens=True)
        on_chunk = _print_chunk if sampling.n == 1 and not as_json else _ignore
        turn = run_turn(engine, token_ids, sampling, on_chunk)
    if as_json:
        print_json(_document(config.model.model, turn))
    elif sampling.n == 1:
        sys.stdout.write("\n")
    else:
        for index, choice in enumerate(turn.texts):
            sys.stdout.write(f"--- {index}\n{choice}\n")
    sys.stdout.flush()
    note(turn.summary())


def _read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if (prompt is None) == (prompt_file is None):
        fail("[generate] expected one of --prompt and --prompt-file", exit_code=EXIT_USAGE)
    if prompt_file is not None:
        try:
            return prompt_file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            fail(f"[generate] --prompt-file must be UTF-8 text: {error}")
    assert prompt is not None
    return sys.stdin.read() if prompt == "-" else prompt


def _print_chunk(chunk: OutputChunk) -> None:
    sys.stdout.write(chunk.text)
    sys.stdout.flush()


def _ignore(chunk: OutputChunk) -> None:
    del chunk


def _document(model: str, turn: Turn) -> dict[str, Any]:  # Any: JSON values
    return {
        "model": model,
        "choices": [
            {
                "text": choice.text,
                "token_ids": list(choice.token_ids),
                "finish_reason": choice.finish_reason,
                "logprobs": [
                    {"token_id": p.token_id, "logprob": p.logprob, "top": [list(t) for t in p.top]}
                    for p in choice.logprobs
                ],
            }
            for choice in turn.choices
        ],
        **turn.numbers(),
    }
