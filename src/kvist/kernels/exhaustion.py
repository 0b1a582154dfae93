"""Memory that torch cannot have, as Python says it.

Responsible for one translation: numpy and the native kernels raise ``MemoryError``, and torch a ``RuntimeError`` that
only its type or its text tells from a bug.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_CPU_MESSAGE = "can't allocate memory"


@contextmanager
def torch_memory_errors() -> Iterator[None]:
    """Raise ``MemoryError`` where torch, on any device, had no memory for a tensor."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or _CPU_MESSAGE in str(error):
            raise MemoryError(str(error).splitlines()[0]) from error
        raise
