"""``kvist serve``: the HTTP server around one engine."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

from kvist.cli.console import end_process, ignore_interrupts, is_debugging, note, set_up_logging
from kvist.cli.models import running_engine
from kvist.cli.options import takes_options
from kvist.config import EngineConfig, ServerConfig

if TYPE_CHECKING:
    from kvist.server.run import RunningServer

READY = "ready: "
"""Begins the one line on stdout; the address follows."""


@takes_options
def serve(config: EngineConfig, server: ServerConfig) -> None:
    """Serve a model over HTTP, compatible with OpenAI's clients, until interrupted.

    When it accepts requests, it writes one line to stdout: "ready: " and its address.
    """
    from kvist.server.auth import Keyring  # noqa: PLC0415  # loads the web framework
    from kvist.server.run import serve as run_server  # noqa: PLC0415  # as above

    # Before the model is loaded, so that a slip is told at once.
    Keyring.from_config(server).check_names(config.cache.cache_share)
    if not is_debugging():
        set_up_logging(level=logging.INFO)
    with running_engine(config) as engine:
        model = server.served_name or engine.model_name
        has_keys = bool(server.api_key or server.api_key_file)

        def on_ready(running: RunningServer) -> None:
            sys.stdout.write(f"{READY}{running.url}\n")
            sys.stdout.flush()
            note(f"try it: {example(running.url, model, has_keys=has_keys)}")

        run_server(engine, server, on_ready)
        # A second signal, now that the first one's work is nearly done, must not turn the end into a failure.
        ignore_interrupts()
    end_process()


def example(url: str, model: str, *, has_keys: bool) -> str:
    """Return a shell command that asks the server one question."""
    key = """ -H 'Authorization: Bearer YOUR_KEY'""" if has_keys else ""
    return (
        f"curl -s {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d "
        f"""'{{"model": "{model}", "messages": [{{"role": "user", "content": "What is fog?"}}], "max_tokens": 40}}'"""
    )
