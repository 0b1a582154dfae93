"""A whole measurement on a tiny model: resumed, calibrated once, and refused where it cannot be."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.tiny_models import TINY_MODELS, build_reference, save

from kvist.codecs.transforms import load_transforms, save_transforms
from kvist.config import ModelConfig
from kvist.errors import ConfigError
from kvist.model.fingerprint import content_fingerprint
from kvist.model.spec_readers import read_spec
from kvist.tune import run
from kvist.tune.run import Measurement, measure, transforms_file

if TYPE_CHECKING:
    from pathlib import Path

TEXT = "".join(chr(97 + i * i % 23) for i in range(1000))
OTHER = TEXT[::-1]


class Letters:
    """One token for a letter, and one in front of each sequence."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [3 + ord(letter) % 100 for letter in text]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = next(model for model in TINY_MODELS if model.name == "llama-gqa")
    return save(build_reference(tiny), tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def request_(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measurement:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(run, "load_tokenizer", lambda _: Letters())
    monkeypatch.setattr(run.torch, "set_num_threads", lambda _: None)
    return Measurement(
        model=ModelConfig(model="tiny", dtype="float32"),
        path=model,
        text=TEXT,
        codecs=("int8", "int4"),
        windows=3,
        window_tokens=128,
        calibration_text=OTHER,
    )


def silent(*_: object) -> None:
    pass


def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Return the list of what each computed window was computed for."""
    calls: list[tuple[str, ...]] = []
    original = run.score_window

    def score_window(computer: Any, transforms: Any, tokens: Any, codecs: Any, on: Any) -> Any:
        calls.append(tuple(codecs))
        return original(computer, transforms, tokens, codecs, on)

    monkeypatch.setattr(run, "score_window", score_window)
    return calls


def test_figures_name_codec_kernels_and_bits(request_: Measurement) -> None:
    told: list[tuple[str, int, int]] = []
    document = measure(request_, lambda *x: told.append(x))
    assert document["plane"] == "torch"
    assert document["positions"] == 3 * 127
    assert document["calibration_tokens"] == 1000
    assert [codec["name"] for codec in document["codecs"]] == ["int8", "int4"]
    for codec in document["codecs"]:
        assert codec["kernels"] == "emulated"
        assert codec["kl"] > 0
        assert 0 < codec["top1_agreement"] <= 1
        assert codec["positions"] == 3 * 127
        assert codec["num_held"] == 0
    assert document["codecs"][1]["bits_per_value"] < document["codecs"][0]["bits_per_value"]
    assert told[-1] == ("measuring", 384, 384)
    assert ("calibrating", 1000, 1000) in told


def test_nothing_is_measured_twice(request_: Measurement, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch)
    first = measure(request_, silent)
    assert calls == [("int8", "int4")] * 3
    calls.clear()
    assert measure(request_, silent) == first
    assert not calls
    more = dataclasses.replace(request_, codecs=("int8", "int4", "int3"))
    assert measure(more, silent)["codecs"][:2] == first["codecs"]
    assert calls == [("int3",)] * 3
    calls.clear()
    assert measure(dataclasses.replace(request_, is_fresh=True), silent) == first
    assert calls == [("int8", "int4")] * 3


@pytest.mark.parametrize(
    "changes",
    [
        {"text": OTHER},
        {"window_tokens": 192},
        {"calibration_text": None},
        {"calibration_text": TEXT},
    ],
)
def test_another_setting_is_measured_anew(
    request_: Measurement, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    measure(request_, silent)
    calls = counted(monkeypatch)
    measure(dataclasses.replace(request_, **changes), silent)
    assert len(calls) == 3


def test_an_interrupted_measurement_goes_on_where_it_was(
    request_: Measurement, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = measure(dataclasses.replace(request_, is_fresh=True), silent)

    def interrupt(what: str, done: int, total: int) -> None:
        if what == "measuring" and done > 128:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(dataclasses.replace(request_, is_fresh=True), interrupt)
    calls = counted(monkeypatch)
    assert measure(request_, silent) == whole
    assert len(calls) == 2


def test_a_calibration_is_made_once_for_a_model_and_text(
    request_: Measurement, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    original = run.calibrate

    def calibrate(*arguments: Any) -> Any:
        made.append(arguments[2])
        return original(*arguments)

    monkeypatch.setattr(run, "calibrate", calibrate)
    measure(request_, silent)
    measure(request_, silent)
    measure(dataclasses.replace(request_, codecs=("int3",)), silent)
    assert len(made) == 1
    fingerprint = made[0]
    file = transforms_file(fingerprint)
    before = load_transforms(file, fingerprint)
    # Damaged, or of another model under this one's name: made anew.
    file.write_bytes(file.read_bytes()[:-5])
    measure(dataclasses.replace(request_, is_fresh=True), silent)
    save_transforms(file, dataclasses.replace(before, fingerprint="another"))
    measure(dataclasses.replace(request_, is_fresh=True), silent)
    assert len(made) == 3
    assert load_transforms(file, fingerprint).text == before.text
    measure(dataclasses.replace(request_, calibration_text=TEXT), silent)
    assert len(made) == 4


def test_codecs_without_transforms_need_no_calibration(
    request_: Measurement, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "calibrate", None)
    document = measure(dataclasses.replace(request_, codecs=("int8",)), silent)
    assert document["calibration_tokens"] == 0
    plain = measure(dataclasses.replace(request_, calibration_text=None), silent)
    assert plain["calibration_tokens"] == 0
    assert plain["codecs"][1]["kl"] > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"codecs": ("int5",)},
            "--codecs must be some of raw16, int8, int4, int3, received 'int5'",
        ),
        ({"codecs": ()}, "--codecs must name each codec once"),
        ({"codecs": ("int4", "int4")}, "--codecs must name each codec once"),
        ({"windows": 0}, "--windows must be at least 1, received 0"),
        ({"window_tokens": 100}, "--window-tokens must be a multiple of 64"),
        ({"window_tokens": 64}, "at least 128, received 64"),
        (
            {"window_tokens": 320},
            "--window-tokens must be at most 256 for this model, received 320",
        ),
        ({"windows": 8}, "--text has 1000 tokens, and 8 windows of 127 need 1016; lower --windows"),
        ({"calibration_text": "short"}, "at least 512 tokens of text, received 5"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    request_: Measurement, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        measure(dataclasses.replace(request_, **changes), silent)


def test_a_fingerprint_follows_the_contents_and_not_the_place(model: Path, tmp_path: Path) -> None:
    spec = read_spec(model)
    fingerprint = content_fingerprint(model, spec)
    copy = tmp_path / "elsewhere"
    copy.mkdir()
    for file in model.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    (copy / "notes.txt").write_text("no weights")
    assert content_fingerprint(copy, spec) == fingerprint
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert content_fingerprint(copy, spec) != fingerprint
    assert content_fingerprint(model, dataclasses.replace(spec, norm_eps=0.5)) != fingerprint


def test_tasks_are_measured_once_and_named(
    request_: Measurement, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = [["ab", "cd"], ["ef", "gh"]]
    line = json.dumps({"ordered_kv_records": pairs, "key": "ab", "value": "cd"})
    asked = dataclasses.replace(
        request_, windows=2, generated_tokens=5, retrieval=(line,), retrieval_prompts=1
    )
    told: list[tuple[str, int, int]] = []
    document = measure(asked, lambda *x: told.append(x))
    for codec in document["codecs"]:
        assert 0 <= codec["greedy_agreement"] <= 1
        assert codec["retrieval"] == codec["retrieval_reference"] == 0
    assert ("generating", 2 * (64 + 5), 2 * (64 + 5)) in told
    assert told[-1][0] == "retrieving"
    assert told[-1][1] == told[-1][2]
    for function in ("score_window", "greedy_score", "retrieval_score"):
        monkeypatch.setattr(run, function, None)
    assert measure(asked, silent) == document
    with pytest.raises(TypeError):
        measure(dataclasses.replace(asked, generated_tokens=6), silent)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"generated_tokens": 65}, "--generate must be from 0 to half of --window-tokens"),
        ({"generated_tokens": -1}, "--generate must be from 0"),
        ({"retrieval": ("{}",), "retrieval_prompts": 0}, "--retrieval-prompts must be at least 1"),
    ],
)
def test_tasks_that_cannot_be_are_refused(
    request_: Measurement, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(request_, **changes)
