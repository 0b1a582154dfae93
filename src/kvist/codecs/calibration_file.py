"""Arrays that were learnt from a model, in a file that is refused for any other model.

Responsible for the file: one safetensors file, read without running anything, with the metadata ``format``,
``version``, ``fingerprint`` (of the model), ``text`` (a digest of what was read for it) and ``blake3`` (of everything
else). Knows nothing of what the arrays mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from kvist.errors import ConfigError
from kvist.files import replace_file

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

MAX_FILE_BYTES = 1 << 30
"""Of transforms, a model of 100 layers with 8 KV heads of 256 dimensions needs 107 MB; of reductions 630 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationKind:
    """What is in a file."""

    where: str
    """Of messages, and what the format is named after: ``transforms``."""
    version: int

    @property
    def format(self) -> str:
        """As the file has it."""
        return f"kvist-kv-{self.where}"

    def unusable(self, path: Path, why: str) -> ConfigError:
        """Return the error that refuses a file."""
        return ConfigError(f"[{self.where}] {path} {why}; make it anew with kvist tune")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Calibration:
    """What a file has."""

    fingerprint: str
    """Of the model."""
    text: str
    """Digest of what was read for it."""
    arrays: Mapping[str, NDArray[Any]]


def save_calibration(path: Path, kind: CalibrationKind, calibration: Calibration) -> None:
    """Write a file, replacing what is there in one step.

    Raises:
        OSError: The file cannot be written.
    """
    # The library writes the memory of an array, whatever its strides say.
    arrays = {name: np.ascontiguousarray(array) for name, array in calibration.arrays.items()}
    metadata = {
        "format": kind.format,
        "version": str(kind.version),
        "fingerprint": calibration.fingerprint,
        "text": calibration.text,
    }
    metadata["blake3"] = _checksum(metadata, arrays)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, save(arrays, metadata))


def load_calibration(path: Path, kind: CalibrationKind, fingerprint: str) -> Calibration:
    """Return what is in a file.

    Args:
        path: Written by ``save_calibration``.
        kind: What is expected.
        fingerprint: Of the model it is wanted for.

    Raises:
        ConfigError: The file is missing or unreadable, is damaged or of another kind, or belongs to another model; the
            message says which, and what to do.
    """
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"[{kind.where}] {path} is larger than {MAX_FILE_BYTES:,} bytes")
        with safe_open(path, framework="numpy") as file:
            metadata = dict(file.metadata() or {})
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    except (OSError, SafetensorError, ValueError, TypeError) as error:
        raise kind.unusable(path, f"cannot be read ({error})") from error
    if metadata.get("format") != kind.format:
        raise kind.unusable(path, f"is no file of {kind.where}")
    if metadata.get("version") != str(kind.version):
        version = metadata.get("version")
        raise kind.unusable(path, f"has version {version!r}, expected {kind.version}")
    checksum = metadata.pop("blake3", None)
    if checksum != _checksum(metadata, arrays):
        raise kind.unusable(path, "is damaged: its checksum differs")
    if metadata.get("fingerprint") != fingerprint:
        raise kind.unusable(path, "was made for another model")
    return Calibration(fingerprint=fingerprint, text=metadata.get("text", ""), arrays=arrays)


def digest_of(arrays: Mapping[str, NDArray[Any]]) -> str:
    """Return 64 hexadecimal digits of some arrays and their names."""
    return _checksum({}, arrays)


def _checksum(metadata: Mapping[str, str], arrays: Mapping[str, NDArray[Any]]) -> str:
    digest = blake3(repr(sorted(metadata.items())).encode())
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return str(digest.hexdigest())
