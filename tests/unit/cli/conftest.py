"""A fake engine behind the commands, so that they run without a model."""

from __future__ import annotations

import pytest
from tests.support.engine_fakes import make_parts
from typer.testing import CliRunner

from kvist.cli.main import app


@pytest.fixture
def parts(monkeypatch):
    """Return the fake engine that every command of the test loads; its answers depend on the whole prompt."""
    parts = make_parts(max_context_len=128)
    tokenizer = parts.engine.tokenizer
    tokenizer.encode_chat = lambda messages: tokenizer.encode(
        tokenizer.apply_chat_template(messages), add_special_tokens=False
    )
    monkeypatch.setattr("kvist.cli.models._build", lambda *_: parts.engine)
    monkeypatch.setattr("kvist.cli.models.ensure_available", lambda name: None)
    # This process is the tests'.
    monkeypatch.setattr("kvist.cli.serve.ignore_interrupts", lambda: None)
    monkeypatch.setattr("kvist.cli.serve.end_process", lambda: None)
    return parts


@pytest.fixture
def kvist():
    """Return a function that runs the command line in this process."""

    def run(*arguments: str, stdin: str | None = None):
        return CliRunner().invoke(app, list(arguments), input=stdin)

    return run
