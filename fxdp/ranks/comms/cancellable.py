"""A wait inside of torch that this process can leave: torch has no way to end one before its timeout."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

_LOOK_S = 0.5
_CAUSE_S = 1.0  # for the cause of an error inside of torch, which seldom names the rank at fault

T = TypeVar("T")


def made_while_looking(make: Callable[[], T], look: Callable[[], None]) -> T:
    """`make()` in a thread of its own; meanwhile `look()` is asked, and what it raises is raised here.

    A thread that is left behind ends with torch's timeout or with the process.
    """
    made: Future[T] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except BaseException as error:
            made.set_exception(error)

    # of a pool the process would wait for threads that are left behind
    threading.Thread(target=run, name="fxdp-opening", daemon=True).start()
    while not wait([made], _LOOK_S).done:
        look()
    end = time.monotonic() + _CAUSE_S
    while made.exception() is not None and time.monotonic() < end:
        look()
        time.sleep(_LOOK_S / 10)
    return made.result()
