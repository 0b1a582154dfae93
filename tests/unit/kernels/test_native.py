"""The door to the native kernels: with the extension, without it, and with one that does not load."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

import kvist
from kvist.errors import ConfigError, KernelUnavailable
from kvist.kernels import native

STUB = Path(kvist.__file__).parent / "_native.pyi"
needs_extension = pytest.mark.skipif(not native.available(), reason=native.why_not())


@pytest.fixture
def reloaded():
    """Return a function that imports the module anew with another outcome of importing the extension."""

    def reload(outcome: ImportError):
        def import_module(name):
            assert name == "kvist._native"
            raise outcome

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(importlib, "import_module", import_module)
            return importlib.reload(native)

    yield reload
    importlib.reload(native)


@pytest.fixture
def without_extension(reloaded):
    return reloaded(ModuleNotFoundError("No module named 'kvist._native'", name="kvist._native"))


def test_without_the_extension_everything_can_be_asked(without_extension):
    assert not without_extension.available()
    assert "were not built: no compiler for C++20" in without_extension.why_not()
    assert "everything runs on torch, slower" in without_extension.describe()


@pytest.mark.parametrize("call", ["extension", "isa", "isas"])
def test_without_the_extension_what_needs_it_says_why_not(call, without_extension):
    with pytest.raises(KernelUnavailable, match=r"\[native\] the native kernels were not built"):
        getattr(without_extension, call)()


def test_without_the_extension_nothing_can_be_forced(without_extension):
    with (
        pytest.raises(KernelUnavailable, match="were not built"),
        without_extension.forced_isa("serial"),
    ):
        pass


def test_an_extension_that_does_not_load_is_told_from_one_that_is_not_there(reloaded):
    module = reloaded(ImportError("libstdc++.so.6: version `GLIBCXX_3.4.99' not found"))
    assert not module.available()
    assert "cannot be loaded (libstdc++.so.6: version" in module.why_not()


@needs_extension
def test_with_the_extension_there_is_no_reason_against_it():
    assert native.available()
    assert native.why_not() == ""
    assert native.isa() in native.isas()
    assert native.describe() == f"native kernels, {native.isa()}"


@needs_extension
def test_a_forced_set_ends_with_its_block_also_when_it_raises():
    before = native.isa()
    for name in native.isas():
        seen = []
        with suppress(ZeroDivisionError), native.forced_isa(name):
            seen.append(native.isa())
            raise ZeroDivisionError
        assert seen == [name]
        assert native.isa() == before


@needs_extension
def test_a_set_the_cpu_lacks_is_refused_by_name():
    with (
        pytest.raises(KernelUnavailable, match=r"out of .*serial, received 'sse9'"),
        native.forced_isa("sse9"),
    ):
        pass


@needs_extension
def test_a_wrong_variable_is_a_configuration_error():
    code = (
        "from kvist.errors import ConfigError\nfrom kvist.kernels import native\n"
        "try: native.isa()\nexcept ConfigError as error: print(error)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "KVIST_ISA": "sse9"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.startswith("[environment] KVIST_ISA must be one of")
    assert issubclass(ConfigError, Exception)


class FakeExtension:
    """The part of the extension that the choice of an instruction set uses, with sets that fail their check."""

    def __init__(self, wrong):
        self.wrong = wrong
        self.checked = []
        self.forced = []

    def isas(self):
        return ["avx512", "avx2", "serial"]

    def self_check(self, name):
        self.checked.append(name)
        return self.wrong.get(name, "")

    def force_isa(self, name):
        self.forced.append(name)


def test_a_set_that_passes_its_check_is_taken_without_a_word(caplog):
    extension = FakeExtension({"avx2": "linear int8"})
    native.leave_wrong_kernels(extension)
    assert (extension.checked, extension.forced) == (["avx512"], ["avx512"])
    assert not caplog.records


def test_a_set_with_wrong_kernels_is_left_for_the_next_one_with_a_warning(caplog):
    extension = FakeExtension({"avx512": "linear int8 with 3 rows: 1.5 instead of 2.5"})
    native.leave_wrong_kernels(extension)
    assert (extension.checked, extension.forced) == (["avx512", "avx2"], ["avx2"])
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "for avx512 do not compute on this CPU" in record.getMessage()
    assert "(linear int8 with 3 rows: 1.5 instead of 2.5)" in record.getMessage()
    assert "falling back to avx2" in record.getMessage()
    assert "KVIST_ISA=avx512 runs them nevertheless" in record.getMessage()


def test_the_portable_kernels_are_what_is_left(caplog):
    extension = FakeExtension({"avx512": "codec", "avx2": "codec"})
    native.leave_wrong_kernels(extension)
    assert (extension.checked, extension.forced) == (["avx512", "avx2"], ["serial"])
    assert len(caplog.records) == 2


def test_the_check_runs_once_in_a_process_and_not_for_a_set_chosen_by_hand(monkeypatch):
    extension = FakeExtension({"avx512": "codec"})
    monkeypatch.setattr(native, "_extension", extension)
    monkeypatch.setattr(native, "_is_chosen", False)
    monkeypatch.setenv("KVIST_ISA", "avx512")
    native.extension()
    assert extension.checked == []
    monkeypatch.setattr(native, "_is_chosen", False)
    monkeypatch.delenv("KVIST_ISA")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: native.extension(), range(50)))
    assert extension.checked == ["avx512", "avx2"]


@needs_extension
def test_a_broken_table_of_the_real_extension_is_left(caplog):
    real = native.extension()
    names, before = real.isas(), real.isa()
    if len(names) == 1:
        pytest.skip("this CPU has the portable kernels alone")
    broken = SimpleNamespace(
        isas=real.isas,
        force_isa=real.force_isa,
        self_check=lambda name: real.self_check(name, "linear" if name == names[0] else ""),
    )
    try:
        native.leave_wrong_kernels(broken)
        assert real.isa() == names[1]
        assert "linear int8 with 1 rows" in caplog.text
    finally:
        real.force_isa(before)


def test_the_module_loads_no_tensor_library():
    code = "import sys, kvist.kernels.native; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert result.stdout.strip() == b"False"


def names_of_stub(nodes: list[ast.stmt], prefix: str = "") -> set[str]:
    names = set()
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            names |= {prefix + node.name, *names_of_stub(node.body, f"{prefix}{node.name}.")}
        elif isinstance(node, ast.FunctionDef):
            names.add(prefix + node.name)
        elif isinstance(node, ast.AnnAssign):
            names.add(prefix + node.target.id)
    return {name for name in names if not name.split(".")[-1].startswith("_")}


def names_of(owner: object, prefix: str = "") -> set[str]:
    names = set()
    for name, value in vars(owner).items():
        if not name.startswith("_"):
            names.add(prefix + name)
            if isinstance(value, type):
                names |= names_of(value, f"{prefix}{name}.")
    return names


@needs_extension
def test_the_stub_names_what_the_extension_has():
    """After a change to the bindings: ``python -m nanobind.stubgen -m kvist._native -o src/kvist/_native.pyi``."""
    assert names_of_stub(ast.parse(STUB.read_text()).body) == names_of(native.extension())
