"""``kvist tune``: what each codec of the KV cache costs in quality and gives in speed, on the user's own text."""

from __future__ import annotations

import gzip
import math
import zlib
from importlib import resources
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from kvist.charts import require_matplotlib
from kvist.cli.console import (
    EXIT_USAGE,
    fail,
    note,
    print_json,
    progress_bar,
    result_console,
)
from kvist.cli.demo import SHIPPED_DOCUMENT
from kvist.cli.models import ensure_available
from kvist.cli.options import Only, takes_options
from kvist.config import EngineConfig
from kvist.errors import ConfigError
from kvist.model import catalog
from kvist.precision import KVPrecision

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Figures = Mapping[str, Any]  # Any: JSON values

ROUNDS, QUICK_ROUNDS = 15, 5
"""Decode steps of each codec that are timed."""
MAX_WIDTH = 1000
"""Columns of a table at most."""


@takes_options
def tune(  # noqa: PLR0913  # one per option
    *,
    text: Annotated[Path, typer.Option(help="UTF-8 file that is scored")],
    codecs: Annotated[
        str,
        typer.Option(help="codecs to measure, separated by commas: raw16, int8, int4, int3, mixed"),
    ] = "int8,int4,int3",
    rules: Annotated[
        list[str] | None,
        typer.Option(
            help="a rule to measure beside them, as serve --kv-precision; may be given several times",
            metavar="RULE",
        ),
    ] = None,
    windows: Annotated[
        int | None,
        typer.Option(help="pieces of the text that are scored; default: 1", show_default=False),
    ] = None,
    window_tokens: Annotated[
        int | None,
        typer.Option(
            help="tokens of a piece, each computed from its beginning; a multiple of 64; default: 2048, 1024 with "
            "--quick",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="a first idea: one short piece, a short continuation, few steps timed"
        ),
    ] = False,
    calibration_text: Annotated[
        Path | None,
        typer.Option(
            help="UTF-8 file from whose first 4,096 tokens int4 and int3 learn what matters to the model; "
            "default: a text that Kvist brings",
            show_default=False,
        ),
    ] = None,
    calibration: Annotated[
        bool, typer.Option(help="measure int4 and int3 calibrated, or as they are without it")
    ] = True,
    generate: Annotated[
        int | None,
        typer.Option(
            help="tokens that are generated after the first half of each piece and compared; 0: none; default: 200 (50 "
            "with --quick), or as many as the second half has",
            show_default=False,
        ),
    ] = None,
    retrieval: Annotated[
        Path | None,
        typer.Option(
            help="file of key-value prompts, JSON lines with ordered_kv_records, key and value (.gz too), cut to "
            "--window-tokens",
            show_default=False,
        ),
    ] = None,
    retrieval_prompts: Annotated[
        int, typer.Option(help="how many prompts of --retrieval are asked")
    ] = 20,
    speed: Annotated[
        bool, typer.Option(help="time decoding in each codec, at --window-tokens, on this machine")
    ] = True,
    layers: Annotated[
        bool,
        typer.Option(
            "--layers",
            help="measure each layer alone in each codec, and search for a codec for each (emulated; takes a pass over "
            "the first piece for each layer and codec)",
        ),
    ] = False,
    layer_bits: Annotated[
        float | None,
        typer.Option(
            help="bits of a value, on average, that --layers may spend; default: as many as --max-loss takes",
            show_default=False,
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            help="file to write for serve --kv-profile: what --max-loss or --budget-gib recommends",
            show_default=False,
        ),
    ] = None,
    max_loss: Annotated[
        str | None,
        typer.Option(
            help="recommend the fewest bits with which the perplexity rises by no more than that, as 1% or 0.01; "
            "default: 1%",
            show_default=False,
        ),
    ] = None,
    budget_gib: Annotated[
        float | None,
        typer.Option(
            help="recommend the least loss with which the KV blocks of --concurrency requests fit into that "
            "(serve --memory-gib)",
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            help="tokens of a request, prompt and output, for what KV blocks take; default: --window-tokens",
            show_default=False,
        ),
    ] = None,
    concurrency: Annotated[int, typer.Option(help="requests at once, for the same")] = 8,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="write loss against bits to this PNG file; needs kvist[plot]", show_default=False
        ),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="measure again what has been measured before")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="print the figures as one line of JSON")
    ] = False,
    config: Annotated[EngineConfig, Only("model", "weights", "dtype", "threads", "kv_head_dim")],
) -> None:
    """Measure what int8, int4 and int3 K and V cost: perplexity, divergence from 16 bits, agreement of tokens, speed.

    Figures of what the kernels here do not read come from an emulation, and the table says so. A measurement that was
    interrupted goes on where it was; the calibration of a model is kept.
    """
    _check_together(
        {
            "--calibration-text and --no-calibration exclude each other": calibration_text
            is not None
            and not calibration,
            "--max-loss and --budget-gib each recommend a codec; give one of them": max_loss
            is not None
            and budget_gib is not None,
            "--kv-head-dim is measured by perplexity and divergence alone; leave out --generate, --retrieval, --rules, "
            "--layers, --plot, --profile, --max-loss and --budget-gib": config.cache.kv_head_dim
            is not None
            and any(
                (
                    generate,
                    retrieval,
                    rules,
                    "mixed" in codecs,
                    layers,
                    plot,
                    profile,
                    max_loss,
                    budget_gib,
                )
            ),
            "--layer-bits is for --layers; add it": layer_bits is not None and not layers,
        }
    )
    allowed_loss = _fraction("1%" if max_loss is None else max_loss)
    # Before minutes of measuring, not after them.
    for option, file in (("--plot", plot), ("--profile", profile)):
        if file is not None and not file.absolute().parent.is_dir():
            fail(
                f"[tune] {option} {file}: there is no folder {file.absolute().parent}",
                exit_code=EXIT_USAGE,
            )
    if plot is not None:
        require_matplotlib("tune")
    shipped = resources.files("kvist.cli").joinpath(SHIPPED_DOCUMENT).read_text(encoding="utf-8")
    scored = _read(text, "--text")
    learnt = shipped if calibration_text is None else _read(calibration_text, "--calibration-text")
    ensure_available(config.model.model)
    # torch is slow to import
    from kvist.tune.plot import write_plot  # noqa: PLC0415
    from kvist.tune.profile import Wanted, make_profile, save_profile  # noqa: PLC0415
    from kvist.tune.reduced import measure_reduced  # noqa: PLC0415
    from kvist.tune.run import QUICK_WINDOW_TOKENS, Measurement, measure  # noqa: PLC0415

    if window_tokens is None:
        window_tokens = QUICK_WINDOW_TOKENS if quick else 2048
    if generate is None:
        generate = min(50 if quick else 200, window_tokens // 2)
    measurement = Measurement(
        model=config.model,
        path=catalog.resolve(config.model.model).path,
        text=scored,
        codecs=(
            *(name.strip() for name in codecs.split(",")),
            *(_rule(rule) for rule in rules or ()),
        ),
        windows=1 if windows is None else windows,
        window_tokens=window_tokens,
        calibration_text=learnt if calibration else None,
        generated_tokens=generate,
        retrieval=() if retrieval is None else tuple(_read(retrieval, "--retrieval").splitlines()),
        retrieval_prompts=retrieval_prompts,
        is_fresh=fresh,
        context=context,
        concurrency=concurrency,
        budget_gib=budget_gib,
        speed_rounds=(QUICK_ROUNDS if quick else ROUNDS) if speed else 0,
        by_layer=layers,
        layer_bits=layer_bits,
        max_loss=allowed_loss,
    )
    kept = config.cache.kv_head_dim
    with progress_bar() as on_progress:
        document = (
            measure(measurement, on_progress)
            if kept is None
            else measure_reduced(measurement, kept, on_progress)
        )
    document = {"text": text.name, "is_quick": quick, **document}
    if as_json:
        # Before what may still fail, so that nothing measured is lost.
        print_json(document)
    else:
        _show(document)
    if profile is not None or max_loss is not None or budget_gib is not None:
        wanted = Wanted(budget_gib=budget_gib) if budget_gib else Wanted(max_loss=allowed_loss)
        chosen = make_profile(document, wanted)
        if profile is not None:
            save_profile(profile, chosen)
        note(f"{profile or 'kvist tune'} recommends {chosen.name}: {wanted}")
    if plot is not None:
        write_plot(plot, document)
        note(f"chart written to {plot}")


def _check_together(faults: Mapping[str, bool]) -> None:
    for message, is_fault in faults.items():
        if is_fault:
            fail(f"[tune] {message}", exit_code=EXIT_USAGE)


def _rule(text: str) -> str:
    try:
        return str(KVPrecision.parse(text))
    except ConfigError as error:
        fail(f"[tune] --rules {text!r} is no rule: {error}")


def _fraction(text: str) -> float:
    number, is_percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    try:
        fraction = float(number) / (100 if is_percent else 1)
    except ValueError:
        fraction = math.nan
    if not 0 <= fraction < math.inf:
        fail(
            f"[tune] --max-loss must be a fraction or a percentage, such as 0.01 or 1%, received {text!r}",
            exit_code=EXIT_USAGE,
        )
    return fraction


def _read(path: Path, option: str) -> str:
    try:
        if path.suffix == ".gz":
            return gzip.decompress(path.read_bytes()).decode("utf-8")
        return path.read_text(encoding="utf-8")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        fail(f"[tune] {option} cannot be unpacked: {error}")
    except UnicodeDecodeError as error:
        fail(f"[tune] {option} must be UTF-8 text: {error}")


def _share(codec: Figures, figure: str) -> str:
    return f"{codec[figure]:.1%}" if figure in codec else ""


def _number(codec: Figures, figure: str, form: str) -> str:
    return format(codec[figure], form) if figure in codec else ""


def _range_columns(document: Figures) -> dict[str, Callable[[Figures], str]]:
    """Return a column for each range of positions; none where there is one only."""
    ranges = document["codecs"][0].get("by_position", [])
    if len(ranges) < 2:
        return {}
    return {
        f"KL {part['from']:,}-{part['to']:,}": _kl_of_range(index)
        for index, part in enumerate(ranges)
    }


def _kl_of_range(index: int) -> Callable[[Figures], str]:
    return lambda codec: f"{codec['by_position'][index]['kl']:.5f}"


def _show(document: Figures) -> None:
    columns: dict[str, Callable[[Figures], str]] = {
        "codec": lambda codec: codec["name"],
        "bits": lambda codec: f"{codec['bits_per_value']:.2f}",
        "in all": lambda codec: _number(codec, "request_bits_per_value", ".2f"),
        "perplexity": lambda codec: f"{codec['perplexity_delta']:+.2%}",
        "+-": lambda codec: f"{codec['perplexity_delta_se']:.2%}",
        "KL": lambda codec: f"{codec['kl']:.5f}",
        **_range_columns(document),
        "same": lambda codec: f"{codec['top1_agreement']:.1%}",
        "generated": lambda codec: _share(codec, "greedy_agreement"),
        "found": lambda codec: _share(codec, "retrieval"),
        "raw found": lambda codec: _share(codec, "retrieval_reference"),
        "tokens/s": lambda codec: _number(codec, "decode_tokens_per_s", ".1f"),
        "x raw16": lambda codec: _number(codec, "decode_speed_ratio", ".2f"),
        "attention ms": lambda codec: _number(codec, "attention_ms", ".1f"),
        "encode ms": lambda codec: _number(codec, "encode_ms", ".2f"),
        "fits": lambda codec: {None: "", True: "yes", False: "no"}[codec.get("fits")],
        "kernels": lambda codec: codec["kernels"],
    }
    title = f"{document['model']}, {document['text']}: {document['positions']:,} positions"
    _print_table(title, columns, document["codecs"])
    note(
        f"against 16 bits, {document['weights']} weights; +- is one standard error; {_in_all(document)}same: most "
        "probable tokens that are; generated: share of a continuation before it differs; found: values by their keys; "
        "emulated: what the codec's reference makes of complete blocks, the block being written stays as it is"
    )
    if "speed" in document:
        speed = document["speed"]
        note(
            f"timing on this machine now: {speed['sequences']} sequences of {speed['context']:,} tokens decode at "
            f"once, medians of {speed['rounds']} steps, {speed['threads']} threads; encode ms: of a block of 64 tokens"
        )
    if document["is_quick"]:
        note(
            f"quick: {document['positions']:,} positions only; the figures are a first idea, leave out --quick for "
            "better ones"
        )
    if "layers" in document:
        _show_layers(document["layers"])


def _in_all(document: Figures) -> str:
    if "context" not in document:
        return ""
    return f"in all: bits of a value in a request of {document['context']:,} tokens; "


def _show_layers(layers: Figures) -> None:
    sensitivity, allocation = layers["sensitivity"], layers["allocation"]
    columns: dict[str, Callable[[Figures], str]] = {
        "layer": lambda row: str(row["layer"]),
        **{f"KL {codec}": _kl_of_codec(codec) for codec in sensitivity},
        "chosen": lambda row: row["chosen"],
    }
    rows = [
        {
            "layer": layer,
            "chosen": chosen,
            **{codec: figures[layer]["kl"] for codec, figures in sensitivity.items()},
        }
        for layer, chosen in enumerate(allocation["codecs"])
    ]
    _print_table(f"Each layer alone, emulated: {layers['positions']:,} positions", columns, rows)
    for codec, figures in layers["uniform"].items():
        note(
            f"{codec} in all layers: {figures['bits_per_value']:.2f} bits, KL {figures['kl']:.5f} +- "
            f"{figures['kl_se']:.5f}, perplexity {figures['perplexity_delta']:+.2%} +- "
            f"{figures['perplexity_delta_se']:.2%}"
        )
    note(
        f"layer by layer: {allocation['bits_per_value']:.2f} bits, KL {allocation['kl']:.5f} +- "
        f"{allocation['kl_se']:.5f}, perplexity {allocation['perplexity_delta']:+.2%} +- "
        f"{allocation['perplexity_delta_se']:.2%} over {allocation['positions']:,} positions, emulated; the sum of "
        f"single layers is {allocation['kl_predicted']:.5f}, with layers drawn by lot it would be "
        f"{allocation['kl_predicted_by_lot']:.5f}. A block has one codec in all layers, so no engine keeps it like that"
    )


def _kl_of_codec(codec: str) -> Callable[[Figures], str]:
    return lambda row: f"{row[codec]:.6f}"


def _print_table(
    title: str, columns: Mapping[str, Callable[[Figures], str]], rows: Sequence[Figures]
) -> None:
    """Print rows, without the columns that are empty in all of them."""
    cells = [[cell(row) for cell in columns.values()] for row in rows]
    # Text: a name in brackets is no markup.
    table = Table(title=Text(title), title_justify="left", box=None)
    is_used = [any(column) for column in zip(*cells, strict=True)]
    for name in compress(columns, is_used):
        table.add_column(name, justify="left" if name in {"codec", "kernels"} else "right")
    for row in cells:
        table.add_row(*compress(row, is_used))
    console = result_console()
    # Figures are not cut to a narrow terminal's width.
    whole = console.measure(table, options=console.options.update(max_width=MAX_WIDTH)).maximum
    console.width = max(console.width, whole)
    console.print(table)
