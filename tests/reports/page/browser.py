"""Chromium without a window, told by its debugging protocol what to do; needs no package."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tests.limits import HANG_S


class Tab:
    """One page: what it logged, what it asked for, and where to click."""

    def __init__(self, orders: BinaryIO, answers: BinaryIO) -> None:
        self._orders, self._answers = orders, answers
        self._numbers, self._session = itertools.count(1), ""
        self.events: list[tuple[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """Give an order, and wait for its answer."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._orders.write(json.dumps(message).encode() + b"\0")
        self._orders.flush()
        while (answer := self._next()).get("id") != number:
            self.events.append((answer["method"], answer["params"]))
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        text = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            assert byte, "the browser ended"
            text += byte
        found: dict[str, Any] = json.loads(text)
        return found

    def open(self, url: str) -> None:
        """Load a page, all of it."""
        self.call("Page.navigate", url=url)
        while not any(method == "Page.loadEventFired" for method, _ in self.events):
            self.call("Runtime.evaluate", expression="0")

    def value(self, expression: str) -> Any:
        """What JavaScript says of the page."""
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def click(self, selector: str) -> None:
        """A real click, where the element is."""
        place = f"document.querySelector({selector!r})"
        self.value(f"{place}.scrollIntoView({{block: 'center'}})")
        left, top, width, height = self.value(
            f"(r => [r.x, r.y, r.width, r.height])({place}.getBoundingClientRect())"
        )
        middle = {"x": left + width / 2, "y": top + height / 2}
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, **middle, button="left", clickCount=1)

    def happened(self, method: str) -> list[Any]:
        """The events of a kind so far."""
        return [parameters for name, parameters in self.events if name == method]


@contextlib.contextmanager
def tab(profile: Path) -> Iterator[Tab]:
    """A tab of a browser of its own, which reads orders from descriptor 3 and answers on 4."""
    their_orders, our_orders = os.pipe()
    our_answers, their_answers = os.pipe()
    flags = f"--headless --no-sandbox --disable-gpu --no-first-run --user-data-dir={profile}"
    command = f"exec chromium {flags} --remote-debugging-pipe 3<&{their_orders} 4>&{their_answers}"
    browser = subprocess.Popen(
        ["bash", "-c", command], pass_fds=(their_orders, their_answers), stderr=subprocess.DEVNULL
    )
    os.close(their_orders)
    os.close(their_answers)
    try:
        with os.fdopen(our_orders, "wb") as orders, os.fdopen(our_answers, "rb") as answers:
            yield Tab(orders, answers)
    finally:
        browser.terminate()
        browser.wait(HANG_S)
