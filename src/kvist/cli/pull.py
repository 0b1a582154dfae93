"""``kvist pull``: fetch a model, or list the ones with a short name."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from kvist.cli.console import EXIT_USAGE, fail, print_json, result_console
from kvist.cli.models import pull_with_progress
from kvist.cli.options import takes_options
from kvist.model.catalog import KNOWN_MODELS


@takes_options
def pull(
    name: Annotated[
        str | None,
        typer.Argument(
            help="known name, hub id (owner/name or owner/name/file.gguf), or a local path to check",
            show_default=False,
        ),
    ] = None,
    *,
    list_models: Annotated[
        bool, typer.Option("--list", help="list the models with a short name")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Fetch a model; goes on where an earlier try stopped, and verifies what arrives."""
    if list_models == (name is not None):
        fail("[pull] expected either a model's name or --list", exit_code=EXIT_USAGE)
    if name is None:
        _list(as_json=as_json)
        return
    model = pull_with_progress(name)
    if as_json:
        print_json({"model": model.name, "path": str(model.path), "kind": model.kind.value})
    else:
        result_console().print(str(model.path), markup=False)


def _list(*, as_json: bool) -> None:
    if as_json:
        models = [
            {
                "name": model.name,
                "title": model.title,
                "license": model.license,
                "size_bytes": model.size_bytes,
                "is_pulled": model.is_pulled,
            }
            for model in KNOWN_MODELS.values()
        ]
        print_json({"models": models})
        return
    table = Table("name", "model", "licence", "size", "pulled", box=None)
    for model in KNOWN_MODELS.values():
        table.add_row(
            model.name,
            model.title,
            model.license,
            f"{model.size_bytes / 1e6:.0f} MB",
            "yes" if model.is_pulled else "no",
        )
    result_console().print(table)
