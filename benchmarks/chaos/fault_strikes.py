"""What happens to a rank that is disturbed: anywhere to its process, or to what it passes to a call."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

PAUSE_S = 1.5


def _raise(error: BaseException) -> Callable[[], None]:
    def run() -> None:
        raise error

    return run


def _signal(number: int) -> Callable[[], None]:
    def run() -> None:
        os.kill(os.getpid(), number)
        time.sleep(20)  # Python handles it between two bytecodes

    return run


def _pause() -> None:
    subprocess.Popen(["sh", "-c", f"sleep {PAUSE_S}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def _recurse() -> None:
    _recurse()


STRIKES: dict[str, Callable[[], None]] = {
    "SIGKILL": _signal(signal.SIGKILL),
    "SIGTERM": _signal(signal.SIGTERM),
    "SIGABRT": _signal(signal.SIGABRT),
    "SIGINT": _signal(signal.SIGINT),
    "error": _raise(ValueError("the reason")),
    "error in a thread": _raise(ValueError("the reason")),
    "out of memory": _raise(MemoryError("the reason")),
    "recursion": _recurse,
    "sys.exit": lambda: sys.exit(3),
    "os._exit": lambda: os._exit(3),
    "pause": _pause,
    "hang": lambda: None,  # `fault_rank.py` waits, until the others know
}
"""What happens to the rank itself, anywhere."""

FROM_OUTSIDE = ("SIGKILL", "SIGTERM", "SIGABRT", "SIGINT", "os._exit")
"""What can happen at any moment, whatever the rank does."""


def _nan(model: Any, x: Tensor, y: Tensor) -> Tensor:
    x[0, 0] = float("nan")
    return model(x, y)  # type: ignore[no-any-return]


def _label(model: Any, x: Tensor, y: Tensor) -> Tensor:
    y[0] = 17
    return model(x, y)  # type: ignore[no-any-return]


def _evaluation(model: Any, x: Tensor, y: Tensor) -> Tensor:
    model.eval()
    try:
        with torch.no_grad():
            return model(x, y)  # type: ignore[no-any-return]
    finally:
        model.train()


REFUSED: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "other keys": lambda model, x, y: model(x=x, y=y),
    "an argument more": lambda model, x, y: model(x, y, None),
    "another dtype": lambda model, x, y: model(x.double(), y),
    "another dtype of labels": lambda model, x, y: model(x, y.int()),
    "another number of dims": lambda model, x, y: model(x[None], y),
    "another width": lambda model, x, y: model(x[:, :5], y),
    "parts of two sizes": lambda model, x, y: model(x, y[:3]),
    "no tensor": lambda model, x, y: model(x.numpy(), y),
    "a bad sample": _nan,
    "a bad label": _label,
    "evaluation of one rank": _evaluation,
}
"""What a rank passes that the others do not: the call is refused, and the next one works."""
