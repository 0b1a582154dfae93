"""``kvist bench``: Kvist measured, against other engines (``peers``) and against the machine (``kernels``).

Responsible for turning flags into what is measured, and documents into tables. How is measured
is ``kvist.bench``'s affair.
"""

from __future__ import annotations

import dataclasses
import sys
from contextlib import ExitStack, contextmanager
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvist.bench.check import Checker
from kvist.bench.machine import busy_warning, machine_document
from kvist.bench.measure import checked_prompts, measure, rows_of
from kvist.bench.plot import write_plot
from kvist.bench.report import rows_document
from kvist.bench.work import KV_CACHE, ROWS, Sizes, Workload, rows_named
from kvist.charts import require_matplotlib
from kvist.cli.child_server import child_server
from kvist.cli.console import (
    EXIT_USAGE,
    fail,
    note,
    note_console,
    print_json,
    result_console,
    working,
)
from kvist.cli.demo import SHIPPED_DOCUMENT
from kvist.cli.models import ensure_available
from kvist.cli.options import Only, flags_of, takes_options
from kvist.cli.plan import find_spec
from kvist.config import EngineConfig
from kvist.model.catalog import resolve
from kvist.plan import detect_hardware

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rich.console import Console

    from kvist.bench.measure import Sample
    from kvist.bench.peers import Peer
    from kvist.bench.report import Document
    from kvist.bench.variants import Common, Opener, PeerOption
    from kvist.bench.work import Row

PEER_ROWS = ",".join(row.name for row in ROWS)
CACHELESS = "no KV cache"
FILE_WIDTH = 160
BOUND = "the larger of bytes over bandwidth and operations over rate"
QUESTION_TOKENS = 64
"""More than the longest question or turn has."""

app = typer.Typer(
    name="bench",
    help="Measure Kvist, against other engines and against the machine.",
    no_args_is_help=True,
)


@app.command()
@takes_options
def peers(  # noqa: PLR0913  # one per option
    *,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="engine to compare with; repeatable. PYTHON is the interpreter that has its library. NAME: openvino, "
            "llamacpp, vllm, transformers, or any name for a server",
            metavar="NAME[:VARIANT]=PYTHON|URL",
        ),
    ] = None,
    kvist: Annotated[
        list[str] | None,
        typer.Option(
            help="a configuration of Kvist to measure, beside the options below; repeatable",
            metavar="NAME=OPTION=VALUE,...",
        ),
    ] = None,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="measure Kvist without its server too")
    ] = False,
    rows: Annotated[str, typer.Option(help="rows of the table", metavar="A,B,...")] = PEER_ROWS,
    runs: Annotated[int, typer.Option(help="runs of each row, interleaved", min=1)] = 3,
    text: Annotated[
        Path | None,
        typer.Option(
            help="text that prompts are cut from; default: the demo's document", show_default=False
        ),
    ] = None,
    prompt_tokens: Annotated[
        int, typer.Option(help="tokens of a long prompt", min=64)
    ] = Sizes().prompt_tokens,
    decode_tokens: Annotated[
        int, typer.Option(help="output tokens of the decode row", min=8)
    ] = Sizes().decode_tokens,
    fanout: Annotated[
        int, typer.Option(help="concurrent requests", min=2, max=64)
    ] = Sizes().fanout,
    fanout_tokens: Annotated[
        int, typer.Option(help="output tokens of each concurrent request", min=4)
    ] = Sizes().fanout_tokens,
    min_agreement: Annotated[
        float,
        typer.Option(
            help="share of outputs that must follow transformers in float32", min=0.0, max=1.0
        ),
    ] = 0.75,
    plot: Annotated[
        Path | None, typer.Option(help="write a chart to this PNG file; needs kvist[plot]")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="the table goes to stderr; stdout has the JSON line only")
    ] = False,
    config: EngineConfig,
) -> None:
    """Measure Kvist against other engines: the same tokens, the same counts, interleaved runs.

    Ends with an error and no numbers when a peer's outputs are wrong. The last line on stdout is JSON.
    """
    from kvist.bench.variants import PeerOption  # noqa: PLC0415  # 0.5 s that other commands need not wait for

    if plot is not None:
        require_matplotlib("bench")
    table_rows = rows_named([name.strip() for name in rows.split(",")])
    session = Session(
        config=config,
        own=_own_configs(config, kvist or ["kvist="]),
        options=[PeerOption.parse(option) for option in peer or []],
        in_process=in_process,
        rows=table_rows,
        runs=runs,
        sizes=Sizes(
            prompt_tokens=prompt_tokens,
            decode_tokens=decode_tokens,
            fanout=fanout,
            fanout_tokens=fanout_tokens,
        ),
        text=_read_text(text),
        min_agreement=min_agreement,
    )
    document = session.document()
    if plot is not None:
        own = [entry["name"] for entry in document["peers"] if entry["is_kvist"]]
        title = f"{config.model.model}, {prompt_tokens:,}-token prompts, median of {runs}"
        write_plot(plot, document["rows"], own, title=title)
        note(f"chart written to {plot}")
    _show_peers(note_console() if as_json else result_console(), document)
    print_json(document)


