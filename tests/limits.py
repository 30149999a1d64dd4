"""Limits of tests, in seconds: they end what hangs, measure nothing, and are longer on a slow machine.

    HANG_S         ranks, threads and programs that a test starts have ended by then, or hang
    SOON_S         what ends by itself has ended by then, well before a limit would end it
    TEST_S         one test, which may start ranks several times
    scaled(0.5)    half a second on the usual machine, of what a test waits for on purpose

The speed of the machine is measured once, by the first process of a session, in 0.06 s. Processes that it
starts read it in their environment.
"""

from __future__ import annotations

import os
import time

_VARIABLE = "TESTS_SLOWNESS"
_TURNS, _USUAL_S = 1_600_000, 0.06
_MOST = 20.0


def measured() -> float:
    """Measure how many times longer than on the usual machine a loop takes, beside all else that runs."""
    begin = time.perf_counter()
    total = 0
    for number in range(_TURNS):
        total += number * number % 7
    return min(max((time.perf_counter() - begin) / _USUAL_S, 1.0), _MOST)


SLOWNESS = float(os.environ.get(_VARIABLE) or measured())
os.environ[_VARIABLE] = str(SLOWNESS)


def scaled(seconds: float) -> float:
    """Seconds on this machine for seconds on the usual one, with two digits, as they stand in messages."""
    return float(f"{seconds * SLOWNESS:.2g}")


HANG_S = scaled(300.0)
SOON_S = HANG_S / 3
TEST_S = HANG_S * 3
