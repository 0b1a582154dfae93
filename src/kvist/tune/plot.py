"""Loss against bits as a picture: what ``kvist tune --plot`` writes.

Responsible for the PNG file and for which settings no other one beats. Needs matplotlib, which is the optional extra
``plot``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvist.charts import blank_figure, require_matplotlib

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    Codec = dict[str, Any]  # Any: JSON values

NATIVE_COLOUR, EMULATED_COLOUR = "#2a7de1", "#b0b7c3"


def best_of(codecs: Sequence[Codec]) -> list[Codec]:
    """Return those with which no other one can compete, by bits: it would take more bits or diverge more."""
    ordered = sorted(codecs, key=lambda codec: (bits_of(codec), codec["kl"]))
    best: list[Codec] = []
    for codec in ordered:
        if not best or codec["kl"] < best[-1]["kl"]:
            best.append(codec)
    return best


def bits_of(codec: Codec) -> float:
    """Return the bits of a value in a request, or without recent blocks where no engine keeps requests like that."""
    bits: float = codec.get("request_bits_per_value") or codec["bits_per_value"]
    return bits


def write_plot(path: Path, document: dict[str, Any]) -> None:  # Any: JSON values
    """Write a PNG: divergence and perplexity of each setting against its bits, with one standard error.

    A line joins those with which no other one can compete.

    Args:
        path: Written to.
        document: As ``run.measure`` returns it, with the name of the ``text``.

    Raises:
        ConfigError: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    require_matplotlib("tune")
    codecs = list(document["codecs"])
    if "layers" in document:
        codecs.append(
            {"name": "by layer", **document["layers"]["allocation"], "kernels": "emulated"}
        )
    title = f"{document['model']}, {document['text']}: {document['positions']:,} positions"
    figure = blank_figure(11, 4.6, title)
    left, right = figure.add_subplot(1, 2, 1), figure.add_subplot(1, 2, 2)
    _points(left, codecs, lambda codec: (codec["kl"], codec["kl_se"]))
    _points(
        right,
        codecs,
        lambda codec: (100 * codec["perplexity_delta"], 100 * codec["perplexity_delta_se"]),
    )
    if all(codec["kl"] > 0 for codec in codecs):
        left.set_yscale("log")
    left.set_ylabel("KL divergence from 16 bits, nats")
    right.set_ylabel("perplexity, % above 16 bits")
    right.axhline(0, color="#dddddd", zorder=0)
    for panel in (left, right):
        panel.set_xlabel(f"bits per value, requests of {document['context']:,} tokens")
    figure.savefig(path, format="png", dpi=120)


def _points(
    panel: Any,  # noqa: ANN401  # matplotlib has no types
    codecs: Sequence[Codec],
    figure_of: Callable[[Codec], tuple[float, float]],
) -> None:
    best = best_of(codecs)
    panel.plot(
        [bits_of(codec) for codec in best],
        [figure_of(codec)[0] for codec in best],
        color=NATIVE_COLOUR,
        linewidth=1,
        zorder=1,
    )
    for codec in codecs:
        value, error = figure_of(codec)
        colour = NATIVE_COLOUR if codec["kernels"] == "native" else EMULATED_COLOUR
        panel.errorbar(bits_of(codec), value, yerr=error, fmt="o", color=colour, ecolor="#444444")
        panel.annotate(
            codec["name"].replace(",", "\n"),
            (bits_of(codec), value),
            textcoords="offset points",
            xytext=(6, 4),
            fontsize="x-small",
        )
    panel.margins(x=0.2, y=0.15)
