"""Flags made from the configuration dataclasses."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from kvist.cli.options import Only, Without, flags_of, markdown_table, takes_options
from kvist.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, ServerConfig
from kvist.types import SamplingParams

SERVER = Annotated[ServerConfig, Without("stop_degenerate")]
"""Beside SamplingParams, which has a flag of that name; no command takes both."""


def run(arguments: list[str], *declared: type):
    """Run a command that takes the declared objects; return the result and what the command received."""
    received = []
    app = typer.Typer()

    def command(**built):
        received.extend(built.values())

    command.__annotations__ = {f"arg{i}": kind for i, kind in enumerate(declared)}
    command.__signature__ = __import__("inspect").Signature(
        [
            __import__("inspect").Parameter(f"arg{i}", __import__("inspect").Parameter.KEYWORD_ONLY)
            for i in range(len(declared))
        ]
    )
    app.command()(takes_options(command))
    return CliRunner().invoke(app, arguments), received


def test_every_field_of_every_group_is_a_flag():
    names = {flag.name for flag in flags_of(EngineConfig)}
    fields = [
        f for kind in (ModelConfig, CacheConfig, SchedulerConfig) for f in dataclasses.fields(kind)
    ]
    assert names == {f"--{field.name.replace('_', '-')}" for field in fields}


def test_every_sampling_field_is_a_flag_with_the_help_of_its_docstring():
    flags = {flag.field_name: flag for flag in flags_of(SamplingParams)}
    assert set(flags) == {field.name for field in dataclasses.fields(SamplingParams)}
    assert flags["temperature"].help.startswith("0 is greedy")
    assert "`" not in "".join(flag.help for flag in flags.values())


def test_without_flags_the_defaults_of_the_dataclass_hold():
    result, received = run([], EngineConfig, SERVER, SamplingParams)
    assert result.exit_code == 0
    assert received == [EngineConfig(), ServerConfig(), SamplingParams()]


def test_flags_fill_their_fields():
    arguments = [
        "--block-size",
        "16",
        "--memory-gib",
        "0.5",
        "--prefix-cache",
        "off",
        "--port",
        "0",
    ]
    arguments += [
        "--api-key",
        "a",
        "--api-key",
        "b",
        "--stop",
        "x",
        "--stop-token-ids",
        "7",
        "--ignore-eos",
    ]
    arguments += ["--logit-bias", "5=-100", "--logit-bias", "6=2.5", "--max-tokens", "0"]
    result, (config, server, sampling) = run(arguments, EngineConfig, SERVER, SamplingParams)
    assert result.exit_code == 0
    assert config.cache == CacheConfig(block_size=16, memory_gib=0.5, prefix_cache="off")
    assert server == ServerConfig(port=0, api_key=("a", "b"))
    assert sampling.stop == ("x",)
    assert sampling.stop_token_ids == (7,)
    assert sampling.ignore_eos
    assert sampling.logit_bias == {5: -100.0, 6: 2.5}
    assert sampling.max_tokens == 0


def test_a_wrong_choice_is_a_usage_error_with_a_suggestion():
    result, _ = run(["--dtype", "flot32"], EngineConfig)
    assert result.exit_code == 2
    assert "did you mean 'float32'?" in " ".join(result.output.split())


def test_an_unknown_flag_is_a_usage_error_with_a_suggestion():
    result, _ = run(["--memry-gib", "1"], EngineConfig)
    assert result.exit_code == 2
    assert "--memory-gib" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "70000"], "[config] --port must be in [0, 65535], received 70000"),
        (["--block-size", "0"], "[config] --block-size must be at least 1, received 0"),
        (["--temperature", "3"], "[sampling] temperature must be in [0, 2], received 3.0"),
        (["--logit-bias", "5"], "received '5' without '='"),
        (["--logit-bias", "five=1"], "received 'five=1'"),
        (
            ["--cache-share", "a"],
            "[--cache-share] expected NAME=FRACTION, received 'a' without '='",
        ),
        (["--cache-share", "a=0.1", "--cache-share", "a=0.2"], "a was given twice"),
    ],
)
def test_a_value_out_of_range_is_one_line_and_exit_code_2(arguments, message):
    result, received = run(arguments, EngineConfig, SERVER, SamplingParams)
    assert result.exit_code == 2
    assert received == []
    assert message in result.output
    assert len(result.output.splitlines()) == 1


def test_only_leaves_the_other_flags_out():
    result, received = run(["--block-size", "16"], Annotated[EngineConfig, Only("block_size")])
    assert result.exit_code == 0
    assert received[0].cache.block_size == 16
    result, _ = run(["--threads", "2"], Annotated[EngineConfig, Only("block_size")])
    assert result.exit_code == 2


def test_without_takes_the_other_flags():
    kind = Annotated[EngineConfig, Without("cache_share")]
    result, received = run(["--block-size", "16"], kind)
    assert result.exit_code == 0
    assert received[0].cache.block_size == 16
    result, _ = run(["--cache-share", "a=1"], kind)
    assert result.exit_code == 2


def test_a_mapping_with_names_is_filled_from_pairs():
    result, (config,) = run(["--cache-share", "a=0.25", "--cache-share", "b=0.5"], EngineConfig)
    assert result.exit_code == 0
    assert config.cache.cache_share == {"a": 0.25, "b": 0.5}


def test_markdown_table_has_a_row_per_flag():
    table = markdown_table(ServerConfig)
    assert len(table.splitlines()) == 2 + len(dataclasses.fields(ServerConfig))
    assert "| `--port` | `8000` | port to listen on; 0 picks a free one |" in table
