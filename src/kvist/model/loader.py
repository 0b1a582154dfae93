"""From a checkpoint on disk to a ``Decoder``: GGUF files and folders of safetensors.

Responsible for finding every tensor, checking its name and shape before anything is allocated, and filling the
decoder's fused tensors part by part, so that the peak is the weights plus one part. Knows nothing of families except
what the formats themselves do differently. Pickled checkpoints are refused unread: loading one can run code.

Sources: llama.cpp's conversion script for the order of query and key rows in GGUF files of the llama family.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from kvist.errors import ModelLoadError
from kvist.model.decoder import Decoder
from kvist.model.gguf_file import read_gguf
from kvist.model.layout import PartKind, parts_of, target_shapes
from kvist.model.spec_readers import read_json
from kvist.spec import GIB

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from kvist.model.layout import Part
    from kvist.spec import ModelSpec

_CHUNK_ELEMENTS = 16 * 1024 * 1024
"""Values converted at a time; 64 MiB as float32."""
_MAX_NAMES = 5
"""Tensor names spelled out in an error message."""
_FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")
_HF_PREFIXES = ("language_model.model.", "model.language_model.", "language_model.", "model.")
"""What surrounds the decoder's names, longest first: multimodal checkpoints old and new, then plain ones."""
_HF_SKIPPED = ("vision_tower.", "multi_modal_projector.")
"""Beside the text decoder in a multimodal checkpoint, and not needed for text."""


def load_decoder(path: Path, spec: ModelSpec, dtype: torch.dtype) -> Decoder:
    """Return the decoder with its weights.

    Args:
        path: A ``.gguf`` file, or a folder with ``model.safetensors`` or its shards and index.
        spec: What ``spec_readers.read_spec`` returned for the same path.
        dtype: ``torch.float32`` or ``torch.bfloat16``; the weights are converted to it.

    Raises:
        ModelLoadError: A file is missing, corrupt or of an unsupported kind, or its tensors are not those of the spec;
            the message names the tensors. Or the weights do not fit in memory.
    """
    source: _Source = _GGUFSource(path, spec) if path.is_file() else _SafetensorsSource(path, spec)
    parts = parts_of(spec)
    _check_tensors(source, parts)
    weights = _allocate(target_shapes(parts), dtype, path)
    for part in parts:
        rows = slice(part.first_row, part.first_row + part.shape[0])
        source.fill(part, weights[part.target][rows])
    return Decoder(spec, weights)


def iterate_tensors(path: Path, spec: ModelSpec) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the decoder's tensors one by one, so that whoever converts them needs memory for one at a time.

    Args:
        path: As ``load_decoder``.
        spec: As ``load_decoder``.

    Yields:
        Name (``layout``) and float32 tensor, in the order of the forward pass. Everything is checked before the first.

    Raises:
        ModelLoadError: As ``load_decoder``.
    """
    source: _Source = _GGUFSource(path, spec) if path.is_file() else _SafetensorsSource(path, spec)
    parts = parts_of(spec)
    _check_tensors(source, parts)
    shapes = target_shapes(parts)
    for target, group in groupby(parts, key=lambda part: part.target):
        tensor = _allocate({target: shapes[target]}, torch.float32, path)[target]
        for part in group:
            source.fill(part, tensor[part.first_row : part.first_row + part.shape[0]])
        yield target, tensor


class _Source(Protocol):
    """The tensors of one checkpoint, under the names of its own format."""

    where: str
    shapes: Mapping[str, tuple[int, ...]]
    """Every tensor that matters, by name."""

    def name_of(self, part: Part) -> str:
        """Return the part's name in this format."""

    def fill(self, part: Part, target: torch.Tensor) -> None:
        """Convert the part's values into ``target``, a tensor of the part's shape."""


