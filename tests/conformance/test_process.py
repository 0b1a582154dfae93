"""The server as a process: ready line, real sockets, signals, and an end in time."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tests.support.fake_engine import FakeEngine, Reply

from kvist.config import ServerConfig
from kvist.errors import ConfigError
from kvist.server.run import serve

ROOT = Path(__file__).resolve().parents[2]
END_S = 5.0
BODY = {"model": "fake-1", "prompt": "p", "stream": True}
JSON = {"Content-Type": "application/json"}


@contextlib.contextmanager
def process(port=0, *, is_holding=False):
    """Yield the process and its port once it is ready; it must have ended at the end."""
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.support.fake_server", str(port), str(int(is_holding))],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        ready = child.stdout.readline()
        match = re.fullmatch(r"ready: http://127\.0\.0\.1:(\d+)\n", ready)
        assert match, (ready, child.stderr.read())
        yield child, int(match[1])
    finally:
        child.kill()
        child.communicate()


@contextlib.contextmanager
def connection(port):
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        yield client
    finally:
        client.close()


@contextlib.contextmanager
def running(engine=None, **config):
    """Yield the running server in a thread of this process."""
    ready = threading.Event()
    server = []
    engine = engine or FakeEngine()

    def on_ready(running_server):
        server.append(running_server)
        engine.loop = asyncio.get_running_loop()
        ready.set()

    thread = threading.Thread(target=serve, args=(engine, ServerConfig(port=0, **config), on_ready))
    thread.start()
    try:
        assert ready.wait(10)
        yield server[0]
    finally:
        server[0].stop()
        server[0].stop()
        thread.join(END_S)
        assert not thread.is_alive()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_the_process_in_time_with_a_stream_open(number):
    with process(is_holding=True) as (child, port), connection(port) as client:
        client.request("POST", "/v1/completions", json.dumps(BODY), JSON)
        response = client.getresponse()
        assert response.status == 200
        assert b'"text":"a"' in response.readline()
        started = time.monotonic()
        child.send_signal(number)
        rest = response.read().decode()
        assert child.wait(END_S) == 0
        assert time.monotonic() - started < END_S
        last = json.loads(rest.strip().split("\n\n")[-1].removeprefix("data: "))
        assert last["error"]["code"] == "engine_stopped"
        assert "Traceback" not in child.stderr.read()


def test_stream_that_can_finish_is_finished_after_the_signal():
    engine = FakeEngine(reply=Reply(text="abcdef", hold_after=2))
    with running(engine) as server, connection(server.port) as client:
        client.request("POST", "/v1/completions", json.dumps(BODY), JSON)
        response = client.getresponse()
        response.readline()
        server.stop()
        engine.loop.call_soon_threadsafe(engine.release)
        assert response.read().endswith(b"data: [DONE]\n\n")


def test_client_that_never_sends_its_body_does_not_hold_up_the_end():
    with process(is_holding=True) as (child, port):
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            )
            client.sendall(b"Content-Length: 100\r\n\r\n{")
            child.send_signal(signal.SIGTERM)
            assert child.wait(END_S) == 0
        assert "Traceback" not in child.stderr.read()


def test_second_signal_does_not_wait():
    with process(is_holding=True) as (child, port), connection(port) as client:
        client.request("POST", "/v1/completions", json.dumps(BODY), JSON)
        client.getresponse().readline()
        child.send_signal(signal.SIGTERM)
        wait_for(lambda: health(port) != "ready")
        child.send_signal(signal.SIGTERM)
        started = time.monotonic()
        assert child.wait(END_S) == 0
        assert time.monotonic() - started < 1.9


def test_idle_server_ends_at_once():
    with process() as (child, port), connection(port) as client:
        client.request("GET", "/health")
        assert client.getresponse().read() == b'{"status":"ready"}'
        child.send_signal(signal.SIGTERM)
        started = time.monotonic()
        assert child.wait(END_S) == 0
        assert time.monotonic() - started < 1.9
        assert child.stdout.read() == ""


def test_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"port {port} on 127.0.0.1 is already in use.*--port"
        ):
            serve(FakeEngine(), ServerConfig(port=port))


def test_host_name_that_does_not_resolve_is_named():
    with pytest.raises(ConfigError, match=r"--host nowhere\.invalid is no address"):
        serve(FakeEngine(), ServerConfig(host="nowhere.invalid", port=0))


def test_ipv6_address_is_written_in_brackets():
    with running(host="::1") as server:
        assert server.url == f"http://[::1]:{server.port}"


def test_host_that_is_not_ours_is_named():
    with pytest.raises(ConfigError, match=r"--host 192\.0\.2\.1"):
        serve(FakeEngine(), ServerConfig(host="192.0.2.1", port=0))


def test_disconnect_on_a_real_socket_cancels():
    engine = FakeEngine(reply=Reply(hold_after=1))
    with running(engine) as server:
        for is_stream in (True, False):
            with connection(server.port) as client:
                client.request(
                    "POST", "/v1/completions", json.dumps({**BODY, "stream": is_stream}), JSON
                )
                wait_for(engine.held.is_set)
            wait_for(lambda: engine.submissions[-1].stream.is_cancelled)
            engine.held.clear()


def test_oversized_body_gets_its_answer_although_it_is_still_being_sent():
    """Closing at once would reset the connection, and most clients would report that and not the 413."""
    with running(max_body_mib=0.001) as server:
        for headers in (JSON, {**JSON, "Transfer-Encoding": "chunked"}):
            body = iter([b"x" * 65536] * 200) if len(headers) > 1 else b"x" * 65536 * 200
            with connection(server.port) as client:
                client.request("POST", "/v1/completions", body, headers, encode_chunked=True)
                response = client.getresponse()
                assert response.status == 413
                assert json.loads(response.read())["error"]["code"] == "request_too_large"
                # And the connection can go on.
                client.request(
                    "POST", "/v1/completions", json.dumps({**BODY, "stream": False}), JSON
                )
                assert client.getresponse().status == 200


def test_malformed_http_does_not_stop_the_server():
    with running() as server:
        for raw in (
            b"\x00\xff\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 200_000 + b"\r\n\r\n",
        ):
            # A connection that is closed while it is still being written to is an answer too.
            with (
                socket.create_connection(("127.0.0.1", server.port), timeout=5) as client,
                contextlib.suppress(ConnectionError),
            ):
                client.sendall(raw)
                client.shutdown(socket.SHUT_WR)
                assert client.recv(65536)[:10] in {b"HTTP/1.1 4", b""}
        with connection(server.port) as client:
            client.request("GET", "/health")
            assert client.getresponse().status == 200


def test_while_it_drains_new_requests_are_refused_and_running_ones_go_on():
    engine = FakeEngine(reply=Reply(text="abcdef", hold_after=2))
    with running(engine, drain_s=30.0) as server, connection(server.port) as client:
        client.request("POST", "/v1/completions", json.dumps(BODY), JSON)
        response = client.getresponse()
        response.readline()
        server.stop()
        wait_for(lambda: health(server.port) == "draining")
        with connection(server.port) as late:
            late.request("POST", "/v1/completions", json.dumps(BODY), JSON)
            refused = late.getresponse()
            assert refused.status == 503
            assert json.loads(refused.read())["error"]["code"] == "engine_stopped"
        engine.loop.call_soon_threadsafe(engine.release)
        assert response.read().endswith(b"data: [DONE]\n\n")
        # Nothing runs any more, so it does not wait for the rest of its 30 s.
        wait_for(lambda: health(server.port) is None)


def health(port):
    """Return what /health says; None when nobody listens."""
    try:
        with connection(port) as client:
            client.request("GET", "/health")
            return json.loads(client.getresponse().read())["status"]
    except ConnectionError:
        return None


def wait_for(condition):
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
