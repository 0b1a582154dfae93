"""Kvist: a large-language-model inference engine built around its prompt cache.

The public API is ``Engine`` and the value types below. Importing this package loads no tensor library, starts no
thread and reads no environment variable; ``Engine`` is resolved on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvist.errors import EngineError
from kvist.types import FinishReason, OutputChunk, SamplingParams, TokenLogprobs, Usage

if TYPE_CHECKING:
    from kvist.engine.api import Engine, GenerationResult

__version__ = "0.1.0"

__all__ = [
    "Engine",
    "EngineError",
    "FinishReason",
    "GenerationResult",
    "OutputChunk",
    "SamplingParams",
    "TokenLogprobs",
    "Usage",
    "__version__",
]


def __getattr__(name: str) -> object:
    """Resolve ``Engine`` and ``GenerationResult`` on first use, so that ``import kvist`` stays cheap."""
    if name in {"Engine", "GenerationResult"}:
        from kvist.engine import api  # noqa: PLC0415  # loads torch

        return getattr(api, name)
    raise AttributeError(f"module 'kvist' has no attribute {name!r}")
