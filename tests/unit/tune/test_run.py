"""A whole measurement on a tiny model: resumed, calibrated once, and refused where it cannot be."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.tiny_models import TINY_MODELS, build_reference, save

from kvist import plan
from kvist.codecs.transforms import load_transforms, save_transforms
from kvist.config import ModelConfig
from kvist.errors import ConfigError
from kvist.kernels import native
from kvist.model.fingerprint import content_fingerprint
from kvist.model.spec_readers import read_spec
from kvist.tune import quality, run
from kvist.tune.run import Measurement, measure, transforms_file

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType

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


def tiny_measurement(
    module: ModuleType, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> Measurement:
    """Return what ``module`` is to measure of a tiny model: in a cache of its own, and with the threads there are."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "load_tokenizer", lambda _: Letters())
    monkeypatch.setattr(module.torch, "set_num_threads", lambda _: None)
    return Measurement(
        model=ModelConfig(model="tiny", dtype="float32"),
        path=model,
        text=TEXT,
        window_tokens=128,
        calibration_text=OTHER,
        **changes,
    )


@pytest.fixture
def request_(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measurement:
    return tiny_measurement(run, model, tmp_path, monkeypatch, codecs=("int8", "int4"), windows=3)


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
    assert told[-1] == ("measuring", 2 * 384, 2 * 384)
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
        if what == "measuring" and done > 2 * 128:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(dataclasses.replace(request_, is_fresh=True), interrupt)
    calls = counted(monkeypatch)
    assert measure(request_, silent) == whole
    assert len(calls) == 2


def test_more_windows_of_the_same_text_are_added(
    request_: Measurement, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure(dataclasses.replace(request_, windows=2), silent)
    calls = counted(monkeypatch)
    assert measure(request_, silent)["positions"] == 3 * 127
    assert len(calls) == 1
    measure(dataclasses.replace(request_, windows=1), silent)
    assert len(calls) == 1


def test_figures_are_told_by_position_and_resumed(
    request_: Measurement, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality, "FIRST_RANGE", 64)
    monkeypatch.setattr(run, "FIRST_RANGE", 64)
    document = measure(request_, silent)
    for codec in document["codecs"]:
        first, second = codec["by_position"]
        assert [(part["from"], part["to"]) for part in (first, second)] == [(0, 64), (64, 128)]
        assert (first["positions"], second["positions"]) == (3 * 64, 3 * 63)
        mean = (first["kl"] * first["positions"] + second["kl"] * second["positions"]) / (3 * 127)
        assert math.isclose(mean, codec["kl"])
        assert first["kl"] == 0.0
    calls = counted(monkeypatch)
    assert measure(request_, silent) == document
    assert not calls


def test_rules_are_measured_beside_codecs(request_: Measurement) -> None:
    rule = "recent:64=raw16,rest=int8"
    asked = dataclasses.replace(
        request_, codecs=("raw16", "int8", "mixed", rule), window_tokens=256
    )
    asked = dataclasses.replace(asked, windows=1)
    raw16, int8, mixed, ruled = measure(asked, silent)["codecs"]
    assert ruled["name"] == rule
    # All of a window of 256 tokens is recent.
    assert mixed["kl"] == 0.0
    assert 0.0 < ruled["kl"] < int8["kl"]
    assert (raw16["bits_per_value"], raw16["request_bits_per_value"]) == (16.0, 16.0)
    assert int8["bits_per_value"] == int8["request_bits_per_value"]
    assert ruled["bits_per_value"] == ruled["request_bits_per_value"] <= 16.0


def test_bits_of_a_request_are_those_that_are_planned(request_: Measurement) -> None:
    asked = dataclasses.replace(request_, context=1000, concurrency=3, windows=1)
    document = measure(asked, silent)
    assert (document["context"], document["concurrency"]) == (1000, 3)
    spec = read_spec(request_.path)
    int4 = document["codecs"][1]
    estimate = plan.memory_estimate(spec, codec="int4", context=1000, concurrency=3, block_size=64)
    assert int4["kv_bytes_per_request"] == estimate.request_bytes
    assert int4["kv_bytes_total"] == estimate.kv_bytes
    num_values = 2 * 1000 * spec.num_layers * spec.num_kv_heads * spec.head_dim
    assert int4["request_bits_per_value"] == 8 * estimate.request_bytes / num_values
    assert int4["bits_per_value"] < int4["request_bits_per_value"] < 16
    assert "fits" not in int4
    long = dataclasses.replace(asked, context=20_000)
    budget_gib = 1.4 * measure(long, silent)["codecs"][1]["kv_bytes_total"] / 2**30
    fitting = measure(dataclasses.replace(long, budget_gib=budget_gib), silent)
    assert not fitting["reference"]["fits"]
    assert [codec["fits"] for codec in fitting["codecs"]] == [False, True]


def test_layers_are_measured_one_by_one_and_once(
    request_: Measurement, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_layers = read_spec(request_.path).num_layers
    asked = dataclasses.replace(
        request_, codecs=("raw16", "int4", "int3", "mixed"), by_layer=True, layer_bits=3.8
    )
    told: list[tuple[str, int, int]] = []
    document = measure(asked, lambda *x: told.append(x))
    layers = document["layers"]
    assert set(layers["sensitivity"]) == {"int4", "int3"}
    assert [len(rows) for rows in layers["sensitivity"].values()] == [num_layers] * 2
    assert layers["positions"] == 127
    found = layers["allocation"]
    assert len(found["codecs"]) == num_layers
    assert found["bits_per_value"] <= 3.8
    assert found["positions"] == 3 * 127
    alone = [layers["sensitivity"][codec][i]["kl"] for i, codec in enumerate(found["codecs"])]
    assert math.isclose(found["kl_predicted"], sum(alone))
    # The same emulation, of all layers.
    for codec, figures in zip(document["codecs"][1:3], layers["uniform"].values(), strict=True):
        assert math.isclose(figures["kl"], codec["kl"], rel_tol=1e-3)
    assert all(done <= total for _, done, total in told)
    ends = {what: (done, total) for what, done, total in told}
    assert ends["measuring layers"] == (2 * num_layers * 128, 2 * num_layers * 128)
    monkeypatch.setattr(run, "score_window", None)
    assert measure(asked, silent) == document


def test_layers_are_measured_in_float32(
    request_: Measurement, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = dataclasses.replace(
        request_, windows=1, by_layer=True, model=ModelConfig(model="tiny", dtype="bfloat16")
    )
    document = measure(asked, silent)
    assert (document["weights"], document["layers"]["weights"]) == ("bfloat16", "float32")
    calls = counted(monkeypatch)
    assert measure(asked, silent) == document
    assert not calls
    in_float32 = measure(dataclasses.replace(request_, windows=1, by_layer=True), silent)
    assert in_float32["layers"] == document["layers"]


def test_many_settings_are_computed_a_few_at_a_time(
    request_: Measurement, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "MAX_SIDE_BY_SIDE", 2)
    calls = counted(monkeypatch)
    measure(dataclasses.replace(request_, codecs=("raw16", "int8", "int4"), windows=1), silent)
    assert calls == [("raw16", "int8"), ("int4",)]


def test_native_kernels_are_timed(request_: Measurement, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = dataclasses.replace(request_, windows=1, speed_rounds=2, codecs=("int8", "mixed"))
    assert "speed" not in measure(asked, silent)
    if not native.available():
        pytest.skip(native.why_not())
    model = ModelConfig(model="tiny", weights="int8", threads=1)
    told: list[tuple[str, int, int]] = []
    document = measure(dataclasses.replace(asked, model=model), lambda *x: told.append(x))
    assert document["speed"] == {"sequences": 8, "context": 128, "rounds": 2, "threads": 1}
    for figures in (document["reference"], *document["codecs"]):
        assert figures["decode_tokens_per_s"] > 0
        assert figures["attention_ms"] > 0
    assert [("encode_ms" in codec) for codec in document["codecs"]] == [False, True]
    assert [codec["kernels"] for codec in document["codecs"]] == ["native", "native"]
    assert told[-1] == ("timing", 2, 2)


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
            "--codecs must be some of raw16, int8, int4, int3, mixed, received 'int5'",
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
    size = 2 * 2 * (64 + 5)
    assert ("generating", size, size) in told
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
        ({"context": 0}, "--context and --concurrency must be at least 1, received 0 and 8"),
        ({"concurrency": -1}, "--context and --concurrency must be at least 1"),
        ({"budget_gib": 0.0}, "--budget-gib must be above 0, received 0"),
        ({"budget_gib": math.nan}, "--budget-gib must be above 0, received nan"),
        ({"by_layer": True, "codecs": ("raw16", "mixed")}, "--layers searches among the codecs"),
        ({"codecs": ("recent:1=raw16,rest=int2",)}, "codecs that blocks can change to"),
        ({"codecs": ("layers:int8*x",)}, "--codecs must be some of"),
        ({"codecs": ("layers:int8",)}, "--codecs must be some of"),
        ({"codecs": ("layers:int8*2=3",)}, "--codecs must be some of"),
        ({"layer_bits": math.nan}, "--layer-bits must be above 0, received nan"),
        ({"layer_bits": -3.0}, "--layer-bits must be above 0, received -3"),
    ],
)
def test_tasks_that_cannot_be_are_refused(
    request_: Measurement, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(request_, **changes)
