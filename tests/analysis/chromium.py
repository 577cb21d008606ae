"""A headless Chromium, driven over its pipe: nothing but the binary and the standard library."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from pathlib import Path

from tests.parts import PARTS


class Page:
    """A page that is open in a browser of its own; a context manager.

    Args:
        path: HTML file.
        profile: empty folder for the browser.
        width: of the viewport, in CSS pixels.
        height: of the viewport.
        touch: a phone, with a touch screen.
        fragment: what follows `#` in the address.
    """

    def __init__(self, path: Path, profile: Path, width: int = 1200, height: int = 900, touch=False, fragment=""):
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._ids = 0
        inward, outward = os.pipe(), os.pipe()
        binary = PARTS["chromium"].program
        assert binary is not None

        def place_pipes() -> None:
            # The browser reads commands from descriptor 3 and writes answers to 4.
            read, write = os.dup(inward[0]), os.dup(outward[1])
            os.dup2(read, 3)
            os.dup2(write, 4)

        self._process = subprocess.Popen(
            [
                binary,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--remote-debugging-pipe",
                f"--user-data-dir={profile}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=place_pipes,
            close_fds=False,
        )
        os.close(inward[0])
        os.close(outward[1])
        self._in, self._out = os.fdopen(inward[1], "wb"), os.fdopen(outward[0], "rb")
        self._buffer = b""
        self._session = None
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=touch)
        self.send("Emulation.setTouchEmulationEnabled", enabled=touch)
        self._loaded = False
        self.send("Page.navigate", url=path.as_uri() + (f"#{fragment}" if fragment else ""))
        while not self._loaded:
            self._receive()

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *error) -> None:
        self._process.kill()
        self._process.wait()
        self._in.close()
        self._out.close()

    def send(self, method: str, **params):
        """A command of the DevTools protocol, and its result."""
        self._ids += 1
        message = {"id": self._ids, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._in.write(json.dumps(message).encode() + b"\0")
        self._in.flush()
        while (answer := self._receive()).get("id") != self._ids:
            pass
        assert "error" not in answer, f"{method}: {answer}"
        return answer["result"]

    def _receive(self) -> dict:
        while b"\0" not in self._buffer:
            chunk = self._out.read1(65536)
            assert chunk, "the browser is gone"
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        event = json.loads(message)
        name, params = event.get("method"), event.get("params", {})
        if name == "Page.loadEventFired":
            self._loaded = True
        elif name == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif name == "Runtime.exceptionThrown":
            self.errors.append(params["exceptionDetails"]["exception"].get("description", ""))
        elif name == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        return event

    def value(self, expression: str):
        """What an expression is worth in the page."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def middle_of(self, selector: str) -> dict[str, float]:
        """Coordinates of an element, scrolled into view."""
        return self.value(
            f"((e) => {{ e.scrollIntoView({{block: 'center'}}); const r = e.getClientRects()[0];"
            f"return {{x: r.left + r.width / 2, y: r.top + r.height / 2}}; }})(document.querySelector({selector!r}))"
        )

    def hover(self, selector: str) -> None:
        self.send("Input.dispatchMouseEvent", type="mouseMoved", **self.middle_of(selector))

    def tap(self, selector: str) -> None:
        point = self.middle_of(selector)
        self.send("Input.dispatchTouchEvent", type="touchStart", touchPoints=[point])
        self.send("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def screenshot(self, target: Path, whole: bool = True) -> None:
        image = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        target.write_bytes(base64.b64decode(image["data"]))
