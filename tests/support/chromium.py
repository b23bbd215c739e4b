"""A headless Chromium, driven by its own protocol over a pipe of the process.

It needs no package, only a `chromium` or `google-chrome` program, or that of `playwright install
chromium`. `browser_program` returns None without such a program. Tests are then skipped.
"""

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
TIMEOUT_S = 60.0

NO_BROWSER = (
    "needs Chromium: install it from your system, or run `.venv/bin/playwright install chromium`"
)
"""Reason for which tests are skipped."""

DOWNLOADED = ".cache/ms-playwright/chromium-*/chrome-linux*/chrome"


def browser_program() -> str | None:
    found = next((path for name in PROGRAMS if (path := shutil.which(name))), None)
    return found or max(map(str, Path.home().glob(DOWNLOADED)), default=None)


class Page:
    """A page of the browser."""

    def __init__(self, process: subprocess.Popen[bytes], write: int, read: int) -> None:
        self._process = process
        self._write = write
        self._read = read
        self._buffer = b""
        self._last = 0
        self._session = ""
        self.errors: list[str] = []
        """Errors of scripts, refused by the security policy or thrown."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._last += 1
        order: dict[str, Any] = {"id": self._last, "method": method, "params": parameters}
        if self._session:
            order["sessionId"] = self._session
        os.write(self._write, json.dumps(order).encode() + b"\0")
        while True:
            message = self._receive()
            if message.get("id") == self._last:
                assert "error" not in message, message["error"]
                return dict(message["result"])
            self._note(message)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            part = os.read(self._read, 1 << 16)
            assert part, "the browser ended"
            self._buffer += part
        text, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(text))

    def _note(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.errors.append(str(details.get("exception", details).get("description", details)))
        if message.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.errors.append(f"{parameters['entry']['text']} {parameters['entry'].get('url')}")

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """Evaluate JavaScript, wait for a promise, and return the result."""
        done = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until a JavaScript expression is true."""
        self._repeat(
            "new Promise((done) => { const look = () => { let is = false; "
            f"try {{ is = Boolean({condition}); }} catch {{ is = false; }} "
            "if (is) done(true); else setTimeout(look, 30); }; look(); "
            "setTimeout(() => done(false), 2000); })",
            condition,
        )

    def scroll_until(self, condition: str) -> None:
        """Scroll through the page, again and again, until a JavaScript expression is true.

        Parts of a page are asked for when they come into view. The page grows when one arrives.
        """
        self._repeat(
            "(async () => { for (let at = 0; at < document.body.scrollHeight; at += 300) { "
            "scrollTo(0, at); await new Promise((done) => setTimeout(done, 30)); } "
            f"try {{ return Boolean({condition}); }} catch {{ return false; }} }})()",
            condition,
        )

    def _repeat(self, script: str, condition: str) -> None:
        """Run a script again and again until it returns true. It must return true once `condition`
        is.
        """
        end = time.monotonic() + TIMEOUT_S
        while not self.run(script):
            text = self.run("document.body?.innerText.slice(0, 600)")
            assert time.monotonic() < end, f"never true: {condition}; {self.errors}; {text}"

    def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        """Set the size of the window, and the theme that the system prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def press(self, key: str) -> None:
        """Press a key, such as `Tab`, `Enter`, `ArrowRight` or a letter."""
        text = {"Enter": "\r", " ": " "}.get(key, key if len(key) == 1 else "")
        codes = {"Tab": 9, "Enter": 13, " ": 32, "ArrowLeft": 37, "ArrowRight": 39, "Home": 36}
        codes |= {"ArrowUp": 38, "ArrowDown": 40}
        about = {"key": key, "windowsVirtualKeyCode": codes.get(key, 0), "text": text}
        about = {name: value for name, value in about.items() if value}
        self.call("Input.dispatchKeyEvent", type="keyDown", **about)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """Save a picture of the window, or of the whole page."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextmanager
def browser() -> Iterator[Page]:
    """Start the browser with an empty profile, and yield a page of it."""
    program = browser_program()
    assert program is not None, "there is no browser"
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()

    def connect() -> None:  # the browser reads from descriptor 3 and writes to 4
        for number, descriptor in ((103, to_read), (104, from_write)):
            os.dup2(descriptor, number)
        os.dup2(103, 3)
        os.dup2(104, 4)

    with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as profile:
        command = [
            program,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
        ]
        process = subprocess.Popen(
            command,
            close_fds=False,
            preexec_fn=connect,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(from_write)
        try:
            yield Page(process, to_write, from_read)
        finally:
            process.kill()
            process.wait()
            os.close(to_write)
            os.close(from_read)


@contextmanager
def dashboard_page(url: str, *, runs: int) -> Iterator[Page]:
    """Start the browser and yield the dashboard's list of runs, which has `runs` of them.

    `url` has the token, which is then no longer in the address. A script of a run that calls
    `alert` is an error of the page.
    """
    with browser() as page:
        page.resize(1280, 900)
        page.open(url)
        page.wait(f"document.querySelectorAll('tbody tr').length === {runs}")
        assert page.run("location.search") == ""
        page.run("window.alert = () => { throw new Error('a script of the run was run'); }")
        yield page
