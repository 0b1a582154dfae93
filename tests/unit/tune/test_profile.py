"""Profiles: the choice of a codec, and files of another model or of none."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import pytest

from kvist.codecs.transforms import uncalibrated
from kvist.errors import ConfigError
from kvist.tune.profile import Wanted, choose, load_profile, make_profile, save_profile

if TYPE_CHECKING:
    from pathlib import Path


def codec(name: str, bits: float, delta: float, error: float = 0.001) -> dict[str, Any]:
    return {
        "name": name,
        "request_bits_per_value": bits,
        "kv_bytes_total": int(1e8 * bits),
        "perplexity_delta": delta,
        "perplexity_delta_se": error,
        "kl": abs(delta) / 2,
        "fits": bits < 6,
    }


CODECS = [codec("int8", 8.25, 0.0002), codec("int4", 4.19, 0.004), codec("int3", 3.19, 0.0095)]
RULE = "sink=raw16,recent:256=raw16,rest=int4"


def document(**changes: Any) -> dict[str, Any]:
    plain = {
        "fingerprint": "f",
        "transforms": "t",
        "text": "x.txt",
        "codecs": CODECS,
        "context": 2048,
        "concurrency": 8,
        "reference": {"name": "raw16", "fits": False},
    }
    return {**plain, **changes}


def within(max_loss: float) -> Wanted:
    return Wanted(max_loss=max_loss)


BUDGET = Wanted(budget_gib=0.6)


@pytest.mark.parametrize(
    ("max_loss", "expected"),
    [(0.02, "int3"), (0.01, "int4"), (0.002, "int8"), (0.0, "raw16")],
)
def test_the_fewest_bits_within_the_loss_are_chosen(max_loss: float, expected: str) -> None:
    assert choose(document(), within(max_loss)) == expected
    assert choose(document(codecs=CODECS[::-1]), within(max_loss)) == expected


def test_the_least_loss_within_the_memory_is_chosen() -> None:
    assert choose(document(), BUDGET) == "int4"
    assert choose(document(codecs=CODECS[::-1]), BUDGET) == "int4"
    assert choose(document(reference={"name": "raw16", "fits": True}), BUDGET) == "raw16"
    message = "8 requests of 2,048 tokens do not fit into --budget-gib 0.6: the smallest.* 0.768 .*int3 to --codecs"
    with pytest.raises(ConfigError, match=message):
        choose(document(codecs=CODECS[:1]), BUDGET)


def test_what_no_engine_keeps_is_not_recommended() -> None:
    emulated = {
        key: value
        for key, value in codec("int2", 2.0, 0.0).items()
        if key not in {"kv_bytes_total", "fits", "request_bits_per_value"}
    }
    assert choose(document(codecs=[emulated, *CODECS]), within(0.01)) == "int4"
    assert choose(document(codecs=[emulated, *CODECS]), BUDGET) == "int4"


def test_a_file_gives_back_what_was_put_in(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile = make_profile(document(), within(0.01))
    assert (profile.kv_cache_dtype, profile.kv_precision, profile.transforms) == ("int4", None, "t")
    save_profile(path, profile)
    assert load_profile(path, "f") == profile
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(ConfigError, match="was made for another model; make it anew"):
        load_profile(path, "g")


def test_a_rule_is_kept_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile = make_profile(document(codecs=[codec(RULE, 4.5, 0.0)]), BUDGET)
    assert (profile.kv_cache_dtype, profile.kv_precision, profile.transforms) == ("auto", RULE, "t")
    assert profile.name == RULE
    save_profile(path, profile)
    assert load_profile(path, "f") == profile
    preset = make_profile(document(codecs=[codec("mixed", 4.5, 0.0)]), BUDGET)
    assert (preset.kv_cache_dtype, preset.kv_precision, preset.name) == ("mixed", None, "mixed")


def test_other_transforms_than_measured_are_refused() -> None:
    transforms = uncalibrated(1, 2, 8)
    profile = make_profile(document(transforms=transforms.digest), within(0.01))
    profile.check(transforms)
    with pytest.raises(ConfigError, match="int4 was measured with other transforms"):
        profile.check(dataclasses.replace(transforms, mean=transforms.mean + 1))
    with pytest.raises(ConfigError, match="other transforms"):
        profile.check(uncalibrated(2, 1, 8))
    make_profile(document(), within(0.002)).check(transforms)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "x"}, "is no profile"),
        ({"version": 1}, "has version 1, expected 2"),
        ({"kv_cache_dtype": "int5"}, "names the codec 'int5', which there is not"),
        ({"kv_cache_dtype": "auto"}, "names the codec 'auto', which there is not"),
        ({"kv_precision": RULE}, "names the codec 'int4', which there is not"),
        ({"kv_cache_dtype": "auto", "kv_precision": "rest=int4"}, "cannot be understood"),
        ({"kv_cache_dtype": "auto", "kv_precision": 1}, "should hold fingerprint"),
        ({"wanted": "x"}, "should hold fingerprint"),
        ({"wanted": {}}, "cannot be understood"),
        ({"wanted": {"max_loss": "x"}}, "cannot be understood"),
        ({"wanted": {"max_loss": 1, "budget_gib": 1}}, "cannot be understood"),
        ({"wanted": {"most": 1}}, "cannot be understood"),
        ({"more": 1}, "should hold fingerprint"),
    ],
)
def test_what_is_no_profile_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = tmp_path / "profile.json"
    save_profile(path, make_profile(document(), within(0.01)))
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ConfigError, match=message):
        load_profile(path, "f")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'"x"', b"[" * 100_000])
def test_damaged_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"\[profile\]"):
        load_profile(path, "f")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_profile(tmp_path / "none", "f")
