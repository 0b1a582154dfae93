"""``kvist serve``: what it tells the user; the server itself is tested with the server."""

from __future__ import annotations

import json
import shlex

from kvist.cli.serve import example


def test_example_is_a_shell_command_with_valid_json():
    words = shlex.split(example("http://127.0.0.1:8000", "smollm2-135m", has_keys=False))
    assert words[:2] == ["curl", "-s"]
    body = json.loads(words[words.index("-d") + 1])
    assert body["model"] == "smollm2-135m"
    assert "Authorization" not in " ".join(words)


def test_example_shows_where_the_key_goes():
    assert "Authorization: Bearer YOUR_KEY" in example("http://h:1", "m", has_keys=True)


def test_a_share_for_an_unknown_tenant_is_refused_before_the_model_is_loaded(kvist, monkeypatch):
    monkeypatch.setattr("kvist.cli.serve.running_engine", None)
    result = kvist("serve", "--api-key", "team-a k", "--cache-share", "team-b=0.5")
    assert result.exit_code == 1
    assert "--cache-share team-b is for a tenant that no API key belongs to" in result.stderr


def test_ready_line_and_example_are_written_when_the_server_listens(parts, kvist, monkeypatch):
    from kvist.server.run import RunningServer

    def serve(engine, config, on_ready):
        assert engine is parts.engine
        on_ready(RunningServer(url="http://127.0.0.1:7", port=7, stop=lambda: None))

    monkeypatch.setattr("kvist.server.run.serve", serve)
    result = kvist("serve", "--port", "7")
    assert result.exit_code == 0, result.output
    assert result.stdout == "ready: http://127.0.0.1:7\n"
    assert "try it: curl" in result.stderr
