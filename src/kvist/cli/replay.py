"""``kvist replay``: a recorded trace through the real control plane, with a cost model in place of a model.

Responsible for turning flags into settings, and documents into a table. What is simulated is ``kvist.replay``'s affair.
"""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvist.cache.eviction import STRATEGIES
from kvist.charts import require_matplotlib
from kvist.cli.console import (
    EXIT_USAGE,
    fail,
    note,
    note_console,
    print_json,
    result_console,
    working,
)
from kvist.cli.options import Only, takes_options
from kvist.cli.plan import find_spec
from kvist.config import CacheConfig, EngineConfig, SchedulerConfig
from kvist.plan import memory_estimate
from kvist.replay.compare import BELADY, Timing, replay_belady, replay_trace
from kvist.replay.cost import CostModel
from kvist.replay.formats import block_size_of, load_trace, num_distinct_blocks
from kvist.replay.metrics import Slo
from kvist.replay.plot import label_of, write_plot
from kvist.replay.setting import Setting
from kvist.replay.simulator import Load
from kvist.sched.policy import POLICIES as SCHEDULES
from kvist.spec import GIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvist.replay.metrics import Document
    from kvist.replay.traces import TraceRequest

DEFAULT_FRACTION = 0.1
PROGRESS_EVERY = 64
"""Requests between two updates of the progress bar; each takes as long as simulating one."""


@takes_options
def replay(  # noqa: PLR0913  # one per option
    file: Annotated[Path, typer.Argument(help="trace, .gz or not", show_default=False)],
    *,
    format_name: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="format of the trace; default: told from its first line",
            metavar="mooncake|claude-code|azure",
        ),
    ] = None,
    memory_blocks: Annotated[
        int | None, typer.Option(help="KV memory in blocks of the trace", min=1)
    ] = None,
    memory_blocks_fraction: Annotated[
        float | None,
        typer.Option(
            help=f"KV memory as a share of the trace's distinct blocks; default: {DEFAULT_FRACTION}"
        ),
    ] = None,
    eviction: Annotated[
        str,
        typer.Option(
            help="eviction strategies to compare; belady is the clairvoyant ceiling of hits",
            metavar="A,B,...",
        ),
    ] = "default",
    schedule: Annotated[
        str | None, typer.Option(help="schedules to compare; needs the clock", metavar="A,B,...")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="requests to read at most", min=1)] = None,
    sessions: Annotated[
        int | None, typer.Option(help="sessions to read at most (claude-code)", min=1)
    ] = None,
    timed: Annotated[
        bool | None,
        typer.Option(
            "--timed/--hits",
            help="with a clock and all metrics, or hit shares alone, prompts one after another; default: hits, "
            "unless an option is given that only a clock makes sense of",
            show_default=False,
        ),
    ] = None,
    speedup: Annotated[
        float | None, typer.Option(help="let requests arrive so many times faster than recorded")
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(help="closed loop of so many clients instead of the recorded times", min=1),
    ] = None,
    max_tokens: Annotated[
        bool | None,
        typer.Option(
            "--max-tokens/--no-max-tokens",
            help="whether requests say how much output they want; default: they do",
            show_default=False,
        ),
    ] = None,
    cost_model: Annotated[
        Path | None, typer.Option(help="JSON file with the prices of a step; see docs/replay.md")
    ] = None,
    slo_ttft_s: Annotated[
        float | None, typer.Option(help="goodput counts a first token within so many s; default: 2")
    ] = None,
    slo_itl_s: Annotated[
        float | None, typer.Option(help="and a mean gap of so many s between tokens; default: 0.2")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="write a plot to this PNG file; needs kvist[plot]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one line of JSON")] = False,
    config: Annotated[
        EngineConfig,
        Only(
            "model", "kv_cache_dtype", "memory_gib", "block_size", "max_context", "max_batch_tokens",
            "max_running", "max_queue", "max_overtakes", "reserve_tokens",
        ),
    ],
) -> None:  # fmt: skip
    """Replay a recorded trace through the real scheduler and cache; no model is loaded.

    Compares eviction policies and schedules side by side: hit share, evictions, latencies, goodput, fairness, memory.
    """
    options = {
        **_changed(config.scheduler),
        "--schedule": schedule,
        "--speedup": speedup,
        "--concurrency": concurrency,
        "--max-tokens": max_tokens,
        "--cost-model": cost_model,
        "--slo-ttft-s": slo_ttft_s,
        "--slo-itl-s": slo_itl_s,
        "--max-context": config.model.max_context,
    }
    given = [name for name, value in options.items() if value is not None]
    if timed is False and given:
        _usage(f"--hits has no clock, so {', '.join(given)} would change nothing; drop it")
    if speedup is not None and concurrency is not None:
        _usage("--concurrency does not look at the recorded times; drop it or --speedup")
    if plot is not None:
        require_matplotlib("replay")
    timing = None
    if timed or given:
        timing = Timing(
            load=Load(
                speedup=1.0 if speedup is None else speedup,
                concurrency=concurrency,
                has_max_tokens=max_tokens is not False,
            ),
            cost=CostModel() if cost_model is None else CostModel.load(cost_model),
            slo=Slo(**_set(ttft_s=slo_ttft_s, itl_s=slo_itl_s)),
        )
    records = load_trace(file, format_name, max_requests=limit, max_sessions=sessions)
    block_size = block_size_of(records, config.cache.block_size)
    if block_size != config.cache.block_size != CacheConfig().block_size:
        _usage(f"the trace has blocks of {block_size} tokens; drop --block-size")
    memory = _Memory(config, block_size, memory_blocks, memory_blocks_fraction, records)
    evictions = _names("--eviction", eviction, (*STRATEGIES, BELADY))
    schedules = _names("--schedule", schedule or SchedulerConfig().schedule, SCHEDULES)
    settings = [
        Setting(
            num_blocks=memory.num_blocks,
            block_size=block_size,
            eviction=name,
            schedule=schedule_name,
            max_batch_tokens=config.scheduler.max_batch_tokens,
            max_running=config.scheduler.max_running,
            max_queue=config.scheduler.max_queue,
            max_overtakes=config.scheduler.max_overtakes,
            reserve_tokens=config.scheduler.reserve_tokens,
            **_set(max_context_len=config.model.max_context),
        )
        for schedule_name in schedules
        for name in evictions
        if name != BELADY
    ]
    runs = _run(records, settings, timing)
    if BELADY in evictions:
        with working("belady"):
            runs.append(replay_belady(records, memory.num_blocks))
    for run in runs:
        run["kv_held_bytes"] = _scaled(run.get("kv_held_blocks"), memory.block_bytes)
    document = {
        "trace": file.name,
        "mode": "hits" if timing is None else "timed",
        "requests": len(records),
        **memory.document(),
        "load": None if timing is None else _load_document(timing),
        "runs": runs,
    }
    if plot is not None:
        write_plot(
            plot,
            runs,
            title=f"{file.name}, {len(records):,} requests, {memory.num_blocks:,} blocks",
        )
        note(f"plot written to {plot}")
    if as_json:
        print_json(document)
    else:
        _show(document)


