"""The environment is read when asked, and malformed values raise."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvist import envvars
from kvist.errors import ConfigError


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    monkeypatch.delenv("KVIST_MODELS", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def test_models_folder_by_precedence(monkeypatch, tmp_path):
    assert envvars.models_folder() == tmp_path / ".cache" / "kvist" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert envvars.models_folder() == tmp_path / "xdg" / "kvist" / "models"
    monkeypatch.setenv("KVIST_MODELS", "~/models")
    assert envvars.models_folder() == tmp_path / "models"
    monkeypatch.setenv("KVIST_MODELS", "relative")
    assert envvars.models_folder() == Path.cwd() / "relative"


def test_packed_weights_go_into_the_cache_folder(monkeypatch, tmp_path):
    assert envvars.packed_folder() == tmp_path / ".cache" / "kvist" / "packed"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert envvars.packed_folder() == tmp_path / "xdg" / "kvist" / "packed"


def test_empty_xdg_cache_counts_as_unset(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert envvars.models_folder() == tmp_path / ".cache" / "kvist" / "models"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("KVIST_MODELS", " ", "received an empty value"),
        ("KVIST_MODELS", __file__, "which is a file"),
        ("KVIST_MODELS", "~nobody_has_this_name/models", "needs a home folder"),
        ("XDG_CACHE_HOME", "relative", "must be an absolute path, received 'relative'"),
    ],
)
def test_malformed_values_raise(monkeypatch, name, value, message):
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        envvars.models_folder()


def test_child_environment_adds_to_our_own(monkeypatch):
    monkeypatch.setenv("KVIST_TEST_VALUE", "1")
    environment = envvars.child_environment(TMPDIR="/somewhere")
    assert (environment["KVIST_TEST_VALUE"], environment["TMPDIR"]) == ("1", "/somewhere")
