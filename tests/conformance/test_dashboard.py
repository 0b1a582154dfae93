"""``/dashboard`` and its feed over ASGI: who gets what, and what the page may load."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from importlib import resources
from typing import TYPE_CHECKING

import pytest
from tests.support.asgi import JSON_HEADERS, arequest, exchange, request
from tests.support.engine_fakes import make_parts
from tests.support.fake_engine import FakeEngine

from kvist.config import ServerConfig
from kvist.server.app import create_app

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvist.engine.async_engine import AsyncEngine

STATIC = resources.files("kvist.server").joinpath("static")
FILES = sorted(file.name for file in STATIC.iterdir() if not file.name.startswith("__"))
BODY = {"model": "fake", "max_tokens": 2, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def engine() -> Iterator[AsyncEngine]:
    with make_parts().engine as engine:
        yield engine


def headers_of(key):
    return JSON_HEADERS if key is None else {**JSON_HEADERS, "authorization": f"Bearer {key}"}


async def complete(app, prompt, key=None, **extra):
    body = {**BODY, "prompt": prompt, **extra}
    answer = await arequest(app, "POST", "/v1/completions", body, headers=headers_of(key))
    assert answer.status == 200, answer.body
    return answer.json()["id"]


class Watcher:
    """Reads the feed and keeps the document as the page does."""

    def __init__(self, connection):
        self._connection = connection
        self._rest = ""
        self.document = {}

    async def take(self):
        """Take one event."""
        while "\n\n" not in self._rest:
            self._rest += (await self._connection.next_body()).decode()
        event, _, self._rest = self._rest.partition("\n\n")
        kind, data = (line.partition(": ")[2] for line in event.split("\n"))
        news = json.loads(data)
        if kind == "full":
            self.document = news
        else:
            assert kind == "delta"
            for name, change in news.items():
                section = self.document.setdefault(name, {})
                for key in change["drop"]:
                    del section[key]
                section.update(change["set"])
        return self.document

    async def until(self, condition):
        while not (self.document and condition(self.document)):
            await asyncio.wait_for(self.take(), 30)
        return self.document


def watch(app, scenario, key=None):
    """Run a scenario with a watcher of the feed."""

    async def run():
        headers = headers_of(key)
        async with exchange(app, "GET", "/v1/cache/watch", headers=headers) as (connection, _):
            start = await connection.start()
            assert start["status"] == 200
            await scenario(Watcher(connection))
            connection.disconnect()

    asyncio.run(run())


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("kvist.server.feed.MIN_PAUSE_S", 0.0)
    monkeypatch.setattr("kvist.server.dashboard.INTERVAL_S", 0.01)


class TestPage:
    def test_needs_no_key_and_holds_no_data(self):
        app = create_app(FakeEngine(), ServerConfig(api_key=("k1",)))
        answer = request(app, "GET", "/dashboard")
        assert answer.status == 200
        assert answer.headers["content-type"].startswith("text/html")
        assert b"fake-1" not in answer.body

    @pytest.mark.parametrize("name", FILES)
    def test_every_file_is_served_with_its_type_and_a_strict_policy(self, name):
        app = create_app(FakeEngine(), ServerConfig())
        path = "/dashboard" if name == "dashboard.html" else f"/dashboard/{name}"
        answer = request(app, "GET", path)
        assert answer.status == 200
        assert answer.body == STATIC.joinpath(name).read_bytes()
        kind = {
            "js": "text/javascript",
            "css": "text/css",
            "svg": "image/svg+xml",
            "html": "text/html",
        }
        assert answer.headers["content-type"].startswith(kind[name.rpartition(".")[2]])
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "require-trusted-types-for 'script'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"

    def test_an_unchanged_file_is_not_sent_again(self):
        app = create_app(FakeEngine(), ServerConfig())
        tag = request(app, "GET", "/dashboard/main.js").headers["etag"]
        again = request(app, "GET", "/dashboard/main.js", headers={"if-none-match": tag})
        assert (again.status, again.body) == (304, b"")

    @pytest.mark.parametrize(
        "name", ["nothing.js", "..%2fapp.py", "__init__.py", "%2e%2e", "dashboard.html.bak"]
    )
    def test_nothing_else_is_served(self, name):
        app = create_app(FakeEngine(), ServerConfig())
        assert request(app, "GET", f"/dashboard/{name}").status == 404

    @pytest.mark.parametrize("name", [name for name in FILES if not name.endswith(".svg")])
    def test_files_name_no_other_host_and_make_no_markup_of_strings(self, name):
        text = STATIC.joinpath(name).read_text(encoding="utf-8")
        addresses = set(re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}", text))
        # The name of SVG, which nothing loads.
        assert addresses <= {"http://www.w3.org"}
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", text
        )

    def test_the_page_has_every_file_and_imports_only_what_is_there(self):
        wanted = set(
            re.findall(r'"dashboard/([^"]+)"', STATIC.joinpath("dashboard.html").read_text())
        )
        for name in FILES:
            if name.endswith(".js"):
                text = STATIC.joinpath(name).read_text()
                wanted |= set(re.findall(r'from "\./([^"]+)"', text))
        assert wanted == set(FILES) - {"dashboard.html"}


class TestFeed:
    def test_shows_what_was_served(self, engine):
        app = create_app(engine, ServerConfig())

        async def scenario(watcher):
            await complete(app, "once upon a time")
            name = await complete(app, "once upon a mile")
            document = await watcher.until(
                lambda d: (
                    len(d["calls"]) == 2
                    and d["values"].get("num_cached_tokens")
                    and len(d["prefixes"]) == 3
                )
            )
            call = document["calls"][name]
            assert (call["reused"], call["computed"], call["output"]) == (12, 4, 2)
            assert call["miss"]["reason"] == "tokens_differ"
            (span, *more) = document["spans"].values()
            assert span["calls"] + sum(s["calls"] for s in more) == 2
            values = document["values"]
            assert sum(values["blocks"]) == 64
            [tier] = values["tiers"]
            assert (tier["name"], tier["codec"], tier["num_blocks"]) == (
                "host memory",
                "float32",
                64,
            )
            assert (tier["block_bytes"], tier["num_bytes"]) == (1, 64)
            assert tier["codecs"] == {"float32": [tier["used_bytes"]] * 2}
            assert 0 < tier["used_bytes"] < 64
            assert len(document["cells"]) == 64
            texts = {prefix["text"]: prefix for prefix in document["prefixes"].values()}
            assert texts["once upon a "]["hits"] == 1
            assert values["breakers"] == []
            assert values["num_others_tokens"] == 0
            assert values["is_private"] is False

        watch(app, scenario)

    def test_an_idle_server_is_looked_at_once(self, engine):
        app = create_app(engine, ServerConfig())
        surveys = []
        original = engine.survey
        engine.survey = lambda: surveys.append(1) or original()

        async def scenario(watcher):
            await watcher.until(lambda d: "blocks" in d["values"])
            for _ in range(20):
                await watcher.take()

        watch(app, scenario)
        assert len(surveys) == 1

    def test_nobody_is_looked_at_without_watchers(self, engine):
        app = create_app(engine, ServerConfig())
        engine.survey = lambda: pytest.fail("nobody watches")
        asyncio.run(complete(app, "once upon a time"))

    def test_a_key_is_needed(self, engine):
        app = create_app(engine, ServerConfig(api_key=("k1",)))
        assert request(app, "GET", "/v1/cache/watch").status == 401
        refused = request(app, "GET", "/v1/cache/watch", headers=headers_of("k2"))
        assert refused.status == 401

    def test_the_key_is_not_taken_out_of_the_address(self, engine):
        app = create_app(engine, ServerConfig(api_key=("k1",)))
        answer = request(app, "GET", "/v1/cache/watch?key=k1", headers=headers_of("k1"))
        assert answer.status == 400

    def test_prompts_and_calls_go_to_their_own_key(self, engine):
        config = ServerConfig(api_key=("k1", "k2"))
        app = create_app(engine, config)

        async def scenario(watcher):
            mine = await complete(app, "my own words", "k1")
            theirs = await complete(app, "their confidence", "k2")
            document = await watcher.until(
                lambda d: d["values"].get("num_others_tokens") and d["calls"] and d["prefixes"]
            )
            assert list(document["calls"]) == [mine]
            text = json.dumps(document)
            assert "my own words" in text
            for foreign in ("their", "confidence", theirs):
                assert foreign not in text
            assert document["values"]["num_others_tokens"] >= 13
            assert document["values"]["is_private"] is True
            # Sums are over all keys, as in /metrics.
            assert sum(span["calls"] for span in document["spans"].values()) == 2

        watch(app, scenario, "k1")

    def test_breakers_are_shown_when_something_finds_them(self, engine):
        found = [{"part": "system", "kind": "timestamp", "example": "12:01", "tokens_per_hour": 9}]
        app = create_app(engine, ServerConfig())
        app.state.dashboard.breakers = lambda tenant: found if tenant == "" else []

        async def scenario(watcher):
            document = await watcher.until(lambda d: d["values"]["breakers"])
            assert document["values"]["breakers"] == found

        watch(app, scenario)

    def test_goes_on_when_the_engine_has_stopped(self, engine):
        app = create_app(engine, ServerConfig())

        async def scenario(watcher):
            await watcher.until(lambda d: "blocks" in d["values"])
            engine.close()
            document = await watcher.until(lambda d: d["values"]["status"] == "stopped")
            assert sum(document["values"]["blocks"]) == 64

        watch(app, scenario)

    def test_a_step_that_takes_long_does_not_hold_up_the_rest(self, monkeypatch):
        entered, released = threading.Event(), threading.Event()

        def hold(plan):
            entered.set()
            assert released.wait(30)

        monkeypatch.setattr("kvist.server.dashboard.SURVEY_WAIT_S", 0.01)
        parts = make_parts()
        parts.runner.before_step = hold
        with parts.engine as engine:
            app = create_app(engine, ServerConfig())

            async def scenario(watcher):
                sending = asyncio.create_task(complete(app, "once upon a time"))
                await asyncio.to_thread(entered.wait, 30)
                for _ in range(3):
                    await watcher.take()
                assert not watcher.document["calls"]
                released.set()
                name = await sending
                await watcher.until(lambda d: name in d["calls"] and d["prefixes"])

            watch(app, scenario)

    def test_hostile_text_travels_as_text(self, engine):
        app = create_app(engine, ServerConfig())
        prompt = "</script>\n\nevent: end\ndata: \u2028\x00<img src=x>"

        async def scenario(watcher):
            await complete(app, prompt)
            document = await watcher.until(lambda d: d["prefixes"])
            texts = [prefix["text"] for prefix in document["prefixes"].values()]
            assert any(text.startswith("</script>\n\nevent") for text in texts)

        watch(app, scenario)
