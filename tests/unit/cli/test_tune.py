"""``kvist tune``: the line that scripts rely on, the table, and what it refuses."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

import pytest

from kvist.cli import tune
from kvist.tune import run
from kvist.tune.profile import load_profile
from kvist.tune.quality import Score

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[run.Measurement]:
    """Return the measurements that the command asks for; none is made."""
    measurements: list[run.Measurement] = []
    score = Score(positions=100, agreed=97, nll=301.0, reference_nll=300.0, kl=0.25)

    def measure(measurement: run.Measurement, on_progress: Any) -> dict[str, Any]:
        measurements.append(measurement)
        on_progress("measuring", 1, 2)
        figures = {"kernels": "emulated", "bits_per_value": 4.19, **score.summary()}
        return {
            "model": measurement.model.model,
            "fingerprint": "of the model",
            "transforms": "",
            "positions": 100,
            "weights": "int8",
            "codecs": [{"name": name, **figures} for name in measurement.codecs],
        }

    model = tmp_path / "model.gguf"
    model.touch()
    monkeypatch.setattr(tune, "ensure_available", lambda _: None)
    monkeypatch.setattr(run, "measure", measure)
    return measurements


def arguments(tmp_path: Path, *more: str) -> list[str]:
    (tmp_path / "text.txt").write_text("some text")
    return [
        "tune",
        "--model",
        str(tmp_path / "model.gguf"),
        "--text",
        str(tmp_path / "text.txt"),
        *more,
    ]


def test_json_is_one_line_with_the_promised_keys(asked: list, kvist: Any, tmp_path: Path) -> None:
    result = kvist(*arguments(tmp_path, "--codecs", "int8, int4", "--windows", "4", "--json"))
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    codecs = json.loads(line)["codecs"]
    assert [codec["name"] for codec in codecs] == ["int8", "int4"]
    assert {"bits_per_value", "perplexity_delta", "kl", "top1_agreement", "kernels"} <= set(
        codecs[0]
    )
    assert abs(codecs[0]["perplexity_delta"] - 0.01005) < 1e-5
    (measurement,) = asked
    assert measurement.windows == 4
    assert measurement.text == "some text"
    assert measurement.calibration_text is not None
    assert len(measurement.calibration_text) > 20_000


def test_the_table_says_how_codecs_were_computed(asked: list, kvist: Any, tmp_path: Path) -> None:
    result = kvist(*arguments(tmp_path))
    assert result.exit_code == 0, result.output
    for part in ("int8", "int4", "int3", "4.19", "+1.01%", "0.00250", "97.0%", "emulated"):
        assert part in result.stdout
    assert "one standard error" in result.stderr


def test_calibration_may_be_another_text_or_none(asked: list, kvist: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    assert (
        kvist(*arguments(tmp_path, "--calibration-text", str(tmp_path / "mine.txt"))).exit_code == 0
    )
    assert kvist(*arguments(tmp_path, "--no-calibration")).exit_code == 0
    assert [measurement.calibration_text for measurement in asked] == ["mine", None]
    result = kvist(
        *arguments(tmp_path, "--no-calibration", "--calibration-text", str(tmp_path / "mine.txt"))
    )
    assert result.exit_code == 2
    assert "exclude each other" in result.stderr


def test_a_profile_names_the_codec_within_the_loss(asked: list, kvist: Any, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    for max_loss, expected in (("0.02", "int8"), ("0.01", "raw16")):
        result = kvist(*arguments(tmp_path, "--profile", str(path), "--max-loss", max_loss))
        assert result.exit_code == 0, result.output
        assert f"recommends {expected}" in result.stderr
        profile = load_profile(path, "of the model")
        assert profile.kv_cache_dtype == expected
        assert profile.text == "text.txt"


def test_tasks_are_passed_on(asked: list, kvist: Any, tmp_path: Path) -> None:
    (tmp_path / "keys.jsonl.gz").write_bytes(gzip.compress(b"{}\n{}\n"))
    retrieval = ("--retrieval", str(tmp_path / "keys.jsonl.gz"))
    assert kvist(*arguments(tmp_path, *retrieval, "--generate", "7")).exit_code == 0
    assert kvist(*arguments(tmp_path, "--window-tokens", "128")).exit_code == 0
    assert [(x.retrieval, x.generated_tokens) for x in asked] == [(("{}", "{}"), 7), ((), 64)]
    (tmp_path / "bad.gz").write_bytes(b"x")
    result = kvist(*arguments(tmp_path, "--retrieval", str(tmp_path / "bad.gz")))
    assert result.exit_code == 1
    assert "--retrieval cannot be unpacked" in result.stderr


@pytest.mark.parametrize(
    ("more", "exit_code", "message"),
    [
        (("--codecs", "int5"), 1, "--codecs must be some of"),
        (("--codecs", "int8,"), 1, "received ''"),
        (("--windows", "0"), 1, "--windows must be at least 1"),
        (("--window-tokens", "100"), 1, "multiple of 64"),
        (("--generate", "1025"), 1, "--generate must be from 0 to half of --window-tokens"),
        (("--windows", "x"), 2, "windows"),
    ],
)
def test_bad_options_are_refused(
    asked: list, kvist: Any, tmp_path: Path, more: tuple[str, ...], exit_code: int, message: str
) -> None:
    result = kvist(*arguments(tmp_path, *more))
    assert result.exit_code == exit_code
    assert message in result.stderr
    assert not asked


def test_texts_that_are_none_are_refused(asked: list, kvist: Any, tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(b"\xff\xfe")
    for option in ("--text", "--calibration-text"):
        result = kvist(*arguments(tmp_path, option, str(tmp_path / "bad")))
        assert result.exit_code == 1
        assert f"{option} must be UTF-8 text" in result.stderr
    result = kvist(*arguments(tmp_path, "--text", str(tmp_path / "missing")))
    assert result.exit_code == 1
    assert "No such file" in result.stderr
