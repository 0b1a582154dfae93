"""The HTTP application: routes, and what each of them checks before the engine hears of a request.

Responsible for the order authentication, size, syntax, meaning, submission. Knows nothing of sockets, processes or
signals (``run``) and nothing of how the engine works (``ports``).
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import FastAPI
from starlette.background import BackgroundTask
from starlette.exceptions import HTTPException
from starlette.responses import Response

from kvist.errors import EngineError, EngineStopped, UnsupportedParameter
from kvist.server.activity import FinishedCall
from kvist.server.auth import Keyring
from kvist.server.body import check_headers, parse_object, read_body
from kvist.server.breakers import WINDOW_MINUTES, Breaker, Breakers, find_breaker
from kvist.server.cache_reset import check_may_reset, parse_reset, prompt_of, reset_json
from kvist.server.dashboard import Dashboard, Page
from kvist.server.endpoints import Job, prepare_chat, prepare_completion, unknown_model
from kvist.server.errors import (
    ClientDisconnected,
    HttpError,
    cut,
    json_response,
    shorten,
    to_reply,
)
from kvist.server.exchange import Exchange
from kvist.server.explanation import (
    MAX_HISTORY,
    History,
    anthropic_diagnostics,
    differences,
    explain_call,
    has_miss,
    openai_diagnostics,
)
from kvist.server.generation import Call, Gate, call_usage, watched
from kvist.server.metrics import EngineCollector, Refusals, exposition
from kvist.server.rerender import Rerenders
from kvist.server.stream import EventStream

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from starlette.requests import Request

    from kvist.config import ServerConfig
    from kvist.server.generation import ChoiceOutput
    from kvist.server.ports import ServedEngine, ServedTokenizer
    from kvist.server.rerender import Check
    from kvist.server.tracing import Tracing

    Prepare = Callable[[dict[str, Any], ServedEngine, str], Job]  # Any: a JSON document

_T = TypeVar("_T")

logger = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499
"""Never on the wire: the status of an answer that nobody is left to receive."""


def create_app(
    engine: ServedEngine, config: ServerConfig, tracing: Tracing | None = None
) -> FastAPI:
    """Return the ASGI application that serves ``engine``.

    Args:
        engine: Started, or about to be, by the caller, who also stops it.
        config: Keys, body limit and served name; host and port are for ``run.serve``.
        tracing: Told of every request that ended; None: nobody wants spans.

    Returns:
        The application; ``app.state.gate`` closes it and aborts what runs.

    Raises:
        ConfigError: The API keys cannot be used.
    """
    # No interactive documentation: its pages load scripts from other hosts.
    app = FastAPI(
        title="Kvist", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )
    app.state.gate = Gate()
    app.add_middleware(Exchange)
    app.add_exception_handler(EngineError, _on_error)
    app.add_exception_handler(HttpError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnected, _on_disconnect)
    routes = _Routes(engine, config, app.state.gate, tracing)
    app.state.dashboard = routes.dashboard_data
    app.add_route("/v1/completions", routes.completions, methods=["POST"])
    app.add_route("/v1/chat/completions", routes.chat_completions, methods=["POST"])
    app.add_route("/v1/models", routes.models, methods=["GET"])
    # ":path", because the id of a model on the hub holds a slash.
    app.add_route("/v1/models/{model_id:path}", routes.model, methods=["GET"])
    app.add_route("/v1/cache/stats", routes.cache_stats, methods=["GET"])
    app.add_route("/v1/cache/explain/{request_id}", routes.cache_explain, methods=["GET"])
    app.add_route("/v1/cache/breakers", routes.cache_breakers, methods=["GET"])
    app.add_route("/v1/cache/watch", routes.cache_watch, methods=["GET"])
    app.add_route("/dashboard", routes.dashboard, methods=["GET"])
    app.add_route("/dashboard/{name}", routes.dashboard_file, methods=["GET"])
    app.add_route("/v1/cache/reset", routes.cache_reset, methods=["POST"])
    app.add_route("/metrics", routes.metrics, methods=["GET"])
    app.add_route("/health", routes.health, methods=["GET"])
    app.add_route("/health/live", routes.health_live, methods=["GET"])
    return app


class _Routes:
    """The handlers of one application."""

    def __init__(
        self, engine: ServedEngine, config: ServerConfig, gate: Gate, tracing: Tracing | None
    ) -> None:
        self._engine = engine
        self._tracing = tracing
        self._gate = gate
        self._keyring = Keyring.from_config(config)
        self._keyring.check_names(config.admin, "--admin")
        self._admins = frozenset(config.admin)
        self._stop_degenerate = config.stop_degenerate
        self._max_body_bytes = int(config.max_body_mib * 2**20)
        self._model = config.served_name or engine.model_name
        self._created = int(time.time())
        self._history = History()
        self._breakers = Breakers()
        self._refusals = Refusals()
        self._rerenders = Rerenders(engine, computes_ahead=config.prefill_rendered_history == "on")
        self._collector = EngineCollector(engine, self._model, self._refusals, self._rerenders)
        self._page = Page()
        self.dashboard_data = Dashboard(
            engine, self._model, self._refusals, gate, is_private=self._keyring.has_keys
        )
        self.dashboard_data.breakers = self._breakers.report

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._generate(request, prepare_completion)

    async def chat_completions(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._generate(request, prepare_chat)

    async def models(self, request: Request) -> Response:
        """GET /v1/models: the one that is served."""
        self._tenant(request)
        return json_response({"object": "list", "data": [self._model_json()]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{id}."""
        self._tenant(request)
        name = request.path_params["model_id"]
        if name != self._model:
            raise unknown_model(name, self._model)
        return json_response(self._model_json())

    async def cache_stats(self, request: Request) -> Response:
        """GET /v1/cache/stats: the engine's counters, and the latest requests of the same API key."""
        tenant = self._tenant(request)
        document = dataclasses.asdict(self._engine.stats())
        return json_response({**document, "recent_requests": self._history.recent(tenant)})

    async def cache_explain(self, request: Request) -> Response:
        """GET /v1/cache/explain/{id}: why a finished call of the same API key was not all hits."""
        tenant = self._tenant(request)
        name = request.path_params["request_id"]
        explanation = self._history.get(name, tenant)
        if explanation is None:
            raise HttpError(
                HTTPStatus.NOT_FOUND,
                f"[server] no finished request {shorten(name)} of this API key is remembered; the server's "
                f"last {MAX_HISTORY} are, by the id of their answers",
                code="not_found",
                param="request_id",
            )
        return json_response({"object": "kvist.explanation", "id": name, **explanation})

    async def cache_breakers(self, request: Request) -> Response:
        """GET /v1/cache/breakers: what kept changing in the prompts of the same API key, and what that cost."""
        tenant = self._tenant(request)
        return json_response(
            {
                "object": "list",
                "window_s": WINDOW_MINUTES * 60,
                "data": self._breakers.report(tenant),
            }
        )

    async def cache_watch(self, request: Request) -> Response:
        """GET /v1/cache/watch: what the dashboard shows of this API key, about once a second, as server-sent events."""
        return self.dashboard_data.stream(self._tenant(request))

    async def dashboard(self, request: Request) -> Response:
        """GET /dashboard: the page; no key needed, since it holds no data."""
        return self._page.index(request)

    async def dashboard_file(self, request: Request) -> Response:
        """GET /dashboard/{name}: a file of the page; no key needed."""
        return self._page.file(request.path_params["name"], request)

    async def cache_reset(self, request: Request) -> Response:
        """POST /v1/cache/reset: forget what is cached of a prompt, of a namespace, or of everybody."""
        tenant = self._tenant(request)
        self._gate.check_open()
        check_headers(request.headers, self._max_body_bytes)
        body = await self._unless_aborted(read_body(request.receive, self._max_body_bytes))
        wanted = parse_reset(parse_object(body))
        check_may_reset(wanted, tenant, self._admins)
        token_ids = await self._unless_aborted(asyncio.to_thread(prompt_of, wanted, self._engine))
        owner = None if wanted.scope == "all" else tenant
        done = asyncio.wrap_future(self._engine.reset_cache(owner, token_ids))
        return json_response(reset_json(wanted, await done))

    async def metrics(self, request: Request) -> Response:
        """GET /metrics: every counter of the engine, for Prometheus; needs a key where others do."""
        self._tenant(request)
        body, media_type = exposition(self._collector, request.headers.get("accept", ""))
        return Response(body, headers={"Content-Type": media_type})

    async def health(self, request: Request) -> Response:  # noqa: ARG002  # the framework's signature
        """GET /health: 200 "ready" while requests are taken and worked on, else 503 with what it is; no key needed."""
        if not self._gate.is_open:
            status = "draining"
        elif self._engine.has_stopped:
            status = "stopped"
        elif not self._engine.is_running:
            status = "starting"
        else:
            return json_response({"status": "ready"})
        return json_response({"status": status}, status=HTTPStatus.SERVICE_UNAVAILABLE)

    async def health_live(self, request: Request) -> Response:  # noqa: ARG002  # the framework's signature
        """GET /health/live: 503 when only a restart helps, so not while starting or draining; no key needed."""
        if self._gate.is_open and self._engine.has_stopped:
            return json_response({"status": "stopped"}, status=HTTPStatus.SERVICE_UNAVAILABLE)
        return json_response({"status": "live"})

    async def _generate(self, request: Request, prepare: Prepare) -> Response:
        try:
            return await self._answer(request, prepare)
        except ClientDisconnected:
            raise
        except Exception as error:
            self._refusals.note(error)
            raise

    async def _answer(self, request: Request, prepare: Prepare) -> Response:
        received_ns = time.perf_counter_ns()
        tenant = self._tenant(request)
        self._gate.check_open()
        check_headers(request.headers, self._max_body_bytes)
        body = await self._unless_aborted(read_body(request.receive, self._max_body_bytes))
        # Parsing and tokenising take milliseconds a megabyte, which other clients' streams need not wait for.
        job = await self._unless_aborted(asyncio.to_thread(self._prepare, body, prepare))
        self._rerenders.make_way()
        tracing = self._tracing
        call = Call.submit(
            self._engine,
            job,
            tenant=tenant,
            gate=self._gate,
            received_ns=received_ns,
            on_end=None if tracing is None else partial(tracing.record, headers=request.headers),
        )
        check = self._rerenders.of(job, call.outputs, tenant)
        after = partial(self._rerenders.start, check)
        if job.is_stream:
            explain = partial(self._explain, job, call, check)
            return EventStream(job, call, explain, self._refusals.note, after)
        async with watched(call, request.receive):
            await call.run()
        answer = job.answer.whole(call.outputs, call_usage(call.outputs, call.n))
        answer.update(await self._explain(job, call, check))
        response = json_response(answer, headers={"X-Request-Id": job.request_id})
        response.background = BackgroundTask(_called_here, after)
        return response

    async def _explain(self, job: Job, call: Call, check: Check) -> dict[str, Any]:  # Any: JSON
        """Keep what is to be told of a finished call, and return what its answer says of it."""
        outputs, tokenizer = call.outputs, self._engine.tokenizer
        if has_miss(outputs):
            # The messages are searched for, which other clients' streams need not wait for.
            explanation, found = await asyncio.to_thread(_explained, job, outputs, tokenizer)
            self._breakers.note(check.tenant, found)
        else:
            explanation = explain_call(job, outputs, tokenizer)
        self._history.add(job.request_id, check.tenant, explanation)
        check.explanation = explanation
        self.dashboard_data.activity.note(
            FinishedCall(
                request_id=job.request_id,
                tenant=check.tenant,
                finished_ns=time.perf_counter_ns(),
                elapsed_s=call.elapsed_s,
                ttft_s=call.ttft_s,
                num_output_tokens=call_usage(outputs, call.n).num_output_tokens,
                explanation=explanation,
            )
        )
        if not job.wants_explanation:
            return {}
        await check.run()
        return {
            "kvist": explanation,
            "prompt_cache_diagnostics": openai_diagnostics(explanation),
            "diagnostics": anthropic_diagnostics(explanation),
        }

    def _prepare(self, body: bytes, prepare: Prepare) -> Job:
        document = parse_object(body)
        if self._stop_degenerate and document.get("stop_degenerate") is None:
            document["stop_degenerate"] = True
        return prepare(document, self._engine, self._model)

    async def _unless_aborted(self, reading: Coroutine[Any, Any, _T]) -> _T:  # Any: unused
        # A client that sends slowly, or a prompt of megabytes, must not hold up the end of the server.
        task = asyncio.ensure_future(reading)
        ending = self._gate.until_aborted()
        try:
            either: set[asyncio.Future[Any]] = {task, ending}  # Any: two types of result
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise EngineStopped("[server] the server shut down before the request was read")
        finally:
            task.cancel()
            ending.cancel()

    def _tenant(self, request: Request) -> str:
        tenant = self._keyring.tenant(request.headers.get("authorization"))
        for name in request.query_params:
            raise UnsupportedParameter(
                f"[request] unknown query parameter {shorten(name)}; parameters belong into the JSON body",
                param=cut(name),
                code="unknown_parameter",
            )
        return tenant

    def _model_json(self) -> dict[str, Any]:  # Any: JSON
        return {
            "id": self._model,
            "object": "model",
            "created": self._created,
            "owned_by": "kvist",
        }


