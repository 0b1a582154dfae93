"""The stream of a changing document: what is sent to whom, and what happens when nobody reads."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.server.errors import HttpError
from kvist.server.feed import MAX_WATCHERS, Feed, FeedStream, difference
from kvist.server.generation import Gate

SECTION = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 3))
DOCUMENT = st.dictionaries(st.sampled_from(["x", "y"]), SECTION)


def applied(document, changes):
    result = {name: dict(section) for name, section in document.items()}
    for name, change in changes.items():
        section = result.setdefault(name, {})
        for key in change["drop"]:
            del section[key]
        section.update(change["set"])
    return {name: section for name, section in result.items() if section}


@given(DOCUMENT, DOCUMENT)
def test_a_difference_turns_one_document_into_the_other(old, new):
    changes = difference(old, new)
    assert applied(old, changes) == {name: section for name, section in new.items() if section}
    assert all(change["set"] or change["drop"] for change in changes.values())


def test_sections_that_are_the_same_object_are_not_looked_at():
    class Unreadable(dict):
        def items(self):
            raise AssertionError

    same = Unreadable(a=1)
    assert difference({"x": same}, {"x": same}) == {}


class Source:
    """Composes a new document each time, for every tenant that is asked for."""

    def __init__(self):
        self.num_composed = 0
        self.tenants = []
        self.error = None
        self._has_composed = asyncio.Event()

    async def composed(self, number):
        while self.num_composed < number:
            self._has_composed.clear()
            await self._has_composed.wait()

    async def compose(self, tenants):
        if self.error is not None:
            raise self.error
        self.num_composed += 1
        self._has_composed.set()
        self.tenants.append(sorted(tenants))
        return {t: {"values": {"n": self.num_composed, "tenant": t}} for t in tenants}


def read(event):
    head, data, *rest = event.decode().split("\n")
    assert rest == ["", ""]
    return head.removeprefix("event: "), json.loads(data.removeprefix("data: "))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("kvist.server.feed.MIN_PAUSE_S", 0.0)


async def drain(events):
    async for _ in events:
        pass


def feed_of(source):
    return Feed(source.compose, interval_s=0.001)


def test_a_watcher_gets_the_whole_first_and_then_what_is_new():
    async def scenario():
        source = Source()
        async with aclosing(feed_of(source).watch("t")) as events:
            first, second = await anext(events), await anext(events)
        assert read(first) == ("full", {"values": {"n": 1, "tenant": "t"}})
        assert read(second) == ("delta", {"values": {"set": {"n": 2}, "drop": []}})

    asyncio.run(scenario())


def test_all_watchers_share_what_is_composed():
    async def scenario():
        source = Source()
        feed = feed_of(source)
        async with aclosing(feed.watch("t")) as one, aclosing(feed.watch("t")) as two:
            # Two tasks: each takes the same documents, however they take turns.
            first, second = await asyncio.gather(anext(one), anext(two))
        assert first is second
        assert source.num_composed == 1

    asyncio.run(scenario())


def test_each_tenant_gets_its_own():
    async def scenario():
        source = Source()
        feed = feed_of(source)
        async with aclosing(feed.watch("a")) as one, aclosing(feed.watch("b")) as two:
            events = await asyncio.gather(anext(one), anext(two))
        assert [read(event)[1]["values"]["tenant"] for event in events] == ["a", "b"]

    asyncio.run(scenario())


def test_who_reads_late_gets_the_whole_again_and_no_backlog():
    async def scenario():
        source = Source()
        async with aclosing(feed_of(source).watch("t")) as events:
            await anext(events)
            await source.composed(5)
            kind, document = read(await anext(events))
        assert kind == "full"
        assert document["values"]["n"] >= 5

    asyncio.run(scenario())


def test_nothing_runs_without_watchers():
    async def scenario():
        source = Source()
        feed = feed_of(source)
        async with aclosing(feed.watch("t")) as events:
            await anext(events)
        await asyncio.wait_for(feed._composing, 5)
        composed = source.num_composed
        assert feed.num_watchers == 0
        assert not feed._channels
        # And it starts again for the next one.
        async with aclosing(feed.watch("t")) as events:
            kind, document = read(await anext(events))
        assert kind == "full"
        assert document["values"]["n"] > composed

    asyncio.run(scenario())


def test_a_failure_reaches_every_watcher_and_the_next_one_starts_anew():
    async def scenario():
        source = Source()
        feed = feed_of(source)
        one, two = feed.watch("a"), feed.watch("b")
        await asyncio.gather(anext(one), anext(two))
        source.error = ValueError("no")
        for events in (one, two):
            with pytest.raises(ValueError, match="no"):
                await drain(events)
        assert feed.num_watchers == 0
        source.error = None
        async with aclosing(feed.watch("a")) as events:
            assert read(await anext(events))[0] == "full"

    asyncio.run(scenario())


def test_too_many_watchers_are_refused():
    async def scenario():
        feed = feed_of(Source())
        streams = [feed.watch(str(i)) for i in range(MAX_WATCHERS)]
        await asyncio.gather(*map(anext, streams))
        with pytest.raises(HttpError, match="dashboards are open") as caught:
            feed.check_room()
        assert caught.value.status == 429
        await streams.pop().aclose()
        feed.check_room()
        for stream in streams:
            await stream.aclose()

    asyncio.run(scenario())


class Client:
    def __init__(self):
        self.sent = []
        self.has_body = asyncio.Event()
        self.leaving = asyncio.Event()

    async def receive(self):
        await self.leaving.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        self.sent.append(message)
        if message.get("body"):
            self.has_body.set()


def test_a_stream_ends_with_its_client():
    async def scenario():
        feed, client = feed_of(Source()), Client()
        stream = asyncio.create_task(FeedStream(feed, "t", Gate())({}, client.receive, client.send))
        await client.has_body.wait()
        client.leaving.set()
        await asyncio.wait_for(stream, 5)
        assert feed.num_watchers == 0
        headers = dict(client.sent[0]["headers"])
        assert headers[b"cache-control"] == b"no-store"
        assert b"content-length" not in headers

    asyncio.run(scenario())


def test_a_stream_ends_with_the_server():
    async def scenario():
        feed, client, gate = feed_of(Source()), Client(), Gate()
        stream = asyncio.create_task(FeedStream(feed, "t", gate)({}, client.receive, client.send))
        await client.has_body.wait()
        gate.close()
        assert not stream.done()
        gate.abort()
        await asyncio.wait_for(stream, 5)
        assert read(client.sent[-1]["body"]) == ("end", {})
        assert feed.num_watchers == 0

    asyncio.run(scenario())


def test_a_failure_is_told_without_its_cause():
    async def scenario():
        source, client = Source(), Client()
        source.error = ValueError("a secret")
        await FeedStream(feed_of(source), "t", Gate())({}, client.receive, client.send)
        kind, told = read(client.sent[-1]["body"])
        assert kind == "end"
        assert told["error"]["code"] == "internal_error"
        assert "secret" not in json.dumps(told)

    asyncio.run(scenario())
