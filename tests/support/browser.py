"""A real headless Chromium, spoken to over a pipe in its own protocol; no package is needed beside the browser.

Source: the Chrome DevTools Protocol, https://chromedevtools.github.io/devtools-protocol/; ``--remote-debugging-pipe``
takes commands on descriptor 3 and answers on 4, each a JSON document and a zero byte.
"""

from __future__ import annotations

import base64
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

ANSWER_S = 60.0
AS_3_AND_4 = """
import fcntl, os, sys
# Copies first: either number may be the other's target.
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find_chromium() -> str | None:
    """Return a Chromium of the system, or one that Playwright has downloaded; None when there is neither."""
    given = os.environ.get("KVIST_TEST_CHROMIUM")
    if given:
        return given
    for name in NAMES:
        path = shutil.which(name)
        if path is not None:
            return path
    found = Path.home().glob(".cache/ms-playwright/chromium*/chrome-*/*")
    return next((str(path) for path in found if path.name in {"chrome", "headless_shell"}), None)


class Browser:
    """One browser process."""

    def __init__(self, path: str, folder: str) -> None:
        to_child, self._commands = os.pipe()
        self._answers, from_child = os.pipe()
        command = [
            path, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-extensions", "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--mute-audio", "--hide-scrollbars", "--force-color-profile=srgb", f"--user-data-dir={folder}",
            "--remote-debugging-pipe", "about:blank",
        ]  # fmt: skip
        self.process = subprocess.Popen(
            [sys.executable, "-c", AS_3_AND_4, str(to_child), str(from_child), *command],
            pass_fds=(to_child, from_child),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": folder},
            start_new_session=True,
        )
        os.close(to_child)
        os.close(from_child)
        self._next_id = 1
        self._waiting: dict[int, queue.Queue[dict[str, Any]]] = {}
        self.events: list[dict[str, Any]] = []
        """Everything that came without being asked for."""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Send one command and return its result."""
        number, answer = self._next_id, queue.Queue[dict[str, Any]]()
        self._next_id += 1
        self._waiting[number] = answer
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        document = answer.get(timeout=ANSWER_S)
        assert "error" not in document, (method, document["error"])
        return document["result"]

    def open(self, *, width: int, height: int, scheme: str = "light", scale: float = 1.0) -> Page:
        """Return a new page that is empty."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session, target)
        page.call("Page.enable")
        page.call("Runtime.enable")
        page.call("Log.enable")
        page.resize(width, height, scale)
        page.set_scheme(scheme)
        return page

    def close(self) -> None:
        """End the process."""
        try:
            self.call("Browser.close")
            self.process.wait(10)
        except (queue.Empty, OSError, subprocess.TimeoutExpired):
            os.killpg(self.process.pid, 9)
            self.process.wait()
        os.close(self._commands)
        self._reader.join(10)

    def _read(self) -> None:
        rest = b""
        with os.fdopen(self._answers, "rb", buffering=0) as pipe:
            while data := pipe.read(1 << 16):
                *whole, rest = (rest + data).split(b"\0")
                for raw in whole:
                    document = json.loads(raw)
                    if "id" in document:
                        self._waiting.pop(document["id"]).put(document)
                    else:
                        self.events.append(document)


class Page:
    """One tab."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser = browser
        self._session = session
        self._target = target

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)

    def resize(self, width: int, height: int, scale: float = 1.0) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )

    def set_scheme(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def go(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        # Not of the page before: its document is another one until the new one has begun.
        self.wait_for(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression, awaited when it is a promise."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Return once an expression is true; fails after ANSWER_S."""
        while True:
            try:
                self.evaluate(
                    "new Promise((done) => { const look = () => "
                    f"({condition}) ? done(true) : setTimeout(look, 20); look(); }})"
                )
            except AssertionError as error:
                # The page went away under the promise, because another one comes.
                if "navigat" in str(error) or "context was destroyed" in str(error):
                    continue
                raise
            return

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press and release a key: a name as ``KeyboardEvent.key`` has it."""
        codes = {
            "Tab": 9, "Enter": 13, "Escape": 27, " ": 32, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38,
            "ArrowRight": 39, "ArrowDown": 40,
        }  # fmt: skip
        params: dict[str, Any] = {
            "key": key,
            "code": "Space" if key == " " else key,
            "windowsVirtualKeyCode": codes[key],
            "modifiers": 8 if shift else 0,
        }
        text = {"Enter": "\r", " ": " "}.get(key)
        self.call(
            "Input.dispatchKeyEvent",
            type="keyDown",
            **params,
            **({} if text is None else {"text": text}),
        )
        self.call("Input.dispatchKeyEvent", type="keyUp", **params)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def problems(self) -> list[str]:
        """Return every exception, console error and refused resource of this page so far."""
        found = []
        for event in list(self._browser.events):
            if event.get("sessionId") != self._session:
                continue
            method, params = event["method"], event["params"]
            if method == "Runtime.exceptionThrown":
                found.append(json.dumps(params["exceptionDetails"]))
            elif method == "Log.entryAdded" and params["entry"]["level"] in {"error", "warning"}:
                found.append(params["entry"]["text"])
            elif method == "Runtime.consoleAPICalled" and params["type"] in {"error", "assert"}:
                found.append(json.dumps(params["args"]))
        return found

    def screenshot(self, path: Path) -> None:
        """Write what is in the window as PNG."""
        shot = self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def chromium() -> Iterator[Browser]:
    """Yield a browser with a profile of its own."""
    path = find_chromium()
    assert path is not None, "no Chromium is installed"
    # Processes of the browser may still write into the profile when the first of them has ended.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        browser = Browser(path, folder)
        try:
            yield browser
        finally:
            browser.close()
