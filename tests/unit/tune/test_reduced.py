"""What fewer dimensions of a head cost, measured on a tiny model."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
from tests.support.tiny_models import TINY_MODELS, build_reference, save
from tests.unit.tune.test_run import silent, tiny_measurement

from kvist.config import ModelConfig
from kvist.errors import ConfigError
from kvist.kernels import native
from kvist.tune import reduced
from kvist.tune.reduced import measure_reduced

if TYPE_CHECKING:
    from pathlib import Path

    from kvist.tune.run import Measurement


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tiny = next(model for model in TINY_MODELS if model.name == "llama-head-dim")
    return save(build_reference(tiny), tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def request_(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measurement:
    return tiny_measurement(
        reduced, model, tmp_path, monkeypatch, codecs=("raw16", "int8"), windows=2
    )


def test_figures_are_of_kept_dimensions(request_: Measurement) -> None:
    told: list[tuple[str, int, int]] = []
    document = measure_reduced(request_, 24, lambda *x: told.append(x))
    assert (document["kv_head_dim"], document["head_dim"], document["plane"]) == (24, 32, "torch")
    assert document["positions"] == 2 * 127
    assert told[-1] == ("measuring", 256, 256)
    raw, int8 = document["codecs"]
    assert (raw["name"], raw["bits_per_value"]) == ("raw16", 12)
    assert int8["bits_per_value"] == pytest.approx((24 + 2) * 8 / 32)
    assert raw["kl"] > 0
    assert "reducing heads" in {what for what, *_ in told}
    told.clear()
    assert measure_reduced(request_, 24, lambda *x: told.append(x)) == document
    assert {what for what, *_ in told} == {"measuring"}


def test_fewer_dimensions_lose_more_and_all_lose_nothing(request_: Measurement) -> None:
    losses = [measure_reduced(request_, kept, silent)["codecs"][0]["kl"] for kept in (8, 24, 32)]
    assert losses[0] > losses[1] > losses[2]
    # What is left is bfloat16.
    assert losses[2] < 0.01 * losses[0]


@pytest.mark.skipif(not native.available(), reason="the native kernels were not built")
def test_codecs_of_spans_are_measured_by_the_kernels(request_: Measurement) -> None:
    request = dataclasses.replace(
        request_,
        model=ModelConfig(model="tiny", weights="bf16"),
        codecs=("raw16", "int4", "int3"),
        window_tokens=256,
    )
    raw, int4, int3 = measure_reduced(request, 32, silent)["codecs"]
    assert raw["kl"] < int4["kl"] < int3["kl"]
    assert (raw["kernels"], int4["kernels"]) == ("native", "native")


@pytest.mark.parametrize(
    ("changes", "kept", "message"),
    [
        ({}, 40, "at most the 32 dimensions"),
        ({"calibration_text": None}, 24, "leave out --no-calibration"),
        ({"codecs": ("int4",)}, 24, "int4 behind --kv-head-dim need the native kernels"),
        ({"text": "short"}, 24, "--text has"),
        ({"calibration_text": "short"}, 24, "--calibration-text"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    request_: Measurement, changes: dict[str, object], kept: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        measure_reduced(dataclasses.replace(request_, **changes), kept, silent)