def _read_text(path: Path | None) -> str:
    if path is None:
        shipped = resources.files("kvist.cli").joinpath(SHIPPED_DOCUMENT)
        return shipped.read_text(encoding="utf-8")
    return path.read_text(encoding="utf-8", errors="replace")


def _usage(message: str) -> NoReturn:
    fail(f"[bench] {message}", exit_code=EXIT_USAGE)


def _own_configs(base: EngineConfig, options: Sequence[str]) -> dict[str, EngineConfig]:
    """Return the configurations of Kvist by their names in the table."""
    configs: dict[str, EngineConfig] = {}
    for option in options:
        name, separator, changes = option.partition("=")
        if not separator or not name:
            _usage(f"--kvist must be NAME=OPTION=VALUE,..., received {option!r}")
        configs[name if name == "kvist" else f"kvist {name}"] = _changed(base, changes)
    return configs


def _changed(base: EngineConfig, changes: str) -> EngineConfig:
    """Return a configuration with ``OPTION=VALUE,...`` on top; options are named as on the command line."""
    flags = {flag.name.removeprefix("--"): flag for flag in flags_of(EngineConfig)}
    values = _flat(base)
    for change in filter(None, changes.split(",")):
        name, separator, value = change.partition("=")
        if not separator or name not in flags:
            _usage(f"--kvist expects options of `kvist serve` as OPTION=VALUE, received {change!r}")
        values[flags[name].field_name] = flags[name].kind(value)
    return EngineConfig.from_options(**values)


