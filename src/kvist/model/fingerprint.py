"""The identity of a checkpoint by what is in it, for files that outlive a process.

Responsible for telling one model's files from another's wherever they were copied to, without reading gigabytes. Knows
nothing of what is kept under a fingerprint. It guards against mixing models up, not against forgery.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from blake3 import blake3

from kvist.errors import ModelLoadError

if TYPE_CHECKING:
    from pathlib import Path

    from kvist.spec import ModelSpec

_SAMPLES = 256
"""Places of a file that are read, evenly spread, the first and the last bytes among them."""
_SAMPLE_BYTES = 16 * 1024
_WEIGHTS = (".gguf", ".safetensors")


def content_fingerprint(path: Path, spec: ModelSpec) -> str:
    """Return 64 hexadecimal digits: of the specification, and of size and sampled bytes of each file of weights.

    Args:
        path: A ``.gguf`` file, or a folder with safetensors.
        spec: What was read from it.

    Raises:
        ModelLoadError: A file cannot be read.
    """
    digest = blake3(repr(spec).encode())
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in _WEIGHTS)
    for file in files:
        try:
            size = file.stat().st_size
            digest.update(f"\n{size}\n".encode())
            last = max(0, size - _SAMPLE_BYTES)
            offsets = sorted({last * i // (_SAMPLES - 1) for i in range(_SAMPLES)})
            with file.open("rb") as stream:
                for offset in offsets:
                    stream.seek(offset)
                    digest.update(stream.read(_SAMPLE_BYTES))
        except OSError as error:
            raise ModelLoadError(f"[model] {file} cannot be read: {error.strerror}") from error
    return str(digest.hexdigest())
