"""``kvist cache stats`` against a server that answers on a real socket."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

DOCUMENT = {"cache": {"num_blocks": 1234567, "prefix_hit_fraction": 0.25}, "is_running": True}


class Handler(BaseHTTPRequestHandler):
    """Answers as the test says."""

    status = 200
    body = json.dumps(DOCUMENT)

    def do_GET(self):
        is_allowed = self.headers.get("Authorization") == "Bearer right"
        status = self.status if self.path == "/v1/cache/stats" else 404
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