def _usage(message: str) -> NoReturn:
    fail(f"[replay] {message}", exit_code=EXIT_USAGE)


def _set(**values: Any) -> dict[str, Any]:  # noqa: ANN401  # option values
    """Return those that were given; the others keep the default of whoever takes them."""
    return {name: value for name, value in values.items() if value is not None}


def _changed(config: SchedulerConfig) -> dict[str, Any]:  # Any: option values
    """Return the flags of the scheduler that differ from their defaults; None for the others."""
    default = SchedulerConfig()
    return {
        f"--{name.replace('_', '-')}": value if value != getattr(default, name) else None
        for name, value in ((name, getattr(config, name)) for name in config.__slots__)
    }


def _names(flag: str, value: str, known: Iterable[str]) -> list[str]:
    """Return the names in a comma-separated list, each once."""
    names = list(dict.fromkeys(name.strip() for name in value.split(",")))
    for name in names:
        if name not in known:
            _usage(f"{flag} must be a list of {', '.join(known)}, received {name!r}")
    return names


class _Memory:
    """How many blocks there are, and what that means."""

    def __init__(
        self,
        config: EngineConfig,
        block_size: int,
        blocks: int | None,
        fraction: float | None,
        records: Sequence[TraceRequest],
    ) -> None:
        gib = config.cache.memory_gib
        if sum([value is not None for value in (gib, blocks, fraction)]) > 1:
            _usage("give one of --memory-gib, --memory-blocks and --memory-blocks-fraction")
        self.model = config.model.model
        self.block_bytes = memory_estimate(
            find_spec(self.model),
            codec=config.cache.kv_cache_dtype,
            context=block_size,
            concurrency=1,
            block_size=block_size,
        ).old_block_bytes
        self.num_distinct = num_distinct_blocks(records, block_size)
        if blocks is not None:
            self.num_blocks = blocks
        elif gib is not None:
            self.num_blocks = int(gib * GIB) // self.block_bytes
        else:
            fraction = DEFAULT_FRACTION if fraction is None else fraction
            if not 0 < fraction < float("inf"):
                _usage(f"--memory-blocks-fraction must be > 0, received {fraction}")
            self.num_blocks = max(1, int(fraction * self.num_distinct))
        if self.num_blocks < 1:
            _usage(f"a block needs {self.block_bytes:,} bytes; raise --memory-gib")

    def document(self) -> dict[str, Any]:  # Any: JSON values
        return {
            "num_blocks": self.num_blocks,
            "distinct_blocks": self.num_distinct,
            "memory_blocks_fraction": self.num_blocks / self.num_distinct
            if self.num_distinct
            else None,
            "model": self.model,
            "block_bytes": self.block_bytes,
            "kv_bytes": self.num_blocks * self.block_bytes,
        }


