"""The ``kvist`` command: its global options and the list of its commands.

Starts fast: nothing here, nor in the command modules at import, loads a tensor library, a tokeniser or a web framework;
each command loads what it needs when it runs.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

import kvist
from kvist.cli import bench, cache, chat, demo, generate, plan, pull, replay, serve, tune
from kvist.cli.console import reported_errors, set_up_logging
from kvist.kernels import native

app = typer.Typer(
    name="kvist",
    help="Run language models with a prompt cache that computes no prefix twice.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command()(pull.pull)
app.command()(serve.serve)
app.command()(generate.generate)
app.command()(chat.chat)
app.command()(demo.demo)
app.command()(plan.plan)
app.command()(tune.tune)
app.command()(replay.replay)
app.add_typer(bench.app)
app.add_typer(cache.app)


def _show_version(value: bool) -> None:  # noqa: FBT001  # the signature of a typer callback
    if value:
        with reported_errors():
            typer.echo(f"kvist {kvist.__version__} ({native.describe()})")
        raise typer.Exit


@app.callback()
def _global_options(
    *,
    version: Annotated[  # noqa: ARG001  # handled by its callback
        bool,
        typer.Option(
            "--version",
            help="show the version, and what the kernels run on",
            callback=_show_version,
            is_eager=True,
        ),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", help="show tracebacks and the debug log (which may hold prompts)"),
    ] = False,
) -> None:
    set_up_logging(level=logging.DEBUG if debug else logging.WARNING)


def main() -> None:
    """Run the command line; the entry point of the ``kvist`` script. Always leaves through ``SystemExit``."""
    _open_missing_streams()
    app(prog_name="kvist")


def _open_missing_streams() -> None:
    """Put the null device where the parent closed a standard stream (``kvist ... >&-``): Python has None there.

    Otherwise the next file opened, a model perhaps, takes the free descriptor, and what is printed goes into it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # In this order each open takes the lowest free descriptor, which is the stream's own.
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115  # for the process's life
