"""A headless Chromium over its DevTools pipe: opens a page at a given size and says what went wrong in it.

The pipe needs no network port and no WebSocket library: messages are JSON, each ended by a NUL byte, on descriptors 3
and 4. Device emulation sets the viewport, because a headless window itself cannot be narrower than about 500 px.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)


def find_browser() -> str | None:
    """Path of a Chromium or Chrome on PATH."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


class Page:
    """One tab. `problems`: uncaught errors, console errors and warnings; `requests`: every address asked for."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive = send, receive
        self._buffer, self._number, self._session = b"", 0, None
        self._events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command and wait for its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read(time.monotonic() + 60)
            if answer is None:
                raise TimeoutError(f"no answer to {method}")
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return dict(answer["result"])
            self._events.append(answer)

    def open(self, path: Path, width: int, height: int = 900, mobile: bool = False) -> None:
        """Open a file at a viewport size and wait until its script is done, or failed."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=mobile,
        )
        self._events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        ready = (
            "document.readyState === 'complete' && (!document.getElementById('report-data')"
            " || 'charts' in document.documentElement.dataset || 'failed' in document.documentElement.dataset)"
        )
        deadline = time.monotonic() + 60
        while not self.evaluate(ready):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{path.name} did not finish; {self.problems}")
            time.sleep(0.1)

    def evaluate(self, expression: str) -> Any:
        """Value of a JavaScript expression; promises are awaited."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(str(result["exceptionDetails"]))
        return result["result"].get("value")

    def move_to(self, x: float, y: float) -> None:
        """Move the pointer."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path, full: bool = True) -> None:
        """Write a PNG of the page, or of the viewport."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        extra: dict[str, Any] = {"captureBeyondViewport": True, "clip": clip} if full else {}
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png", **extra)["data"]))

    def pdf(self) -> bytes:
        """The page as it prints, on the paper that its style asks for."""
        return base64.b64decode(self.call("Page.printToPDF", preferCSSPageSize=True)["data"])

    @property
    def problems(self) -> list[str]:
        """Console errors and warnings, log entries and uncaught exceptions since `open`."""
        self._drain()
        found = []
        for event in self._events:
            params = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(json.dumps(params["exceptionDetails"])[:400])
            elif event.get("method") == "Runtime.consoleAPICalled" and params["type"] in (
                "error",
                "warning",
                "assert",
            ):
                found.append(json.dumps(params["args"])[:400])
            elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(params["entry"]["text"])
        return found

    @property
    def requests(self) -> list[str]:
        """Addresses asked for since `open`."""
        self._drain()
        return [e["params"]["request"]["url"] for e in self._events if e.get("method") == "Network.requestWillBeSent"]

    def _drain(self) -> None:
        while (event := self._read(time.monotonic() + 0.05)) is not None:
            self._events.append(event)

    def _read(self, deadline: float) -> dict[str, Any] | None:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._receive], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            chunk = os.read(self._receive, 1 << 20)
            if not chunk:
                raise RuntimeError("the browser went away")
            self._buffer += chunk
        message, self._buffer = self._buffer.split(b"\0", 1)
        return dict(json.loads(message))


@contextmanager
def browse(executable: str, profile: Path) -> Iterator[Page]:
    """Start a browser with an empty profile directory; it ends with the block."""
    theirs_in, send = os.pipe()
    receive, theirs_out = os.pipe()
    # Out of the way of 3 and 4, where the browser wants them.
    child_in, child_out = (fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (theirs_in, theirs_out))

    def place() -> None:
        os.dup2(child_in, 3)
        os.dup2(child_out, 4)

    command = [executable, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(
        command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, close_fds=False, preexec_fn=place
    )
    for fd in (theirs_in, theirs_out, child_in, child_out):
        os.close(fd)
    try:
        yield Page(send, receive)
    finally:
        os.close(send)
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(receive)
