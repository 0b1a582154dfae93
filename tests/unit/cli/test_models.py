"""Pulling and loading around the commands."""

from __future__ import annotations

import pytest
from rich.console import Console

from kvist.cli import models
from kvist.config import EngineConfig
from kvist.errors import ModelLoadError
from kvist.model.catalog import ModelKind, ResolvedModel
from kvist.model.pull import PullProgress, PullStage


@pytest.fixture
def pulled(monkeypatch, tmp_path):
    """Replace the pull by one that reports progress and touches no network; return the names pulled."""
    names = []

    def pull(name, on_progress):
        names.append(name)
        for done in (0, 40_000_000, 90_000_000):
            on_progress(
                PullProgress(stage=PullStage.DOWNLOADING, done_bytes=done, total_bytes=90_000_000)
            )
        on_progress(PullProgress(stage=PullStage.VERIFYING))
        return ResolvedModel(name=name, path=tmp_path / "model.gguf", kind=ModelKind.GGUF)

    monkeypatch.setattr(models.pull, "pull", pull)
    monkeypatch.setenv("KVIST_MODELS", str(tmp_path))
    return names


def test_progress_is_plain_lines_without_a_terminal(pulled, kvist):
    result = kvist("pull", "smollm2-135m")
    assert result.exit_code == 0
    assert result.stdout.strip().endswith("model.gguf")
    assert result.stderr.splitlines() == ["downloading smollm2-135m", "verifying smollm2-135m"]


def test_long_stages_report_now_and_then(pulled, kvist, monkeypatch):
    monkeypatch.setattr(models, "LINE_INTERVAL_S", 0.0)
    assert "90 of 90 MB" in kvist("pull", "smollm2-135m").stderr


def test_progress_is_a_bar_on_a_terminal(pulled, monkeypatch, capsys):
    monkeypatch.setattr(models, "note_console", lambda: Console(stderr=True, force_terminal=True))
    models.pull_with_progress("smollm2-135m")
    shown = capsys.readouterr().err
    assert "downloading" in shown
    assert "MB" in shown


def test_json_names_the_path(pulled, kvist):
    result = kvist("pull", "smollm2-135m", "--json")
    assert len(result.stdout.splitlines()) == 1
    assert '"kind": "gguf"' in result.stdout


def test_the_embedded_default_is_pulled_when_it_is_missing(pulled):
    with pytest.raises(ModelLoadError):  # the pull of this test brings nothing
        models.ensure_available("smollm2-135m")
    assert pulled == ["smollm2-135m"]


def test_no_other_model_is_pulled_unasked(pulled):
    with pytest.raises(ModelLoadError, match="kvist pull owner/name"):
        models.ensure_available("owner/name")
    assert pulled == []


def test_the_engine_is_closed_when_the_command_fails(monkeypatch):
    events = []

    class FakeEngine:
        def start(self):
            events.append("start")

        def close(self):
            events.append("close")

    monkeypatch.setattr(models, "_build", lambda *_: FakeEngine())
    monkeypatch.setattr(models, "ensure_available", lambda name: None)
    with pytest.raises(ModelLoadError), models.running_engine(EngineConfig()):
        raise ModelLoadError("[test] stop")
    assert events == ["start", "close"]