def _check_tensors(source: _Source, parts: list[Part]) -> None:
    expected = {source.name_of(part): part.shape for part in parts}
    problems = []
    missing = [name for name in expected if name not in source.shapes]
    unexpected = [name for name in source.shapes if name not in expected]
    if missing:
        problems.append(f"{len(missing)} missing ({_some(missing)})")
    if unexpected:
        problems.append(f"{len(unexpected)} not part of this model ({_some(unexpected)})")
    wrong = [
        f"{name} {source.shapes[name]}, expected {shape}"
        for name, shape in expected.items()
        if name in source.shapes and source.shapes[name] != shape
    ]
    if wrong:
        problems.append(f"{len(wrong)} of the wrong shape ({_some(wrong)})")
    if problems:
        raise ModelLoadError(
            f"[loader] {source.where}: its tensors are not those its configuration describes: {'; '.join(problems)}"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:_MAX_NAMES]) + (", ..." if len(names) > _MAX_NAMES else "")


def _allocate(
    shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, path: Path
) -> dict[str, torch.Tensor]:
    try:
        return {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}
    except (RuntimeError, MemoryError) as error:
        num_elements = sum(torch.Size(shape).numel() for shape in shapes.values())
        hint = "; set --dtype bfloat16" if dtype == torch.float32 else ""
        raise ModelLoadError(
            f"[loader] {path}: cannot allocate {num_elements * dtype.itemsize / GIB:.2f} GiB for the weights{hint}"
        ) from error


