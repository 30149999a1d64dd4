"""Interrupt the thread inside a compiled call after another rank has failed.

Then a collective breaks by itself. Python code does not: compiling a model would continue for minutes, in
vain. The watch raises `Interrupted` inside that thread, and `guard` of `ranks/liveness/failure.py` turns
this into the error that names the rank at fault:

    Python code              raised at the next bytecode, like Ctrl-C
    a system call            the main thread is woken by a signal (SIGURG, which is ignored by default)
    C++ (gloo, a compiler)   raised after the C++ code returns; only a collective that never returns ends the
                             process, as gloo can lose a wake-up
"""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
import time
from types import FrameType

_AGAIN_S = 2.0  # before raising again: code that catches all errors may have caught the first one
_COLLECTIVES = (
    "torch/distributed/distributed_c10d.py", "fxdp/runtime/p2p.py", "fxdp/transport/host_sums.py",
)  # fmt: skip
_DEPTH = 4  # frames from torch's call of an op to the thread's innermost frame


class Interrupted(BaseException):
    """Raised in a thread that works in vain, as another rank has failed.

    Not an `Exception`: tracing and compiling try one way, catch any error, and try a different way.
    """

    def __str__(self) -> str:
        return "interrupted here, as another rank has failed"


class Caller:
    """The thread inside a compiled call, which enters and leaves; `interrupt` is for the watch.

    Attributes
    ----------
    active : True during a call.
    interrupted : True if `Interrupted` was raised inside the call.
    thread : the thread that has entered last; 0 before.
    """

    def __init__(self) -> None:
        self.active = self.interrupted = False
        self.thread = 0
        self._seen: set[int] = set()
        self._at = 0.0
        self._lock = threading.Lock()

    def enter(self) -> None:
        """Begin a call in this thread."""
        with self._lock:
            self.thread = threading.get_ident()
            self._seen.add(self.thread)
            self._at = 0.0
            self.active, self.interrupted = True, False

    def leave(self) -> None:
        """End the call, and cancel an interrupt that has not been raised yet."""
        with self._lock:
            self.active = False
            if self.interrupted:
                _raise_in(self.thread, wanted=False)

    def has_been(self, thread: int | None) -> bool:
        """Return whether this thread has ever made a call."""
        return thread in self._seen

    def interrupt(self) -> None:
        """Raise `Interrupted` inside the call, and again every few seconds while the call continues."""
        with self._lock:
            now = time.monotonic()
            if not self.active or (self._at and now - self._at < _AGAIN_S):
                return
            self._at, self.interrupted = now, True
            _raise_in(self.thread, wanted=True)

    def frame(self) -> FrameType | None:
        """Return the thread's current frame."""
        return sys._current_frames().get(self.thread)


def prepare_signal() -> None:
    """Install a handler by which the main thread wakes from system calls, unless SIGURG is in use.

    Must be called in the main thread.
    """
    try:
        if signal.getsignal(signal.SIGURG) is signal.SIG_DFL:
            signal.signal(signal.SIGURG, _wake_up)
    except ValueError:  # not the main thread
        return


def _wake_up(number: int, frame: FrameType | None) -> None:
    """Run Python code, so that a pending error is raised inside the system call."""


def _raise_in(thread: int, wanted: bool) -> None:
    """Make a thread raise `Interrupted`, or cancel an interrupt that has not been raised yet."""
    raised = ctypes.py_object(Interrupted) if wanted else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)
    is_main = thread == threading.main_thread().ident  # only the main thread handles signals
    if wanted and is_main and signal.getsignal(signal.SIGURG) is _wake_up:
        signal.pthread_kill(thread, signal.SIGURG)


def in_collective(frame: FrameType | None) -> bool:
    """Return whether a thread waits in a collective in C++, judged by the innermost Python frames."""
    if frame is None:
        return False
    if frame.f_code.co_filename.endswith(_COLLECTIVES):
        return True
    for _ in range(_DEPTH):
        op = frame.f_locals.get("self")
        if frame.f_code.co_filename.endswith("torch/_ops.py") and "c10d" in str(op):
            return True
        if frame.f_back is None:
            return False
        frame = frame.f_back
    return False