def _flat(config: EngineConfig) -> dict[str, Any]:  # Any: option values
    groups = (config.model, config.cache, config.scheduler)
    return {name: getattr(group, name) for group in groups for name in group.__slots__}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """One measurement of peers, from the flags to the document."""

    config: EngineConfig
    own: Mapping[str, EngineConfig]
    """Configurations of Kvist, by name."""
    options: Sequence[PeerOption]
    in_process: bool
    rows: tuple[Row, ...]
    runs: int
    sizes: Sizes
    text: str
    min_agreement: float

    def document(self) -> Document:
        """Measure and return the document.

        Raises:
            BenchError: A peer cannot be started, died, or computed something else than it was asked to.
        """
        from kvist.bench.reference import reference_candidates, reference_settings  # noqa: PLC0415  # slow
        from kvist.bench.variants import Common  # noqa: PLC0415  # slow
        from kvist.model.tokenizer import load_tokenizer  # noqa: PLC0415  # slow

        ensure_available(self.config.model.model)
        weights = resolve(self.config.model.model).path
        tokenizer = load_tokenizer(weights)
        workload = Workload(tokenizer, self.text, self.sizes, self.runs)
        common = Common(weights=weights, threads=self.threads, max_context=self.max_context)
        prompts = checked_prompts(workload, self.rows, self.runs)
        with _progress("reference") as on_computed:
            reference = reference_candidates(
                reference_settings(weights, self.threads, self.max_context), prompts, on_computed
            )
        checker = Checker(tokenizer, reference, self.min_agreement)
        with ExitStack() as stack:
            taking_part = self._open(stack, common)
            if (warning := busy_warning()) is not None:
                note(warning, style="yellow")
            total = self.runs * sum(len(rows) for rows in taking_part.values())
            with _progress("measuring") as on_done:
                reporter = _Reporter(total, on_done)
                samples = measure(taking_part, workload, checker, self.runs, reporter.on_measured)
            described = [
                {
                    "name": peer.name,
                    "family": peer.family,
                    "is_kvist": peer.is_kvist,
                    **peer.describes,
                }
                for peer in taking_part
            ]
        checker.require_agreement()
        return {
            "bench": "peers",
            "model": self.config.model.model,
            "machine": machine_document(),
            "threads": self.threads,
            "runs": self.runs,
            "sizes": dataclasses.asdict(self.sizes),
            "fanout_prefix": "warm",
            "peers": described,
            "agreement": checker.agreement(),
            "min_agreement": self.min_agreement,
            "rows": rows_document(samples),
        }

    @property
    def threads(self) -> int:
        """The same for everybody."""
        return self.config.model.threads or detect_hardware().cpus

    @property
    def max_context(self) -> int:
        """Tokens that peers with one pool of cells for all concurrent requests need."""
        sizes = self.sizes
        each = QUESTION_TOKENS + max(sizes.fanout_tokens, sizes.decode_tokens)
        return -(-(sizes.prompt_tokens + sizes.fanout * each) // 256) * 256

    def _open(self, stack: ExitStack, common: Common) -> dict[Peer, list[Row]]:
        """Start everybody, and return them with the rows that each takes part in."""
        from kvist.bench.variants import openers  # noqa: PLC0415  # slow

        started: list[Peer] = []
        configs = dict(self.own)
        if KV_CACHE in [row.name for row in self.rows]:
            first = next(iter(self.own))
            configs[f"{first}, {CACHELESS}"] = _changed(self.own[first], "kv-cache=off")
        for name, config in configs.items():
            started.append(_open_kvist(stack, name, config))
            if self.in_process and name in self.own:
                started.append(_open_in_process(stack, name, config))
        for option in self.options:
            for name, opener in openers(option, common).items():
                with working(f"starting {name}"):
                    started.append(_enter(stack, opener))
                note(f"{name} is ready")
        cacheless = frozenset(set(configs) - set(self.own))
        return {peer: rows_of(peer, self.rows, cacheless) for peer in started}


def _enter(stack: ExitStack, opener: Opener) -> Peer:
    peer = opener()
    stack.callback(peer.close)
    return peer


def _open_kvist(stack: ExitStack, name: str, config: EngineConfig) -> Peer:
    from kvist.bench.peers import ServerPeer  # noqa: PLC0415  # slow

    url = stack.enter_context(child_server(config, 0))
    note(f"{name} is ready")
    return stack.enter_context(ServerPeer(name, url, family="kvist", is_kvist=True))


def _open_in_process(stack: ExitStack, name: str, config: EngineConfig) -> Peer:
    from kvist.bench.peers import DriverPeer, DriverSettings  # noqa: PLC0415  # slow

    settings = DriverSettings(
        name=f"{name}, in process",
        family="kvist",
        driver="kvist",
        python=sys.executable,
        settings={"options": _flat(config)},
        is_kvist=True,
    )
    return stack.enter_context(DriverPeer(settings))


class _Reporter:
    """Says on stderr what was measured, as it comes."""

    def __init__(self, total: int, on_done: Callable[[int, int], None]) -> None:
        self._total = total
        self._num_done = 0
        self._on_done = on_done

    def on_measured(self, sample: Sample) -> None:
        self._num_done += 1
        value = _cell_value(sample.row.unit, sample.value)
        note(f"run {sample.run + 1}, {sample.row.title}: {sample.peer.name} {value}")
        self._on_done(self._num_done, self._total)


@contextmanager
def _progress(name: str) -> Iterator[Callable[[int, int], None]]:
    """Show on a terminal how far something is; yields what to call with done and total."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())  # fmt: skip
    console = note_console()
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@app.command()
@takes_options
def kernels(
    *,
    only: Annotated[
        str, typer.Option(help="only cases whose name has this in it", metavar="TEXT")
    ] = "",
    seconds: Annotated[
        float, typer.Option(help="seconds for timing each case", min=0.001, max=60.0)
    ] = 0.25,
    footprint_mib: Annotated[
        int,
        typer.Option(help="MiB of weights or K and V that a timed loop goes through", min=1),
    ] = 128,
    as_json: Annotated[
        bool, typer.Option("--json", help="the table goes to stderr; stdout has the JSON line only")
    ] = False,
    config: Annotated[EngineConfig, Only("model", "threads")],
) -> None:
    """Measure each native kernel against what bounds it: memory reads, or its dominating instructions.

    Ceilings are measured in the same run. A kernel whose result is wrong is not timed, and ends the command with an
    error. The last line on stdout is JSON.
    """
    from kvist.bench.kernels import KernelOptions, measure_kernels  # noqa: PLC0415  # numpy is slow to import

    spec = find_spec(config.model.model)
    threads = config.model.threads or detect_hardware().cpus
    if (warning := busy_warning()) is not None:
        note(warning, style="yellow")
    with _progress("measuring") as on_done:
        document = measure_kernels(
            spec, threads, KernelOptions(only, seconds, footprint_mib * 2**20), on_done
        )
    document = {"bench": "kernels", "model": config.model.model, **document}
    _show_kernels(note_console() if as_json else result_console(), document)
    print_json(document)


# --- the tables


def _table(columns: Sequence[str], title: str) -> Table:
    table = Table("", *columns, title=title, title_justify="left", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _print(console: Console, table: Table) -> None:
    # Into a file or a pipe as wide as it is: nobody reads columns of three letters.
    if not console.is_terminal:
        console.width = FILE_WIDTH
    console.print(table)


def _shown_unit(unit: str) -> str:
    return "ms" if unit == "s" else unit


def _cell_value(unit: str, value: float) -> str:
    return f"{1e3 * value:,.1f} ms" if unit == "s" else f"{value:,.1f}"


def _show_peers(console: Console, document: Document) -> None:
    sizes = document["sizes"]
    title = (
        f"{document['model']}, {document['threads']} threads, prompts of {sizes['prompt_tokens']:,} tokens; median "
        f"(least to greatest) of {document['runs']} interleaved runs"
    )
    table = _table(
        [f"{row['title']}, {_shown_unit(row['unit'])}" for row in document["rows"]], title
    )
    for peer in document["peers"]:
        cells = [_cell(row, peer["name"]) for row in document["rows"]]
        table.add_row(peer["name"], *cells)
    _print(console, table)
    if any(row["ratios"] for row in document["rows"]):
        _print(console, _ratio_table(document["rows"]))


def _cell(row: Document, name: str) -> str:
    summary = row["peers"].get(name)
    if summary is None:
        return ""
    scale = 1e3 if row["unit"] == "s" else 1.0
    median, least, greatest = (f"{scale * summary[key]:,.1f}" for key in ("median", "min", "max"))
    return f"{median}\n({least} to {greatest})"


def _ratio_table(rows: Sequence[Document]) -> Table:
    """Return how many times faster Kvist is, against the best setting of each engine."""
    pairs = list(
        dict.fromkeys((ratio["kvist"], ratio["family"]) for row in rows for ratio in row["ratios"])
    )
    title = "times faster than the best setting of each engine (~: runs overlap)"
    table = _table([row["title"] for row in rows], title)
    for own, family in pairs:
        cells = [
            "".join(
                f"{'' if ratio['is_clear'] else '~'}{ratio['ratio']:.2f}x"
                for ratio in row["ratios"]
                if (ratio["kvist"], ratio["family"]) == (own, family)
            )
            for row in rows
        ]
        table.add_row(f"{own} / {family}", *cells)
    return table


def _show_kernels(console: Console, document: Document) -> None:
    title = f"{document['threads']} threads, {document['isa']}; the bound is {BOUND}"
    table = _table(["time", "reads", "speed", "bound by", "ceiling", "reached"], title)
    for case in document["cases"]:
        unit = "GB/s" if case["bound_by"].startswith("read") else "GOP/s"
        table.add_row(
            case["case"],
            f"{1e6 * case['time_s']:,.1f} us",
            f"{case['num_bytes'] / case['time_s'] / 1e9:,.1f} GB/s",
            f"{case['num_operations'] / case['time_s'] / 1e9:,.0f} GOP/s",
            case["bound_by"],
            f"{case['ceiling'] / 1e9:,.1f} {unit}",
            f"{case['fraction']:.0%}",
        )
    _print(console, table)
