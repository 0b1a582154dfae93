from __future__ import annotations

import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.decoding import run_decoder
from tests.support.gguf_files import write_gguf
from tests.support.tiny_models import TINY_MODELS, build_reference, random_prompt, save

from kvist.errors import ModelLoadError
from kvist.model.loader import load_decoder
from kvist.model.spec_readers import read_spec

MODELS = {model.name: model for model in TINY_MODELS}
PROMPT = random_prompt(9)


@pytest.fixture(scope="module")
def reference():
    return build_reference(MODELS["llama-gqa"])


@pytest.fixture
def folder(reference, tmp_path):
    return save(reference, tmp_path / "model")


def _load(path, dtype=torch.float32):
    return load_decoder(path, read_spec(path), dtype)


def _rewrite(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def test_shards_load_like_one_file(reference, folder, tmp_path):
    sharded = save(reference, tmp_path / "sharded", max_shard_size="60kB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert torch.equal(run_decoder(_load(sharded), PROMPT), run_decoder(_load(folder), PROMPT))


def test_bfloat16_halves_the_weights_and_stays_close(folder):
    exact, rounded = _load(folder), _load(folder, torch.bfloat16)
    assert 2 * rounded.num_bytes == exact.num_bytes
    expected = run_decoder(exact, PROMPT)
    difference = run_decoder(rounded, PROMPT, codec="raw16") - expected
    assert float(difference.std() / expected.std()) < 0.05


def test_missing_tensor_is_named(folder):
    _rewrite(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelLoadError, match=r"1 missing \(layers\.1\.mlp\.up_proj\.weight\)"):
        _load(folder)


def test_unexpected_tensor_is_named(folder):
    _rewrite(folder, lambda tensors: tensors.update(stranger=torch.zeros(2)))
    with pytest.raises(ModelLoadError, match=r"1 not part of this model \(stranger\)"):
        _load(folder)


def test_wrong_shape_is_named_with_both_shapes(folder):
    _rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(63)}))
    with pytest.raises(ModelLoadError, match=r"norm\.weight \(63,\), expected \(64,\)"):
        _load(folder)


def test_integer_weights_are_refused(folder):
    zeros = torch.zeros(64, dtype=torch.int8)
    _rewrite(folder, lambda tensors: tensors.update({"model.norm.weight": zeros}))
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight has type I8"):
        _load(folder)


def test_known_leftovers_are_skipped(folder):
    leftover = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    expected = run_decoder(_load(folder), PROMPT)
    _rewrite(folder, lambda tensors: tensors.update(leftover))
    assert torch.equal(run_decoder(_load(folder), PROMPT), expected)


def test_pickled_weights_are_refused_unread(folder):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04never read")
    with pytest.raises(ModelLoadError, match=r"pickled weights only \(pytorch_model\.bin\)"):
        _load(folder)


def test_folder_without_weights_is_refused(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"expected model\.safetensors"):
        _load(folder)


def test_shards_without_index_are_refused(folder):
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    (folder / "b.safetensors").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"2 safetensors files without"):
        _load(folder)


@pytest.mark.parametrize(
    "file",
    [
        "../outside.safetensors",
        "/etc/x.safetensors",
        "a\\b.safetensors",
        "C:x.safetensors",
        "weights.bin",
        7,
    ],
)
def test_index_pointing_outside_the_folder_is_refused(folder, file):
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    index = {"weight_map": {"model.norm.weight": file}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match=r"should be in a \.safetensors file of this folder"):
        _load(folder)


@pytest.mark.parametrize("index", ["[]", "{}", "{", '{"weight_map": []}'])
def test_malformed_index_is_refused(folder, index):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelLoadError, match=r"index\.json"):
        _load(folder)


def test_index_naming_an_absent_shard_or_tensor_is_refused(folder):
    (folder / "model.safetensors").rename(folder / "one.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "two.safetensors"}}))
    with pytest.raises(ModelLoadError, match=r"two\.safetensors: cannot be read"):
        _load(folder)
    index.write_text(json.dumps({"weight_map": {"model.absent.weight": "one.safetensors"}}))
    with pytest.raises(ModelLoadError, match=r"model\.absent\.weight"):
        _load(folder)


def _hostile(header: dict | bytes, length: int | None = None) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 7,
        _hostile(b"{}", length=2**63),
        _hostile(b"not json"),
        _hostile({"t": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}),
        _hostile({"t": {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]}}) + bytes(16),
        _hostile({"t": {"dtype": "Q99", "shape": [4], "data_offsets": [0, 16]}}) + bytes(16),
    ],
)
def test_hostile_safetensors_header_is_refused(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: cannot be read"):
        _load(folder)


def test_absurd_sizes_are_refused_before_anything_is_allocated(folder):
    config = json.loads((folder / "config.json").read_text())
    config.update(vocab_size=2**24, hidden_size=2**20)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=r"of the wrong shape"):
        _load(folder)


def test_missing_path_is_refused(tmp_path, folder):
    with pytest.raises(ModelLoadError, match=r"no such file or folder"):
        load_decoder(tmp_path / "absent", read_spec(folder), torch.float32)


def test_gguf_with_missing_or_foreign_tensors_is_refused(reference, folder, tmp_path):
    spec, path = read_spec(folder), tmp_path / "model.gguf"
    write_gguf(path, reference, spec)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"blk.2.ffn_up.weight", b"blk.7.ffn_up.weight"))
    with pytest.raises(ModelLoadError, match=r"1 missing \(blk\.2\..*blk\.7\.ffn_up"):
        _load(path)
