"""Memory that is read all the time, on large pages.

Responsible for one thing: on pages of 4 KiB, whoever streams through hundreds of megabytes waits for the translation of
addresses as well. Knows nothing of what is in the memory.
"""

from __future__ import annotations

import mmap
from contextlib import suppress

__all__ = ["LARGE_PAGE", "anonymous_memory"]

LARGE_PAGE = 2 * 1024 * 1024
"""Bytes, on x86-64 and with 4 KiB pages on ARM."""


def anonymous_memory(num_bytes: int) -> mmap.mmap:
    """Return memory of this process alone, all zeros, on large pages where the system has them.

    Args:
        num_bytes: At least 1.

    Raises:
        OSError: The memory cannot be had.
    """
    # What mmap takes when it is not told otherwise is shared memory, which most systems never put on large pages.
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
