"""Cancellable waits inside torch, which by itself ends a wait only by a timeout."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

_LOOK_S = 0.5
_CAUSE_S = 1.0  # to learn the cause of an error inside torch, which seldom names the rank at fault

_T = TypeVar("_T")


def made_while_looking(make: Callable[[], _T], look: Callable[[], None]) -> _T:
    """Return `make()`, run in a new thread; meanwhile call `look()`, and raise any error from there.

    An abandoned thread ends with torch's timeout or with the process.
    """
    made: Future[_T] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except BaseException as error:
            made.set_exception(error)

    # not a thread pool: the process would wait for abandoned threads at exit
    threading.Thread(target=run, name="fxdp-opening", daemon=True).start()
    while not wait([made], _LOOK_S).done:
        look()
    end = time.monotonic() + _CAUSE_S
    while made.exception() is not None and time.monotonic() < end:
        look()
        time.sleep(_LOOK_S / 10)
    return made.result()
