"""The dashboard: its page, and what the page is told.

Responsible for the files of the page with their security headers, and for putting engine, cache and calls together into
one document for each API key (``feed`` sends it). Knows neither keys nor how the page draws.

    section     key                  value
    values      a name               one number, word or list
    spans       second it begins at  sums of all keys' calls (``activity``)
    calls       id of the answer     one call of this key
    cells       number of the cell   blocks by state, in the order of ``engine.picture.BlockState``
    prefixes    number               one prefix of this key, with the beginning of its text

Invariants:
    1. Of prompts and calls a document has this key's only. Sums are over all keys, as in ``/metrics``.
    2. The cache is looked at only while somebody watches, and drawn for MAX_FRACTION of one core at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

import kvist
from kvist.cache.hash import TOKEN_BYTES, unpack
from kvist.engine.picture import BlockState, CachePicture
from kvist.errors import EngineStopped
from kvist.server.activity import SPAN_S, Activity
from kvist.server.errors import HttpError, shorten
from kvist.server.feed import INTERVAL_S, Feed, FeedStream

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from concurrent.futures import Future

    from starlette.requests import Request

    from kvist.cache.survey import CacheSurvey
    from kvist.engine.async_engine import EngineStats
    from kvist.engine.picture import PrefixRow
    from kvist.server.feed import Document, Section
    from kvist.server.generation import Gate
    from kvist.server.metrics import Refusals
    from kvist.server.ports import ServedEngine

    Json = dict[str, Any]  # Any: a JSON document
    Breakers = Callable[[str], Sequence[Json]]

MAX_FRACTION = 0.02
"""Of one core, for drawing pictures of the cache: when one takes more than 18 ms there are fewer than one a second."""
SURVEY_WAIT_S = 0.15
"""How long a document waits for the survey it has asked for; a step may take longer, and it goes out without."""
NUM_LABEL_TOKENS = 40
"""Tokens shown of what a prefix begins with."""
MAX_TEXTS = 4096
"""Texts of tokens kept, of a few hundred bytes each."""
_NS_PER_S = 1_000_000_000

_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    media_type: str
    tag: str


class Page:
    """The files of the page, read once."""

    def __init__(self) -> None:
        self._files = {
            file.name: _read(file.name, file.read_bytes())
            for file in resources.files("kvist.server").joinpath("static").iterdir()
            if "." + file.name.rpartition(".")[2] in _TYPES
        }

    def index(self, request: Request) -> Response:
        """Return the page itself."""
        return self._respond(self._files["dashboard.html"], request)

    def file(self, name: str, request: Request) -> Response:
        """Return one of its files.

        Raises:
            HttpError: 404, when there is none of that name.
        """
        if name not in self._files:
            raise HttpError(
                404,
                f"[dashboard] there is no file {shorten(name)}; the page is at /dashboard",
                code="not_found",
            )
        return self._respond(self._files[name], request)

    def _respond(self, file: _File, request: Request) -> Response:
        headers = {**_HEADERS, "ETag": file.tag}
        if request.headers.get("if-none-match") == file.tag:
            return Response(status_code=304, headers=headers)
        return Response(file.body, headers=headers, media_type=file.media_type)


def _read(name: str, body: bytes) -> _File:
    media_type = _TYPES["." + name.rpartition(".")[2]]
    return _File(body, media_type, f'"{hashlib.sha256(body).hexdigest()[:32]}"')


class Dashboard:
    """What the page is told. One event loop.

    Args:
        engine: Looked at while somebody watches.
        model: The name that is served.
        refusals: The server's own counts.
        gate: Says whether the server is ending.
        is_private: Whether there are API keys, each with prompts of its own.
    """

    def __init__(
        self,
        engine: ServedEngine,
        model: str,
        refusals: Refusals,
        gate: Gate,
        *,
        is_private: bool,
    ) -> None:
        self.activity = Activity()
        """Told of every call that finishes."""
        self.breakers: Breakers | None = None
        """Returns the top prefix breakers of a tenant, each ``{part, kind, example, tokens_per_hour}``; None: nothing
        looks for them, and the page has no panel of them."""
        self._engine = engine
        self._model = model
        self._refusals = refusals
        self._gate = gate
        self._is_private = is_private
        self._feed = Feed(self._compose, INTERVAL_S)
        self._survey: Future[CacheSurvey] | None = None
        self._surveyed: object = None  # the counters when it was asked for
        self._not_before_ns = 0
        self._picture: CachePicture | None = None
        self._cells: Section = {}
        self._shared: Json = {}
        self._prefixes: dict[str, Section] = {}
        self._sums: dict[str, Json] = {}
        self._texts: dict[bytes, str] = {}

    def stream(self, tenant: str) -> FeedStream:
        """Return the stream of a tenant's document.

        Raises:
            HttpError: 429, when too many watch already.
        """
        self._feed.check_room()
        return FeedStream(self._feed, tenant, self._gate)

    # --- composing

    async def _compose(self, tenants: Sequence[str]) -> Mapping[str, Document]:
        stats: EngineStats = self._engine.stats()
        # What nobody watches any more is not drawn any more.
        self._prefixes = {t: self._prefixes[t] for t in tenants if t in self._prefixes}
        await self._look(stats)
        now_ns = time.perf_counter_ns()
        values = {**self._values(stats, now_ns), **self._shared}
        spans = self.activity.spans(now_ns)
        missing = [tenant for tenant in tenants if tenant not in self._prefixes]
        if self._picture is not None and missing:
            await asyncio.to_thread(self._draw_prefixes, self._picture, missing)
        return {
            tenant: {
                "values": {**values, **self._own_values(tenant)},
                "spans": spans,
                "calls": self.activity.calls(tenant),
                "cells": self._cells,
                "prefixes": self._prefixes.get(tenant, {}),
            }
            for tenant in tenants
        }

    async def _look(self, stats: EngineStats) -> None:
        """Take a new picture of the cache, when it has changed and the last one has paid for itself."""
        counters = (stats.num_steps, stats.cache)
        is_due = counters != self._surveyed and time.perf_counter_ns() >= self._not_before_ns
        if self._survey is None and is_due:
            with contextlib.suppress(EngineStopped):
                self._survey = self._engine.survey()
                self._surveyed = counters
        if self._survey is None:
            return
        await asyncio.wait({asyncio.wrap_future(self._survey)}, timeout=SURVEY_WAIT_S)
        if not self._survey.done():
            return
        survey, self._survey = self._survey, None
        with contextlib.suppress(EngineStopped):
            await asyncio.to_thread(self._draw, survey.result())

    def _draw(self, survey: CacheSurvey) -> None:
        start_ns = time.thread_time_ns()
        picture = CachePicture(survey)
        self._cells = {str(i): cell for i, cell in enumerate(picture.cells().tolist())}
        self._shared = {
            "blocks": picture.state_counts().tolist(),
            "seen_s": round(survey.taken_ns / _NS_PER_S, 2),
        }
        tenants, self._prefixes, self._sums = list(self._prefixes), {}, {}
        self._picture = picture
        self._draw_prefixes(picture, tenants)
        spent_ns = time.thread_time_ns() - start_ns
        self._not_before_ns = time.perf_counter_ns() + round(spent_ns / MAX_FRACTION)

    def _draw_prefixes(self, picture: CachePicture, tenants: Sequence[str]) -> None:
        totals = picture.tokens_by_tenant()
        for tenant in tenants:
            found = picture.prefixes(tenant)
            self._prefixes[tenant] = {str(row.number): self._prefix(row) for row in found.rows}
            self._sums[tenant] = {
                "num_cached_tokens": found.num_tokens,
                "num_prefixes": found.num_prefixes,
                "num_others_tokens": sum(totals.values()) - found.num_tokens,
            }

    def _prefix(self, row: PrefixRow) -> Json:
        start = row.num_common * TOKEN_BYTES
        named_by = row.tokens[start : start + NUM_LABEL_TOKENS * TOKEN_BYTES]
        return {
            "parent": None if row.parent is None else str(row.parent),
            "tokens": row.num_tokens,
            "below": row.num_subtree_tokens,
            "rest": row.num_rest_tokens,
            "blocks": row.num_blocks,
            "hits": row.num_hits,
            "holders": row.num_holders,
            "computed_s": round(row.computed_ns / _NS_PER_S, 1),
            "used_s": round(row.used_ns / _NS_PER_S, 1),
            "text": self._text(named_by),
            "is_cut": row.num_common > 0,
        }

    def _text(self, tokens: bytes) -> str:
        """Return the text of tokens. Nearly all prefixes are the same from one picture to the next."""
        text = self._texts.get(tokens)
        if text is None:
            if len(self._texts) >= MAX_TEXTS:
                self._texts.clear()
            raw = b"".join(map(self._engine.tokenizer.token_bytes, unpack(tokens)))
            text = self._texts[tokens] = raw.decode(errors="replace")
        return text

    def _values(self, stats: EngineStats, now_ns: int) -> Json:
        plan, cache, memory = self._engine.plan, stats.cache, stats.memory
        num_bytes = sum(memory.bytes_by_state.values())
        return {
            "model": self._model,
            "version": kvist.__version__,
            "status": self._status(),
            "now_s": round(now_ns / _NS_PER_S, 2),
            "span_s": SPAN_S,
            "is_private": self._is_private,
            "codec": plan.kv_format,
            # All blocks are in one arena in the memory of the host.
            "tiers": [
                {
                    "name": "host memory",
                    "codec": plan.kv_format,
                    "num_blocks": cache.num_ids,
                    "block_bytes": memory.block_bytes,
                    "num_bytes": num_bytes,
                    "used_bytes": num_bytes - memory.bytes_by_state["free"],
                    # Blocks and bytes of those that hold something.
                    "codecs": {
                        codec: [memory.blocks_by_codec[codec], num_codec_bytes]
                        for codec, num_codec_bytes in memory.bytes_by_codec.items()
                    },
                    "compression": round(memory.compression, 2),
                }
            ],
            "block_states": [state.name.lower() for state in BlockState],
            "block_size": cache.block_size,
            "num_running": stats.scheduler.num_running,
            "num_waiting": stats.num_queued,
            "num_refused": self._refusals.counts.total(),
            "num_preemptions": stats.scheduler.num_preemptions,
            "num_evictions": cache.num_evictions,
            "num_remembered": cache.num_ghosts,
            "busy_s": round(stats.busy_s, 2),
        }

    def _own_values(self, tenant: str) -> Json:
        values = dict(self._sums.get(tenant, {}))
        if self.breakers is not None:
            values["breakers"] = list(self.breakers(tenant))
        return values

    def _status(self) -> str:
        if not self._gate.is_open:
            return "draining"
        if self._engine.has_stopped:
            return "stopped"
        return "running" if self._engine.is_running else "starting"
