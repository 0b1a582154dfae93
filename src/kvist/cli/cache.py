"""``kvist cache``: look into the cache of a running server."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from kvist.cli.console import fail, print_json, result_console
from kvist.cli.options import takes_options

app = typer.Typer(
    name="cache", help="Look into the cache of a running server.", no_args_is_help=True
)

TIMEOUT_S = 10.0


@app.callback()
def _group() -> None:
    """Keep ``stats`` a subcommand although it is the only one."""


@app.command()
@takes_options
def stats(
    *,
    url: Annotated[str, typer.Option(help="address of the server")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None, typer.Option(help="API key, where the server wants one", show_default=False)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the counters as JSON")] = False,
) -> None:
    """Show the counters of a running server's cache and scheduler."""
    document = _fetch(url, api_key)
    if as_json:
        print_json(document)
        return
    table = Table("counter", "value", box=None)
    table.columns[1].justify = "right"
    for name, value in _flattened(document):
        table.add_row(name, value)
    result_console().print(table)


def _fetch(url: str, api_key: str | None) -> dict[str, Any]:  # Any: JSON values
    import httpx  # noqa: PLC0415  # 0.2 s that other commands need not wait for

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        response = httpx.get(
            f"{url.rstrip('/')}/v1/cache/stats", headers=headers, timeout=TIMEOUT_S
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        fail(
            f"[cache] no answer from {url} ({error}); is `kvist serve` running, and is --url right?"
        )
    if response.status_code == httpx.codes.UNAUTHORIZED:
        fail(f"[cache] {url} wants an API key; give a valid one with --api-key")
    if response.status_code != httpx.codes.OK:
        fail(f"[cache] expected status 200 from {url}, received {response.status_code}")
    try:
        document = response.json()
    except ValueError:
        document = None
    if not isinstance(document, dict):
        fail(f"[cache] expected a JSON object from {url}; is it a Kvist server?")
    return document


def _flattened(document: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in document.items():
        if isinstance(value, dict):
            rows += _flattened(value, f"{prefix}{name}.")
        elif isinstance(value, float):
            rows.append((prefix + name, f"{value:,.3f}"))
        elif isinstance(value, int) and not isinstance(value, bool):
            rows.append((prefix + name, f"{value:,}"))
        else:
            rows.append((prefix + name, str(value)))
    return rows
