"""POST /v1/cache/reset: what is forgotten, who may ask, and that running requests do not notice."""

from __future__ import annotations

import pytest
from tests.support.asgi import JSON_HEADERS, request
from tests.support.engine_fakes import answer, make_parts

from kvist.config import ServerConfig
from kvist.errors import ConfigError, EngineStopped, RequestError
from kvist.server.app import create_app
from kvist.types import SamplingParams

PROMPT = "Fog lies over the harbour, and the bell rings."
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def parts():
    made = make_parts(num_blocks=200)
    made.engine.start()
    yield made
    made.engine.close()


def ask(parts, prompt: str = PROMPT, tenant: str = "") -> int:
    """Return the tokens that were reused."""
    *_, last = parts.engine.submit(prompt.encode(), GREEDY, tenant=tenant)
    assert last.usage is not None
    return last.usage.num_cached_tokens


def post(parts, body, *, config: ServerConfig | None = None, key: str | None = None):
    app = create_app(parts.engine, config or ServerConfig())
    headers = JSON_HEADERS if key is None else {**JSON_HEADERS, "authorization": f"Bearer {key}"}
    reply = request(app, "POST", "/v1/cache/reset", body, headers=headers)
    return reply.status, reply.json()


KEYS = ServerConfig(api_key=("ops k-ops", "one k-one", "two k-two"), admin=("ops",))


def test_everything(parts):
    ask(parts)
    assert ask(parts) > 40
    status, body = post(parts, {"scope": "all"})
    assert status == 200
    assert body["object"] == "kvist.cache_reset"
    assert body["dropped_blocks"] >= len(PROMPT) // 4
    assert body["detached_blocks"] == 0
    stats = parts.engine.stats().cache
    assert (stats.num_free, stats.num_reset_blocks) == (200, body["dropped_blocks"])
    assert ask(parts) == 0


def test_the_namespace_of_the_key_and_no_other(parts):
    for tenant in ("one", "two"):
        ask(parts, tenant=tenant)
    assert post(parts, {"scope": "namespace"}, config=KEYS, key="k-one")[0] == 200
    assert ask(parts, tenant="one") == 0
    assert ask(parts, tenant="two") == len(PROMPT) - 1


def test_everybody_is_reset_by_admins_only(parts):
    for tenant in ("one", "two"):
        ask(parts, tenant=tenant)
    status, body = post(parts, {"scope": "all"}, config=KEYS, key="k-one")
    assert (status, body["error"]["code"]) == (403, "insufficient_permissions")
    assert "--admin" in body["error"]["message"]
    assert parts.engine.stats().cache.num_reset_blocks == 0
    assert post(parts, {"scope": "all"}, config=KEYS)[0] == 401
    assert post(parts, {"scope": "all"}, config=KEYS, key="k-ops")[0] == 200
    assert ask(parts, tenant="one") == ask(parts, tenant="two") == 0


def test_an_admin_without_a_key_is_a_slip(parts):
    with pytest.raises(ConfigError, match="--admin nobody"):
        create_app(parts.engine, ServerConfig(api_key=("one k",), admin=("nobody",)))


def test_what_begins_with_a_prompt(parts):
    ask(parts, PROMPT + " Then it stops.")
    ask(parts, "Fog lies over the mill.")
    status, body = post(parts, {"scope": "prompt", "prompt": "Fog lies over the harbour"})
    assert status == 200
    assert body["dropped_blocks"] >= 8
    # The block of its last token is gone; blocks before it stay, since other prompts share them.
    assert ask(parts, "Fog lies over the mill.") == len("Fog lies over the mill.") - 1
    assert ask(parts, PROMPT) == 24
    assert post(parts, {"scope": "prompt", "prompt": "never sent"})[1]["dropped_blocks"] == 0


def test_token_ids_and_a_prompt_that_ends_with_a_block(parts):
    ask(parts)
    assert post(parts, {"scope": "prompt", "prompt": list(b"Fog lies")})[1]["dropped_blocks"] > 8
    assert ask(parts) == 4


