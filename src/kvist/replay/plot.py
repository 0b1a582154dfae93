"""A replay's documents as a picture.

Responsible for the PNG file. Needs matplotlib, which is the optional extra ``plot``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvist.charts import blank_figure, require_matplotlib

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvist.replay.metrics import Document

_LATENCIES = ("ttft_s", "itl_s", "e2e_s")
_SHOWN_PERCENTILES = ("p50", "p95", "p99")


def write_plot(path: Path, runs: Sequence[Document], *, title: str) -> None:
    """Write a PNG: hit shares of all runs and, of those with a clock, latencies and goodput.

    Raises:
        ConfigError: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    require_matplotlib("replay")
    timed = [run for run in runs if run["mode"] == "timed"]
    num_panels = 1 + (len(_LATENCIES) + 1 if timed else 0)
    figure = blank_figure(4.5 * min(3, num_panels), 4 * -(-num_panels // 3), title)
    num_rows, num_columns = -(-num_panels // 3), min(3, num_panels)
    panels = [figure.add_subplot(num_rows, num_columns, i + 1) for i in range(num_panels)]
    _bars(
        panels[0], runs, [100 * run["hit_share"] for run in runs], "hit share, % of prompt tokens"
    )
    if timed:
        for panel, name in zip(panels[1:], _LATENCIES, strict=False):
            _percentile_lines(panel, timed, name)
        _bars(panels[-1], timed, [run["goodput_rps"] for run in timed], "goodput, requests/s")
    figure.savefig(path, format="png", dpi=120)


def label_of(run: Document) -> str:
    """Return what tells a run from the others, in a few words."""
    return " / ".join([part for part in (run["schedule"], run["eviction"]) if part])


def _bars(panel: Any, runs: Sequence[Document], values: list[float], title: str) -> None:  # noqa: ANN401  # matplotlib has no types
    panel.bar(range(len(runs)), values)
    panel.set_xticks(range(len(runs)), [label_of(run) for run in runs], rotation=30, ha="right")
    panel.set_title(title)
    for index, value in enumerate(values):
        panel.annotate(f"{value:.3g}", (index, value), ha="center", va="bottom")


def _percentile_lines(panel: Any, runs: Sequence[Document], name: str) -> None:  # noqa: ANN401  # matplotlib has no types
    for run in runs:
        if run[name] is not None:
            values = [run[name][key] for key in _SHOWN_PERCENTILES]
            panel.plot(_SHOWN_PERCENTILES, values, marker="o", label=label_of(run))
    panel.set_yscale("log")
    panel.set_title(f"{name.removesuffix('_s')}, s")
    panel.legend(fontsize="small")
