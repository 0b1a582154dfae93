"""The same weights for everybody: files in the formats that peers read, made once from the model's own.

Responsible for making and keeping them. A file is quantised again from the values that the model's file stands for, so
every peer starts from the same numbers.
"""

from __future__ import annotations

import hashlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np

from kvist.envvars import bench_folder
from kvist.errors import BenchError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FILE_TYPES = {"q8_0": 7, "q4_0": 2}
"""llama.cpp's numbers of the kinds of files that can be made here."""
EMBEDDING = "token_embd.weight"


def identity(path: Path) -> str:
    """Return a short name of a file or folder as it is now: another content has another one."""
    files = [path] if path.is_file() else sorted(path.iterdir())
    facts = [f"{file.resolve()} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files]
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def requantised(path: Path, kind: str) -> Path:
    """Return a GGUF file with the weights of another one in the given kind (``q8_0``, ``q4_0``).

    The embedding, which is also the output layer of small models, is never below 8 bits, as llama.cpp's own files.

    Raises:
        BenchError: The model is no GGUF file.
    """
    if not path.is_file():
        raise BenchError(f"[bench] {kind} weights are made from a GGUF file, the model is {path}")
    target = bench_folder() / f"{identity(path)}-{kind}.gguf"
    if not target.exists():
        with replacing(target) as incoming:
            _write(path, incoming, kind)
    return target


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a path to write to, which becomes the target when the block ends well."""
    target.parent.mkdir(parents=True, exist_ok=True)
    incoming = target.with_name(target.name + ".incoming")
    yield incoming
    incoming.replace(target)


def _write(path: Path, target: Path, kind: str) -> None:
    reader = gguf.GGUFReader(path)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value: Any = field.contents()  # Any: any metadata value
        if name == "general.file_type":
            value = FILE_TYPES[kind]
        kinds = (field.types[0], field.types[-1] if len(field.types) > 1 else None)
        writer.add_key_value(name, value, *kinds)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
            continue
        wanted = gguf.GGMLQuantizationType["Q8_0" if tensor.name == EMBEDDING else kind.upper()]
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