def _row_ranges(shape: tuple[int, ...]) -> list[range]:
    """Cut the first axis into ranges of at most ``_CHUNK_ELEMENTS`` values."""
    step = max(1, _CHUNK_ELEMENTS // max(1, torch.Size(shape[1:]).numel()))
    return [range(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]


class _GGUFSource:
    """A GGUF file. Norm weights are stored as multiplied; llama-family query and key rows are interleaved."""

    def __init__(self, path: Path, spec: ModelSpec) -> None:
        self.where = str(path)
        self._file = read_gguf(path)
        # The frequency factors are in the spec already.
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: tensor.shape
            for name, tensor in self._file.tensors.items()
            if name != "rope_freqs.weight"
        }
        self._head_dim = spec.head_dim
        self._is_interleaved = spec.architecture == "llama"

    def name_of(self, part: Part) -> str:
        return part.gguf_name

    def fill(self, part: Part, target: torch.Tensor) -> None:
        name = part.gguf_name
        if self._is_interleaved and part.kind in (PartKind.QUERY, PartKind.KEY):
            values = self._tensor(name, None)
            # Rows of a head are stored as pairs (i, i + D / 2); the decoder wants both halves in order.
            pairs = values.view(-1, self._head_dim // 2, 2, *part.shape[1:])
            target.view(-1, 2, self._head_dim // 2, *part.shape[1:]).copy_(pairs.transpose(1, 2))
        elif target.dim() == 1:
            target.copy_(self._tensor(name, None))
        else:
            for rows in _row_ranges(part.shape):
                target[rows.start : rows.stop].copy_(self._tensor(name, rows))

    def _tensor(self, name: str, rows: range | None) -> torch.Tensor:
        values = self._file.dequantize(name, rows)
        # Unquantised float32 is the file's own read-only memory, which torch cannot wrap.
        return torch.from_numpy(values if values.flags.writeable else values.copy())


class _SafetensorsSource:
    """A folder of safetensors files. Gemma's norm weights are stored minus one."""

    def __init__(self, folder: Path, spec: ModelSpec) -> None:
        self.where = str(folder)
        self._norm_offset = 1.0 if spec.architecture == "gemma3" else 0.0
        self._handles: dict[str, Any] = {}  # Any: safetensors ships no types
        self._stored_names: dict[str, str] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for file, stored_names in _files_of(folder).items():
            handle = _open(folder / file)
            for stored_name in handle.keys() if stored_names is None else stored_names:
                name = _decoder_name(stored_name, spec)
                if name is None:
                    continue
                if name in shapes:
                    raise ModelLoadError(f"[loader] {folder}: tensor {name} appears twice")
                shapes[name] = _checked_shape(handle, stored_name, folder / file)
                self._handles[name] = handle
                self._stored_names[name] = stored_name
        self.shapes: Mapping[str, tuple[int, ...]] = shapes

    def name_of(self, part: Part) -> str:
        return part.hf_name

    def fill(self, part: Part, target: torch.Tensor) -> None:
        name = part.hf_name
        try:
            stored = self._handles[name].get_slice(self._stored_names[name])
            for rows in _row_ranges(part.shape):
                values = stored[rows.start : rows.stop]
                if part.kind is PartKind.NORM and self._norm_offset:
                    values = values.to(torch.float32) + self._norm_offset
                target[rows.start : rows.stop].copy_(values)
        except SafetensorError as error:
            raise ModelLoadError(f"[loader] {self.where}: tensor {name}: {error}") from error


def _files_of(folder: Path) -> dict[str, list[str] | None]:
    """Return the safetensors files of a checkpoint, each with the tensors the index places there (None: all of it)."""
    if not folder.is_dir():
        raise ModelLoadError(f"[loader] {folder}: there is no such file or folder")
    if (folder / _SINGLE).is_file():
        return {_SINGLE: None}
    if (folder / _INDEX).is_file():
        return _read_index(folder)
    found = sorted(file.name for file in folder.glob("*.safetensors"))
    if len(found) == 1:
        return {found[0]: None}
    if found:
        raise ModelLoadError(
            f"[loader] {folder}: {len(found)} safetensors files without {_INDEX}; fetch the index too"
        )
    pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if pickles:
        raise ModelLoadError(
            f"[loader] {folder}: holds pickled weights only ({_some(pickles)}), which can run code when loaded and are "
            "never read; convert them to safetensors"
        )
    raise ModelLoadError(
        f"[loader] {folder}: expected {_SINGLE}, {_INDEX} or a .gguf file, found none"
    )


def _read_index(folder: Path) -> dict[str, list[str] | None]:
    where = folder / _INDEX
    weight_map = read_json(where).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"[loader] {where}: weight_map should name the file of each tensor")
    files: dict[str, list[str] | None] = {}
    for name, file in weight_map.items():
        # Only a plain name can be nothing but a file of this folder, on every system.
        if (
            not isinstance(file, str)
            or not file.endswith(".safetensors")
            or set(file) & set("/\\:\0")
        ):
            raise ModelLoadError(
                f"[loader] {where}: tensor {name} should be in a .safetensors file of this folder, received {file!r}"
            )
        names = files.setdefault(file, [])
        assert names is not None
        names.append(name)
    return files


def _open(path: Path) -> Any:  # noqa: ANN401  # safetensors ships no types
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"[loader] {path}: cannot be read: {error}") from error


def _checked_shape(handle: Any, name: str, path: Path) -> tuple[int, ...]:  # noqa: ANN401  # safetensors ships no types
    try:
        stored = handle.get_slice(name)
    except SafetensorError as error:
        raise ModelLoadError(f"[loader] {path}: tensor {name}: {error}") from error
    if stored.get_dtype() not in _FLOAT_TYPES:
        raise ModelLoadError(
            f"[loader] {path}: tensor {name} has type {stored.get_dtype()}, expected one of {', '.join(_FLOAT_TYPES)}"
        )
    return tuple(stored.get_shape())


def _decoder_name(stored_name: str, spec: ModelSpec) -> str | None:
    """Return a tensor's name without what surrounds the decoder; None when it is knowingly not loaded."""
    name = stored_name
    for prefix in _HF_PREFIXES:
        if name.startswith(prefix):
            name = name.removeprefix(prefix)
            break
    if name.endswith("rotary_emb.inv_freq"):
        return None  # a constant that old checkpoints carry; computed from the configuration
    if name == "lm_head.weight" and spec.has_tied_embeddings:
        return None  # a copy of the embedding
    if spec.architecture == "gemma3" and name.startswith(_HF_SKIPPED):
        return None
    return name