async def _called_here(function: Callable[[], None]) -> None:
    # Starlette calls what is no coroutine function in a thread.
    function()


def _explained(
    job: Job, outputs: Sequence[ChoiceOutput], tokenizer: ServedTokenizer
) -> tuple[dict[str, Any], list[Breaker]]:  # Any: JSON
    """Return what is told of a finished call, and what in its prompts broke their prefixes."""
    explanation = explain_call(job, outputs, tokenizer)
    found = map(find_breaker, differences(job, outputs, explanation, tokenizer))
    return explanation, [breaker for breaker in found if breaker is not None]


async def _on_error(request: Request, error: Exception) -> Response:
    reply = to_reply(error)
    if reply.status == HTTPStatus.INTERNAL_SERVER_ERROR:
        # The answer points to the log, so the cause must be there.
        logger.error("[server] %s failed", request.url.path, exc_info=error)
    return reply.to_response()


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # registered for this type
    method, path = request.method, request.url.path
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        allowed = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
        message = f"[server] {shorten(path)} does not take {method}; use {allowed}"
        code = "method_not_allowed"
    else:
        message = f"[server] there is nothing at {shorten(path)}; the API is under /v1/, for example /v1/models"
        code = "not_found"
    return to_reply(
        HttpError(error.status_code, message, code=code, headers=error.headers)
    ).to_response()


async def _on_disconnect(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)
