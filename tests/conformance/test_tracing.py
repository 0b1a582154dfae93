"""Spans of requests, as OpenTelemetry's own exporter in memory sees them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import ClassVar

import pytest
from tests.support.asgi import JSON_HEADERS, exchange, request
from tests.support.engine_fakes import make_parts
from tests.support.fake_engine import FakeEngine, Reply

from kvist import envvars
from kvist.config import ServerConfig
from kvist.errors import ConfigError
from kvist.server.app import create_app
from kvist.server.tracing import Tracing, open_tracing

pytest.importorskip("opentelemetry.sdk", reason="the extra kvist[otel] is not installed")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

CHAT = {
    "model": "fake",
    "messages": [{"role": "user", "content": "How thick is the fog?"}],
    "max_tokens": 3,
    "temperature": 0,
    "ignore_eos": True,
}
OTHER = {**CHAT, "messages": [{"role": "user", "content": "How thick was the fog?"}]}
PATH = "/v1/chat/completions"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def spans():
    return InMemorySpanExporter()


@pytest.fixture
def tracing(spans):
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    tracing = Tracing(provider, "fake")
    yield tracing
    tracing.close()


def by_name(spans):
    return {span.name: span for span in spans.get_finished_spans()}


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_request_is_a_span_with_three_parts_inside(spans, tracing, is_stream):
    with make_parts().engine as engine:
        app = create_app(engine, ServerConfig(), tracing)
        request(app, "POST", PATH, CHAT)
        spans.clear()
        answer = request(app, "POST", PATH, {**OTHER, "stream": is_stream})
    assert answer.status == 200
    named = by_name(spans)
    assert set(named) == {"chat fake", "queue", "prefill", "decode"}
    span = named["chat fake"]
    assert span.kind is SpanKind.SERVER
    assert span.parent is None
    assert span.status.status_code is StatusCode.UNSET
    attributes = dict(span.attributes)
    assert attributes.pop("gen_ai.response.id") == answer.headers["x-request-id"]
    assert attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "fake",
        "gen_ai.usage.input_tokens": 40,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.response.finish_reasons": ("length",),
        "kvist.reused_tokens": 16,
        "kvist.recomputed_tokens": 0,
        "kvist.miss.reason": "tokens_differ",
        "kvist.miss.position": 16,
        "kvist.miss.tokens_lost": 23,
    }
    children = [named[name] for name in ("queue", "prefill", "decode")]
    assert {child.parent.span_id for child in children} == {span.context.span_id}
    times = [span.start_time]
    for child in children:
        times += [child.start_time, child.end_time]
    times.append(span.end_time)
    assert times == sorted(times)
    assert children[0].end_time == children[1].start_time
    assert children[1].end_time == children[2].start_time


def test_the_span_is_a_child_of_the_client_s(spans, tracing):
    with make_parts().engine as engine:
        app = create_app(engine, ServerConfig(), tracing)
        request(app, "POST", PATH, CHAT, headers={**JSON_HEADERS, "traceparent": PARENT})
        request(app, "POST", PATH, CHAT, headers={**JSON_HEADERS, "traceparent": "nonsense"})
    first, second = (s for s in spans.get_finished_spans() if s.name == "chat fake")
    assert f"{first.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{first.parent.span_id:016x}" == PARENT.split("-")[2]
    assert second.parent is None


def test_no_span_holds_text_or_a_key(spans, tracing):
    with make_parts().engine as engine:
        app = create_app(engine, ServerConfig(api_key=("secret-key",)), tracing)
        headers = {**JSON_HEADERS, "authorization": "Bearer secret-key"}
        assert request(app, "POST", PATH, CHAT, headers=headers).status == 200
    text = "".join(span.to_json() for span in spans.get_finished_spans())
    assert "thick" not in text
    assert "secret" not in text


def test_a_client_that_goes_away_and_a_failure_are_errors(spans, tracing):
    engine = FakeEngine(reply=Reply(hold_after=1))
    app = create_app(engine, ServerConfig(), tracing)
    body = [b'{"model": "fake-1", "prompt": "p", "stream": true}']

    async def leave():
        async with exchange(app, "POST", "/v1/completions", headers=JSON_HEADERS, body=body) as (
            connection,
            _,
        ):
            await engine.held.wait()
            connection.disconnect()

    asyncio.run(leave())
    span = by_name(spans)["text_completion fake"]
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["error.type"] == "ClientDisconnected"
    assert "gen_ai.usage.input_tokens" not in span.attributes


def test_a_request_that_is_refused_has_no_span(spans, tracing):
    app = create_app(FakeEngine(), ServerConfig(), tracing)
    assert request(app, "POST", PATH, {**CHAT, "model": "fake-1", "temperature": 9}).status == 400
    assert spans.get_finished_spans() == ()


# --- the configuration


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for kind in ("", "TRACES_"):
        for name in ("ENDPOINT", "PROTOCOL"):
            monkeypatch.delenv(f"OTEL_EXPORTER_OTLP_{kind}{name}", raising=False)
    for name in ("OTEL_SDK_DISABLED", "OTEL_TRACES_EXPORTER", "OTEL_SERVICE_NAME"):
        monkeypatch.delenv(name, raising=False)


class Collector(BaseHTTPRequestHandler):
    paths: ClassVar[list[str]]

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.paths.append(self.path)
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments):
        """Say nothing."""


@pytest.fixture
def collector():
    class Collecting(Collector):
        paths: ClassVar[list[str]] = []

    with HTTPServer(("127.0.0.1", 0), Collecting) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", Collecting.paths
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("suffix", ["", "/", "/v1/traces"])
def test_spans_are_sent_to_the_endpoint_at_the_end_at_the_latest(collector, suffix):
    url, paths = collector
    tracing = open_tracing(ServerConfig(otel_endpoint=url + suffix), "fake")
    app = create_app(FakeEngine(), ServerConfig(), tracing)
    request(app, "POST", "/v1/completions", {"model": "fake-1", "prompt": "p"})
    tracing.close()
    assert paths == ["/v1/traces"]


def test_opentelemetry_s_own_variables_are_enough(collector, monkeypatch):
    url, paths = collector
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
    tracing = open_tracing(ServerConfig(), "fake")
    app = create_app(FakeEngine(), ServerConfig(), tracing)
    request(app, "POST", "/v1/completions", {"model": "fake-1", "prompt": "p"})
    assert tracing._provider.resource.attributes["service.name"] == "kvist"
    tracing.close()
    assert paths == ["/v1/traces"]


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": " "},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_SDK_DISABLED": "true"},
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x", "OTEL_TRACES_EXPORTER": "none"},
    ],
)
def test_without_an_endpoint_there_is_no_tracing(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert open_tracing(ServerConfig(), "fake") is None


def test_a_protocol_that_is_not_spoken_is_refused_by_name(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://x")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_PROTOCOL must be http/protobuf"):
        envvars.has_otel_endpoint()


@pytest.mark.parametrize("url", ["127.0.0.1:4318", "grpc://x", "http://", ""])
def test_an_endpoint_must_be_a_url(url):
    with pytest.raises(ConfigError, match="--otel-endpoint must be"):
        ServerConfig(otel_endpoint=url)


def test_missing_libraries_are_named_with_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"install kvist\[otel\]"):
        open_tracing(ServerConfig(otel_endpoint="http://x"), "fake")


def test_nobody_else_pays_for_the_import():
    code = (
        "import sys, kvist.server.run; "
        "from kvist.config import ServerConfig; from kvist.server.tracing import open_tracing; "
        "assert open_tracing(ServerConfig(), 'm') is None; "
        # The web framework imports the interfaces, where they are installed.
        "heavy = ('opentelemetry.sdk', 'opentelemetry.exporter'); "
        "print(any(name.startswith(heavy) for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
