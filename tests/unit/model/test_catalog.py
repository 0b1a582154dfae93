"""Names resolve to complete models, or to a message that says what to do."""

from __future__ import annotations

import re

import pytest

from kvist.errors import ModelLoadError
from kvist.model.catalog import (
    KNOWN_MODELS,
    MANIFEST,
    HubModel,
    ModelKind,
    parse_hub_id,
    resolve,
    resolve_path,
)


@pytest.fixture(autouse=True)
def models(monkeypatch, tmp_path):
    monkeypatch.setenv("KVIST_MODELS", str(tmp_path / "models"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "models"


def make(folder, *names):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"x")
    return folder


def test_known_model_that_was_not_pulled():
    with pytest.raises(ModelLoadError, match=r"run `kvist pull smollm2-135m`"):
        resolve("smollm2-135m")


def test_known_model_must_have_its_full_length(models):
    known = KNOWN_MODELS["smollm2-135m"]
    known.path.parent.mkdir(parents=True)
    with known.path.open("wb") as file:
        file.truncate(known.size_bytes - 1)
    with pytest.raises(ModelLoadError, match=f"found {known.size_bytes - 1} bytes"):
        resolve("smollm2-135m")
    with known.path.open("wb") as file:
        file.truncate(known.size_bytes)
    model = resolve("smollm2-135m")
    assert (model.name, model.path, model.kind) == ("smollm2-135m", known.path, ModelKind.GGUF)
    assert known.path.is_relative_to(models)


def test_known_models_are_well_formed():
    for name, known in KNOWN_MODELS.items():
        assert name == known.name
        assert re.fullmatch(r"[0-9a-f]{64}", known.sha256)
        assert known.license


def test_local_paths(tmp_path):
    gguf = make(tmp_path / "a", "m.gguf") / "m.gguf"
    folder = make(tmp_path / "b", "config.json", "model.safetensors", "m.gguf")
    assert resolve(str(gguf)).kind is ModelKind.GGUF
    assert resolve("a").path == gguf
    assert resolve("./a/m.gguf").name == "m"
    assert (resolve("b").path, resolve("b").kind) == (folder, ModelKind.FOLDER)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "holds neither config.json"),
        (["model.safetensors"], "safetensors but no config.json"),
        (["a.gguf", "b.gguf"], r"holds 2 .gguf files \(a.gguf, b.gguf\)"),
        (["config.json", "pytorch_model.bin"], "pickled weights only.*never loads"),
        (["config.json", "x.pt"], "pickled weights only"),
    ],
)
def test_folders_that_hold_no_model(tmp_path, files, message):
    with pytest.raises(ModelLoadError, match=message):
        resolve_path(make(tmp_path / "f", *files))


def test_files_that_are_no_model(tmp_path):
    make(tmp_path, "weights.bin")
    with pytest.raises(ModelLoadError, match=r"must be a \.gguf file.*'\.bin'"):
        resolve("weights.bin")


def test_hub_models_are_found_when_complete(models):
    folder = make(models / "hub" / "owner--name", "config.json", "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"run `kvist pull owner/name`"):
        resolve("owner/name")
    make(folder, MANIFEST)
    model = resolve("owner/name")
    assert (model.name, model.path, model.kind) == ("owner/name", folder, ModelKind.FOLDER)


def test_one_file_of_a_hub_repository(models):
    folder = make(models / "hub" / "owner--name--x.gguf", "x.gguf", MANIFEST)
    assert resolve("owner/name/x.gguf").path == folder / "x.gguf"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("owner/name", HubModel(repository="owner/name")),
        ("Qwen/Qwen2.5-0.5B", HubModel(repository="Qwen/Qwen2.5-0.5B")),
        ("o/n/sub/f-Q4.gguf", HubModel(repository="o/n", file="sub/f-Q4.gguf")),
        ("name", None),
        ("owner/name/x.bin", None),
        ("../name", None),
        ("owner/..", None),
        ("a--b/c", None),
        ("owner/name/../x.gguf", None),
        ("owner/na me", None),
    ],
)
def test_hub_ids(name, expected):
    assert parse_hub_id(name) == expected


def test_typos_get_a_suggestion():
    with pytest.raises(ModelLoadError, match="did you mean 'smollm2-135m'"):
        resolve("smolm2-135")
    with pytest.raises(ModelLoadError, match="known names: smollm2-135m"):
        resolve("zzzz")


def test_missing_paths_are_called_missing():
    for name in ("./nowhere", "/nowhere/m.gguf", "~/nowhere"):
        with pytest.raises(ModelLoadError, match="does not exist"):
            resolve(name)


@pytest.mark.parametrize("name", ["~no-such-user-here/model", "x" * 5000, "", "a\0b"], ids=repr)
def test_names_that_no_file_can_have_are_unknown_models(name):
    with pytest.raises(ModelLoadError, match=r"does not exist|not a known name"):
        resolve(name)