def _load_document(timing: Timing) -> dict[str, Any]:  # Any: JSON values
    load = timing.load
    return {
        "concurrency": load.concurrency,
        "speedup": load.speedup if load.concurrency is None else None,
        "max_tokens": load.has_max_tokens,
        "cost_model": dataclasses.asdict(timing.cost),
    }


def _run(
    records: Sequence[TraceRequest],
    settings: Sequence[Setting],
    timing: Timing | None,
) -> list[Document]:
    """Return the documents of all runs."""
    runs: list[Document] = []
    for setting in settings:
        name = setting.eviction if timing is None else f"{setting.schedule} / {setting.eviction}"
        with _progress(name, len(records)) as on_finished:
            runs.append(replay_trace(records, setting, timing, on_finished))
    return runs


@contextmanager
def _progress(name: str, num_requests: int) -> Iterator[Callable[[], None]]:
    """Show on a terminal how far a run is; yields what to call after each request."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())  # fmt: skip
    console = note_console()
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(name, total=num_requests)
        num_done = 0

        def on_finished() -> None:
            nonlocal num_done
            num_done += 1
            if num_done % PROGRESS_EVERY == 0:
                bar.update(task, completed=num_done)

        yield on_finished


def _scaled(values: dict[str, float] | None, factor: int) -> dict[str, float] | None:
    return None if values is None else {name: value * factor for name, value in values.items()}


# --- the table


def _show(document: dict[str, Any]) -> None:  # Any: JSON values
    runs = document["runs"]
    how = {
        "hits": "prompts one after another, no clock",
        "timed": "virtual clock",
    }[document["mode"]]
    table = Table(
        "",
        *[label_of(run) for run in runs],
        title=(
            f"{document['trace']}: {document['requests']:,} requests, {document['num_blocks']:,} of "
            f"{document['distinct_blocks']:,} distinct blocks ({document['kv_bytes'] / GIB:.2f} GiB of "
            f"{document['model']}); {how}"
        ),
        title_justify="left",
        box=None,
    )
    for column in table.columns[1:]:
        column.justify = "right"
    for title, cell in _ROWS:
        cells = [cell(run) for run in runs]
        if any(cells):
            table.add_row(title, *cells)
    result_console().print(table)


def _number(
    key: str, form: str = ",", scale: float = 1.0, unit: str = ""
) -> Callable[[Document], str]:
    def cell(run: Document) -> str:
        value: Any = run  # Any: JSON values
        for name in key.split("."):
            value = None if value is None else value.get(name)
        return "" if value is None else f"{value if scale == 1.0 else value * scale:{form}}{unit}"

    return cell


def _quantiles(key: str) -> Callable[[Document], str]:
    def cell(run: Document) -> str:
        values = run.get(key)
        return (
            ""
            if values is None
            else " ".join([f"{values[name]:.3g}" for name in ("p50", "p90", "p95", "p99")])
        )

    return cell


def _refused(run: Document) -> str:
    return f"{sum(run['refused'].values()):,}" if run.get("refused") else ""


_ROWS: tuple[tuple[str, Callable[[Document], str]], ...] = (
    ("hit share", _number("hit_share", ".2%")),
    ("requests", _number("requests")),
    ("refused", _refused),
    ("evicted blocks", _number("evicted_blocks")),
    ("computed tokens", _number("computed_tokens")),
    ("recomputed tokens", _number("recomputed_tokens")),
    ("preemptions", _number("preemptions")),
    ("TTFT s, p50 p90 p95 p99", _quantiles("ttft_s")),
    ("ITL s, p50 p90 p95 p99", _quantiles("itl_s")),
    ("TPOT s, p50 p90 p95 p99", _quantiles("tpot_s")),
    ("E2E s, p50 p90 p95 p99", _quantiles("e2e_s")),
    ("queue s, p50 p90 p95 p99", _quantiles("queue_s")),
    ("makespan s", _number("makespan_s", ",.1f")),
    ("output tokens/s", _number("output_tokens_per_s", ",.1f")),
    ("goodput requests/s", _number("goodput_rps", ",.4f")),
    ("within SLO", _number("slo_share", ".1%")),
    ("Jain fairness", _number("jain_fairness", ".3f")),
    ("KV held, mean", _number("kv_held_bytes.mean", ",.2f", 1 / GIB, " GiB")),
    ("KV held, peak", _number("kv_held_bytes.peak", ",.2f", 1 / GIB, " GiB")),
    ("wall s", _number("wall_s", ",.1f")),
    ("requests per wall minute", _number("requests_per_wall_minute", ",.0f")),
    ("requests per CPU minute", _number("requests_per_cpu_minute", ",.0f")),
)
