"""``/metrics``: what a parser makes of it, what the numbers mean, and what is not in it."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_text
from tests.support.asgi import JSON_HEADERS, request
from tests.support.engine_fakes import make_parts

import kvist
from kvist.config import ServerConfig
from kvist.errors import DeadlineExceeded, EngineError, EngineStopped
from kvist.server.app import create_app
from kvist.server.errors import HttpError
from kvist.server.metrics import REFUSALS, EngineCollector, Refusals, exposition
from kvist.types import FinishReason, MissReason

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvist.engine.async_engine import AsyncEngine

ROOT = Path(__file__).resolve().parents[2]
BODY = {
    "model": "fake",
    "prompt": "once upon a time",
    "max_tokens": 3,
    "temperature": 0,
    "ignore_eos": True,
}


@pytest.fixture
def engine() -> Iterator[AsyncEngine]:
    with make_parts().engine as engine:
        yield engine


@pytest.fixture
def app(engine):
    return create_app(engine, ServerConfig())


def scrape(app, accept="text/plain", key=None):
    headers = {"accept": accept}
    if key:
        headers["authorization"] = f"Bearer {key}"
    return request(app, "GET", "/metrics", headers=headers)


def samples(app):
    """Return the samples by name and labels."""
    return {
        (sample.name, *[value for _, value in sorted(sample.labels.items())]): sample.value
        for family in parse_text(scrape(app).body.decode())
        for sample in family.samples
    }


@pytest.mark.parametrize(
    ("accept", "parse", "media_type"),
    [
        ("text/plain", parse_text, "text/plain"),
        ("*/*", parse_text, "text/plain"),
        ("application/openmetrics-text; version=1.0.0", parse_openmetrics, "openmetrics"),
    ],
)
def test_parsers_read_it(app, accept, parse, media_type):
    request(app, "POST", "/v1/completions", BODY)
    answer = scrape(app, accept)
    assert answer.status == 200
    assert media_type in answer.headers["content-type"]
    families = list(parse(answer.body.decode()))
    names = [family.name for family in families]
    assert len(names) == len(set(names))
    assert all(family.name.startswith("kvist") and family.documentation for family in families)
    for family in families:
        if family.type == "histogram":
            check_histogram(family)


def check_histogram(family):
    by_labels = {}
    for sample in family.samples:
        labels = tuple(sorted((k, v) for k, v in sample.labels.items() if k != "le"))
        by_labels.setdefault(labels, []).append(sample)
    for series in by_labels.values():
        buckets = [s for s in series if s.name.endswith("_bucket")]
        bounds = [float(s.labels["le"]) for s in buckets]
        values = [s.value for s in buckets]
        assert bounds == sorted(bounds)
        assert bounds[-1] == float("inf")
        assert values == sorted(values)
        (count,) = [s.value for s in series if s.name.endswith("_count")]
        assert count == values[-1]
        assert any(s.name.endswith("_sum") for s in series)


def test_numbers_are_those_of_what_was_served(app, engine):
    for _ in range(2):
        request(app, "POST", "/v1/completions", BODY)
    changed = {**BODY, "prompt": "once upon a mile"}
    request(app, "POST", "/v1/completions", changed)
    engine.close()  # so that the last step's counters are out
    got = samples(app)
    assert got["kvist_prompt_tokens_total", "cache"] == 0 + 15 + 12
    assert got["kvist_prompt_tokens_total", "computed"] == 3 * 16 - 27
    assert got["kvist_missed_tokens_total", "new_prompt"] == 15
    assert got["kvist_missed_tokens_total", "tokens_differ"] == 3
    assert got["kvist_output_tokens_total",] == 9
    assert got["kvist_sequences_total", "length"] == 3
    assert got["kvist_hit_length_tokens_count",] == 3
    assert got["kvist_hit_length_tokens_sum",] == 27
    assert got["kvist_time_to_first_token_seconds_count", "cold"] == 1
    assert got["kvist_time_to_first_token_seconds_count", "warm"] == 2
    assert got["kvist_inter_token_seconds_count",] == 6
    assert got["kvist_time_per_output_token_seconds_count",] == 3
    assert got["kvist_queue_seconds_count",] == 3
    num_steps = got["kvist_steps_total",]
    for phase in ("schedule", "memory", "forward", "sample", "apply"):
        assert got["kvist_step_seconds_count", phase] == num_steps
    states = [
        got["kvist_blocks", "float32", state, "device"] for state in ("held", "free", "evictable")
    ]
    assert sum(states) == 64
    assert got["kvist_block_bytes",] == 1
    assert got["kvist_info", "float32", "fake", kvist.__version__] == 1


def test_labels_have_closed_sets_of_values(app):
    for prompt in ("a", "b" * 30, "c"):
        request(app, "POST", "/v1/completions", {**BODY, "prompt": prompt})
    before = set(samples(app))
    for tenant in range(5):
        request(app, "POST", "/v1/completions", {**BODY, "prompt": f"{tenant} other", "n": 2})
        request(app, "POST", "/v1/completions", {**BODY, "model": f"no-{tenant}"})
    assert set(samples(app)) == before
    assert {key[1] for key in before if key[0] == "kvist_missed_tokens_total"} == {
        reason.value for reason in MissReason
    }
    assert {key[1] for key in before if key[0] == "kvist_sequences_total"} == {
        reason.value for reason in FinishReason
    }


def test_refused_requests_are_counted_by_reason(app):
    for body in (
        {**BODY, "temperature": 9},
        {**BODY, "model": "other"},
        {**BODY, "prompt": "x" * 500},
        {**BODY, "nonsense": 1},
    ):
        request(app, "POST", "/v1/completions", body)
    request(app, "POST", "/v1/completions", raw=[b"["])
    got = samples(app)
    assert got["kvist_refused_requests_total", "invalid"] == 3
    assert got["kvist_refused_requests_total", "unknown_model"] == 1
    assert got["kvist_refused_requests_total", "prompt_too_long"] == 1


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (DeadlineExceeded("late"), "deadline"),
        (EngineStopped("gone"), "stopping"),
        (EngineError("why"), "internal"),
        (HttpError(413, "big", code="c"), "body_too_large"),
        (HttpError(415, "kind", code="c"), "invalid"),
    ],
)
def test_every_error_has_one_reason(error, reason):
    refusals = Refusals()
    refusals.note(error)
    assert {name for name, count in refusals.counts.items() if count} == {reason}
    assert set(refusals.counts) == set(REFUSALS)


def test_a_stream_that_fails_is_counted(app, engine):
    body = {**BODY, "stream": True, "timeout_s": 1e-9}
    request(app, "POST", "/v1/completions", body)
    assert samples(app)["kvist_refused_requests_total", "deadline"] == 1


def test_a_key_is_asked_for_where_there_are_keys(engine):
    app = create_app(engine, ServerConfig(api_key=("right",)))
    assert scrape(app).status == 401
    assert scrape(app, key="right").status == 200
    body = request(
        app,
        "POST",
        "/v1/completions",
        BODY,
        headers={**JSON_HEADERS, "authorization": "Bearer wrong"},
    )
    assert body.status == 401
    text = scrape(app, key="right").body.decode()
    assert 'kvist_refused_requests_total{reason="unauthorized"} 1.0' in text
    assert "right" not in text


def test_a_scrape_costs_the_same_with_many_blocks():
    """In CPU time, since wall time measures what else the machine does."""
    times = []
    for num_blocks in (64, 100_000):  # all of them cached
        parts = make_parts(num_blocks=num_blocks, block_size=1, max_context_len=num_blocks)
        chain = parts.manager.new_chain(parts.core._namespace, range(num_blocks - 1))
        lease = parts.manager.admit(parts.manager.lookup(chain, 0), chain, num_blocks - 1)
        assert lease is not None
        parts.manager.extend(lease, num_blocks - 1)
        parts.manager.commit(lease, chain, num_blocks - 1)
        parts.manager.release(lease)
        parts.engine._core_stats = parts.core.stats()
        collector = EngineCollector(parts.engine, "m", Refusals())
        best = float("inf")
        for _ in range(5):
            start = time.process_time()
            body, _ = exposition(collector, "")
            best = min(best, time.process_time() - start)
        times.append(best)
        assert b"kvist_blocks" in body
    assert times[1] < 0.020


def test_the_dashboard_names_metrics_that_exist(app):
    request(app, "POST", "/v1/completions", BODY)
    known = {key[0] for key in samples(app)}
    dashboard = json.loads((ROOT / "docs" / "grafana.json").read_text())
    expressions = [
        target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])
    ]
    assert len(expressions) >= len(dashboard["panels"])
    named = {name for text in expressions for name in re.findall(r"\bkvist_\w+", text)}
    assert named <= known
    identifiers = [panel["id"] for panel in dashboard["panels"]]
    assert len(identifiers) == len(set(identifiers))


def test_the_documentation_lists_every_metric(app):
    text = (ROOT / "docs" / "metrics.md").read_text()
    listed = set(re.findall(r"^\| `(kvist_\w+)`", text, re.MULTILINE))
    families = {
        family.name + ("_total" if family.type == "counter" else "")
        for family in parse_text(scrape(app).body.decode())
    }
    families = {"kvist_info" if name == "kvist" else name for name in families}
    assert listed == families
