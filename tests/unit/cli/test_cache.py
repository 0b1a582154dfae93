"""``kvist cache`` against a server that answers on a real socket."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import ClassVar

import pytest

from kvist.cli.cache import ADVICE
from kvist.types import MissReason

DOCUMENT = {"cache": {"num_blocks": 1234567, "prefix_hit_fraction": 0.25}, "is_running": True}


class Handler(BaseHTTPRequestHandler):
    """Answers as the test says."""

    status = 200
    body = json.dumps(DOCUMENT)
    paths = (
        "/v1/cache/breakers",
        "/v1/cache/stats",
        "/v1/cache/explain/chatcmpl-1",
        "/v1/cache/explain/a%2Fb",
        "/v1/cache/reset",
    )

    def do_POST(self):
        length = int(self.headers.get("Content-Length", 0))
        type(self).received = json.loads(self.rfile.read(length))
        self.do_GET()

    def do_GET(self):
        is_allowed = self.headers.get("Authorization") == "Bearer right"
        status = self.status if self.path in self.paths else 404
        self.send_response(status if is_allowed else 401)
        self.end_headers()
        self.wfile.write(self.body.encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    class Handling(Handler):
        pass

    with HTTPServer(("127.0.0.1", 0), Handling) as http_server:
        thread = threading.Thread(target=http_server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{http_server.server_port}/", Handling
        http_server.shutdown()
        thread.join()


def test_json_is_what_the_server_says(kvist, server):
    url, _ = server
    result = kvist("cache", "stats", "--url", url, "--api-key", "right", "--json")
    assert result.exit_code == 0
    (line,) = result.stdout.splitlines()
    assert json.loads(line) == DOCUMENT


def test_table_names_nested_counters(kvist, server):
    url, _ = server
    result = kvist("cache", "stats", "--url", url, "--api-key", "right")
    text = " ".join(result.stdout.split())
    assert "cache.num_blocks 1,234,567" in text
    assert "cache.prefix_hit_fraction 0.250" in text
    assert "is_running True" in text


def test_layers_and_the_latest_requests_have_tables_of_their_own(kvist, server):
    url, handler = server
    layer = {"num_layers": 15, "window": 512, "block_bytes": 16384, "num_read_tokens": 511}
    miss = {"reason": "tokens_differ", "part": "system", "position": 5, "tokens_lost": 70}
    row = {"reused_tokens": 25, "computed_tokens": 75, "recomputed_tokens": 0}
    handler.body = json.dumps(
        {
            "memory": {"block_bytes": 1048576, "layers": [layer, {**layer, "window": None}]},
            "recent_requests": [
                {"id": "chatcmpl-2", **row, "miss": miss},
                {"id": "chatcmpl-1", **row, "miss": None},
            ],
        }
    )
    result = kvist("cache", "stats", "--url", url, "--api-key", "right")
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "memory.block_bytes 1,048,576" in lines
    assert lines[lines.index("one layer of each kind:") + 1 :][:3] == [
        "num_layers window block_bytes num_read_tokens",
        "15 512 16,384 511",
        "15 None 16,384 511",
    ]
    assert lines[lines.index("latest requests:") + 1 :] == [
        "id prompt reused share recomputed miss part lost",
        "chatcmpl-2 100 25 25% 0 tokens_differ system 70",
        "chatcmpl-1 100 25 25% 0 - - 0",
    ]


def test_a_missing_key_is_said_to_be_one(kvist, server):
    url, _ = server
    result = kvist("cache", "stats", "--url", url)
    assert result.exit_code == 1
    assert "--api-key" in result.stderr


@pytest.mark.parametrize(("status", "body"), [(500, "{}"), (200, "<html>"), (200, "[]")])
def test_something_else_than_a_kvist_server_is_said_to_be_one(kvist, server, status, body):
    url, handler = server
    handler.status, handler.body = status, body
    result = kvist("cache", "stats", "--url", url, "--api-key", "right", "--json")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1


def test_no_server_is_said_to_be_none(kvist):
    result = kvist("cache", "stats", "--url", "http://127.0.0.1:9")
    assert result.exit_code == 1
    assert "is `kvist serve` running" in result.stderr


def test_a_histogram_is_one_line(kvist, server):
    url, handler = server
    filled = {"bounds": [0.1, 1.0], "counts": [5, 4, 1], "total": 7.0}
    empty = {"bounds": [0.1, 1.0], "counts": [0, 0, 0], "total": 0.0}
    over = {"bounds": [0.1], "counts": [0, 2], "total": 7.0}
    handler.body = json.dumps({"filled": filled, "empty": empty, "over": over})
    result = kvist("cache", "stats", "--url", url, "--api-key", "right")
    text = " ".join(result.stdout.split())
    assert "filled n 10, mean 0.7, p50 <= 0.1, p90 <= 1" in text
    assert "empty none" in text
    assert "over n 2, mean 3.5, p50 > 0.1, p90 > 0.1" in text


SPAN = {
    "reason": "tokens_differ",
    "part": "message 1",
    "position": 1234,
    "tokens_lost": 5678,
    "before": "Today is\n",
    "expected": "[bold]Sunday",
    "received": "Monday",
    "left_s_ago": None,
}
EVICTED = {
    **dict.fromkeys(SPAN),
    "reason": "evicted",
    "position": 0,
    "tokens_lost": 9,
    "left_s_ago": 12.34,
}
REPORT = {
    "reused_tokens": 1234,
    "computed_tokens": 5679,
    "recomputed_tokens": 0,
    "miss": SPAN,
    "spans": [SPAN],
}


def explained(kvist, server, document, request_id="chatcmpl-1", *options):
    url, handler = server
    handler.body = json.dumps(document)
    return kvist("cache", "explain", request_id, "--url", url, "--api-key", "right", *options)


def test_a_report_says_what_differs_where_and_what_to_do(kvist, server):
    result = explained(kvist, server, REPORT)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "1,234 prompt tokens reused, 5,679 computed",
        "5,678 tokens from position 1,234 in message 1: tokens_differ",
        f"    {ADVICE['tokens_differ']}",
        "    expected: Today is\\n | [bold]Sunday",
        "    received: Today is\\n | Monday",
    ]


def test_every_prompt_of_a_request_has_its_lines(kvist, server):
    hit = {**REPORT, "miss": None, "spans": [], "recomputed_tokens": 70}
    evicted = {**REPORT, "miss": EVICTED, "spans": [EVICTED]}
    result = explained(kvist, server, {**REPORT, "prompts": [hit, evicted]})
    text = result.stdout
    assert "70 computed again after a preemption" in text
    assert "nothing was missed" in text
    assert "9 tokens from position 0: evicted, 12.3 s before" in text


def test_a_report_as_json_is_what_the_server_says(kvist, server):
    result = explained(kvist, server, REPORT, "chatcmpl-1", "--json")
    assert json.loads(result.stdout) == REPORT


def test_an_id_is_one_part_of_the_path_whatever_is_in_it(kvist, server):
    assert explained(kvist, server, REPORT, "a/b").exit_code == 0


def test_an_unknown_request_is_said_to_be_one(kvist, server):
    _, handler = server
    handler.status = 404
    document = {"error": {"message": "[server] no finished request 'x' of this API key"}}
    result = explained(kvist, server, document)
    assert result.exit_code == 1
    assert "no finished request 'x'" in result.stderr


BREAKER = {
    "part": "system",
    "kind": "timestamp",
    "example": "Today is [bold]\n[2026-11-14 -> 2026-11-15]",
    "tokens_per_hour": 123456,
    "count": 41,
    "hint": "move the date",
}


def test_breakers_are_a_table_with_a_hint_for_each_kind(kvist, server):
    url, handler = server
    rows = [BREAKER, {**BREAKER, "part": None, "count": 1}]
    handler.body = json.dumps({"object": "list", "window_s": 3600, "data": rows})
    result = kvist("cache", "breakers", "--url", url, "--api-key", "right")
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[0] == "tokens/hour times part kind example"
    shown = r"Today is [bold]\n[2026-11-14 -> 2026-11-15]"
    assert lines[1:] == [
        f"123,456 41 system timestamp {shown}",
        f"123,456 1 - timestamp {shown}",
        "timestamp: move the date",
    ]


def test_breakers_as_json_are_what_the_server_says_and_none_are_said_to_be_none(kvist, server):
    url, handler = server
    handler.body = json.dumps({"object": "list", "window_s": 3600, "data": []})
    result = kvist("cache", "breakers", "--url", url, "--api-key", "right", "--json")
    assert json.loads(result.stdout) == json.loads(handler.body)
    result = kvist("cache", "breakers", "--url", url, "--api-key", "right")
    assert "nothing within the last hour" in result.stdout


def test_there_is_advice_for_every_reason():
    assert set(ADVICE) == {reason.value for reason in MissReason}


class TestReset:
    ANSWER: ClassVar = {
        "object": "kvist.cache_reset",
        "scope": "all",
        "dropped_blocks": 1234,
        "detached_blocks": 5,
    }

    def run(self, kvist, server, *arguments):
        url, self.handler = server
        self.handler.body = json.dumps(self.ANSWER)
        return kvist("cache", "reset", "--url", url, "--api-key", "right", *arguments)

    @pytest.mark.parametrize(
        ("arguments", "body"),
        [
            ((), {"scope": "namespace"}),
            (("--all",), {"scope": "all"}),
            (("--prompt", "Fog is"), {"scope": "prompt", "prompt": "Fog is"}),
        ],
    )
    def test_what_is_asked_for(self, kvist, server, arguments, body):
        result = self.run(kvist, server, *arguments)
        assert result.exit_code == 0
        assert self.handler.received == body
        assert "1,234 blocks forgotten, and 5 more" in " ".join(result.stdout.split())

    def test_a_prompt_from_a_file(self, kvist, server, tmp_path):
        path = tmp_path / "prompt.txt"
        path.write_text("Fog\nis", encoding="utf-8")
        result = self.run(kvist, server, "--prompt-file", str(path), "--json")
        assert json.loads(result.stdout) == self.ANSWER
        assert self.handler.received == {"scope": "prompt", "prompt": "Fog\nis"}

    def test_a_file_that_is_no_text(self, kvist, server, tmp_path):
        path = tmp_path / "prompt.bin"
        path.write_bytes(b"\xff\xfe\xff")
        result = self.run(kvist, server, "--prompt-file", str(path))
        assert result.exit_code == 1
        assert "--prompt-file" in result.stderr

    def test_two_scopes_are_a_usage_error(self, kvist, server):
        result = self.run(kvist, server, "--all", "--prompt", "x")
        assert result.exit_code == 2
        assert "exclude each other" in result.stderr
