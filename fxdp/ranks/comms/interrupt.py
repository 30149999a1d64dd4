"""The thread that is inside a compiled call, and how the watch ends what it does there.

After another rank has failed a collective breaks by itself. Python code does not: a model that is being
compiled would be compiled for minutes, for nobody. There the watch raises `Interrupted` inside of that
thread, of which `guard` of `ranks/failure.py` makes the error that names the rank at fault:

    Python code              it is raised at the next bytecode, as Ctrl-C would
    a system call            the main thread is woken by a signal (SIGURG, which else does nothing)
    C++ (gloo, a compiler)   it waits until that returns; only a collective that never does ends the
                             process, as gloo can lose a wake-up
"""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
import time
from types import FrameType

_AGAIN_S = 2.0  # before it is raised again: code that catches all errors may have caught it
_COLLECTIVES = (
    "torch/distributed/distributed_c10d.py", "fxdp/runtime/p2p.py", "fxdp/ranks/comms/host_sums.py",
)  # fmt: skip
_DEPTH = 4  # frames from torch's call of an op to the thread's innermost one


class Interrupted(BaseException):
    """What this thread does is for nobody any more, as another rank has failed.

    No `Exception`: tracing and compiling try one way, catch what goes wrong, and try another one.
    """

    def __str__(self) -> str:
        return "interrupted here, as another rank has failed"


class Caller:
    """Enters and leaves calls in one thread; `interrupt` is for the watch.

    Attributes
    ----------
    active : whether a call is under way.
    interrupted : whether `Interrupted` was raised inside of it.
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
                _raise_in(self.thread, wanted=False)

    def has_been(self, thread: int | None) -> bool:
        """Whether this thread has ever made a call."""
        return thread in self._seen

    def interrupt(self) -> None:
        """Raise `Interrupted` inside of the call, now and again every few seconds while it goes on."""
        with self._lock:
            now = time.monotonic()
            if not self.active or (self._at and now - self._at < _AGAIN_S):
                return
            self._at, self.interrupted = now, True
            _raise_in(self.thread, wanted=True)

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


def _raise_in(thread: int, wanted: bool) -> None:
    """Make a thread raise `Interrupted`; or take back what it has not raised yet."""
    raised = ctypes.py_object(Interrupted) if wanted else None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), raised)
    is_main = thread == threading.main_thread().ident  # signals are handled there only
    if wanted and is_main and signal.getsignal(signal.SIGURG) is _wake_up:
        signal.pthread_kill(thread, signal.SIGURG)


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
