"""What clients see of a server that has no memory to compute with: they wait, or get 429, and the server stays."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tests.support.asgi import Answer, arequest
from tests.support.engine_fakes import Parts, answer, make_parts

from kvist.cache.manager import CacheManager
from kvist.config import ServerConfig
from kvist.server.app import create_app
from kvist.types import SamplingParams

if TYPE_CHECKING:
    import pytest

    from kvist.sched.output import StepPlan

PROMPT = "hello world"
COMPLETION = {"model": "fake", "prompt": PROMPT, "max_tokens": 6, "temperature": 0.0}


def exchange_all(parts: Parts, *documents: object) -> list[Answer]:
    """Post completions one after the other, and ask for the server's health after each."""

    async def ask() -> list[Answer]:
        app = create_app(parts.engine, ServerConfig())
        answers = []
        for document in documents:
            answers.append(await arequest(app, "POST", "/v1/completions", document))
            health = await arequest(app, "GET", "/health")
            assert (health.status, health.json()["status"]) == (200, "ready")
        return answers

    with parts.engine:
        return asyncio.run(ask())


def expected_text() -> str:
    params = SamplingParams(max_tokens=6, temperature=0.0)
    return bytes(t for t in answer(PROMPT.encode(), params) if t < 256).decode()


def test_a_step_without_memory_is_computed_in_smaller_ones() -> None:
    parts = make_parts()
    lengths: list[int] = []

    def fail_while_long(plan: StepPlan) -> None:
        lengths.append(plan.num_batch_tokens)
        if plan.num_batch_tokens > 3:
            raise MemoryError("no room for activations")

    parts.runner.before_step = fail_while_long
    (got,) = exchange_all(parts, COMPLETION)
    assert got.status == 200
    assert got.json()["choices"][0]["text"] == expected_text()
    assert lengths[:5] == [11, 5, 2, 3, 4]
    assert parts.core.stats().num_failed == 0


def test_no_memory_at_all_is_429_and_the_next_request_is_answered() -> None:
    parts = make_parts()
    num_steps = 0

    def fail_at_first(_: StepPlan) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps <= 8:
            raise MemoryError("nothing left")

    parts.runner.before_step = fail_at_first
    refused, answered = exchange_all(parts, COMPLETION, COMPLETION)
    assert refused.status == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert "--max-batch-tokens" in refused.error["message"]
    assert answered.status == 200
    assert answered.json()["choices"][0]["text"] == expected_text()


def test_no_memory_for_the_prompt_is_429(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = make_parts()
    original = CacheManager.new_chain
    num_chains = 0

    def fail_once(*args: object) -> object:
        nonlocal num_chains
        num_chains += 1
        if num_chains == 1:
            raise MemoryError
        return original(*args)

    monkeypatch.setattr(CacheManager, "new_chain", fail_once)
    refused, answered = exchange_all(parts, COMPLETION, COMPLETION)
    assert (refused.status, answered.status) == (429, 200)
