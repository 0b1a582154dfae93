"""Who is measured: ``--peer`` and ``--kvist``, and the weights that are made for others."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import typer

from kvist.bench.variants import VARIANTS, Common, PeerOption, openers
from kvist.bench.weights import identity, requantised
from kvist.cli.bench import _own_configs
from kvist.config import EngineConfig
from kvist.errors import BenchError


@pytest.fixture
def model(tmp_path, monkeypatch):
    """Return a GGUF file with one matrix and one vector; what is made of it goes to a folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 1)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    random = np.random.default_rng(3)
    writer.add_tensor("blk.0.attn_q.weight", random.standard_normal((4, 64), dtype=np.float32))
    writer.add_tensor("token_embd.weight", random.standard_normal((2, 64), dtype=np.float32))
    writer.add_tensor("output_norm.weight", np.ones(64, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("openvino=/venv/bin/python", PeerOption("openvino", None, "/venv/bin/python")),
        ("llamacpp:q4_0=python3", PeerOption("llamacpp", "q4_0", "python3")),
        ("openvino:/models/ir=python3", PeerOption("openvino", "/models/ir", "python3")),
        ("theirs=http://host:1?a=b", PeerOption("theirs", None, "http://host:1?a=b")),
    ],
)
def test_a_peer_is_a_name_and_where_it_is(text, expected):
    assert PeerOption.parse(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("openvino", "--peer must be NAME=PYTHON or NAME=http"),
        ("=python3", "--peer must be"),
        ("ollama=python3", "--peer ollama is not known here: expected one of openvino, "),
        ("llamacpp:q5=python3", "llamacpp has the variants q8_0, q4_0, received 'q5'"),
    ],
)
def test_what_is_no_peer_is_refused(text, message):
    with pytest.raises(BenchError, match=message):
        PeerOption.parse(text)


def test_all_variants_are_peers_of_one_family(model):
    common = Common(weights=model, threads=2, max_context=512)
    assert list(openers(PeerOption.parse("llamacpp=python3"), common)) == [
        "llamacpp q8_0",
        "llamacpp q4_0",
    ]
    assert list(openers(PeerOption.parse("llamacpp:q4_0=python3"), common)) == ["llamacpp q4_0"]
    assert list(openers(PeerOption.parse(f"openvino:{model}=python3"), common)) == [
        "openvino model.gguf"
    ]
    assert VARIANTS["transformers"]["f32"].weights == "file"


@pytest.mark.parametrize("kind", ["q8_0", "q4_0"])
def test_weights_are_quantised_again_from_the_same_values(model, kind):
    path = requantised(model, kind)
    assert requantised(model, kind) == path
    source = {tensor.name: tensor for tensor in gguf.GGUFReader(model).tensors}
    reader = gguf.GGUFReader(path)
    made = {tensor.name: tensor for tensor in reader.tensors}
    assert {name: tensor.tensor_type.name for name, tensor in made.items()} == {
        "blk.0.attn_q.weight": kind.upper(),
        "token_embd.weight": "Q8_0",
        "output_norm.weight": "F32",
    }
    assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
    assert reader.fields["llama.block_count"].contents() == 1
    for name, tensor in made.items():
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        step = np.abs(source[name].data).max() / (7 if tensor.tensor_type.name == "Q4_0" else 127)
        assert np.abs(values - source[name].data).max() <= step


def test_another_content_is_another_file(model):
    before = identity(model)
    model.write_bytes(model.read_bytes() + b"\0")
    assert identity(model) != before


def test_a_folder_cannot_be_quantised(tmp_path):
    with pytest.raises(BenchError, match="q8_0 weights are made from a GGUF file"):
        requantised(tmp_path, "q8_0")


def test_configurations_of_kvist_are_options_on_top_of_the_common_ones():
    base = EngineConfig.from_options(threads=2, block_size=32)
    configs = _own_configs(base, ["kvist=", "small=block-size=16,max-running=4"])
    assert configs["kvist"] == base
    assert configs["kvist small"] == EngineConfig.from_options(
        threads=2, block_size=16, max_running=4
    )


@pytest.mark.parametrize(
    "text", ["small", "=block-size=16", "small=blocksize=16", "small=block-size"]
)
def test_what_is_no_configuration_is_a_usage_error(text):
    with pytest.raises(typer.Exit) as raised:
        _own_configs(EngineConfig(), [text])
    assert raised.value.exit_code == 2
