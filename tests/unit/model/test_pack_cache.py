"""Packed weights on disk: exactly what was stored, or nothing."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import logging
import os
import struct
import subprocess
import sys
from typing import NoReturn

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvist.model import pack_cache
from kvist.model.pack_cache import PackKey, find, keep, load, locations, store

KEY = PackKey(fingerprint="f" * 64, kind="int8", group=0, layout="avx2-1")
OTHER_KEYS = [
    dataclasses.replace(KEY, **change)
    for change in ({"fingerprint": "0"}, {"kind": "int4"}, {"group": 32}, {"layout": "serial-1"})
]


def make_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = {"a": (1,), "layers.0.qkv": (130, 7), "empty": (0, 3), "b": (64,), "naïve": (2, 3, 5)}
    return {name: rng.integers(0, 256, shape, dtype=np.uint8) for name, shape in shapes.items()}


def assert_equal(received, expected) -> None:
    assert received is not None
    assert list(received) == list(expected)
    for name, tensor in expected.items():
        assert received[name].shape == tensor.shape
        assert received[name].dtype == np.uint8
        assert np.array_equal(received[name], tensor)


@pytest.fixture
def stored(tmp_path):
    """Return a file of ``make_tensors()``."""
    path = tmp_path / "weights.pack"
    assert store(path, KEY, make_tensors())
    return path


def test_what_was_stored_comes_back(stored):
    assert_equal(load(stored, KEY), make_tensors())


def test_tensors_are_aligned_and_read_only(stored):
    for tensor in load(stored, KEY).values():
        assert tensor.ctypes.data % 64 == 0
        assert not tensor.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            tensor[...] = 0


def test_many_tensors_with_long_offsets_fit_the_index(tmp_path):
    tensors = {f"t{i}": np.full(i % 130, i % 251, np.uint8) for i in range(2000)}
    assert store(tmp_path / "x", KEY, tensors)
    assert_equal(load(tmp_path / "x", KEY), tensors)


def test_no_tensors_are_a_file_too(tmp_path):
    assert store(tmp_path / "x", KEY, {})
    assert load(tmp_path / "x", KEY) == {}


def test_a_file_that_is_not_there_is_no_news(tmp_path, caplog):
    assert load(tmp_path / "nothing", KEY) is None
    assert caplog.text == ""


@pytest.mark.parametrize("key", OTHER_KEYS)
def test_a_file_for_another_key_is_not_used_and_is_replaced(stored, key, caplog):
    with caplog.at_level(logging.INFO, logger="kvist"):
        assert load(stored, key) is None
    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert "another model, or in another format" in record.getMessage()
    assert store(stored, key, make_tensors(1))
    assert_equal(load(stored, key), make_tensors(1))
    assert load(stored, KEY) is None


@pytest.mark.parametrize("has_memory", [True, False])
def test_tensors_keep_their_bytes_when_the_file_is_replaced(
    stored, has_memory, monkeypatch, caplog
):
    """Whether they are a copy, or mapped because there was no memory for one."""

    def no_memory(num_bytes: int) -> NoReturn:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    if not has_memory:
        monkeypatch.setattr(pack_cache, "anonymous_memory", no_memory)
    with caplog.at_level(logging.INFO, logger="kvist"):
        old = load(stored, KEY)
    assert ("stay mapped" in caplog.text) is not has_memory
    assert store(stored, KEY, make_tensors(1))
    assert_equal(old, make_tensors())
    assert_equal(load(stored, KEY), make_tensors(1))


@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_damaged_file_is_never_used(stored, data, caplog):
    """Every byte but the padding is covered: one changed byte, a cut and a tail that is missing give nothing."""
    content = bytearray(stored.read_bytes())
    damaged = stored.with_name("damaged")
    position = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[position] ^= data.draw(st.integers(1, 255))
    else:
        del content[position:]
    damaged.write_bytes(content)
    caplog.clear()
    received = load(damaged, KEY)
    if received is None:
        assert "damaged is not used and will be replaced" in caplog.text
    else:
        # Padding, or the padding behind the last tensor.
        assert_equal(received, make_tensors())


def test_every_byte_of_a_tensor_and_of_the_index_matters(stored):
    content = stored.read_bytes()
    tensor = make_tensors()["layers.0.qkv"].tobytes()
    start = content.index(tensor)
    (length,) = struct.unpack_from("<I", content, 12)
    damaged = stored.with_name("damaged")
    for position in (*range(0, 48 + length, 7), *range(start, start + len(tensor), 31)):
        damaged.write_bytes(
            content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]
        )
        assert load(damaged, KEY) is None, position


@settings(max_examples=200, deadline=None)
@given(content=st.binary(max_size=200), has_magic=st.booleans())
def test_a_foreign_file_is_never_used(tmp_path_factory, content, has_magic):
    path = tmp_path_factory.getbasetemp() / "foreign"
    path.write_bytes(b"KVISTPK\n" * has_magic + content)
    assert load(path, KEY) is None


def forged(document: object) -> bytes:
    """Return a file with a sound checksum over an index that no one should have written."""
    index = document if isinstance(document, bytes) else json.dumps(document).encode()
    prefix = struct.pack("<8sII32s", b"KVISTPK\n", 1, len(index), blake3(index).digest())
    return (prefix + index).ljust(4096, b"\0")


ENTRY = {"name": "a", "shape": [4], "offset": 1024, "blake3": blake3(bytes(4)).hexdigest()}


@pytest.mark.parametrize(
    "document",
    [
        [],
        {},
        {"key": dataclasses.asdict(KEY)},
        {"key": dataclasses.asdict(KEY), "tensors": 5},
        {"key": dataclasses.asdict(KEY), "tensors": [[]]},
        b"\xff\xfe",
        b"{",
        b"[" * 100_000,
        *(
            {"key": dataclasses.asdict(KEY), "tensors": [{**ENTRY, **change}]}
            for change in (
                {"offset": -64},
                {"offset": 1025},
                {"offset": 4096},
                {"offset": 2**70},
                {"offset": None},
                {"offset": float("inf")},
                {"shape": [-4]},
                {"shape": [-2, -2]},
                {"shape": [2**40, 2**40]},
                {"shape": 4},
                {"shape": ["x"]},
                {"blake3": None},
                {"blake3": "0" * 64},
            )
        ),
    ],
)
def test_a_forged_index_is_never_used(tmp_path, document, caplog):
    path = tmp_path / "forged"
    path.write_bytes(forged(document))
    assert load(path, KEY) is None
    assert "is not used and will be replaced" in caplog.text


def test_the_forgery_is_refused_for_what_is_forged(tmp_path):
    path = tmp_path / "forged"
    path.write_bytes(forged({"key": dataclasses.asdict(KEY), "tensors": [ENTRY]}))
    assert_equal(load(path, KEY), {"a": np.zeros(4, np.uint8)})


def test_a_newer_version_is_left_alone(stored, caplog):
    content = bytearray(stored.read_bytes())
    content[8] = 2
    stored.write_bytes(content)
    assert load(stored, KEY) is None
    assert "expected version 1, received 2" in caplog.text


def test_a_folder_in_the_files_place_is_a_line_in_the_log(tmp_path, caplog):
    path = tmp_path / "x"
    path.mkdir()
    assert load(path, KEY) is None
    assert not store(path, KEY, make_tensors())
    assert len(caplog.records) == 2
    assert sorted(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_a_line_in_the_log_and_leaves_nothing_behind(tmp_path, monkeypatch, caplog):
    def write(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pack_cache, "_write", write)
    assert not store(tmp_path / "x", KEY, make_tensors())
    assert "the next start packs again: No space left on device" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_file_that_was_there(stored, monkeypatch):
    monkeypatch.setattr(pack_cache, "_checksums", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        store(stored, KEY, make_tensors(1))
    monkeypatch.undo()
    assert_equal(load(stored, KEY), make_tensors())
    assert sorted(stored.parent.iterdir()) == [stored]


def test_a_file_that_a_killed_writer_left_is_written_over(stored):
    temporary = stored.with_name("weights.pack.tmp")
    temporary.write_bytes(b"x" * 100_000)
    assert store(stored, KEY, make_tensors(2))
    assert_equal(load(stored, KEY), make_tensors(2))
    assert not temporary.exists()


def test_while_another_process_writes_nothing_is_stored(stored, caplog):
    temporary = stored.with_name("weights.pack.tmp")
    code = (
        "import fcntl, sys; f = open(sys.argv[1], 'wb'); fcntl.flock(f, fcntl.LOCK_EX);"
        "print('locked', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, temporary], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout.readline() == b"locked\n"
        assert not store(stored, KEY, make_tensors(1))
        other.stdin.close()
    assert_equal(load(stored, KEY), make_tensors())


def test_a_file_renamed_between_opening_and_locking_is_not_written_to(stored, monkeypatch):
    """The other writer finished in between: what this one has opened is the finished file."""
    flock = fcntl.flock

    def finish_first(file, operation):
        os.rename(stored.with_name("weights.pack.tmp"), stored)  # noqa: PTH104
        flock(file, operation)

    stored.with_name("weights.pack.tmp").write_bytes(stored.read_bytes())
    monkeypatch.setattr(fcntl, "flock", finish_first)
    assert not store(stored, KEY, make_tensors(1))
    assert_equal(load(stored, KEY), make_tensors())


def test_a_link_in_the_place_of_the_temporary_file_is_not_followed(stored, tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    stored.with_name("weights.pack.tmp").symlink_to(victim)
    assert not store(stored, KEY, make_tensors(1))
    assert victim.read_bytes() == b"mine"


class TestPlaces:
    @pytest.fixture(autouse=True)
    def cache(self, monkeypatch, tmp_path):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def test_beside_the_model_first_and_never_in_its_folder(self, tmp_path):
        for model in (tmp_path / "m.gguf", tmp_path / "folder"):
            beside, cached = locations(model, KEY)
            assert beside == tmp_path / ".kvist-packed" / f"{model.name}.int8-avx2-1.pack"
            assert cached.parent == tmp_path / "cache" / "kvist" / "packed"

    def test_names_tell_formats_and_layouts_apart_and_no_fingerprints(self, tmp_path):
        names = {locations(tmp_path / "m", key)[0].name for key in (KEY, *OTHER_KEYS)}
        assert len(names) == 4
        assert not any("fff" in name for name in names)

    def test_models_of_one_name_do_not_meet_in_the_cache_folder(self, tmp_path):
        one, other = (locations(tmp_path / name / "m.gguf", KEY)[1] for name in "ab")
        assert one != other

    def test_kept_beside_the_model_and_found_there(self, tmp_path):
        model = tmp_path / "m.gguf"
        assert find(model, KEY) is None
        assert keep(model, KEY, make_tensors()) == locations(model, KEY)[0]
        assert_equal(find(model, KEY), make_tensors())
        assert find(model, OTHER_KEYS[0]) is None

    def test_kept_in_the_cache_folder_where_the_models_cannot_be_written(self, tmp_path, caplog):
        # A file in the folder's place refuses root as well, which permissions do not.
        (tmp_path / ".kvist-packed").write_text("")
        model = tmp_path / "m.gguf"
        assert keep(model, KEY, make_tensors()) == locations(model, KEY)[1]
        assert_equal(find(model, KEY), make_tensors())

    def test_without_any_place_it_goes_without(self, tmp_path, monkeypatch):
        (tmp_path / ".kvist-packed").write_text("")
        monkeypatch.setenv("XDG_CACHE_HOME", "relative")
        assert keep(tmp_path / "m.gguf", KEY, make_tensors()) is None
        assert find(tmp_path / "m.gguf", KEY) is None
