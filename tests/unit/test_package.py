"""The package as a whole: cheap to import, its public names, its layers, its options."""

from __future__ import annotations

import ast
import dataclasses
import os
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import kvist
from kvist.config import CacheConfig, ModelConfig, SchedulerConfig, ServerConfig

ROOT = Path(__file__).resolve().parents[2]
CONFIG_GROUPS = (ModelConfig, CacheConfig, SchedulerConfig, ServerConfig)


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )


def best_cpu_seconds(code: str, repetitions: int = 5) -> float:
    """Return the least CPU time of several runs; on a busy machine wall time measures the others."""
    times = []
    for _ in range(repetitions):
        process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        times.append(used.ru_utime + used.ru_stime)
    return min(times)


@pytest.mark.parametrize(
    "module", ["torch", "transformers", "numpy", "fastapi", "typer", "logging"]
)
def test_import_of_kvist_does_not_load(module):
    heavy = run_python("import sys, kvist; print(*sorted(sys.modules))").stdout.split()
    bare = run_python("import sys; print(*sorted(sys.modules))").stdout.split()
    assert module not in set(heavy) - set(bare)


def test_import_of_kvist_takes_less_than_100_ms():
    assert best_cpu_seconds("import kvist") - best_cpu_seconds("pass") < 0.1


def test_import_of_kvist_starts_no_thread_and_touches_no_logging_handler():
    code = (
        "import threading, logging, kvist; print(threading.active_count(), logging.root.handlers)"
    )
    assert run_python(code).stdout.strip() == "1 []"


def test_all_is_sorted_and_names_what_is_there():
    assert kvist.__all__ == sorted(kvist.__all__)
    for name in kvist.__all__:
        assert getattr(kvist, name) is not None


def test_all_equals_the_public_names_of_the_module():
    tree = ast.parse((ROOT / "src/kvist/__init__.py").read_text())
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvist"):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    assert {name for name in names if not name.startswith("_")} | {"__version__"} - {"__all__"} == {
        *kvist.__all__,
        "api",  # imported inside __getattr__ only
    }


def test_an_unknown_attribute_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Motor'"):
        _ = kvist.Motor


def test_version_is_the_one_of_pyproject():
    assert f'version = "{kvist.__version__}"' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("group", CONFIG_GROUPS)
def test_every_option_has_a_type_and_a_help_line(group):
    hints = typing.get_type_hints(group)
    for field in dataclasses.fields(group):
        assert field.name in hints
        text = field.metadata.get("help", "")
        assert text, f"{group.__name__}.{field.name} has no help"
        assert "\n" not in text
        assert not text.endswith("."), f"{group.__name__}.{field.name}: help is a phrase"


def test_option_names_are_unique_and_within_budget():
    names = [field.name for group in CONFIG_GROUPS for field in dataclasses.fields(group)]
    assert len(names) == len(set(names))
    assert len(names) <= 40


def test_environment_is_read_in_one_module_only():
    readers = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "src/kvist").rglob("*.py"))
        if any(word in path.read_text() for word in ("os.environ", "os.getenv"))
    ]
    assert readers == ["src/kvist/envvars.py"]


def test_nothing_is_printed_outside_the_command_line():
    printers = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "src/kvist").rglob("*.py"))
        if "cli" not in path.parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert printers == []


def test_import_contracts_hold():
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())",
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("package", ["cache", "sched"])
def test_control_plane_loads_no_tensor_library(package):
    """Import every module of the package and look; the import contracts check the same from the source."""
    modules = [
        ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
        for path in sorted((ROOT / "src/kvist" / package).glob("*.py"))
        if path.stem != "__init__"
    ]
    code = (
        f"import sys, {', '.join(modules)}; print('torch' in sys.modules, 'numpy' in sys.modules)"
    )
    assert run_python(code).stdout.split()[0] == "False"


def test_readme_shows_every_option():
    from kvist.cli.options import markdown_table
    from kvist.config import EngineConfig

    readme = (ROOT / "README.md").read_text()
    for declared in (EngineConfig, ServerConfig):
        table = markdown_table(declared)
        assert table in readme, "README.md is out of date; run python tools/update_readme.py"


def test_every_command_of_the_readme_exists():
    from typer.testing import CliRunner

    from kvist.cli.main import app

    readme = (ROOT / "README.md").read_text()
    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", readme, re.DOTALL))
    commands = [line.split("#")[0].split() for line in blocks.splitlines()]
    names = {words[1] for words in commands if words[:1] == ["kvist"]}
    assert names >= {"pull", "chat", "generate", "plan", "serve", "cache"}
    for words in commands:
        if words[:1] == ["kvist"]:
            # --help stops before anything runs, after every option's name was checked.
            result = CliRunner().invoke(app, [*words[1:], "--help"])
            assert result.exit_code == 0, words
    targets = {words[1] for words in commands if words[:1] == ["make"]}
    makefile = (ROOT / "Makefile").read_text()
    for target in targets:
        assert f"\n{target}:" in makefile


def test_python_examples_of_the_readme_compile_and_use_names_that_exist():
    readme = (ROOT / "README.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert len(examples) == 2
    for example in examples:
        compile(example, "README.md", "exec")


@pytest.mark.model
def test_the_library_example_of_the_readme_runs(smollm2_path, capsys):
    readme = (ROOT / "README.md").read_text()
    (example,) = (
        e for e in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "import kvist" in e
    )
    exec(compile(example, "README.md", "exec"), {})
    assert "tokens reused" in capsys.readouterr().out
