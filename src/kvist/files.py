"""Writing files so that a reader finds the old one or the new one, whole.

Responsible for nothing but that.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def replace_file(path: Path, data: bytes) -> None:
    """Write a file, replacing what is there in one step; processes that do it at once do not meet.

    Raises:
        OSError: It cannot be written; what was there is still there.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
