"""The application: start-up cost, exit codes, streams."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import types

import pytest
from typer.testing import CliRunner

import kvist as package
from kvist import __main__ as entry
from kvist.cli.console import note, reported_errors, set_up_logging
from kvist.cli.main import app
from kvist.errors import ConfigError
from kvist.kernels import native

COMMANDS = ("pull", "serve", "generate", "chat", "demo", "plan", "cache")


def kvist(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvist", *arguments],
        capture_output=True,
        text=True,
        check=False,
        **options,
    )


def test_help_names_every_command():
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    for command in COMMANDS:
        assert command in result.output


@pytest.mark.parametrize("command", [*COMMANDS, "cache stats"])
def test_every_command_has_help(command):
    result = CliRunner().invoke(app, [*command.split(), "--help"])
    assert result.exit_code == 0
    assert "Usage" in result.output


def test_version_goes_to_stdout():
    result = kvist("--version")
    assert result.returncode == 0
    assert result.stdout == f"kvist {package.__version__} ({native.describe()})\n"
    assert result.stderr == ""


@pytest.mark.parametrize(
    "arguments", [["--help"], ["plan", "--model", "llama-2-7b"], ["pull", "--list"]]
)
def test_fast_commands_load_no_tensor_library(arguments):
    code = (
        "import sys; from kvist.cli.main import app\n"
        f"try: app({arguments!r})\n"
        "except SystemExit: pass\n"
        "print(*sorted(sys.modules.keys() & {'torch', 'transformers', 'fastapi'}), file=sys.stderr)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stderr.strip() == ""
    assert result.stdout


def test_a_wrong_option_is_exit_code_2():
    result = kvist("plan", "--contxt", "5")
    assert result.returncode == 2
    assert result.stdout == ""
    assert "--context" in result.stderr


def test_an_engine_error_is_one_line_on_stderr_and_exit_code_1():
    result = kvist("plan", "--model", "/nowhere/model.gguf")
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("kvist: [model] /nowhere/model.gguf does not exist")
    assert len(result.stderr.splitlines()) == 1


def test_debug_shows_the_traceback():
    result = kvist("--debug", "plan", "--model", "/nowhere/model.gguf")
    assert result.returncode == 1
    assert "Traceback" in result.stderr


def test_missing_model_says_how_to_pull_it():
    result = kvist("generate", "--model", "someone/something", "--prompt", "x")
    assert result.returncode == 1
    assert "kvist pull someone/something" in result.stderr


def test_no_colour_where_there_is_no_terminal():
    result = kvist("plan", "--model", "/nowhere/model.gguf")
    assert "\x1b" not in result.stderr


def test_interrupt_is_exit_code_130_without_traceback():
    """Chat waits for its input before it loads anything only when there is a model; pull --list is too quick."""
    code = (
        # A shell starts background jobs with SIGINT ignored, and their children inherit that.
        "import signal, time, typer\n"
        "from kvist.cli.console import reported_errors\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "app = typer.Typer()\n"
        "@app.command()\n"
        "def wait():\n"
        "    with reported_errors():\n"
        "        print('ready', flush=True)\n"
        "        time.sleep(60)\n"
        "app()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 130
    assert stderr == "interrupted\n"


def test_reader_that_goes_away_ends_the_command_quietly():
    process = subprocess.Popen(
        [sys.executable, "-m", "kvist", "pull", "--list"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    stderr = process.stderr.read()
    process.stderr.close()
    process.wait(timeout=20)
    assert "Traceback" not in stderr
    assert process.returncode in (0, 1)


def test_square_brackets_in_messages_are_not_markup(capsys):
    note("[config] --port [red]")
    assert capsys.readouterr().err == "[config] --port [red]\n"


def test_errors_of_several_lines_become_one(capsys):
    set_up_logging(level=30)
    with pytest.raises(Exception) as caught, reported_errors():  # noqa: PT011  # typer.Exit is a RuntimeError
        raise ConfigError("[config] first\n   second")
    assert caught.value.exit_code == 1
    assert capsys.readouterr().err == "kvist: [config] first second\n"


def test_json_of_pull_list_is_the_whole_stdout():
    result = kvist("pull", "--list", "--json")
    (line,) = result.stdout.splitlines()
    assert {model["name"] for model in json.loads(line)["models"]} >= {"smollm2-135m"}


def test_pull_wants_a_name_or_list():
    assert kvist("pull").returncode == 2
    assert kvist("pull", "smollm2-135m", "--list").returncode == 2


def test_pull_of_an_unknown_name_suggests_one():
    result = kvist("pull", "smollm2-136m")
    assert result.returncode == 1
    assert "did you mean 'smollm2-135m'?" in result.stderr


@pytest.mark.parametrize(
    ("redirection", "code", "message"),
    [
        ("plan --model llama-2-7b --json >&-", 0, ""),
        ("plan --model llama-2-7b >&-", 0, ""),
        ("plan --model nosuch 2>&-", 1, ""),
        (
            "plan --model llama-2-7b --json > /dev/full",
            1,
            "kvist: [system] No space left on device\n",
        ),
        ("plan --model llama-2-7b --json <&- >&- 2>&-", 0, ""),
    ],
)
def test_closed_and_full_streams_end_without_a_traceback(redirection, code, message):
    script = f"exec '{sys.executable}' -m kvist {redirection}"
    result = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (code, message)


def test_a_prompt_from_a_closed_stdin_is_an_empty_one(smollm2_path):
    script = f"exec '{sys.executable}' -m kvist generate --memory-gib 0.1 --prompt - <&-"
    result = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "at least one prompt token" in result.stderr


def test_an_interrupt_while_the_command_line_is_loaded_is_no_traceback(monkeypatch, capsys):
    class Loading(types.ModuleType):
        def __getattr__(self, name):
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "kvist.cli.main", Loading("kvist.cli.main"))
    with pytest.raises(SystemExit) as end:
        entry.main()
    assert end.value.code == 130
    assert capsys.readouterr().err == "interrupted\n"
