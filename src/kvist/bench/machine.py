"""The machine that a benchmark ran on, for its report.

Knows Linux; what it cannot find out is None.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import kvist

CPU_INFO = Path("/proc/cpuinfo")
MEMORY_INFO = Path("/proc/meminfo")
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")


def machine_document() -> dict[str, Any]:  # Any: JSON values
    """Return the CPU, the memory, the caches, how busy it is, and the versions."""
    return {
        "cpu": _line(CPU_INFO, "model name"),
        "cpus": len(os.sched_getaffinity(0)),
        "memory": _line(MEMORY_INFO, "MemTotal"),
        "cache_bytes": cache_bytes(),
        "governor": _text(GOVERNOR),
        "load_average": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "kvist": kvist.__version__,
    }


def cache_bytes() -> dict[str, int]:
    """Return the size of each level of the first CPU's data caches, in bytes."""
    sizes: dict[str, int] = {}
    for folder in sorted(CACHES.glob("index*")):
        kind, level, size = (_text(folder / name) for name in ("type", "level", "size"))
        if kind in {"Data", "Unified"} and level and size and size.endswith("K"):
            sizes[f"L{level}"] = int(size.removesuffix("K")) * 1024
    return sizes


def busy_warning() -> str | None:
    """Return what to say when others use the machine; None when it is quiet."""
    load = os.getloadavg()[0]
    if load < 0.5 * len(os.sched_getaffinity(0)):
        return None
    return f"the machine is busy (load average {load:.1f}): times will be wrong, for some more than others"


def _line(path: Path, name: str) -> str | None:
    text = _text(path) or ""
    found = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith(name)]
    return found[0] if found else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
