"""Reading of GGUF files: metadata, tensor directory, dequantised tensors.

Responsible for the container format and for refusing files that lie about themselves. Knows no tensor library, no
architecture and no tokeniser: ``spec_readers``, ``loader`` and ``tokenizer`` give the entries their meaning.

The header is walked once with every count and length checked against the bytes that are left, so a hostile header
costs at most a walk over the file; nothing is allocated by a number found in it. Values are converted when looked up.
``gguf.GGUFReader`` is not used for the walk: it makes one array per string (seconds for a vocabulary of 150,000 tokens)
and trusts the counts. Tensor types, their block sizes and their dequantisation do come from the ``gguf`` package.

Source: the GGUF specification, github.com/ggml-org/ggml docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvist.errors import ModelLoadError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4  # GGML_MAX_DIMS
_MAX_KEY_BYTES = 65535  # the specification's limit
_STRING, _ARRAY = 8, 9
_SCALARS: dict[int, str] = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
"""Value type of the specification -> numpy dtype; 8 is a string and 9 an array."""
_MIN_ENTRY_BYTES = 8 + 4 + 1
"""Bytes of the smallest metadata entry: key length, value type, one byte."""
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8
"""Bytes of the smallest tensor entry: name length, rank, type, offset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFTensor:
    """One entry of the tensor directory."""

    name: str
    shape: tuple[int, ...]
    """Outermost dimension first, as torch and numpy have it (the file stores the reverse)."""
    type: str
    """Name of the ggml type, for example ``Q4_1`` or ``F32``."""
    offset: int
    """First byte of the data, from the start of the file."""
    num_bytes: int
    """Length of the data in bytes."""

    @property
    def num_elements(self) -> int:
        """Values in the tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class _Value:
    """Where a metadata value lies."""

    type: int
    offset: int
    count: int | None = None
    """Elements of an array; None for a single value."""


class GGUFMetadata(Mapping[str, Any]):  # Any: the value types are those of the file
    """The key-value section of a GGUF file.

    Values are Python's: int, float, bool, str, or a list of one of them. A list is built anew on every access, because
    vocabularies are large and looked up once.
    """

    def __init__(self, data: mmap.mmap, values: dict[str, _Value], where: str) -> None:
        self._data = data
        self._values = values
        self._where = where

    def __getitem__(self, key: str) -> Any:  # noqa: ANN401  # see the class
        value = self._values[key]
        if value.count is None:
            if value.type == _STRING:
                return self._string(key, value.offset)[0]
            return np.frombuffer(self._data, _SCALARS[value.type], 1, value.offset)[0].item()
        if value.type != _STRING:
            dtype = _SCALARS[value.type]
            return np.frombuffer(self._data, dtype, value.count, value.offset).tolist()
        strings = []
        offset = value.offset
        for _ in range(value.count):
            text, offset = self._string(key, offset)
            strings.append(text)
        return strings

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def array_len(self, key: str) -> int:
        """Return the number of elements of an array without converting it.

        Raises:
            KeyError: There is no such key.
            ModelLoadError: The value is not an array.
        """
        count = self._values[key].count
        if count is None:
            raise ModelLoadError(f"[gguf] {self._where}: {key} should be an array")
        return count

    def _string(self, key: str, offset: int) -> tuple[str, int]:
        (length,) = struct.unpack_from("<Q", self._data, offset)
        end = offset + 8 + length
        try:
            return self._data[offset + 8 : end].decode(), end
        except UnicodeDecodeError as error:
            raise ModelLoadError(
                f"[gguf] {self._where}: {key} should be UTF-8 text: {error.reason} at byte {error.start}"
            ) from error


class GGUFFile:
    """A GGUF file, memory-mapped read-only; the mapping lives as long as this object and its arrays.

    Build one with ``read_gguf``.
    """

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self._data = data
        walk = _HeaderWalk(path, data)
        values = walk.metadata()
        self.metadata = GGUFMetadata(data, values, str(path))
        self.tensors: Mapping[str, GGUFTensor] = walk.tensors(self._alignment())
        """The tensor directory by name, in file order."""

    def dequantize(self, name: str, rows: range | None = None) -> NDArray[np.float32]:
        """Return a tensor, or some of its rows, as float32.

        Args:
            name: A key of ``tensors``.
            rows: Contiguous indices along the first dimension, to bound the memory of large tensors; None: all of them.

        Returns:
            Array of the tensor's shape (first dimension ``len(rows)``). It may share the file's read-only memory.

        Raises:
            ModelLoadError: The tensor is absent, or the ``gguf`` package cannot dequantise its type.
        """
        from gguf.constants import GGMLQuantizationType  # noqa: PLC0415  # slow import
        from gguf.quants import dequantize  # noqa: PLC0415  # slow import

        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelLoadError(f"[gguf] {self.path}: there is no tensor {name!r}")
        shape, offset, num_bytes = tensor.shape or (1,), tensor.offset, tensor.num_bytes
        if rows is not None:
            # A one-dimensional quantised tensor is one row of blocks: it cannot be cut at single values.
            if len(shape) < 2 or rows.step != 1 or not 0 <= rows.start <= rows.stop <= shape[0]:
                raise ValueError(f"rows must be a contiguous part of range({shape[0]}), got {rows}")
            row_bytes = num_bytes // shape[0]
            shape = (len(rows), *shape[1:])
            offset, num_bytes = offset + rows.start * row_bytes, len(rows) * row_bytes
        raw = np.frombuffer(self._data, np.uint8, num_bytes, offset)
        num_rows = math.prod(shape[:-1])
        try:
            values = dequantize(raw.reshape(num_rows, -1), GGMLQuantizationType[tensor.type])
        except NotImplementedError as error:
            raise ModelLoadError(
                f"[gguf] {self.path}: tensor {name} has type {tensor.type}, which cannot be dequantised"
            ) from error
        return np.asarray(values, dtype=np.float32).reshape(tensor.shape if rows is None else shape)

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise ModelLoadError(
                f"[gguf] {self.path}: general.alignment should be a power of two, received {alignment!r}"
            )
        return alignment


def read_gguf(path: Path) -> GGUFFile:
    """Open a GGUF file and check its whole header.

    Raises:
        ModelLoadError: The file cannot be read, is not GGUF, is truncated, or its header contradicts itself; the
            message names the file and the reason.

    Complexity: one walk over the header, about 0.1 s for a vocabulary of 250,000 tokens; no tensor data is read.
    """
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise ModelLoadError(f"[gguf] {path}: cannot be read: {error}") from error
    return GGUFFile(path, data)


class _HeaderWalk:
    """One pass over a header. ``_at`` never passes the end of the file: every read and skip checks first."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._at = 0
        if data[:4] != _MAGIC:
            raise self._error(f"not a GGUF file: it starts with {data[:4]!r}, not {_MAGIC!r}")
        self._at = 4
        version = self._number("<I", "version")
        if version & 0xFFFF == 0 and version:
            raise self._error("big-endian GGUF files are not supported")
        if version not in _VERSIONS:
            raise self._error(
                f"GGUF version {version} is not supported, expected one of {_VERSIONS}"
            )
        self._num_tensors = self._number("<Q", "tensor count")
        self._num_entries = self._number("<Q", "metadata count")
        self._check_count("metadata", self._num_entries, _MIN_ENTRY_BYTES)
        self._check_count("tensor", self._num_tensors, _MIN_TENSOR_BYTES)

    def metadata(self) -> dict[str, _Value]:
        """Walk the key-value section; called first."""
        values: dict[str, _Value] = {}
        for _ in range(self._num_entries):
            key = self._text("a metadata key")
            if key in values:
                raise self._error(f"metadata key {key!r} appears twice")
            value_type = self._number("<I", f"type of {key}")
            if value_type == _ARRAY:
                values[key] = self._array(key)
            else:
                values[key] = _Value(value_type, self._at)
                self._skip_values(key, value_type, 1)
        return values

    def tensors(self, alignment: int) -> dict[str, GGUFTensor]:
        """Walk the tensor directory; called after ``metadata``."""
        entries: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(self._num_tensors):
            name = self._text("a tensor name")
            if name in entries:
                raise self._error(f"tensor {name!r} appears twice")
            rank = self._number("<I", f"rank of {name}")
            if rank > _MAX_DIMENSIONS:
                raise self._error(
                    f"tensor {name} has {rank} dimensions, at most {_MAX_DIMENSIONS} are possible"
                )
            dimensions = [self._number("<Q", f"shape of {name}") for _ in range(rank)]
            tensor_type = self._number("<I", f"type of {name}")
            entries[name] = (
                tuple(reversed(dimensions)),
                tensor_type,
                self._number("<Q", f"offset of {name}"),
            )
        start = -(-self._at // alignment) * alignment
        return {name: self._tensor(name, start, *entry) for name, entry in entries.items()}

    def _tensor(
        self, name: str, start: int, shape: tuple[int, ...], type_id: int, offset: int
    ) -> GGUFTensor:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType  # noqa: PLC0415  # slow

        try:
            tensor_type = GGMLQuantizationType(type_id)
            block_len, block_bytes = GGML_QUANT_SIZES[tensor_type]
        except (ValueError, KeyError):
            raise self._error(f"tensor {name} has the unknown type {type_id}") from None
        num_elements = math.prod(shape)
        row_len = shape[-1] if shape else 1
        if num_elements == 0 or row_len % block_len:
            raise self._error(
                f"tensor {name} of type {tensor_type.name} has shape {shape}; "
                f"rows must be a positive multiple of {block_len}"
            )
        num_bytes = num_elements // block_len * block_bytes
        if start + offset + num_bytes > self._size:
            raise self._error(
                f"tensor {name} should lie at bytes {start + offset} to {start + offset + num_bytes}, "
                f"the file has {self._size}; it is truncated or corrupt, fetch it again"
            )
        return GGUFTensor(
            name=name,
            shape=shape,
            type=tensor_type.name,
            offset=start + offset,
            num_bytes=num_bytes,
        )

    def _array(self, key: str) -> _Value:
        element_type = self._number("<I", f"element type of {key}")
        count = self._number("<Q", f"length of {key}")
        value = _Value(element_type, self._at, count)
        self._skip_values(key, element_type, count)
        return value

    def _skip_values(self, key: str, value_type: int, count: int) -> None:
        if value_type in _SCALARS:
            self._skip(count * np.dtype(_SCALARS[value_type]).itemsize, key)
        elif value_type == _STRING:
            self._check_count(key, count, 8)
            self._skip_strings(key, count)
        else:
            kind = "a nested array" if value_type == _ARRAY else f"of the unknown type {value_type}"
            raise self._error(f"{key} is {kind}, which is not supported")

    def _skip_strings(self, key: str, count: int) -> None:
        # Vocabularies are most of the header: one unpack per string, checks on the running offset only.
        data, at, last = self._data, self._at, self._size - 8
        unpack_from = struct.Struct("<Q").unpack_from
        for _ in range(count):
            if at > last:
                break
            at += 8 + unpack_from(data, at)[0]
        else:
            self._skip(at - self._at, key)
            return
        self._skip(at + 8 - self._at, key)

    def _text(self, what: str) -> str:
        length = self._number("<Q", what)
        if length > _MAX_KEY_BYTES:
            raise self._error(f"{what} of {length} bytes, at most {_MAX_KEY_BYTES} are possible")
        start = self._at
        self._skip(length, what)
        try:
            return self._data[start : self._at].decode()
        except UnicodeDecodeError:
            raise self._error(f"{what} at byte {start} is not UTF-8 text") from None

    def _number(self, layout: str, what: str) -> int:
        start = self._at
        self._skip(struct.calcsize(layout), what)
        (value,) = struct.unpack_from(layout, self._data, start)
        return int(value)

    def _skip(self, num_bytes: int, what: str) -> None:
        if num_bytes > self._size - self._at:
            raise self._error(
                f"{what} needs {num_bytes} bytes at byte {self._at}, the file has {self._size}; "
                "it is truncated or corrupt, fetch it again"
            )
        self._at += num_bytes

    def _check_count(self, what: str, count: int, min_bytes: int) -> None:
        if count * min_bytes > self._size - self._at:
            raise self._error(
                f"{what} count {count} needs at least {count * min_bytes} bytes, the file has {self._size}"
            )

    def _error(self, message: str) -> ModelLoadError:
        return ModelLoadError(f"[gguf] {self._path}: {message}")
