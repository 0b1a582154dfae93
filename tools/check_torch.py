"""Refuse to download a CUDA build of torch onto a machine without a GPU: it is several GB that nothing would use.

Asks pip what it would install for the torch requirement of pyproject.toml, without installing it. Exits with 0 when
that is fine, with 1 and advice when it is not. Runs before anything is installed, so it uses the standard library only.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd")
"""Present where a driver for NVIDIA or AMD accelerators is loaded."""


def main() -> int:
    """Return the exit code."""
    if sys.platform != "linux" or any(Path(device).exists() for device in GPU_DEVICES):
        return 0
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirement = next(r for r in project["dependencies"] if r.startswith("torch"))
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--quiet",
        "--report",
        "-",
        requirement,
    ]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if result.returncode != 0:
        print(f"pip cannot resolve {requirement} (its message is above)", file=sys.stderr)
        return 1
    packages = [item["metadata"]["name"].lower() for item in json.loads(result.stdout)["install"]]
    if not any(name.startswith(("nvidia-", "cuda-")) for name in packages):
        return 0
    print(
        f"pip would install a CUDA build for {requirement}, several GB, and this machine has no GPU.\n"
        "Point pip at the index of CPU builds that PyTorch's installation page names, for instance with "
        "PIP_EXTRA_INDEX_URL, and run make again.",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
