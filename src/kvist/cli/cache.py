"""``kvist cache``: look into the cache of a running server, and reset it."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer
from rich.table import Table
from rich.text import Text

from kvist.cli.console import EXIT_USAGE, fail, print_json, result_console
from kvist.cli.options import takes_options

if TYPE_CHECKING:
    from collections.abc import Iterator

app = typer.Typer(
    name="cache", help="Look into the cache of a running server, or reset it.", no_args_is_help=True
)

TIMEOUT_S = 10.0
MIN_TABLE_WIDTH = 120
MIN_BREAKERS_WIDTH = 180

ADVICE = {
    "new_prompt": "no earlier prompt goes on like this; nothing to do",
    "tokens_differ": "an earlier prompt had something else here; put what changes last",
    "evicted": "it was computed and gave way to others; give the cache more memory (--memory-gib)",
    "expired": "it was kept for a time that is over; keep it for longer",
    "namespace_differs": "this API key has a cache of its own, and the prompt is new to it",
    "model_changed": "another model or adapter computed it",
    "below_block_size": "less than a block matched, not copied: no memory (--memory-gib), or a block in int4 or int3",
    "verification_failed": "a block did not hold what it should; if this goes on, report it",
    "not_yet_computed": "another request was computing it at that moment",
    "cache_off": "the server runs with --prefix-cache off",
}
"""What to do about each reason; docs/explain.md says more."""


Url = Annotated[str, typer.Option(help="address of the server")]
ApiKey = Annotated[
    str | None, typer.Option(help="API key, where the server wants one", show_default=False)
]


@app.command()
@takes_options
def stats(
    *,
    url: Url = "http://127.0.0.1:8000",
    api_key: ApiKey = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the counters as JSON")] = False,
) -> None:
    """Show the counters of a running server, its memory by layer, and the latest requests of this API key."""
    document = _fetch(url, "/v1/cache/stats", api_key)
    if as_json:
        print_json(document)
        return
    recent = document.pop("recent_requests", [])
    layers = document.get("memory", {}).pop("layers", [])
    table = Table("counter", "value", box=None)
    table.columns[1].justify = "right"
    for name, value in _flattened(document):
        table.add_row(name, value)
    console = result_console()
    # Not cut where the terminal ends: the end of a line is the number.
    console.print(table, width=max(console.width, MIN_TABLE_WIDTH))
    for title, rows in (
        ("one layer of each kind", layers),
        ("latest requests", [_request_row(row) for row in recent]),
    ):
        if rows:
            console.print(f"\n{title}:")
            console.width = max(console.width, MIN_TABLE_WIDTH)
            console.print(_row_table(rows))


@app.command()
@takes_options
def explain(
    request_id: Annotated[str, typer.Argument(help="id of an answer of this API key")],
    *,
    url: Url = "http://127.0.0.1:8000",
    api_key: ApiKey = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the report as JSON")] = False,
) -> None:
    """Say what a finished request reused, and why not the rest."""
    document = _fetch(url, f"/v1/cache/explain/{quote(request_id, safe='')}", api_key)
    if as_json:
        print_json(document)
        return
    console = result_console()
    for prompt in document.get("prompts") or [document]:
        for line in explained(prompt):
            console.print(Text(line))


@app.command()
@takes_options
def breakers(
    *,
    url: Url = "http://127.0.0.1:8000",
    api_key: ApiKey = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the list as JSON")] = False,
) -> None:
    """Show what keeps changing in the prompts of this API key, and what that cost within the last hour."""
    document = _fetch(url, "/v1/cache/breakers", api_key)
    if as_json:
        print_json(document)
        return
    console = result_console()
    if not document["data"]:
        console.print(
            "nothing within the last hour: no prompt differed from an earlier one and went on like it"
        )
        return
    table = Table("tokens/hour", "times", "part", "kind", "example", box=None)
    for column in table.columns[:2]:
        column.justify = "right"
    for row in document["data"]:
        cells = (row["part"] or "-", row["kind"], _shown(row["example"]))
        table.add_row(f"{row['tokens_per_hour']:,}", f"{row['count']:,}", *map(Text, cells))
    # As in ``stats``; an example is only of use as a whole.
    console.width = max(console.width, MIN_BREAKERS_WIDTH)
    console.print(table)
    for kind in dict.fromkeys(row["kind"] for row in document["data"]):
        hint = next(row["hint"] for row in document["data"] if row["kind"] == kind)
        console.print(Text(f"{kind}: {hint}"))


@app.command()
@takes_options
def reset(
    *,
    url: Url = "http://127.0.0.1:8000",
    api_key: ApiKey = None,
    everybody: Annotated[
        bool,
        typer.Option(
            "--all", help="the cache of all API keys; needs a key of one that --admin names"
        ),
    ] = False,
    prompt: Annotated[
        str | None,
        typer.Option(
            help="only what begins with this text, from its last block on", show_default=False
        ),
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(help="file with such a text", show_default=False, exists=True, dir_okay=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the answer as JSON")] = False,
) -> None:
    """Make a running server forget what it has cached: of this API key, unless --all says otherwise.

    Running requests are not disturbed. Prompts of chats can be given as messages over HTTP (docs/guards.md).
    """
    if everybody + (prompt is not None) + (prompt_file is not None) > 1:
        fail(
            "[cache] --all, --prompt and --prompt-file exclude each other; give one of them",
            exit_code=EXIT_USAGE,
        )
    if prompt_file is not None:
        try:
            prompt = prompt_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            fail(f"[cache] --prompt-file {prompt_file} cannot be read as UTF-8: {error}")
    body: dict[str, str] = {"scope": "all" if everybody else "namespace"}
    if prompt is not None:
        body = {"scope": "prompt", "prompt": prompt}
    document = _fetch(url, "/v1/cache/reset", api_key, body)
    if as_json:
        print_json(document)
        return
    result_console().print(
        f"{document['dropped_blocks']:,} blocks forgotten, and {document['detached_blocks']:,} more that running "
        "requests still hold"
    )


def explained(prompt: dict[str, Any]) -> Iterator[str]:  # Any: JSON values
    """Yield lines for a person about one prompt."""
    recomputed = prompt["recomputed_tokens"]
    yield (
        f"{prompt['reused_tokens']:,} prompt tokens reused, {prompt['computed_tokens']:,} computed"
        + (f", {recomputed:,} computed again after a preemption" if recomputed else "")
    )
    if not prompt["spans"]:
        yield "nothing was missed: the last token of a prompt is always computed"
    for span in prompt["spans"]:
        where = f" in {span['part']}" if span["part"] else ""
        ago = "" if span["left_s_ago"] is None else f", {span['left_s_ago']:,.1f} s before"
        yield f"{span['tokens_lost']:,} tokens from position {span['position']:,}{where}: {span['reason']}{ago}"
        yield f"    {ADVICE.get(span['reason'], 'see docs/explain.md')}"
        for side in ("expected", "received"):
            if span[side] is not None:
                yield f"    {side}: {_shown(span['before'])} | {_shown(span[side])}"


def _request_row(row: dict[str, Any]) -> dict[str, Any]:  # Any: JSON values
    """Return what is shown of a finished request: a share instead of counts that need working out."""
    num_prompt = row["reused_tokens"] + row["computed_tokens"]
    miss = row["miss"] or {"reason": "-", "part": None, "tokens_lost": 0}
    return {
        "id": row["id"],
        "prompt": num_prompt,
        "reused": row["reused_tokens"],
        "share": f"{row['reused_tokens'] / num_prompt:.0%}",
        "recomputed": row["recomputed_tokens"],
        "miss": miss["reason"],
        "part": miss["part"] or "-",
        "lost": miss["tokens_lost"],
    }


def _row_table(rows: list[dict[str, Any]]) -> Table:  # Any: JSON values
    table = Table(*rows[0], box=None)
    for row in rows:
        cells = (f"{value:,}" if isinstance(value, int) else str(value) for value in row.values())
        table.add_row(*map(Text, cells))
    for column, value in zip(table.columns, rows[0].values(), strict=True):
        column.justify = "right" if isinstance(value, int) else "left"
    return table


def _shown(text: str) -> str:
    """Return a text on one line, quoted, with control characters spelled."""
    return repr(text)[1:-1]


def _fetch(
    url: str, path: str, api_key: str | None, body: dict[str, str] | None = None
) -> dict[str, Any]:  # Any: JSON values
    """Return what a server answers to a GET, or to a POST of ``body``; leave with a message when it is an error."""
    import httpx  # noqa: PLC0415  # 0.2 s that other commands need not wait for

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        response = httpx.request(
            "GET" if body is None else "POST",
            f"{url.rstrip('/')}{path}",
            headers=headers,
            json=body,
            timeout=TIMEOUT_S,
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        fail(
            f"[cache] no answer from {url} ({error}); is `kvist serve` running, and is --url right?"
        )
    if response.status_code == httpx.codes.UNAUTHORIZED:
        fail(f"[cache] {url} wants an API key; give a valid one with --api-key")
    try:
        document = response.json()
    except ValueError:
        document = None
    if response.status_code != httpx.codes.OK:
        known = isinstance(document, dict) and isinstance(document.get("error"), dict)
        reason = f": {document['error'].get('message')}" if known else ""
        fail(f"[cache] expected status 200 from {url}, received {response.status_code}{reason}")
    if not isinstance(document, dict):
        fail(f"[cache] expected a JSON object from {url}; is it a Kvist server?")
    return document


def _flattened(document: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in document.items():
        if isinstance(value, dict) and value.keys() == {"bounds", "counts", "total"}:
            rows.append((prefix + name, _distribution(**value)))
        elif isinstance(value, dict):
            rows += _flattened(value, f"{prefix}{name}.")
        elif isinstance(value, float):
            rows.append((prefix + name, f"{value:,.3f}"))
        elif isinstance(value, int) and not isinstance(value, bool):
            rows.append((prefix + name, f"{value:,}"))
        else:
            rows.append((prefix + name, str(value)))
    return rows


def _distribution(bounds: list[float], counts: list[int], total: float) -> str:
    """Return number, mean, and the buckets in which the median and the 90th percentile are."""
    num_values = sum(counts)
    if not num_values:
        return "none"
    parts = [f"n {num_values:,}", f"mean {total / num_values:,.4g}"]
    for name, fraction in (("p50", 0.5), ("p90", 0.9)):
        place = bisect_left(list(accumulate(counts)), fraction * num_values)
        bound = f"<= {bounds[place]:g}" if place < len(bounds) else f"> {bounds[-1]:g}"
        parts.append(f"{name} {bound}")
    return ", ".join(parts)
