"""A headless Chromium, driven over a pair of pipes by its own debugging protocol; nothing but the standard library."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def found() -> str | None:
    """Where there is one: that of ``CHROMIUM``, else one on the path."""
    return os.environ.get("CHROMIUM") or next((path for path in map(shutil.which, NAMES) if path), None)


class Chromium:
    """One browser with one page, that reaches no network.

    Args:
        program: see :func:`found`.
        folder: for its profile.
        size: of the window.
    """

    def __init__(self, program: str, folder: Path, size: tuple[int, int] = (1280, 800)) -> None:
        to_it, from_us = os.pipe()
        from_it, to_us = os.pipe()
        flags = [
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"),
            *("--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update"),
            *("--host-resolver-rules=MAP * ~NOTFOUND", "--force-device-scale-factor=1", "--hide-scrollbars"),
            *(f"--user-data-dir={folder}", f"--window-size={size[0]},{size[1]}", "about:blank"),
        ]
        # It reads commands from file 3 and answers on file 4; a plain sh knows no numbers above 9.
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$0" "$@" 3<&{to_it} 4>&{to_us}', program, *flags],
            pass_fds=(to_it, to_us),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_it)
        os.close(to_us)
        self._out, self._in, self._rest, self._count = from_us, from_it, b"", 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        page = next(each for each in self("Target.getTargets")["targetInfos"] if each["type"] == "page")
        self._session = self("Target.attachToTarget", targetId=page["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False}
        self("Emulation.setDeviceMetricsOverride", **metrics)

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)

    def __call__(self, method: str, **parameters: Any) -> Mapping[str, Any]:
        """Send a command and wait for its answer."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next(60)
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def _next(self, seconds: float) -> dict[str, Any]:
        until = time.monotonic() + seconds
        while b"\0" not in self._rest:
            if not select.select([self._in], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError("Chromium does not answer")
            read = os.read(self._in, 1 << 20)
            if not read:
                raise RuntimeError("Chromium has gone away")
            self._rest += read
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def open(self, path: Path) -> None:
        """Open a page of ours and wait until it shows its timeline, or says that it cannot."""
        self("Page.navigate", url=path.as_uri())
        until = time.monotonic() + 60
        ready = "Boolean(window.timeline) || document.getElementById('failed')?.hidden === false"
        while not self.value(ready):
            if time.monotonic() > until:
                raise TimeoutError(f"{path} did not show: {self.complaints()}")
            time.sleep(0.02)

    def value(self, expression: str) -> Any:
        """What a piece of JavaScript comes to in the page."""
        result = self("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"]["exception"]["description"])
        return result["result"].get("value")

    def complaints(self) -> list[str]:
        """What the page has thrown, logged as an error, or had refused so far."""
        self.value("0")  # what was on its way has come before the answer
        found = []
        for event in self.events:
            said = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                details = said["exceptionDetails"]
                found.append(details.get("exception", {}).get("description", details["text"]))
            if event.get("method") == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
                found.append(said["entry"]["text"])
        return found

    def requests(self) -> list[str]:
        """The addresses it has asked for so far."""
        asked = [each for each in self.events if each.get("method") == "Network.requestWillBeSent"]
        return [each["params"]["request"]["url"] for each in asked]

    def picture(self, path: Path) -> None:
        """Write what it shows as a PNG."""
        path.write_bytes(base64.b64decode(self("Page.captureScreenshot", format="png")["data"]))

    def pointer(self, what: str, x: float, y: float, **more: Any) -> None:
        """A mouse event, such as ``mouseMoved`` or ``mouseWheel``, at a point of the window."""
        self("Input.dispatchMouseEvent", type=what, x=x, y=y, **more)
