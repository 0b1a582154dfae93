"""The table of ``kvist bench peers`` as a chart: one panel a row, one bar a peer.

Responsible for the PNG; matplotlib is optional.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvist.charts import blank_figure, require_matplotlib

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from kvist.bench.report import Document

NUM_COLUMNS = 3
KVIST_COLOUR, OTHER_COLOUR = "#2a7de1", "#b0b7c3"


def write_plot(
    path: Path, rows: Sequence[Document], own_names: Collection[str], *, title: str
) -> None:
    """Write a PNG: medians as bars, the spread from the least to the greatest run as a line.

    Args:
        path: Written to.
        rows: As ``kvist.bench.report.rows_document`` returns them.
        own_names: Peers that are Kvist.
        title: Above all panels.

    Raises:
        ConfigError: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    require_matplotlib("bench")
    num_columns = min(NUM_COLUMNS, len(rows))
    num_lines = -(-len(rows) // num_columns)
    figure = blank_figure(4.8 * num_columns, 3.6 * num_lines, title)
    for index, row in enumerate(rows):
        _bars(figure.add_subplot(num_lines, num_columns, index + 1), row, own_names)
    figure.savefig(path, format="png", dpi=120)


def _bars(panel: Any, row: Document, own_names: Collection[str]) -> None:  # noqa: ANN401  # matplotlib has no types
    names = list(row["peers"])
    summaries = list(row["peers"].values())
    medians = [summary["median"] for summary in summaries]
    below = [summary["median"] - summary["min"] for summary in summaries]
    above = [summary["max"] - summary["median"] for summary in summaries]
    colours = [KVIST_COLOUR if name in own_names else OTHER_COLOUR for name in names]
    panel.barh(range(len(names)), medians, xerr=(below, above), color=colours, ecolor="#444444")
    panel.set_yticks(range(len(names)), names)
    panel.invert_yaxis()
    better = "more is better" if row["unit"] != "s" else "less is better"
    panel.set_title(f"{row['title']}, {row['unit']} ({better})", fontsize="medium")
    for index, median in enumerate(medians):
        panel.annotate(f" {median:.3g}", (median, index), va="center", fontsize="small")
    panel.margins(x=0.15)
