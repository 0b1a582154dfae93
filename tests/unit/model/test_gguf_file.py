from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvist.errors import ModelLoadError
from kvist.model.gguf_file import read_gguf


def _string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def _header(entries=(), tensors=(), num_entries=None, num_tensors=None, version=3) -> bytes:
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(entries) if num_entries is None else num_entries,
    )
    return b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join(entries) + b"".join(tensors)


def _entry(key: str | bytes, kind: int, value: bytes) -> bytes:
    return _string(key) + struct.pack("<I", kind) + value


def _tensor(name: str, dimensions, kind: int = 0, offset: int = 0) -> bytes:
    return (
        _string(name)
        + struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
        + struct.pack("<IQ", kind, offset)
    )


UINT32 = struct.pack("<I", 7)
HUGE = 2**63


@pytest.fixture
def valid_file(tmp_path):
    path = tmp_path / "valid.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 2)
    writer.add_float32("llama.eps", 0.5)
    writer.add_bool("tokenizer.ggml.add_bos_token", True)
    writer.add_string("general.name", "tiny ö")
    writer.add_array("tokenizer.ggml.tokens", ["a", "", "ö"])
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.0])
    writer.add_tensor("plain", np.arange(12, dtype=np.float32).reshape(3, 4))
    packed = gguf.quantize(np.ones((3, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("packed", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("whole", np.arange(4, dtype=np.int32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_values_are_python_values(valid_file):
    metadata = read_gguf(valid_file).metadata
    assert metadata["llama.block_count"] == 2
    assert metadata["llama.eps"] == 0.5
    assert metadata["tokenizer.ggml.add_bos_token"] is True
    assert metadata["general.name"] == "tiny ö"
    assert metadata["tokenizer.ggml.tokens"] == ["a", "", "ö"]
    assert metadata["tokenizer.ggml.scores"] == [0.5, -1.0]
    assert metadata.array_len("tokenizer.ggml.tokens") == 3
    assert metadata.get("absent") is None


def test_tensors_have_torch_order_and_dequantise_whole_or_by_rows(valid_file):
    file = read_gguf(valid_file)
    assert {name: tensor.shape for name, tensor in file.tensors.items()} == {
        "plain": (3, 4),
        "packed": (3, 64),
        "whole": (4,),
    }
    expected = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert np.array_equal(file.dequantize("plain"), expected)
    assert np.array_equal(file.dequantize("plain", range(1, 3)), expected[1:3])
    assert np.allclose(file.dequantize("packed", range(2, 3)), np.ones((1, 64)), atol=1e-3)


def test_type_without_dequantisation_is_named(valid_file):
    with pytest.raises(ModelLoadError, match=r"tensor whole has type I32"):
        read_gguf(valid_file).dequantize("whole")


def test_absent_tensor_is_named(valid_file):
    with pytest.raises(ModelLoadError, match=r"no tensor 'absent'"):
        read_gguf(valid_file).dequantize("absent")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "cannot be read"),
        (b"GG", "not a GGUF file"),
        (b"\x80\x04pickle", "not a GGUF file"),
        (_header(version=99), "version 99 is not supported"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (_header(num_entries=HUGE), "metadata count"),
        (_header(num_tensors=HUGE), "tensor count"),
        (_header()[:10], "truncated"),
        (_header([_entry("a", 4, UINT32)] * 2), "'a' appears twice"),
        (_header([_entry("a", 77, UINT32)]), "unknown type 77"),
        (_header([_entry("a", 8, struct.pack("<Q", HUGE))]), "needs .* bytes"),
        (_header([_entry("a", 9, struct.pack("<IQ", 4, HUGE))]), "needs .* bytes"),
        (_header([_entry("a", 9, struct.pack("<IQ", 8, HUGE))]), "a count"),
        (_header([_entry("a", 9, struct.pack("<IQ", 9, 1) + bytes(16))]), "nested array"),
        (_header([_entry("a", 9, struct.pack("<IQ", 8, 2) + _string("x") + struct.pack("<Q", 99))]), "needs"),
        (_header([struct.pack("<Q", 2**20) + bytes(2**20) + bytes(8)]), "at most 65535"),
        (_header([_entry(b"\xff\xfe", 4, UINT32)]), "not UTF-8"),
        (_header([_entry("general.alignment", 4, UINT32)]), "power of two"),
        (_header([], [_tensor("t", (4,)), _tensor("t", (4,))]), "'t' appears twice"),
        (_header([], [_tensor("t", (1,) * 9)]), "9 dimensions"),
        (_header([], [_tensor("t", (4,), kind=999)]), "unknown type 999"),
        (_header([], [_tensor("t", (0,))]), "shape"),
        (_header([], [_tensor("t", (31, 4), kind=2)]), "multiple of 32"),
        (_header([], [_tensor("t", (HUGE, HUGE, HUGE))]), "the file has"),
        (_header([], [_tensor("t", (4,), offset=HUGE)]), "truncated or corrupt"),
    ],
)  # fmt: skip
def test_hostile_header_is_refused_with_file_and_reason(content, reason, tmp_path):
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=rf"hostile\.gguf: .*{reason}"):
        read_gguf(path)


def test_missing_file_is_a_load_error(tmp_path):
    with pytest.raises(ModelLoadError, match=r"absent\.gguf: cannot be read"):
        read_gguf(tmp_path / "absent.gguf")


def test_text_that_is_not_utf8_is_refused_when_looked_up(tmp_path):
    path = tmp_path / "text.gguf"
    path.write_bytes(_header([_entry("general.name", 8, _string(b"\xff"))]))
    with pytest.raises(ModelLoadError, match=r"general\.name should be UTF-8"):
        read_gguf(path).metadata["general.name"]


def test_every_truncation_is_refused(valid_file, tmp_path):
    content = valid_file.read_bytes()
    path = tmp_path / "cut.gguf"
    for length in range(
        0, len(content) - 31, 7
    ):  # the last tensor may be followed by up to 31 bytes of padding
        path.write_bytes(content[:length])
        with pytest.raises(ModelLoadError):
            read_gguf(path)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_flipped_bytes_never_crash(data, tmp_path_factory):
    """A header with any byte changed is either refused with our error or still read without one."""
    header = _header(
        [_entry("a", 4, UINT32), _entry("b", 9, struct.pack("<IQ", 8, 2) + _string("x") * 2)],
        [_tensor("t", (4, 2)), _tensor("u", (32,), kind=8, offset=32)],
    )
    content = bytearray(header + bytes(128))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(4, len(header) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("flip") / "flipped.gguf"
    path.write_bytes(content)
    try:
        file = read_gguf(path)
        for key in file.metadata:
            file.metadata[key]
        for name in file.tensors:
            file.dequantize(name)
    except ModelLoadError:
        pass
