"""Profiles: the choice of a codec, and files of another model or of none."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import pytest

from kvist.codecs.transforms import uncalibrated
from kvist.errors import ConfigError
from kvist.tune.profile import choose, load_profile, make_profile, save_profile

if TYPE_CHECKING:
    from pathlib import Path


def codec(name: str, bits: float, delta: float, error: float = 0.001) -> dict[str, Any]:
    return {
        "name": name,
        "bits_per_value": bits,
        "perplexity_delta": delta,
        "perplexity_delta_se": error,
    }


CODECS = [codec("int8", 8.25, 0.0002), codec("int4", 4.19, 0.004), codec("int3", 3.19, 0.0095)]


def document(**changes: Any) -> dict[str, Any]:
    return {"fingerprint": "f", "transforms": "t", "text": "x.txt", "codecs": CODECS, **changes}


@pytest.mark.parametrize(
    ("max_loss", "expected"),
    [(0.02, "int3"), (0.01, "int4"), (0.002, "int8"), (0.0, "raw16")],
)
def test_the_fewest_bits_within_the_loss_are_chosen(max_loss: float, expected: str) -> None:
    assert choose(CODECS, max_loss) == expected
    assert choose(CODECS[::-1], max_loss) == expected


def test_a_file_gives_back_what_was_put_in(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile = make_profile(document(), 0.01)
    assert (profile.kv_cache_dtype, profile.transforms) == ("int4", "t")
    save_profile(path, profile)
    assert load_profile(path, "f") == profile
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(ConfigError, match="was made for another model; make it anew"):
        load_profile(path, "g")


def test_other_transforms_than_measured_are_refused() -> None:
    transforms = uncalibrated(1, 2, 8)
    profile = make_profile(document(transforms=transforms.digest), 0.01)
    profile.check(transforms)
    with pytest.raises(ConfigError, match="int4 was measured with other transforms"):
        profile.check(dataclasses.replace(transforms, mean=transforms.mean + 1))
    with pytest.raises(ConfigError, match="other transforms"):
        profile.check(uncalibrated(2, 1, 8))
    make_profile(document(), 0.002).check(transforms)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "x"}, "is no profile"),
        ({"version": 2}, "has version 2, expected 1"),
        ({"kv_cache_dtype": "int5"}, "names the codec 'int5', which there is not"),
        ({"max_loss": "x"}, "should hold fingerprint"),
        ({"more": 1}, "should hold fingerprint"),
    ],
)
def test_what_is_no_profile_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = tmp_path / "profile.json"
    save_profile(path, make_profile(document(), 0.01))
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
