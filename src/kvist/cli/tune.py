"""``kvist tune``: what each codec of the KV cache costs in quality, on the user's own text."""

from __future__ import annotations

import gzip
import zlib
from importlib import resources
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

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
from kvist.model import catalog

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@takes_options
def tune(  # noqa: PLR0913  # one per option
    *,
    text: Annotated[Path, typer.Option(help="UTF-8 file that is scored")],
    codecs: Annotated[
        str, typer.Option(help="codecs to measure, separated by commas: raw16, int8, int4, int3")
    ] = "int8,int4,int3",
    windows: Annotated[int, typer.Option(help="pieces of the text that are scored")] = 1,
    window_tokens: Annotated[
        int,
        typer.Option(help="tokens of a piece, each computed from its beginning; a multiple of 64"),
    ] = 2048,
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
            help="tokens that are generated after the first half of each piece and compared; 0: none; default: 200, or "
            "as many as the second half has",
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
    profile: Annotated[
        Path | None,
        typer.Option(
            help="file to write for serve --kv-profile: the codec with the fewest bits within --max-loss",
            show_default=False,
        ),
    ] = None,
    max_loss: Annotated[
        float, typer.Option(help="what the perplexity may rise by in a --profile: 0.01 is 1 %")
    ] = 0.01,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="measure again what has been measured before")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="print the figures as one line of JSON")
    ] = False,
    config: Annotated[EngineConfig, Only("model", "weights", "dtype", "threads", "kv_head_dim")],
) -> None:
    """Measure what int8, int4 and int3 K and V cost: perplexity, divergence from 16 bits, agreement of tokens.

    Figures of codecs that the kernels here do not read come from an emulation, and the table says so. A measurement
    that was interrupted goes on where it was; the calibration of a model is kept.
    """
    if calibration_text is not None and not calibration:
        fail(
            "[tune] --calibration-text and --no-calibration exclude each other",
            exit_code=EXIT_USAGE,
        )
    if config.cache.kv_head_dim is not None and (generate or retrieval or profile):
        fail(
            "[tune] --kv-head-dim is measured by perplexity and divergence alone; leave out --generate, --retrieval "
            "and --profile",
            exit_code=EXIT_USAGE,
        )
    shipped = resources.files("kvist.cli").joinpath(SHIPPED_DOCUMENT).read_text(encoding="utf-8")
    scored = _read(text, "--text")
    learnt = shipped if calibration_text is None else _read(calibration_text, "--calibration-text")
    ensure_available(config.model.model)
    # torch is slow to import
    from kvist.tune.profile import make_profile, save_profile  # noqa: PLC0415
    from kvist.tune.reduced import measure_reduced  # noqa: PLC0415
    from kvist.tune.run import Measurement, measure  # noqa: PLC0415

    measurement = Measurement(
        model=config.model,
        path=catalog.resolve(config.model.model).path,
        text=scored,
        codecs=tuple(name.strip() for name in codecs.split(",")),
        windows=windows,
        window_tokens=window_tokens,
        calibration_text=learnt if calibration else None,
        generated_tokens=min(200, window_tokens // 2) if generate is None else generate,
        retrieval=() if retrieval is None else tuple(_read(retrieval, "--retrieval").splitlines()),
        retrieval_prompts=retrieval_prompts,
        is_fresh=fresh,
    )
    kept = config.cache.kv_head_dim
    with progress_bar() as on_progress:
        if kept is None:
            document = measure(measurement, on_progress)
        else:
            document = measure_reduced(measurement, kept, on_progress)
    document = {"text": text.name, **document}
    if profile is not None:
        chosen = make_profile(document, max_loss)
        save_profile(profile, chosen)
        note(
            f"{profile} recommends {chosen.kv_cache_dtype}: perplexity up by {max_loss:.2%} at most"
        )
    if as_json:
        print_json(document)
    else:
        _show(document)


def _read(path: Path, option: str) -> str:
    try:
        if path.suffix == ".gz":
            return gzip.decompress(path.read_bytes()).decode("utf-8")
        return path.read_text(encoding="utf-8")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        fail(f"[tune] {option} cannot be unpacked: {error}")
    except UnicodeDecodeError as error:
        fail(f"[tune] {option} must be UTF-8 text: {error}")


def _share(codec: Mapping[str, Any], figure: str) -> str:
    return f"{codec[figure]:.1%}" if figure in codec else ""


def _show(document: Mapping[str, Any]) -> None:  # Any: JSON values
    columns: dict[str, Callable[[Mapping[str, Any]], str]] = {  # Any: JSON values
        "codec": lambda codec: codec["name"],
        "bits": lambda codec: f"{codec['bits_per_value']:.2f}",
        "perplexity": lambda codec: f"{codec['perplexity_delta']:+.2%}",
        "+-": lambda codec: f"{codec['perplexity_delta_se']:.2%}",
        "KL": lambda codec: f"{codec['kl']:.5f}",
        "same": lambda codec: f"{codec['top1_agreement']:.1%}",
        "generated": lambda codec: _share(codec, "greedy_agreement"),
        "found": lambda codec: _share(codec, "retrieval"),
        "raw found": lambda codec: _share(codec, "retrieval_reference"),
        "kernels": lambda codec: codec["kernels"],
    }
    rows = [[cell(codec) for cell in columns.values()] for codec in document["codecs"]]
    table = Table(
        title=Text(f"{document['model']}, {document['text']}: {document['positions']:,} positions"),
        title_justify="left",
        box=None,
    )
    is_used = [any(cells) for cells in zip(*rows, strict=True)]
    for name in compress(columns, is_used):
        table.add_column(name, justify="left" if name in {"codec", "kernels"} else "right")
    for row in rows:
        table.add_row(*compress(row, is_used))
    result_console().print(table)
    note(
        f"against 16 bits, {document['weights']} weights; +- is one standard error; same: most probable tokens that "
        "are; generated: share of a continuation before it differs; found: values by their keys; emulated: what the "
        "codec's reference makes of complete blocks, the block being written stays as it is"
    )
