"""``kvist generate``: streams, JSON, usage, and what it refuses."""

from __future__ import annotations

import json

import pytest
from tests.support.engine_fakes import EOS, answer

from kvist.types import SamplingParams

PROMPT = "once upon"
GREEDY = ["--temperature", "0", "--max-tokens", "8"]


def expected_text(prompt: str, max_tokens: int = 8) -> str:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return bytes(t for t in answer(list(prompt.encode()), params) if t != EOS).decode()


def test_text_goes_to_stdout_and_usage_to_stderr(parts, kvist):
    result = kvist("generate", "--prompt", PROMPT, *GREEDY)
    assert result.exit_code == 0, result.output
    assert result.stdout == expected_text(PROMPT) + "\n"
    assert "reused 0 of 9 prompt tokens" in result.stderr
    assert "TTFT" in result.stderr


def test_prompt_from_file_and_from_stdin_are_the_same(parts, kvist, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT)
    assert (
        kvist("generate", "--prompt-file", str(file), *GREEDY).stdout
        == expected_text(PROMPT) + "\n"
    )


def test_dash_reads_the_prompt_from_stdin(parts, kvist):
    assert (
        kvist("generate", "--prompt", "-", *GREEDY, stdin=PROMPT).stdout
        == expected_text(PROMPT) + "\n"
    )


def test_json_is_one_line_with_text_tokens_and_usage(parts, kvist):
    result = kvist("generate", "--prompt", PROMPT, *GREEDY, "--json", "--logprobs", "0")
    (line,) = result.stdout.splitlines()
    document = json.loads(line)
    (choice,) = document["choices"]
    assert choice["text"] == expected_text(PROMPT)
    assert len(choice["logprobs"]) == len(choice["token_ids"]) == document["num_output_tokens"]
    assert choice["finish_reason"] in {"stop", "length"}
    assert document["num_prompt_tokens"] == 9
    assert document["num_cached_tokens"] == 0
    assert document["ttft_s"] <= document["e2e_s"]


def test_several_sequences_are_shown_one_after_the_other(parts, kvist):
    result = kvist("generate", "--prompt", PROMPT, *GREEDY, "--n", "2")
    assert result.stdout.startswith("--- 0\n")
    assert "\n--- 1\n" in result.stdout


def test_no_output_tokens_is_a_valid_request(parts, kvist):
    result = kvist("generate", "--prompt", PROMPT, "--max-tokens", "0", "--json")
    assert json.loads(result.stdout)["num_output_tokens"] == 0


@pytest.mark.parametrize("arguments", [[], ["--prompt", "a", "--prompt-file", "b"]])
def test_exactly_one_prompt_is_wanted(kvist, arguments):
    result = kvist("generate", *arguments)
    assert result.exit_code == 2
    assert "one of --prompt and --prompt-file" in result.stderr


def test_a_missing_prompt_file_is_named(kvist, tmp_path):
    result = kvist("generate", "--prompt-file", str(tmp_path / "none.txt"))
    assert result.exit_code == 1
    assert "none.txt" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_prompt_file_that_is_not_text_is_refused(kvist, tmp_path):
    file = tmp_path / "bytes"
    file.write_bytes(b"\xff\xfe\x00")
    result = kvist("generate", "--prompt-file", str(file))
    assert result.exit_code == 1
    assert "must be UTF-8" in result.stderr


def test_a_prompt_that_is_too_long_is_one_line(parts, kvist):
    result = kvist("generate", "--prompt", "x" * 200)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "the prompt has 200 tokens" in result.stderr
    assert len(result.stderr.splitlines()) == 1
