"""``kvist serve``: the HTTP server around one engine."""

from __future__ import annotations

import logging

from kvist.cli.console import is_debugging, note, set_up_logging
from kvist.cli.models import running_engine
from kvist.cli.options import takes_options
from kvist.config import EngineConfig, ServerConfig


@takes_options
def serve(config: EngineConfig, server: ServerConfig) -> None:
    """Serve a model over HTTP, compatible with OpenAI's clients, until interrupted."""
    from kvist.server.run import serve as run_server  # noqa: PLC0415  # loads the web framework

    if not is_debugging():
        set_up_logging(level=logging.INFO)
    with running_engine(config) as engine:
        run_server(engine, server)
