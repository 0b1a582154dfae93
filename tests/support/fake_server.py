"""``kvist.server.run.serve`` around the fake engine, as a process of its own.

Usage: ``python -m tests.support.fake_server PORT HOLD``; with HOLD 1 every reply stops after two characters for ever.
"""

from __future__ import annotations

import sys

from tests.support.fake_engine import FakeEngine, Reply

from kvist.config import ServerConfig
from kvist.errors import ConfigError
from kvist.server.run import serve

if __name__ == "__main__":
    reply = Reply(text="abcdef", hold_after=2 if sys.argv[2] == "1" else None)
    try:
        serve(FakeEngine(reply=reply), ServerConfig(port=int(sys.argv[1])))
    except ConfigError as error:
        sys.exit(str(error))
