"""``kvist replay``: what scripts read, and what it refuses."""

from __future__ import annotations

import gzip
import importlib.util
import json
import subprocess
import sys

import pytest

MOONCAKE = [
    {"timestamp": 0, "input_length": 1024, "output_length": 3, "hash_ids": [0, 1]},
    {"timestamp": 500, "input_length": 1100, "output_length": 2, "hash_ids": [0, 1, 2]},
    {"timestamp": 900, "input_length": 600, "output_length": 1, "hash_ids": [5, 6]},
]


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in MOONCAKE))
    return path


def replay_json(kvist, *arguments):
    result = kvist("replay", *map(str, arguments), "--json")
    assert result.exit_code == 0, result.output
    (line,) = result.stdout.splitlines()
    return json.loads(line)


def test_the_contract(kvist, trace):
    document = replay_json(
        kvist, trace, "--format", "mooncake", "--memory-blocks-fraction", "1.0",
        "--eviction", "default,lru,belady",
    )  # fmt: skip
    assert [run["eviction"] for run in document["runs"]] == ["default", "lru", "belady"]
    for run in document["runs"]:
        assert run["requests"] == 3
        assert run["hit_share"] == 1024 / 2724
        assert run["wall_s"] > 0
        assert run["mode"] == document["mode"] == "hits"
    assert (document["num_blocks"], document["distinct_blocks"]) == (5, 5)


def test_options_of_the_clock_turn_it_on(kvist, trace):
    document = replay_json(kvist, trace, "--schedule", "fcfs,shortest", "--memory-blocks", "20")
    assert document["mode"] == "timed"
    assert [run["schedule"] for run in document["runs"]] == ["fcfs", "shortest"]
    for run in document["runs"]:
        assert run["output_tokens"] == 6
        assert set(run["ttft_s"]) == {"p50", "p90", "p95", "p99", "mean"}
    assert document["load"]["cost_model"]["step_s"] > 0
    assert replay_json(kvist, trace, "--timed")["mode"] == "timed"


def test_the_table_has_a_column_for_each_run(kvist, trace):
    result = kvist("replay", str(trace), "--schedule", "fcfs,fair", "--concurrency", "2",
        "--memory-blocks", "20",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    for text in ("fcfs / default", "fair / default", "hit share", "TTFT s", "virtual clock"):
        assert text in result.stdout


def test_formats_are_told_from_the_first_line(kvist, tmp_path):
    azure = tmp_path / "a.csv"
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,100,4\n")
    assert replay_json(kvist, azure, "--memory-blocks", "9")["runs"][0]["prompt_tokens"] == 100
    sessions = tmp_path / "s.jsonl.gz"
    session = {
        "id": "x",
        "block_size": 64,
        "requests": [
            {"t": 0.0, "in": 130, "out": 1, "hash_runs": [[1, 2]]},
            {"t": 1.0, "in": 200, "out": 1, "hash_runs": [[1, 3]]},
        ],
    }
    with gzip.open(sessions, "wt") as file:
        file.write(json.dumps(session) + "\n" + json.dumps(session) + "\n")
    # Ids are local to a session, so the second shares nothing with the first.
    document = replay_json(kvist, sessions, "--memory-blocks", "90")
    assert document["runs"][0]["hit_tokens"] == 2 * 128
    assert document["distinct_blocks"] == 6
    for name in ("claude-code", "sessions"):
        document = replay_json(
            kvist, sessions, "--format", name, "--sessions", "1", "--memory-blocks", "90"
        )
        assert document["requests"] == 2


def test_memory_in_gib_counts_the_models_bytes(kvist, trace):
    document = replay_json(kvist, trace, "--memory-gib", "1", "--model", "llama-2-7b")
    assert document["block_bytes"] == 512 * 524_288
    assert document["num_blocks"] == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--hits", "--speedup", "2"), "--speedup would change nothing"),
        (("--hits", "--max-running", "2"), "--max-running would change nothing"),
        (("--speedup", "2", "--concurrency", "2"), "drop it or --speedup"),
        (("--eviction", "lru,best"), "--eviction must be a list of"),
        (("--schedule", "fcfs,best"), "--schedule must be a list of"),
        (("--memory-blocks", "2", "--memory-gib", "1"), "give one of"),
        (("--memory-blocks-fraction", "0"), "must be > 0"),
        (("--block-size", "32"), "drop --block-size"),
        (("--memory-gib", "0.001"), "raise --memory-gib"),
    ],
)
def test_options_that_make_no_sense_are_usage_errors(kvist, trace, arguments, message):
    result = kvist("replay", str(trace), *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "of no known format"),
        ("{bad", "of no known format"),
        (json.dumps(MOONCAKE[0]) + "\n{bad\n", "hostile.jsonl: line 2"),
        (json.dumps(MOONCAKE[0] | {"hash_ids": [2**40, 1]}) + "\n", "block ids must be below"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no requests"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnow,1,1\n", "line 2"),
    ],
)
def test_hostile_files_are_one_line_errors(kvist, tmp_path, content, message):
    path = tmp_path / "hostile.jsonl"
    path.write_text(content)
    result = kvist("replay", str(path), "--memory-blocks", "20")
    assert result.exit_code == 1
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_truncated_gzip_file_is_an_error(kvist, tmp_path):
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(MOONCAKE[0]).encode() * 50)[:40])
    result = kvist("replay", str(path))
    assert result.exit_code == 1
    assert "t.jsonl.gz" in result.stderr


@pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is not None, reason="matplotlib is installed"
)
def test_plot_names_the_extra(kvist, trace, tmp_path):
    result = kvist("replay", str(trace), "--plot", str(tmp_path / "x.png"))
    assert result.exit_code == 1
    assert "kvist[plot]" in result.stderr


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs kvist[plot]")
def test_plot_is_a_png(kvist, trace, tmp_path):
    path = tmp_path / "x.png"
    result = kvist("replay", str(trace), "--schedule", "fcfs,fair", "--memory-blocks", "20",
        "--plot", str(path),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith(b"\x89PNG")


def test_nothing_imports_a_tensor_library(trace):
    code = (
        "import sys; from kvist.cli.main import app\n"
        f"try: app(['replay', {str(trace)!r}, '--timed', '--json'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.shared_data
@pytest.mark.parametrize(
    ("name", "format_name", "prompt_tokens"),
    [
        ("mooncake_conversation.jsonl", "mooncake", None),
        ("azure_2023_conv.csv", "azure", None),
    ],
)
def test_the_first_500_requests_of_public_traces(
    kvist, shared_data, name, format_name, prompt_tokens
):
    path = shared_data / "traces" / name
    hits = replay_json(kvist, path, "--limit", "500")
    explicit = replay_json(kvist, path, "--limit", "500", "--format", format_name)
    assert hits["runs"][0]["requests"] == 500
    assert hits["runs"][0]["hit_tokens"] == explicit["runs"][0]["hit_tokens"]
    timed = replay_json(
        kvist, path, "--limit", "200", "--concurrency", "8", "--max-batch-tokens", "8192",
    )  # fmt: skip
    (run,) = timed["runs"]
    assert run["requests"] == 200
    assert run["steps"] >= run["planned_steps"] > 0


@pytest.mark.shared_data
def test_the_first_coding_sessions(kvist, shared_data):
    path = shared_data / "traces" / "claude_code_sessions_rle.jsonl.gz"
    document = replay_json(
        kvist, path, "--sessions", "8", "--limit", "60", "--memory-blocks-fraction", "1.2"
    )
    assert document["runs"][0]["requests"] == 60
    assert document["runs"][0]["hit_share"] > 0.5
