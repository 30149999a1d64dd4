"""How a process that ends tells the other ranks why, whoever ends it.

    an error leaves the main thread      sys.excepthook, or at exit, if somebody else has replaced that hook
    ... another thread                   threading.excepthook, if the thread has called a compiled module
    Ctrl-C inside of a destructor        Python would drop it: sys.unraisablehook interrupts the thread again
    SIGTERM                              said as such, then the process ends by it as it would without this
    SIGKILL, os._exit, a crash           nothing is said; the connections end

Where nobody calls these (a child of multiprocessing), `report_errors()` of `ranks/failure.py` does the same.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import functools
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from fxdp.ranks.comms import Departure, DepartureKind, broadcast_everywhere, speaking_comms
from fxdp.ranks.comms.interrupt import prepare_signal
from fxdp.ranks.failure import broadcast_all
from fxdp.torch_compat import replace_for_good

_TERMINATED = (
    "it was ended by SIGTERM: by the scheduler, by torchrun as another rank or its host failed, or by hand"
)
_AGAIN_S = 0.05


@functools.cache
def install_hook() -> None:
    """Chain the hooks for errors that end this process, and note SIGTERM. Done once."""
    replace_for_good("sys:excepthook", _error_hook)
    replace_for_good("threading:excepthook", _thread_hook)
    replace_for_good("sys:unraisablehook", _unraisable_hook)
    prepare_signal()
    _Termination().install()


def _error_hook(previous: Callable[..., Any]) -> Callable[..., None]:
    def broadcast_then_show(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(Exception):
            broadcast_all(error)
        previous(kind, error, trace)

    return broadcast_then_show


def _thread_hook(previous: Callable[..., Any]) -> Callable[..., None]:
    def broadcast_then_show(args: Any) -> None:
        thread = args.thread.ident if args.thread is not None else None
        # a thread of a progress bar or of a logger may fail without an end to the training
        if args.exc_value is not None and any(comms.caller.has_been(thread) for comms in speaking_comms()):
            with contextlib.suppress(Exception):
                broadcast_all(args.exc_value)
        previous(args)

    return broadcast_then_show


def _unraisable_hook(previous: Callable[..., Any]) -> Callable[..., None]:
    def not_ctrl_c(args: Any) -> None:
        # a trace makes and drops so many objects that one Ctrl-C in some fifty would be lost
        if issubclass(args.exc_type, KeyboardInterrupt):
            later = threading.Timer(_AGAIN_S, _interrupt_again)  # what is raised in here is dropped, too
            later.daemon = True
            later.start()
        else:
            previous(args)

    return not_ctrl_c


def _interrupt_again() -> None:
    main = threading.main_thread().ident
    if main is not None and callable(signal.getsignal(signal.SIGINT)):
        signal.pthread_kill(main, signal.SIGINT)


@atexit.register
def _broadcast_uncaught() -> None:
    """What Python noted before it asked `sys.excepthook`, which may be somebody else's by now."""
    error = getattr(sys, "last_value", None)
    interactive = hasattr(sys, "ps1") or hasattr(builtins, "__IPYTHON__")  # where errors do not end a process
    if isinstance(error, BaseException) and not interactive:
        with contextlib.suppress(Exception):
            broadcast_all(error)


class _Termination:
    """SIGTERM: the last words, then the default end.

    Python runs handlers in the main thread only, between bytecodes: a main thread that waits in C++ would
    outlive the signal. So a thread hears of it, too, by the descriptor to which Python writes each signal.
    """

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._once = threading.Lock()

    def install(self) -> None:
        """Where nobody else handles SIGTERM or reads signals; from the main thread only."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
            ours.close()
            theirs.close()
            return
        theirs.detach()  # Python writes to it until the process ends
        signal.signal(signal.SIGTERM, self._handle)
        threading.Thread(target=self._listen, args=(ours,), name="fxdp-signals", daemon=True).start()
        atexit.register(self._give_back)
        os.register_at_fork(after_in_child=self._give_back)

    def _give_back(self) -> None:
        """No thread listens any more, at exit or in a forked child: the signal does what it did before."""
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._end()

    def _listen(self, signals: socket.socket) -> None:
        while data := signals.recv(64):
            if signal.SIGTERM in data:
                self._end()

    def _end(self) -> None:
        if os.getpid() == self._owner and self._once.acquire(blocking=False):
            with contextlib.suppress(Exception):
                if not speaking_comms():
                    broadcast_everywhere(_TERMINATED)
                for comms in speaking_comms():
                    own = Departure(comms.rank, DepartureKind.FAILED, _TERMINATED)
                    comms.control.broadcast_failure(comms.departure or own)
            # as `signal.signal` is for the main thread only
            ctypes.CDLL(None).signal(int(signal.SIGTERM), None)
            os.kill(os.getpid(), signal.SIGTERM)
