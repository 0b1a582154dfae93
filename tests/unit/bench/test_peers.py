"""Peers in processes of their own: the protocol, and what happens when one breaks it."""

from __future__ import annotations

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from tests.support import fake_driver

from kvist.bench.peers import DriverPeer, DriverSettings, ServerPeer
from kvist.bench.work import Batch
from kvist.errors import BenchError

DRIVER = fake_driver.__file__


def start(fault=None, *, python=sys.executable, driver=DRIVER):
    return DriverPeer(
        DriverSettings(
            name="fake", family="fake", driver=str(driver), python=python, settings={"fault": fault}
        )
    )


def test_a_driver_loads_describes_itself_and_answers():
    with start() as peer:
        first, second = peer.run("cold", Batch(([1, 2, 3], [4]), 5))
        assert peer.describes["fake"] == "1.0"
        assert peer.describes["load_s"] >= 0
    assert list(first.token_ids) == fake_driver.continuation([1, 2, 3], 5)
    assert list(second.token_ids) == fake_driver.continuation([4], 5)
    assert first.num_tokens == 5
    assert 0 <= first.first_s < first.last_s
    assert first.last_s - first.first_s == pytest.approx(0.004)


def test_closing_ends_the_process_and_may_be_repeated():
    peer = start()
    process = peer._process
    peer.close()
    peer.close()
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            "die",
            "fake died with exit code 3; its last words: a library says something\nout of memory",
        ),
        ("raise", "fake failed: ValueError: no"),
        ("lost", "fake was asked 2 prompts and answered 1"),
    ],
)
def test_a_broken_peer_is_named(fault, message):
    with start(fault) as peer, pytest.raises(BenchError, match=message):
        peer.run("cold", Batch(([1], [2]), 3))


def test_a_driver_that_cannot_load_is_an_error_and_leaves_no_process():
    with pytest.raises(BenchError, match=r"fake failed: RuntimeError: no such weights"):
        start("load")


def test_an_interpreter_that_is_not_there_is_an_error():
    with pytest.raises(BenchError, match=r"cannot run /no/such/python for fake"):
        start(python="/no/such/python")


def test_a_library_that_is_not_there_is_an_error(tmp_path):
    driver = tmp_path / "driver.py"
    driver.write_text("import a_library_that_is_not_there\n", encoding="utf-8")
    with pytest.raises(BenchError, match=r"ModuleNotFoundError.*a_library_that_is_not_there"):
        start(driver=driver)


def test_a_driver_named_as_its_library_imports_the_library(tmp_path):
    """The folder of the drivers comes first on the path of a script; ``transformers.py`` would import itself."""
    folder = Path(sys.modules["kvist.bench.peers"].__file__).parent / "drivers"
    assert (folder / "transformers.py").exists()
    driver = tmp_path / "driver.py"
    driver.write_text(
        "import importlib.util\n"
        "class Driver:\n"
        "    def __init__(self, settings): pass\n"
        "    def describe(self):\n"
        "        return {'origin': importlib.util.find_spec('transformers').origin}\n",
        encoding="utf-8",
    )
    with start(driver=driver) as peer:
        assert not peer.describes["origin"].startswith(str(folder))


class Completions(BaseHTTPRequestHandler):
    """A server that streams letters; its class attributes say what it does."""

    bodies: ClassVar[list] = []
    status = 200
    arrived = threading.Barrier(2)

    def do_GET(self):
        self._send({"data": [{"id": "a-model"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        if self.status != 200:
            self._send({"error": {"message": "too busy"}})
            return
        if (
            body["prompt"][0] == 7
        ):  # both requests of a batch must be here before either is answered
            self.arrived.wait(timeout=20)
        self.send_response(200)
        self.end_headers()
        events = [{"choices": [{"text": "a"}]} for _ in range(body["max_tokens"])]
        usage = {
            "completion_tokens": body["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": 2},
        }
        for event in [*events, {"choices": [], "usage": usage}]:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, document):
        self.send_response(self.status if self.command == "POST" else 200)
        self.end_headers()
        self.wfile.write(json.dumps(document).encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Completions)
    Completions.bodies, Completions.status = [], 200
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_server_is_asked_for_exact_counts_of_greedy_tokens(server):
    with ServerPeer("theirs", server) as peer:
        (output,) = peer.run("cold", Batch(([1, 2, 3],), 4))
    (body,) = Completions.bodies
    assert body == {
        "model": "a-model",
        "prompt": [1, 2, 3],
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert (output.num_tokens, output.text, output.token_ids) == (4, "aaaa", None)
    assert output.num_cached_tokens == 2
    assert 0 < output.first_s <= output.last_s


def test_requests_of_a_batch_are_sent_at_the_same_time(server):
    with ServerPeer("theirs", server) as peer:
        outputs = peer.run("fanout", Batch(([7, 1], [7, 2]), 2))
    assert [output.num_tokens for output in outputs] == [2, 2]


def test_a_refusal_is_named(server):
    with ServerPeer("theirs", server) as peer:
        Completions.status = 503
        with pytest.raises(BenchError, match=r"theirs answered 503: .*too busy"):
            peer.run("cold", Batch(([1],), 1))


def test_an_address_without_a_server_is_an_error():
    with pytest.raises(BenchError, match=r"theirs: http://127.0.0.1:9 is no server"):
        ServerPeer("theirs", "http://127.0.0.1:9")
