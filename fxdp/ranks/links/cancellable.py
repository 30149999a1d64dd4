"""A wait inside of torch that this process can leave: torch has no way to end one before its timeout."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

_LOOK_S = 0.5
_CAUSE_S = 1.0  # for the cause of an error inside of torch, which seldom names the rank at fault

T = TypeVar("T")


def made_while_looking(make: Callable[[], T], look: Callable[[], None]) -> T:
    """`make()` in a thread of its own; meanwhile `look()` is asked, and what it raises is raised here.

    A thread that is left behind ends with torch's timeout or with the process.
    """
    made: list[T] = []
    failed: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            made.append(make())
        except BaseException as error:
            failed.append(error)
        done.set()

    threading.Thread(target=run, name="fxdp-opening", daemon=True).start()
    while not done.wait(_LOOK_S):
        look()
    if failed:
        end = time.monotonic() + _CAUSE_S
        while time.monotonic() < end:
            look()
            time.sleep(_LOOK_S / 10)
        raise failed[0]
    return made[0]
