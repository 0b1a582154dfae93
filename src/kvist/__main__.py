"""Run the command line, as ``kvist`` or with ``python -m kvist``.

Imports nothing but the package before it can be interrupted: Ctrl-C in the first second, while the rest is loaded, ends
the process like any other interrupt, and not with a traceback.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Load the command line and run it. Always leaves through ``SystemExit``."""
    try:
        from kvist.cli.main import main as run  # noqa: PLC0415  # loads for a second
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        raise SystemExit(130) from None
    run()


if __name__ == "__main__":
    main()
