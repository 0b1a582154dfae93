"""Print what building the package needs, one requirement a line for pip, as an isolated build would install it.

That is ``build-system.requires`` of pyproject.toml, and cmake and ninja where the system has none. Runs before anything
is installed, so it uses the standard library only.
"""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path


def main() -> None:
    """Print the requirements."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
    tools = [name for name in ("cmake", "ninja") if shutil.which(name) is None]
    print(*project["build-system"]["requires"], *tools, sep="\n")


if __name__ == "__main__":
    main()
