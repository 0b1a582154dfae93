"""``kvist demo``: the document, the questions, the numbers; and once the whole thing with the real model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from importlib import resources

import httpx
import pytest

from kvist.cli.child_server import child_server, engine_arguments
from kvist.cli.client import Answer, Client
from kvist.cli.demo import FORK_NOTE, Step, forked, messages_for
from kvist.cli.options import flags_of
from kvist.config import EngineConfig
from kvist.errors import EngineStopped

SHORT_DOCUMENT = "\n\n".join(
    f"Room {number} of the house is painted {colour}, and nobody has slept in it for {number} years."
    for number, colour in enumerate(("red", "green", "blue", "white", "grey", "black"), start=3)
)


@pytest.fixture(scope="module")
def shipped() -> str:
    return resources.files("kvist.cli").joinpath("demo_document.txt").read_text(encoding="utf-8")


def make_answer(**changes) -> Answer:
    values = {
        "text": "x",
        "start_s": 1.0,
        "first_s": 1.5,
        "last_s": 2.5,
        "num_prompt_tokens": 100,
        "num_cached_tokens": 60,
        "num_output_tokens": 11,
    }
    return Answer(**{**values, **changes})


def test_shipped_document_is_long_and_repeats_nothing(shipped):
    assert 20_000 <= len(shipped.encode()) <= 30_000
    paragraphs = [paragraph for paragraph in shipped.split("\n\n") if len(paragraph) > 40]
    assert max(Counter(paragraphs).values()) == 1
    assert shipped.isascii()


def test_the_fork_shares_the_first_half_and_the_rest_follows_the_note(shipped):
    edited = forked(shipped)
    before, _, after = edited.partition(f"{FORK_NOTE}\n\n")
    assert before + after == shipped
    assert 0.45 < len(before) / len(shipped) < 0.55


def test_the_document_comes_before_the_question():
    first, last = messages_for("DOCUMENT", "QUESTION")
    assert first["role"] == "system"
    assert first["content"].endswith("DOCUMENT")
    assert last == {"role": "user", "content": "QUESTION"}


def test_numbers_of_one_answer():
    answer = make_answer()
    assert answer.ttft_s == 0.5
    assert answer.num_computed_tokens == 40
    assert answer.output_tokens_per_s == 10.0


def test_one_token_has_no_speed():
    assert make_answer(last_s=1.5, num_output_tokens=1).output_tokens_per_s is None


def test_numbers_of_several_answers_are_sums_medians_and_wall_time():
    answers = (make_answer(), make_answer(first_s=2.0), make_answer(first_s=9.0))
    step = Step(name="fan-out", questions=("a", "b", "c"), answers=answers, wall_s=3.0)
    assert step.ttft_s == 1.0
    assert step.num_prompt_tokens == 300
    assert step.num_cached_tokens == 180
    assert step.output_tokens_per_s == 11.0


def test_engine_options_are_handed_on_as_flags():
    config = EngineConfig.from_options(block_size=32, prefix_cache="off", memory_gib=0.5)
    arguments = engine_arguments(config)
    assert arguments == ["--memory-gib", "0.5", "--block-size", "32", "--prefix-cache", "off"]
    assert engine_arguments(EngineConfig()) == []
    shares = EngineConfig.from_options(cache_share={"a": 0.25, "b": 0.5})
    assert engine_arguments(shares) == ["--cache-share", "a=0.25", "--cache-share", "b=0.5"]
    assert {a for a in arguments if a.startswith("--")} <= {f.name for f in flags_of(EngineConfig)}


def test_a_server_that_does_not_start_is_reported_with_its_last_words():
    config = EngineConfig.from_options(model="/nowhere/model.gguf")
    with (
        pytest.raises(EngineStopped, match=r"exit code 1 .*/nowhere/model\.gguf does not exist"),
        child_server(config, 0),
    ):
        pass


def test_signal_handler_is_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(EngineStopped), child_server(EngineConfig.from_options(model="/nowhere"), 0):
        pass
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_document_that_cannot_be_used_is_refused_before_anything_starts(kvist, tmp_path):
    empty, binary = tmp_path / "empty.txt", tmp_path / "binary.txt"
    empty.write_text(" \n")
    binary.write_bytes(b"\xff\xff")
    for path, message in (
        (empty, "is empty"),
        (binary, "must be UTF-8"),
        (tmp_path / "none", "none"),
    ):
        result = kvist("demo", "--document", str(path))
        assert result.exit_code == 1
        assert message in result.stderr


class ScriptedTransport(httpx.AsyncBaseTransport):
    """Answers each path with a fixed status and body."""

    def __init__(self, replies: dict[str, tuple[int, str]]) -> None:
        self.replies = replies
        self.bodies: list[dict[str, object]] = []

    async def handle_async_request(self, request):
        if request.method == "POST":
            self.bodies.append(json.loads(await request.aread()))
        status, text = self.replies[request.url.path]
        return httpx.Response(status, text=text)


def ask(chat_reply: tuple[int, str]) -> tuple[Answer, dict[str, object]]:
    """Ask a scripted server one question; return the answer and what was sent."""
    import asyncio

    transport = ScriptedTransport(
        {"/v1/models": (200, '{"data": [{"id": "m"}]}'), "/v1/chat/completions": chat_reply}
    )

    async def run() -> Answer:
        client = Client("http://server")
        await client._http.aclose()
        client._http = httpx.AsyncClient(base_url="http://server", transport=transport)
        async with client:
            return await client.ask(messages_for("d", "q"), 5)

    return asyncio.run(run()), transport.bodies[0]


def event(document: dict[str, object]) -> str:
    return f"data: {json.dumps(document)}\n\n"


def test_client_reads_text_and_usage_from_the_stream():
    usage = {
        "prompt_tokens": 9,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 4},
    }
    stream = (
        event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        + event({"choices": [{"delta": {"content": "wa"}}]})
        + event({"choices": [{"delta": {"content": "ter"}}]})
        + event({"choices": [], "usage": usage})
        + "data: [DONE]\n\n"
    )
    answer, body = ask((200, stream))
    assert answer.text == "water"
    assert (answer.num_prompt_tokens, answer.num_cached_tokens) == (9, 4)
    assert answer.start_s <= answer.first_s <= answer.last_s
    assert body["model"] == "m"
    assert body["temperature"] == 0


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ((429, '{"error": {"message": "queue full"}}'), "answered 429: queue full"),
        ((502, "bad gateway"), "answered 502: bad gateway"),
        ((200, event({"error": {"message": "step failed"}})), "step failed"),
        ((200, "data: [DONE]\n\n"), "expected a usage chunk"),
    ],
)
def test_client_reports_what_went_wrong(reply, message):
    with pytest.raises(EngineStopped, match=message):
        ask(reply)


@pytest.mark.model
def test_demo_ends_with_one_line_of_json(smollm2_path, tmp_path):
    document = tmp_path / "house.txt"
    document.write_text(SHORT_DOCUMENT)
    command = [sys.executable, "-m", "kvist", "demo", "--json", "--document", str(document)]
    options = [
        "--max-tokens",
        "4",
        "--memory-gib",
        "0.25",
        "--threads",
        "1",
        "--model",
        str(smollm2_path),
    ]
    result = subprocess.run(
        [*command, *options], capture_output=True, text=True, check=False, env=os.environ.copy()
    )
    assert result.returncode == 0, result.stderr
    (line,) = result.stdout.splitlines()
    numbers = json.loads(line)
    assert numbers["warm_reused_tokens"] > 100
    assert 0 < numbers["warm_computed_tokens"] < 40
    assert 0 < numbers["fork_reused_tokens"] < numbers["warm_reused_tokens"]
    assert numbers["fanout_output_tokens_per_s"] > 0
    assert numbers["warm_ttft_s"] < numbers["cold_ttft_s"]
    assert [step["name"] for step in numbers["steps"]] == [
        "cold",
        "warm",
        "warm",
        "fork",
        "fan-out",
    ]
    assert numbers["steps"][0]["reused_tokens"] == [0]
    assert len(numbers["steps"][-1]["answers"]) == 8
    assert "fan-out x8" in result.stderr


@pytest.mark.model
def test_serve_says_when_it_is_ready_and_ends_on_sigterm(smollm2_path):
    config = EngineConfig.from_options(model=str(smollm2_path), memory_gib=0.1, threads=1)
    with child_server(config, 0) as url:
        assert httpx.get(f"{url}/health").status_code == 200
        stats = httpx.get(f"{url}/v1/cache/stats").json()
        assert stats
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")
