"""The dashboard in a real headless Chromium, around a real engine with a fake runner."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import httpx
import pytest
from tests.support.browser import chromium, find_chromium
from tests.support.engine_fakes import make_parts

from kvist.config import ServerConfig
from kvist.server.dashboard import Dashboard
from kvist.server.run import serve

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

    from tests.support.browser import Browser, Page

pytestmark = pytest.mark.skipif(
    find_chromium() is None,
    reason="no Chromium: install one (on Debian: chromium), or set KVIST_TEST_CHROMIUM",
)

# As tall as the page is: what is out of sight is not drawn.
PHONE, TABLET, DESK = (390, 6000), (768, 4000), (1440, 2600)
HOSTILE = '<img src=x onerror="window.hacked=1"></script><b>&amp;'


class Server:
    """A server in a thread of this process."""

    def __init__(self, *keys: str, **changes) -> None:
        plan = {
            "num_blocks": 512,
            "max_context_len": 512,
            "max_batch_tokens": 128,
            "block_size": 16,
        }
        self.parts = make_parts(**{**plan, **changes})
        self.keys = keys
        self.url = ""
        self._stop = lambda: None
        self._is_ready = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        with self.parts.engine as engine:
            serve(engine, ServerConfig(port=0, api_key=self.keys, drain_s=0), self._ready)

    def _ready(self, server) -> None:
        self.url, self._stop = server.url, server.stop
        self._is_ready.set()

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._is_ready.wait(60)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._stop()
        self._thread.join(60)

    def complete(self, prompt: str, key: str | None = None) -> str:
        body = {
            "model": "fake",
            "prompt": prompt,
            "max_tokens": 4,
            "temperature": 0,
            "ignore_eos": True,
        }
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        answer = httpx.post(f"{self.url}/v1/completions", json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()["id"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def busy() -> Iterator[Server]:
    """A server without keys that has served a little of everything."""
    with Server() as server:
        for topic in ("fog", "mills", "harbours"):
            for question in ("What is it?", "Why is it so?", "Who says so?"):
                server.complete(
                    f"You answer questions about {topic} in one sentence, always. {question}"
                )
        server.complete(HOSTILE * 2)
        yield server


@contextmanager
def opened(
    browser: Browser, url: str, size: tuple[int, int] = DESK, scheme: str = "light"
) -> Iterator[Page]:
    page = browser.open(width=size[0], height=size[1], scheme=scheme)
    try:
        page.go(f"{url}/dashboard")
        yield page
    finally:
        page.close()


def live(page: Page) -> None:
    page.wait_for("document.getElementById('status-text').textContent === 'Live'")
    page.wait_for("document.documentElement.dataset.drawn")


def text(page: Page, selector: str) -> str:
    return page.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")


class TestContent:
    def test_shows_what_was_served_and_breaks_no_rule_of_its_own(self, browser, busy):
        with opened(browser, busy.url) as page:
            live(page)
            page.wait_for("document.querySelectorAll('[role=treeitem]').length > 4")
            assert "10 in 15 min" in text(page, "#tiles")
            assert "tokens" in text(page, "#misses")
            assert "GiB" in text(page, "#memory") or "B" in text(page, "#memory")
            assert page.evaluate("!document.getElementById('breakers').hidden")
            assert page.problems() == []

    def test_a_new_request_appears_by_itself(self, browser, busy):
        with opened(browser, busy.url) as page:
            live(page)
            page.evaluate("document.querySelector('#calls details').open = true")
            name = busy.complete("You answer questions about fog in one sentence, always. When?")
            page.evaluate("document.querySelector('#calls').scrollIntoView()")
            page.wait_for(f"document.querySelector('#calls table')?.innerText.includes('{name}')")

    def test_text_of_prompts_is_never_markup(self, browser, busy):
        with opened(browser, busy.url) as page:
            live(page)
            page.evaluate("document.querySelector('#prefixes details').open = true")
            page.wait_for(
                "document.querySelector('#prefixes table')?.innerText.includes('onerror')"
            )
            assert page.evaluate("window.hacked === undefined")
            assert (
                page.evaluate("document.querySelectorAll('main img, main b:not(.sides b)').length")
                == 0
            )
            assert page.problems() == []

    def test_a_server_that_was_never_asked_says_so(self, browser):
        with Server() as server, opened(browser, server.url) as page:
            live(page)
            page.wait_for("document.querySelector('#memory table')")
            shown = text(page, "main")
            for words in (
                "No requests yet",
                "No requests of this key yet",
                "Nothing of this key is cached yet",
                "No requests in the last 15 minutes",
            ):
                assert words in shown
            assert "NaN" not in shown
            assert "undefined" not in shown
            assert page.problems() == []

    def test_breakers_have_a_panel_once_something_finds_them(self, browser, busy, monkeypatch):
        found = [
            {"part": "system", "kind": "timestamp", "example": HOSTILE, "tokens_per_hour": 12345}
        ]
        own_values = Dashboard._own_values
        monkeypatch.setattr(
            Dashboard, "_own_values", lambda self, t: {**own_values(self, t), "breakers": found}
        )
        with opened(browser, busy.url) as page:
            live(page)
            page.wait_for("document.getElementById('breakers').innerText.includes('12k')")
            assert "12k tokens/h" in text(page, "#breakers")
            assert HOSTILE in text(page, "#breakers")


class TestKey:
    def test_is_asked_for_and_sent_in_a_header_and_kept_for_the_tab(self, browser):
        with Server("k1", "k2") as server:
            server.complete("the words of the first key", "k1")
            server.complete("quite other ones of somebody else", "k2")
            with opened(browser, server.url) as page:
                page.wait_for("!document.getElementById('key-form').hidden")
                assert page.evaluate("document.activeElement.id") == "key"
                page.type("wrong")
                page.press("Enter")
                page.wait_for(
                    "document.getElementById('key-problem').textContent.includes('not accept')"
                )
                page.type("k1")
                page.press("Enter")
                live(page)
                page.wait_for("document.querySelector('.node')")
                page.evaluate("document.querySelector('#prefixes details').open = true")
                page.wait_for(
                    "document.querySelector('#prefixes table')?.innerText.includes('first key')"
                )
                assert "somebody" not in text(page, "main")
                assert "other keys have" in text(page, "#prefixes")
                assert page.evaluate("sessionStorage.getItem('kvist-key')") == "k1"
                assert (
                    page.evaluate(
                        "JSON.stringify(localStorage) + document.cookie + location.href"
                    ).find("k1")
                    < 0
                )
                page.evaluate("document.getElementById('forget').click()")
                page.wait_for(
                    "document.getElementById('key-form') && !document.getElementById('key-form').hidden"
                )
                assert "first key" not in text(page, "body")
                assert page.evaluate("sessionStorage.length") == 0


class TestConnection:
    def test_a_server_that_goes_away_is_told_of(self, browser):
        server = Server()
        with server, opened(browser, server.url) as page:
            live(page)
            server.stop()
            page.wait_for("document.getElementById('status').classList.contains('bad')")
            assert page.evaluate("document.body.classList.contains('waiting')")

    def test_pausing_ends_the_stream(self, browser):
        with Server() as server, opened(browser, server.url) as page:
            live(page)
            page.evaluate("document.getElementById('pause').click()")
            assert text(page, "#status-text") == "Paused"
            drawn = page.evaluate("document.documentElement.dataset.drawn")
            page.evaluate("document.getElementById('pause').click()")
            page.wait_for(f"document.documentElement.dataset.drawn !== '{drawn}'")


class TestLayout:
    @pytest.mark.parametrize("scheme", ["light", "dark"])
    @pytest.mark.parametrize("size", [PHONE, TABLET, DESK, (320, 6000)])
    def test_nothing_is_wider_than_the_window_and_no_panels_overlap(
        self, browser, busy, size, scheme
    ):
        with opened(browser, busy.url, size, scheme) as page:
            live(page)
            page.evaluate("document.querySelectorAll('details').forEach((d) => { d.open = true })")
            page.wait_for("document.querySelectorAll('table').length >= 5")
            assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
            boxes = page.evaluate(
                "[...document.querySelectorAll('.panel:not([hidden]), .tiles')].map((p) => "
                "{ const b = p.getBoundingClientRect(); return [b.left, b.top, b.right, b.bottom]; })"
            )
            assert len(boxes) == 9
            for index, one in enumerate(boxes):
                for other in boxes[:index]:
                    apart = (
                        one[0] >= other[2]
                        or other[0] >= one[2]
                        or one[1] >= other[3]
                        or other[1] >= one[3]
                    )
                    assert apart, (one, other)
            cut = page.evaluate(
                "[...document.querySelectorAll('.chart text')].filter((t) => { const b = t.getBoundingClientRect(), "
                "p = t.closest('.chart').getBoundingClientRect(); return b.left < p.left - 0.5 || b.right > p.right + 0.5; })"
                ".map((t) => t.textContent)"
            )
            assert cut == []

    def test_colours_follow_the_system_until_they_are_chosen(self, browser, busy):
        back = "getComputedStyle(document.body).backgroundColor"
        with opened(browser, busy.url, scheme="dark") as page:
            live(page)
            dark = page.evaluate(back)
            page.evaluate("document.querySelector('#theme input[value=light]').click()")
            light = page.evaluate(back)
            assert light != dark
            page.go(f"{busy.url}/dashboard")
            assert page.evaluate(back) == light
            page.evaluate("document.querySelector('#theme input[value=auto]').click()")
            assert page.evaluate(back) == dark
            page.set_scheme("light")
            assert page.evaluate(back) == light

    @pytest.mark.parametrize("scheme", ["light", "dark"])
    def test_text_has_enough_contrast(self, browser, busy, scheme):
        """WCAG AA: 4.5 to 1 for every text on its own background."""
        with opened(browser, busy.url, scheme=scheme) as page:
            live(page)
            page.wait_for(
                "document.querySelectorAll('.node').length > 4 && document.querySelector('#memory table')"
            )
            # All shades of the tree, those too that this server has no prefix for.
            page.evaluate(
                "[0, 1, 2, 3, 4].forEach((h) => { const n = document.createElement('div'); n.className = `node h${h}`; "
                "n.textContent = `shade ${h}`; document.querySelector('.icicle').append(n); })"
            )
            assert page.evaluate(CONTRAST) == []


# ruff: noqa: E501  # JavaScript
CONTRAST = """
(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((v) => v / 255).map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const behind = (node) => {
    for (let n = node; n; n = n.parentElement) {
      const colour = rgba(getComputedStyle(n).backgroundColor);
      if (colour[3] > 200) return colour;
    }
    return [255, 255, 255, 255];
  };
  const bad = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !node.checkVisibility() || node.closest("script, noscript, .skip")) continue;
    const style = getComputedStyle(node);
    const front = rgba(node instanceof SVGElement ? style.fill : style.color);
    const [a, b] = [light(front), light(behind(node))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) bad.push([walker.currentNode.textContent.trim().slice(0, 30), ((a + 0.05) / (b + 0.05)).toFixed(2)]);
  }
  return bad;
})()
"""


class TestKeyboard:
    def test_everything_can_be_reached_and_shows_where_the_focus_is(self, browser, busy):
        with opened(browser, busy.url) as page:
            live(page)
            page.wait_for(
                "document.querySelectorAll('.node').length > 4 && document.querySelector('#memory table')"
            )
            page.evaluate("document.body.focus()")
            seen = []
            for _ in range(30):
                page.press("Tab")
                where = page.evaluate(
                    "(() => { const n = document.activeElement, b = n.closest('section')?.id ?? n.id ?? ''; "
                    "const s = getComputedStyle(n.matches('.choice input') ? n.nextElementSibling : n); "
                    "return [b, n.tagName.toLowerCase(), s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) >= 1]; })()"
                )
                if where[1] == "body":
                    break
                seen.append(where)
            assert all(is_visible for _, _, is_visible in seen), seen
            places = {(panel, kind) for panel, kind, _ in seen}
            assert {
                ("hits", "svg"),
                ("ttft", "svg"),
                ("prefixes", "div"),
                ("calls", "svg"),
                ("blocks", "canvas"),
                ("hits", "summary"),
                ("prefixes", "summary"),
                ("pause", "button"),
            } <= places

    def test_the_prefix_tree(self, browser, busy):
        chosen = (
            "document.activeElement.getAttribute('aria-label') ?? document.activeElement.innerText"
        )
        level = "Number(document.activeElement.getAttribute('aria-level'))"
        with opened(browser, busy.url) as page:
            live(page)
            page.wait_for("document.querySelectorAll('[role=treeitem]').length > 4")
            assert (
                page.evaluate("document.querySelectorAll('[role=treeitem][tabindex=\"0\"]').length")
                == 1
            )
            page.evaluate("document.querySelector('[role=treeitem][tabindex=\"0\"]').focus()")
            assert page.evaluate(level) == 1
            page.press("ArrowDown")
            assert page.evaluate(level) == 2
            first = page.evaluate(chosen)
            page.press("ArrowRight")
            assert page.evaluate(chosen) != first
            page.press("ArrowLeft")
            assert page.evaluate(chosen) == first
            facts = text(page, "#prefixes .chosen")
            for fact in ("its own", "held by", "owner", "computed", "last used", "ago"):
                assert fact in facts
            page.press("ArrowDown")
            page.press("Enter")
            assert page.evaluate("!document.querySelector('.crumbs').hidden")
            assert page.evaluate(level) == 1
            page.press("Escape")
            page.press("Escape")
            assert page.evaluate("document.querySelector('.crumbs').hidden")
            assert page.evaluate("document.activeElement.getAttribute('role')") == "treeitem"

    def test_requests_and_why_one_was_missed(self, browser, busy):
        busy.complete("You answer questions about mills in ONE sentence, always. What is it?")
        with opened(browser, busy.url) as page:
            live(page)
            page.evaluate("document.querySelector('#calls svg').focus()")
            page.press("End")
            page.wait_for("document.querySelector('#calls .sides')")
            shown = text(page, "#calls .chosen")
            assert "tokens differ" in shown
            assert "ONE sentence" in shown
            page.press("Escape")
            assert text(page, "#calls .chosen") == ""

    def test_the_block_map_and_the_curves(self, browser, busy):
        with opened(browser, busy.url) as page:
            live(page)
            page.evaluate("document.querySelector('#blocks').scrollIntoView()")
            page.wait_for(
                "document.querySelector('#blocks canvas').getAttribute('aria-label')?.includes('free')"
            )
            page.evaluate("document.querySelector('#blocks canvas').focus()")
            page.press("ArrowRight")
            assert text(page, "#blocks .readout").startswith("Block 0:")
            page.press("ArrowRight")
            assert text(page, "#blocks .readout").startswith("Block 1:")
            for colour in ("codec", "tier", "state"):
                page.evaluate(f"document.querySelector('#blocks-by input[value={colour}]').click()")
            page.evaluate("document.querySelector('#hits').scrollIntoView()")
            page.wait_for("document.querySelector('#hits .area').getAttribute('d')")
            page.evaluate("document.querySelector('#hits svg').focus()")
            page.press("ArrowLeft")
            assert "prompt tokens in 5 s" in text(page, "#hits .readout")
            assert page.problems() == []
