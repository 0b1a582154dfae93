"""The random model: a file that loads as the shape it was asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from benchmarks import random_model

from kvist import plan as planning
from kvist.model.gguf_file import read_gguf
from kvist.model.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from pathlib import Path


def write(path: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> int:
    monkeypatch.setattr("sys.argv", ["random_model", str(path), *options])
    return random_model.main()


@pytest.mark.usefixtures("smollm2_path")
def test_the_file_has_the_shape_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "random.gguf"
    sizes = {
        "layers": 2,
        "hidden": 64,
        "intermediate": 96,
        "heads": 4,
        "kv-heads": 2,
        "head-dim": 16,
    }
    options = [f"--{name}={size}" for name, size in sizes.items()]

    assert write(path, monkeypatch, *options) == 0

    spec = planning.read_spec(path)
    assert (spec.num_layers, spec.hidden_size, spec.intermediate_size) == (2, 64, 96)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (4, 2, 16)
    assert load_tokenizer(path).encode("a river")
    weights = read_gguf(path).dequantize("blk.1.ffn_down.weight")
    outputs_deviate_by = float((weights**2).sum(axis=1).mean() ** 0.5)
    assert weights.shape == (64, 96)
    assert outputs_deviate_by == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize(
    ("options", "message"),
    [(("--hidden", "100"), "multiples of 32"), (("--heads", "9", "--kv-heads", "2"), "--kv-heads")],
)
def test_shapes_that_no_file_can_have_are_refused(
    options: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        write(tmp_path / "random.gguf", monkeypatch, *options)

    assert message in capsys.readouterr().err
