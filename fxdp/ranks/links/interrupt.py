"""The thread that is inside a compiled call, and how the watch ends what it does there.

After another rank has failed a collective breaks by itself. Python code does not: a model that is being
compiled would be compiled for minutes, for nobody. There the watch raises the error inside of that thread:

    Python code              the error is raised at the next bytecode, as Ctrl-C would
    a system call            the main thread is woken by a signal (SIGURG, which else does nothing)
    C++ (gloo, a compiler)   the error waits until it returns; only a collective that never does ends the
                             process, as gloo can lose a wake-up
"""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
import time
from types import FrameType

from fxdp.errors import RankFailedError

_AGAIN_S = 5.0  # before the error is raised again: code that catches all errors may have caught it
_COLLECTIVES = ("torch/distributed/distributed_c10d.py", "fxdp/runtime/p2p.py")
_DEPTH = 4  # frames from torch's call of an op to the thread's innermost one


class Caller:
    """Enters and leaves calls in one thread; `interrupt` is for the watch.

    Attributes
    ----------
    active : whether a call is under way.
    interrupted : whether an error was raised inside of it.
    thread : the one that has entered last; 0 before.
    """

    def __init__(self) -> None:
        self.active = self.interrupted = False
        self.thread = 0
        self._seen: set[int] = set()
        self._at = 0.0
        self._lock = threading.Lock()

    def enter(self) -> None:
        """This thread begins a call."""
        with self._lock:
            self.thread = threading.get_ident()
            self._seen.add(self.thread)
            self._at = 0.0
            self.active, self.interrupted = True, False

    def leave(self) -> None:
        """The call has ended, and with it what was about to be raised inside of it."""
        with self._lock:
            self.active = False
            if self.interrupted:
                _raise_in(self.thread, None)

    def has_been(self, thread: int | None) -> bool:
        """Whether this thread has ever made a call."""
        return thread in self._seen

    def interrupt(self, text: str) -> None:
        """Raise `RankFailedError` inside of the call, now and again every few seconds while it goes on."""
        with self._lock:
            now = time.monotonic()
            if not self.active or (self._at and now - self._at < _AGAIN_S):
                return
            self._at, self.interrupted = now, True
            _raise_in(self.thread, text)

    def frame(self) -> FrameType | None:
        """Where the thread is."""
        return sys._current_frames().get(self.thread)


def prepare_signal() -> None:
    """Let the main thread be woken out of system calls; to be called there. Another's handler stays."""
    try:
        if signal.getsignal(signal.SIGURG) is signal.SIG_DFL:
            signal.signal(signal.SIGURG, _wake_up)
    except ValueError:  # not the main thread
        return


def _wake_up(number: int, frame: FrameType | None) -> None:
    """Python code, so that the error that waits is raised here, inside of the system call."""


def _raise_in(thread: int, text: str | None) -> None:
    """Make a thread raise `RankFailedError`; None takes back what it has not raised yet."""
    raised = None if text is None else ctypes.py_object(_error_class(text))
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)
    is_main = thread == threading.main_thread().ident  # signals are handled there only
    if text is not None and is_main and signal.getsignal(signal.SIGURG) is _wake_up:
        signal.pthread_kill(thread, signal.SIGURG)


def _error_class(text: str) -> type[RankFailedError]:
    """Python makes the error itself, of a class without arguments: so the class has the words."""

    def __init__(self: RankFailedError) -> None:  # noqa: N807
        RankFailedError.__init__(self, text)

    return type("RankFailedError", (RankFailedError,), {"__init__": __init__, "__module__": "fxdp.errors"})


def in_collective(frame: FrameType | None) -> bool:
    """Whether a thread waits in a collective in C++: by the innermost frames, as C++ has none."""
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