def test_the_beginning_of_a_conversation(parts):
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    tokens = parts.engine.tokenizer.encode_chat([*turns, {"role": "assistant", "content": "So."}])
    for _ in parts.engine.submit(tokens, GREEDY):
        pass
    status, body = post(parts, {"scope": "prompt", "messages": turns})
    assert status == 200
    assert body["dropped_blocks"] > 0
    assert ask(parts, bytes(tokens).decode()) <= 32


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "scope"),
        ({"scope": "world"}, "scope"),
        ({"scope": "prompt"}, "scope"),
        ({"scope": "all", "prompt": "Fog"}, "scope"),
        (
            {"scope": "prompt", "prompt": "a", "messages": [{"role": "user", "content": "a"}]},
            "scope",
        ),
        ({"scope": "prompt", "prompt": ["a", "b"]}, "prompt"),
        ({"scope": "prompt", "prompt": [9999]}, "prompt"),
        ({"scope": "prompt", "prompt": ""}, "prompt"),
        ({"scope": "prompt", "messages": []}, "messages"),
        ({"scope": "namespace", "tenant": "two"}, "tenant"),
    ],
)
def test_what_makes_no_sense_is_refused_and_changes_nothing(parts, body, param):
    ask(parts)
    status, reply = post(parts, body)
    assert (status, reply["error"]["param"]) == (400, param)
    assert parts.engine.stats().cache.num_reset_blocks == 0


def test_running_requests_do_not_notice(parts):
    """They end as they would have, and what they hold is offered to nobody."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    ask(parts)
    held: list[int] = []
    core = parts.core

    def reset(plan) -> None:
        if plan.sequences[0].sample is not None and plan.sequences[0].sample.output_index == 10:
            parts.runner.before_step = lambda plan: None
            done = parts.engine.reset_cache(None)
            done.add_done_callback(lambda d: held.append(d.result().num_detached_blocks))

    parts.runner.before_step = reset
    chunks = list(parts.engine.submit(PROMPT.encode(), params))
    tokens = tuple(t for chunk in chunks for t in chunk.token_ids)
    assert tokens == answer(PROMPT.encode(), params)
    assert held[0] > 10
    assert ask(parts) == 0
    parts.engine.close()
    core.check_invariants()


def test_in_the_middle_of_everything(parts):
    """Resets between the steps of many requests: every answer is right, and every law holds."""
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = [(PROMPT[: 8 + i % 30] + str(i % 7)).encode() for i in range(60)]
    streams = []
    for index, prompt in enumerate(prompts):
        streams.append(parts.engine.submit(prompt, params, tenant=str(index % 2)))
        scope = (None, "0", "1")[index % 3]
        token_ids = prompt[:5] if scope is not None and index % 2 else None
        parts.engine.reset_cache(scope, token_ids)
    for prompt, stream in zip(prompts, streams, strict=True):
        tokens = tuple(t for chunk in stream for t in chunk.token_ids)
        assert tokens == answer(prompt, params)
    parts.engine.reset_cache(None).result(timeout=10)
    parts.engine.close()
    parts.core.check_invariants()
    assert parts.manager.num_free == 200


def test_pins_end_with_what_they_hold():
    from kvist.types import Keep

    made = make_parts(num_blocks=64, pin_fraction=0.5)
    made.engine.start()
    *_, last = made.engine.submit(PROMPT.encode(), GREEDY, keep=Keep(ttl_s=60, is_pinned=True))
    assert last.usage.num_pinned_tokens == 44
    taken = made.engine.reset_cache("").result(timeout=10)
    assert taken.num_detached_blocks == 0
    assert made.engine.stats().cache.num_pinned in (0, 11)  # published after the next step
    made.engine.close()
    assert made.manager.num_free == 64


def test_bad_prompts_are_refused_in_python_too(parts):
    with pytest.raises(RequestError, match="at least one prompt token"):
        parts.engine.reset_cache("", [])
    with pytest.raises(RequestError, match="token ids must be in"):
        parts.engine.reset_cache("", [10_000])


def test_a_stopped_engine_says_so():
    made = make_parts()
    waiting = made.engine.reset_cache(None)
    made.engine.close()
    with pytest.raises(EngineStopped):
        waiting.result(timeout=10)
    with pytest.raises(EngineStopped):
        made.engine.reset_cache(None)
