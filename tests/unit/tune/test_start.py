"""Where an engine's transforms come from."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from tests.support.tiny_models import TINY_MODELS, build_reference, save

from kvist import envvars
from kvist.config import EngineConfig
from kvist.errors import ConfigError
from kvist.model.fingerprint import content_fingerprint
from kvist.model.spec_readers import read_spec
from kvist.plan import precision_of
from kvist.tune import start
from kvist.tune.profile import KVProfile, Wanted, save_profile
from kvist.tune.reduction import reduction_file
from kvist.tune.run import transforms_file
from kvist.tune.start import profile_at_start, reduction_at_start, transforms_at_start

LARGE = 10**12


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert tmp_path in envvars.tune_folder().parents


class Words:
    """A tokeniser of a small vocabulary, with a token that every text begins with."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        words = [3 + len(word) * 31 % 150 for word in text.split()]
        return [1, *words] if add_special_tokens else words


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return [
        save(build_reference(model), tmp_path_factory.mktemp(model.name))
        for model in TINY_MODELS[:2]
    ]


@pytest.fixture(autouse=True)
def tokenizer(monkeypatch):
    monkeypatch.setattr(start, "load_tokenizer", lambda _: Words())


def at_start(source: str, path, memory: int = LARGE):
    news: list[tuple[str, int, int]] = []
    spec = read_spec(path)
    transforms = transforms_at_start(source, path, spec, memory, lambda *x: news.append(x))
    return transforms, news


def test_a_model_is_calibrated_once_and_what_was_learnt_is_kept(checkpoints) -> None:
    first, news = at_start("auto", checkpoints[0])
    assert first.is_calibrated
    assert news[-1][2] > 512
    assert news[-1][2] - news[-1][1] < 64
    again, no_news = at_start("auto", checkpoints[0])
    assert no_news == []
    np.testing.assert_array_equal(first.mean, again.mean)
    np.testing.assert_array_equal(first.values.balance, again.values.balance)


def test_a_file_is_taken_from_anywhere_and_refused_for_another_model(checkpoints, tmp_path) -> None:
    made, _ = at_start("auto", checkpoints[0])
    fingerprint = content_fingerprint(checkpoints[0], read_spec(checkpoints[0]))
    elsewhere = tmp_path / "model.transforms"
    transforms_file(fingerprint).rename(elsewhere)
    taken, news = at_start(str(elsewhere), checkpoints[0])
    assert news == []
    np.testing.assert_array_equal(made.mean, taken.mean)
    with pytest.raises(ConfigError, match="was made for another model"):
        at_start(str(elsewhere), checkpoints[1])
    with pytest.raises(ConfigError, match=r"nowhere.*cannot be read.* give it as --kv-transforms"):
        at_start(str(tmp_path / "nowhere"), checkpoints[0])
    elsewhere.write_bytes(elsewhere.read_bytes()[:-5] + b"hello")
    with pytest.raises(ConfigError, match=r"(damaged|cannot be read).*--kv-transforms"):
        at_start(str(elsewhere), checkpoints[0])


def test_nothing_is_learnt_where_nobody_wants_it(checkpoints) -> None:
    transforms, news = at_start("none", checkpoints[0])
    assert (transforms.is_calibrated, news) == (False, [])
    assert not envvars.tune_folder().exists()


def test_what_is_kept_and_damaged_is_made_anew(checkpoints, caplog) -> None:
    at_start("auto", checkpoints[0])
    file = transforms_file(content_fingerprint(checkpoints[0], read_spec(checkpoints[0])))
    file.write_bytes(b"nothing")
    with caplog.at_level(logging.WARNING):
        transforms, news = at_start("auto", checkpoints[0])
    assert transforms.is_calibrated
    assert news
    assert "calibrating anew" in caplog.text
    assert at_start("auto", checkpoints[0])[1] == []


def test_a_folder_that_cannot_be_written_costs_the_next_start_the_time(checkpoints, caplog) -> None:
    envvars.tune_folder().parent.mkdir(parents=True)
    envvars.tune_folder().write_text("a file in the way")
    with caplog.at_level(logging.WARNING):
        assert at_start("auto", checkpoints[0])[0].is_calibrated
    assert "the next start makes it again" in caplog.text


def test_too_little_memory_names_the_ways_out(checkpoints) -> None:
    num_weights = read_spec(checkpoints[0]).num_parameters
    assert at_start("auto", checkpoints[0], 2 * num_weights)[0].is_calibrated
    with pytest.raises(ConfigError, match="--kv-transforms none"):
        at_start("auto", checkpoints[1], 1000)


def profile_of(path, file, **changes):
    values = {
        "fingerprint": content_fingerprint(path, read_spec(path)),
        "kv_cache_dtype": "int4",
        "kv_precision": None,
        "transforms": "digest",
        "wanted": Wanted(max_loss=0.01),
        "text": "x.txt",
        "measured": (),
    }
    save_profile(file, KVProfile(**{**values, **changes}))
    return str(file)


