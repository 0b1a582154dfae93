"""``kvist tune``: the line that scripts rely on, the table, and what it refuses."""

from __future__ import annotations

import gzip
import json
from typing import TYPE_CHECKING, Any

import pytest

from kvist.cli import tune
from kvist.errors import ConfigError
from kvist.tune import plot, run
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
        figures = {
            "kernels": "emulated",
            "bits_per_value": 4.19,
            "request_bits_per_value": 4.95,
            "kv_bytes_total": 1 << 30,
            "fits": True,
            "decode_tokens_per_s": 123.4,
            "by_position": [
                {"from": 0, "to": 2048, "kl": 0.125}, {"from": 2048, "to": 4096, "kl": 0.375}
            ],
            **score.summary(),
        }  # fmt: skip
        more = {}
        if measurement.by_layer:
            more["layers"] = {
                "positions": 50,
                "sensitivity": {"int4": [{"kl": 0.0625}, {"kl": 0.03125}]},
                "allocation": {
                    "codecs": ["int4", "int3"],
                    "bits_per_value": 3.69,
                    "kl_predicted": 0.5,
                    "kl_predicted_by_lot": 0.75,
                    **score.summary(),
                },
                "uniform": {"int4": {"bits_per_value": 4.25, **score.summary()}},
            }
        return {
            "model": measurement.model.model,
            "fingerprint": "of the model",
            "transforms": "",
            "positions": 100,
            "weights": "int8",
            "context": 4096,
            "concurrency": 8,
            "reference": {"name": "raw16", "fits": False},
            "speed": {"sequences": 8, "context": 2048, "rounds": 5, "threads": 2},
            **more,
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
    for part in ("int8", "int4", "int3", "4.19", "4.95", "+1.01%", "0.00250", "97.0%", "emulated"):
        assert part in result.stdout
    for part in ("KL 0-2,048", "0.12500", "KL 2,048-4,096", "0.37500", "123.4"):
        assert part in result.stdout
    assert "one standard error" in result.stderr
    assert "timing on this machine now: 8 sequences of 2,048 tokens" in result.stderr
    assert "quick" not in result.stderr


def test_quick_measures_less_and_says_so(asked: list, kvist: Any, tmp_path: Path) -> None:
    result = kvist(*arguments(tmp_path, "--quick"))
    assert result.exit_code == 0, result.output
    assert "quick: 100 positions only" in result.stderr
    assert kvist(*arguments(tmp_path, "--quick", "--windows", "2", "--no-speed")).exit_code == 0
    assert kvist(*arguments(tmp_path)).exit_code == 0
    fields = ("windows", "window_tokens", "generated_tokens", "speed_rounds")
    assert [tuple(getattr(x, field) for field in fields) for x in asked] == [
        (1, 1024, 50, tune.QUICK_ROUNDS), (2, 1024, 50, 0), (1, 2048, 200, tune.ROUNDS)
    ]  # fmt: skip


def test_rules_stand_beside_codecs(asked: list, kvist: Any, tmp_path: Path) -> None:
    rules = ("sink=raw16, recent:64=raw16,rest=int4", "recent:64=raw16,rest=int3")
    options = [part for rule in rules for part in ("--rules", rule)]
    assert kvist(*arguments(tmp_path, "--codecs", "mixed", *options)).exit_code == 0
    assert asked[0].codecs == (
        "mixed",
        "sink=raw16,recent:64=raw16,rest=int4",
        "sink=int8,recent:64=raw16,rest=int3",
    )
    result = kvist(*arguments(tmp_path, "--rules", "rest=int4"))
    assert result.exit_code == 1
    assert "--rules 'rest=int4' is no rule" in result.stderr


def test_a_table_of_layers_is_shown(asked: list, kvist: Any, tmp_path: Path) -> None:
    result = kvist(*arguments(tmp_path, "--layers", "--layer-bits", "3.7", "--max-loss", "2%"))
    assert result.exit_code == 0, result.output
    for part in ("Each layer alone", "KL int4", "0.062500", "0.031250", "chosen"):
        assert part in result.stdout
    assert "3.69 bits, KL 0.00250" in result.stderr
    assert "int4 in all layers: 4.25 bits" in result.stderr
    assert "by lot it would be 0.75000" in result.stderr
    assert (asked[0].by_layer, asked[0].layer_bits, asked[0].max_loss) == (True, 3.7, 0.02)


def test_a_budget_recommends_what_fits(asked: list, kvist: Any, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    options = ("--budget-gib", "1.5", "--context", "4096", "--concurrency", "3")
    result = kvist(*arguments(tmp_path, "--profile", str(path), *options))
    assert result.exit_code == 0, result.output
    assert "recommends int8: the least loss in 1.5 GiB" in result.stderr
    assert load_profile(path, "of the model").kv_cache_dtype == "int8"
    assert (asked[0].budget_gib, asked[0].context, asked[0].concurrency) == (1.5, 4096, 3)
    result = kvist(*arguments(tmp_path, "--max-loss", "1%"))
    assert "kvist tune recommends raw16: perplexity up by 1.00% at most" in result.stderr


def test_a_chart_is_written_or_refused_before_anything_is_measured(
    asked: list, kvist: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(plot, "write_plot", lambda *x: drawn.append(x))
    monkeypatch.setattr(tune, "require_matplotlib", lambda _: None)
    path = tmp_path / "loss.png"
    assert kvist(*arguments(tmp_path, "--plot", str(path))).exit_code == 0
    assert [(to, document["text"]) for to, document in drawn] == [(path, "text.txt")]

    def missing(command: str) -> None:
        raise ConfigError(f"[{command}] --plot needs matplotlib")

    monkeypatch.setattr(tune, "require_matplotlib", missing)
    asked.clear()
    result = kvist(*arguments(tmp_path, "--plot", str(path)))
    assert result.exit_code == 1
    assert "[tune] --plot needs matplotlib" in result.stderr
    assert not asked


@pytest.mark.parametrize("option", ["--plot", "--profile"])
def test_a_file_for_which_there_is_no_folder_is_refused_before_anything_is_measured(
    asked: list, kvist: Any, tmp_path: Path, option: str
) -> None:
    folder = tmp_path / "nowhere"
    result = kvist(*arguments(tmp_path, option, str(folder / "file")))
    assert result.exit_code == 2
    assert f"there is no folder {folder}" in result.stderr.replace("\n", "")
    assert not asked


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
    for max_loss, expected in (
        ("0.02", "int8"),
        ("2 %", "int8"),
        ("0.01", "raw16"),
        ("1%", "raw16"),
    ):
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
        (("--max-loss", "x"), 2, "--max-loss must be a fraction or a percentage"),
        (("--max-loss", "-1%"), 2, "received '-1%'"),
        (("--max-loss", "nan"), 2, "received 'nan'"),
        (("--max-loss", "1%", "--budget-gib", "2"), 2, "give one of them"),
        (("--budget-gib", "0"), 1, "--budget-gib must be above 0"),
        (("--layer-bits", "3.5"), 2, "--layer-bits is for --layers"),
        (("--kv-head-dim", "8", "--codecs", "mixed"), 2, "--kv-head-dim is measured by"),
        (("--kv-head-dim", "8", "--budget-gib", "2"), 2, "--kv-head-dim is measured by"),
        (("--context", "0"), 1, "--context and --concurrency must be at least 1"),
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
