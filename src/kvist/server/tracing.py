"""Spans of requests for OpenTelemetry, where that is asked for.

Responsible for one span for each request that reached the engine, with children for waiting, prefill and decoding, and
for where they go. Knows nothing of how a request is served: it is told once, when it has ended. The libraries are an
extra (``kvist[otel]``) and are not imported before a configuration asks for them.

    chat smollm2-135m   received .............................................. last token sent
      queue               submitted ... admitted
      prefill                           admitted ... first token
      decode                                         first token ... last token

Names follow OpenTelemetry's conventions for generative AI where these have one (``gen_ai.*``). No span holds a word of
a prompt or of an answer, or says whose it is.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import kvist
from kvist import envvars
from kvist.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry.sdk.trace import TracerProvider

    from kvist.config import ServerConfig
    from kvist.server.generation import CallRecord

_TRACES_PATH = "/v1/traces"
"""Where OTLP over HTTP takes spans, below the endpoint."""


@dataclass(frozen=True, slots=True)
class _Child:
    """One part of a request."""

    name: str
    start_ns: int
    end_ns: int


class Tracing:
    """Turns ended requests into spans. Any thread.

    Args:
        provider: Where spans go; ended by ``close``.
        model: The name that is served.
    """

    def __init__(self, provider: TracerProvider, model: str) -> None:
        from opentelemetry import trace  # noqa: PLC0415  # an extra; see the module
        from opentelemetry.trace.propagation import tracecontext  # noqa: PLC0415  # as above

        self._provider = provider
        self._model = model
        self._api = trace
        self._propagator = tracecontext.TraceContextTextMapPropagator()
        self._tracer = provider.get_tracer("kvist", kvist.__version__)

    def record(self, record: CallRecord, headers: Mapping[str, str]) -> None:
        """Make the spans of one request.

        Args:
            record: What became of it.
            headers: As the client sent them; ``traceparent`` says whose child the span is.
        """
        # Spans are dated by the wall clock, durations are the monotonic clock's.
        offset_ns = time.time_ns() - time.perf_counter_ns()
        operation = "chat" if record.request_id.startswith("chat") else "text_completion"
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            context=self._propagator.extract(headers),
            kind=self._api.SpanKind.SERVER,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.request.model": self._model,
                **_attributes(record),
            },
            start_time=record.received_ns + offset_ns,
        )
        if record.error is not None:
            name = type(record.error).__name__
            span.set_attribute("error.type", name)
            span.set_status(self._api.Status(self._api.StatusCode.ERROR, name))
        inside = self._api.set_span_in_context(span)
        for child in _children(record):
            part = self._tracer.start_span(
                child.name, context=inside, start_time=child.start_ns + offset_ns
            )
            part.end(child.end_ns + offset_ns)
        span.end(record.ended_ns + offset_ns)

    def close(self) -> None:
        """Send what has not been sent, and end."""
        self._provider.shutdown()


def open_tracing(config: ServerConfig, model: str) -> Tracing | None:
    """Return where spans go as the configuration or OpenTelemetry's own variables say; None: nowhere.

    Raises:
        ConfigError: The libraries are not there, or a protocol is asked for that Kvist does not speak.

    Side effects: starts a thread that sends spans.
    """
    endpoint = config.otel_endpoint
    if endpoint is None and not envvars.has_otel_endpoint():
        return None
    try:
        # An extra, and half a second that nobody else should wait for.
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter,
        )
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            f"[otel] spans need OpenTelemetry's libraries ({error}); install kvist[otel], or leave --otel-endpoint and "
            "OTEL_EXPORTER_OTLP_ENDPOINT out"
        ) from error
    resource = Resource.create()
    if str(resource.attributes.get("service.name", "")).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "kvist"}))
    provider = TracerProvider(resource=resource)
    # Without an argument the exporter takes everything from the environment.
    target: dict[str, Any] = {}  # Any: keyword arguments
    if endpoint is not None:
        target["endpoint"] = endpoint.rstrip("/").removesuffix(_TRACES_PATH) + _TRACES_PATH
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(**target)))
    return Tracing(provider, model)


def _attributes(record: CallRecord) -> dict[str, Any]:  # Any: what spans may hold
    attributes: dict[str, Any] = {"gen_ai.response.id": record.request_id}
    usage = record.usage
    if usage is not None:
        attributes |= {
            "gen_ai.usage.input_tokens": usage.num_prompt_tokens,
            "gen_ai.usage.output_tokens": usage.num_output_tokens,
            "gen_ai.response.finish_reasons": record.finish_reasons,
            "kvist.reused_tokens": usage.num_cached_tokens,
            "kvist.recomputed_tokens": usage.num_recomputed_tokens,
        }
    if record.miss is not None:
        attributes |= {
            "kvist.miss.reason": record.miss.reason.value,
            "kvist.miss.position": record.miss.start,
            "kvist.miss.tokens_lost": record.miss.end - record.miss.start,
        }
    return attributes


def _children(record: CallRecord) -> list[_Child]:
    """Return the parts of a request, as far as it got."""
    first_ns, last_ns = record.first_token_ns, record.last_token_ns
    if record.queue_s is None:
        # Cancelled or refused; the engine tells of a start only at the end of a sequence.
        if first_ns is None or last_ns is None:
            return []
        return [_Child("decode", first_ns, last_ns)]
    admitted_ns = record.submitted_ns + int(record.queue_s * 1e9)
    prefilled_ns = record.ended_ns if first_ns is None else first_ns
    children = [
        _Child("queue", record.submitted_ns, min(admitted_ns, prefilled_ns)),
        _Child("prefill", min(admitted_ns, prefilled_ns), prefilled_ns),
    ]
    if first_ns is not None and last_ns is not None:
        children.append(_Child("decode", first_ns, last_ns))
    return children
