"""API keys: who is let in, and which cache namespace each key owns."""

from __future__ import annotations

import asyncio

import pytest
from tests.support.asgi import JSON_HEADERS, exchange, request
from tests.support.fake_engine import FakeEngine

from kvist.config import ServerConfig
from kvist.errors import ConfigError
from kvist.server.app import create_app
from kvist.server.auth import Keyring

GOOD = {"model": "fake-1", "prompt": "p"}
PATH = "/v1/completions"
PROTECTED = [
    ("POST", "/v1/completions", GOOD),
    ("POST", "/v1/chat/completions", {"model": "fake-1", "messages": []}),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/fake-1", None),
    ("GET", "/v1/cache/stats", None),
    ("GET", "/v1/cache/breakers", None),
]


def with_key(key):
    return {**JSON_HEADERS, "authorization": f"Bearer {key}"}


def tenants(keys, *sent):
    engine = FakeEngine()
    app = create_app(engine, ServerConfig(api_key=keys))
    for key in sent:
        headers = JSON_HEADERS if key is None else with_key(key)
        assert request(app, "POST", PATH, GOOD, headers=headers).status == 200
    return [submission.tenant for submission in engine.submissions]


@pytest.mark.parametrize(("method", "path", "document"), PROTECTED)
@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        "Bearer key-",
        "Bearer KEY-1",
        "Basic key-1",
        "key-1",
        "Bearer key-1 key-2",
        "Bearer nyckel-å",
    ],
)
def test_wrong_key_is_refused_everywhere(method, path, document, authorization):
    engine = FakeEngine()
    app = create_app(engine, ServerConfig(api_key=("key-1", "key-2")))
    headers = dict(JSON_HEADERS)
    if authorization is not None:
        headers["authorization"] = authorization
    answer = request(app, method, path, document, headers=headers)
    assert answer.status == 401
    assert answer.error["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == "Bearer"
    assert engine.submissions == []
    assert "key-1" not in answer.body.decode()


def test_scheme_is_case_insensitive():
    app = create_app(FakeEngine(), ServerConfig(api_key=("key-1",)))
    headers = {**JSON_HEADERS, "authorization": "bearer key-1"}
    assert request(app, "POST", PATH, GOOD, headers=headers).status == 200


def test_health_needs_no_key():
    app = create_app(FakeEngine(), ServerConfig(api_key=("key-1",)))
    answer = request(app, "GET", "/health")
    assert answer.status == 200
    assert answer.json() == {"status": "ready"}
    answer = request(app, "GET", "/health/live")
    assert (answer.status, answer.json()) == (200, {"status": "live"})


@pytest.mark.parametrize(
    ("engine", "ready", "live"),
    [
        ({"is_running": False}, (503, "starting"), (200, "live")),
        ({"is_running": False, "has_stopped": True}, (503, "stopped"), (503, "stopped")),
    ],
)
def test_health_tells_what_only_a_restart_helps_from_what_passes(engine, ready, live):
    app = create_app(FakeEngine(**engine), ServerConfig())
    for path, expected in (("/health", ready), ("/health/live", live)):
        answer = request(app, "GET", path)
        assert (answer.status, answer.json()["status"]) == expected


def test_cache_statistics_are_the_engine_s():
    app = create_app(FakeEngine(), ServerConfig(api_key=("key-1",)))
    answer = request(app, "GET", "/v1/cache/stats", headers=with_key("key-1"))
    assert answer.json() == {"cache": {"num_hits": 3}, "num_steps": 0, "recent_requests": []}


def test_each_key_has_a_namespace_of_its_own():
    first, second, again = tenants(("key-1", "key-2"), "key-1", "key-2", "key-1")
    assert first == again
    assert first != second
    assert "" not in {first, second}
    assert "key" not in first


def test_namespace_depends_on_the_key_alone():
    assert tenants(("key-1",), "key-1") == tenants(("other", "key-1"), "key-1")


def test_without_keys_everybody_shares_one_namespace():
    assert tenants((), None, "anything") == ["", ""]


def test_keys_are_refused_before_the_body_is_read():
    async def run():
        app = create_app(FakeEngine(), ServerConfig(api_key=("key-1",)))
        headers = {**JSON_HEADERS, "content-length": "1000", "expect": "100-continue"}
        async with exchange(
            app, "POST", PATH, headers=headers, body=[b"x"], is_body_complete=False
        ) as (connection, _):
            assert (await connection.answer()).status == 401
            assert connection.num_body_messages_taken == 0

    asyncio.run(run())


def test_key_file_has_one_key_a_line(tmp_path):
    path = tmp_path / "keys"
    path.write_text("key-1\n\n  key-2  \r\n")
    keyring = Keyring.from_config(ServerConfig(api_key=("key-3",), api_key_file=str(path)))
    assert len({keyring.tenant(f"Bearer key-{number}") for number in (1, 2, 3)}) == 3


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xff\xfe"])
def test_key_file_without_keys_does_not_open_the_server(tmp_path, content):
    path = tmp_path / "keys"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"--api-key-file .* (holds no key|not UTF-8)"):
        create_app(FakeEngine(), ServerConfig(api_key_file=str(path)))


def test_missing_key_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere cannot be read: No such file"):
        create_app(FakeEngine(), ServerConfig(api_key_file=str(tmp_path / "nowhere")))


def test_a_named_key_is_its_name_s_tenant_so_that_keys_can_be_replaced():
    keys = ("team-a old-key", "team-a  new-key", "team-b other", "bare")
    first, again, other, bare = tenants(keys, "old-key", "new-key", "other", "bare")
    assert (first, again, other) == ("team-a", "team-a", "team-b")
    assert len(bare) == 64


@pytest.mark.parametrize("name", ["a=b", "-a", "x" * 64, "'a'"])
def test_a_malformed_name_is_refused_without_showing_the_key(name):
    with pytest.raises(ConfigError, match="the name before an API key must be") as caught:
        Keyring([f"{name} secret"])
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("second", ["team-b key", "key"])
def test_a_key_with_two_names_is_refused(second):
    with pytest.raises(ConfigError, match="belongs to one tenant, received one with two names"):
        Keyring(["team-a key", second])


def test_a_share_for_a_name_without_a_key_is_refused():
    keyring = Keyring(["team-a key", "bare"])
    keyring.check_names(["team-a"])
    with pytest.raises(ConfigError, match=r"--cache-share team-x is for .* \(known: team-a\)"):
        keyring.check_names(["team-a", "team-x"])


@pytest.mark.parametrize("key", ["", " ", "three small words", "nyckel-å", "a\nb", "name a\tb"])
def test_key_that_no_header_can_carry_is_refused(key):
    with pytest.raises(ConfigError, match="API key must be printable ASCII"):
        Keyring([key])


def test_keys_are_not_kept_in_clear():
    keyring = Keyring(["key-to-find"])
    assert "key-to-find" not in repr(vars(keyring))
