"""The chart of loss against bits."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import pytest

from kvist.errors import ConfigError
from kvist.tune.plot import best_of, write_plot

if TYPE_CHECKING:
    from pathlib import Path

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None


def codec(name: str, bits: float, kl: float, **more: Any) -> dict[str, Any]:
    figures = {"kl_se": 0.1 * kl, "perplexity_delta": kl, "perplexity_delta_se": 0.1 * kl}
    return {"name": name, "bits_per_value": bits, "kl": kl, "kernels": "native", **figures, **more}


def document(*codecs: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "model": "m", "text": "t [x]", "positions": 9, "context": 64, "codecs": list(codecs), **more
    }  # fmt: skip


def test_what_another_one_beats_is_left_out() -> None:
    int8, int4, int3 = codec("int8", 8.0, 0.1), codec("int4", 4.0, 0.2), codec("int3", 3.0, 0.9)
    worse = codec("worse", 4.0, 0.3)
    assert best_of([int8, worse, int3, int4]) == [int3, int4, int8]
    assert best_of([int8, codec("more", 9.0, 0.1), int4]) == [int4, int8]
    # By the bits of a whole request, where they are known.
    large = codec("large", 3.5, 0.05, request_bits_per_value=8.5)
    assert best_of([int8, large, int4]) == [int4, int8, large]


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="needs kvist[plot]")
def test_a_chart_is_a_png(tmp_path: Path) -> None:
    path = tmp_path / "loss.png"
    allocation = codec("", 3.7, 0.3)
    layers = {"allocation": {key: allocation[key] for key in allocation if key != "name"}}
    rule = codec("sink=raw16,recent:64=raw16,rest=int4", 5.0, 0.15)
    write_plot(path, document(codec("int8", 8.0, 0.0), rule, layers=layers))
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG")
    write_plot(path, document(codec("int8", 8.0, 0.1), codec("int4", 4.0, 0.2)))
    assert path.read_bytes() != content


@pytest.mark.skipif(HAS_MATPLOTLIB, reason="matplotlib is installed")
def test_a_chart_without_matplotlib_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\[tune\] --plot needs matplotlib.*kvist\[plot\]"):
        write_plot(tmp_path / "loss.png", document(codec("int8", 8.0, 0.1)))