def test_a_profile_says_the_codec(checkpoints, tmp_path) -> None:
    path = checkpoints[0]
    file = profile_of(path, tmp_path / "profile.json")
    config = EngineConfig.from_options(model=str(path), kv_profile=file, max_running=7)

    chosen, profile = profile_at_start(config, path, read_spec(path))

    assert chosen.cache.kv_cache_dtype == profile.kv_cache_dtype == "int4"
    assert chosen.scheduler.max_running == 7
    with pytest.raises(ConfigError, match="other transforms"):
        profile.check(at_start("none", path)[0])


def test_a_profile_may_say_a_rule(checkpoints, tmp_path) -> None:
    path, rule = checkpoints[0], "sink=raw16,recent:64=raw16,rest=int8"
    file = profile_of(path, tmp_path / "profile.json", kv_cache_dtype="auto", kv_precision=rule)
    config = EngineConfig.from_options(model=str(path), kv_profile=file)

    chosen, _ = profile_at_start(config, path, read_spec(path))

    assert str(precision_of(chosen.cache)) == rule


def test_without_a_profile_nothing_changes(checkpoints) -> None:
    config = EngineConfig.from_options(model="m")
    assert profile_at_start(config, checkpoints[0], read_spec(checkpoints[0])) == (config, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_dtype": "int8"}, "--kv-cache-dtype"),
        ({"kv_precision": "recent:1=raw16,rest=int8"}, "--kv-precision"),
    ],
)
def test_a_profile_and_a_codec_are_one_too_many(checkpoints, tmp_path, options, message) -> None:
    path = checkpoints[0]
    file = profile_of(path, tmp_path / "profile.json")
    config = EngineConfig.from_options(model=str(path), kv_profile=file, **options)
    with pytest.raises(ConfigError, match=message):
        profile_at_start(config, path, read_spec(path))


def test_the_profile_of_another_model_is_refused(checkpoints, tmp_path) -> None:
    file = profile_of(checkpoints[1], tmp_path / "profile.json")
    config = EngineConfig.from_options(model=str(checkpoints[0]), kv_profile=file)
    with pytest.raises(ConfigError, match=r"another model.*, or leave out --kv-profile"):
        profile_at_start(config, checkpoints[0], read_spec(checkpoints[0]))


def reduction_for(path, memory: int = LARGE):
    news: list[tuple[str, int, int]] = []
    spec = read_spec(path)
    reduction = reduction_at_start(8, path, spec, memory, lambda *x: news.append(x))
    return reduction, news


def test_a_reduction_is_found_once_and_kept(checkpoints, caplog) -> None:
    first, news = reduction_for(checkpoints[0])
    assert (first.kv_head_dim, first.head_dim) == (8, 16)
    assert news[-1][0] == "reducing heads to 8"
    again, no_news = reduction_for(checkpoints[0])
    assert no_news == []
    assert again.digest == first.digest
    file = reduction_file(first.fingerprint, 8)
    file.write_bytes(file.read_bytes()[:-9] + b"otherwise")
    with caplog.at_level(logging.WARNING):
        anew, news = reduction_for(checkpoints[0])
    assert "calibrating anew" in caplog.text
    assert news
    assert anew.digest == first.digest


def test_a_reduction_of_another_model_is_not_taken(checkpoints, caplog) -> None:
    first, _ = reduction_for(checkpoints[0])
    other = content_fingerprint(checkpoints[1], read_spec(checkpoints[1]))
    reduction_file(first.fingerprint, 8).rename(reduction_file(other, 8))
    with caplog.at_level(logging.WARNING):
        second, news = reduction_for(checkpoints[1])
    assert "was made for another model" in caplog.text
    assert news
    assert second.fingerprint == other


def test_a_reduction_needs_memory_or_a_file(checkpoints) -> None:
    with pytest.raises(ConfigError, match="--kv-head-dim"):
        reduction_for(checkpoints[0], 1000)


def test_transforms_are_of_one_reduction(checkpoints) -> None:
    """What is learnt of whole heads is not taken for reduced ones, nor the other way round."""
    path = checkpoints[0]
    spec = read_spec(path)
    reduction, _ = reduction_for(path)
    whole, _ = at_start("auto", path)
    reduced = transforms_at_start("auto", path, spec, LARGE, lambda *_: None, reduction)
    assert (whole.mean.shape[-1], reduced.mean.shape[-1]) == (16, 8)
    assert whole.fingerprint != reduced.fingerprint
    kept = transforms_at_start("auto", path, spec, 0, lambda *_: None, reduction)
    assert kept.digest == reduced.digest
    file = str(transforms_file(whole.fingerprint))
    with pytest.raises(ConfigError, match="was made for another model"):
        transforms_at_start(file, path, spec, LARGE, lambda *_: None, reduction)
    none = transforms_at_start("none", path, spec, 0, lambda *_: None, reduction)
    assert none.mean.shape[-1] == 8


def test_a_profile_is_of_whole_heads(checkpoints, tmp_path) -> None:
    path = checkpoints[0]
    file = profile_of(path, tmp_path / "profile.json")
    config = EngineConfig.from_options(model=str(path), kv_profile=file, kv_head_dim=8)
    with pytest.raises(ConfigError, match="measured with K and V of whole heads"):
        profile_at_start(config, path, read_spec(path))
