"""Hooks by which a process that ends tells all ranks the reason.

    an error leaves the main thread      sys.excepthook, or at exit if other code has replaced that hook
    an error leaves another thread       threading.excepthook, if the thread has called a compiled module
    Ctrl-C inside a destructor           Python would drop this: sys.unraisablehook interrupts again
    SIGTERM                              reported, then the process ends by the signal as usual
    SIGKILL, os._exit, a crash           nothing is reported; the connections end

Where these hooks are not called (a child of multiprocessing), use `report_errors()` of
`ranks/liveness/failure.py`.
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
from types import TracebackType
from typing import Any

from fxdp.ranks.comms import Departure, DepartureKind, broadcast_everywhere, speaking_comms
from fxdp.ranks.liveness.failure import broadcast_all
from fxdp.ranks.liveness.interrupt import prepare_signal
from fxdp.torch_compat import replace_for_good

_TERMINATED = (
    "it was ended by SIGTERM: by the scheduler, by torchrun as another rank or its host failed, or by hand"
)
_AGAIN_S = 0.05


@functools.cache
def install_hook() -> None:
    """Chain the hooks for errors that end this process, and for SIGTERM; later calls do nothing."""
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
        callers = [comms.liveness.caller for comms in speaking_comms()]
        if args.exc_value is not None and any(caller.has_been(thread) for caller in callers):
            with contextlib.suppress(Exception):
                broadcast_all(args.exc_value)
        previous(args)

    return broadcast_then_show


def _unraisable_hook(previous: Callable[..., Any]) -> Callable[..., None]:
    def not_ctrl_c(args: Any) -> None:
        # tracing creates and drops so many objects that one Ctrl-C in fifty would be lost
        if issubclass(args.exc_type, KeyboardInterrupt):
            later = threading.Timer(_AGAIN_S, _interrupt_again)  # errors in here would be dropped, too
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
    """Broadcast an uncaught error at exit, in case `sys.excepthook` has been replaced by other code."""
    error = getattr(sys, "last_value", None)
    interactive = hasattr(sys, "ps1") or hasattr(builtins, "__IPYTHON__")  # where errors do not end a process
    if isinstance(error, BaseException) and not interactive:
        with contextlib.suppress(Exception):
            broadcast_all(error)


class _Termination:
    """Handler of SIGTERM, which reports the signal and then ends the process.

    Python runs signal handlers only in the main thread, between bytecodes: a main thread that waits in C++
    would outlive the signal. So a second thread reads the descriptor to which Python writes each signal. A
    handler that a script installs afterwards is obeyed instead.
    """

    def __init__(self) -> None:
        self._owner, self._wakeup = os.getpid(), -1
        self._once = threading.Lock()

    def install(self) -> None:
        """Install the handler, unless SIGTERM or the wakeup descriptor is in use; only in the main thread."""
        main = threading.current_thread() is threading.main_thread()
        if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
            ours.close()
            theirs.close()
            return
        self._wakeup = theirs.detach()  # Python writes to it until the process ends
        signal.signal(signal.SIGTERM, self._end)
        threading.Thread(target=self._listen, args=(ours,), name="fxdp-signals", daemon=True).start()
        atexit.register(self._give_back)
        os.register_at_fork(after_in_child=self._give_back)

    def _give_back(self) -> None:
        """Restore the default handler at exit and in a forked child, where no thread listens any more."""
        if self._is_in_charge():
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        before = signal.set_wakeup_fd(-1)
        if before != self._wakeup:  # a script's own
            signal.set_wakeup_fd(before)

    def _is_in_charge(self) -> bool:
        return signal.getsignal(signal.SIGTERM) == self._end

    def _listen(self, signals: socket.socket) -> None:
        while data := signals.recv(64):
            if signal.SIGTERM in data and self._is_in_charge():
                self._end()

    def _end(self, *_: object) -> None:
        if os.getpid() == self._owner and self._once.acquire(blocking=False):
            with contextlib.suppress(Exception):
                if not speaking_comms():
                    broadcast_everywhere(_TERMINATED)
                for comms in speaking_comms():
                    own = Departure(comms.rank, DepartureKind.FAILED, _TERMINATED)
                    comms.control.broadcast_failure(comms.liveness.departure or own)
            # in C, because `signal.signal` works only in the main thread
            ctypes.CDLL(None).signal(int(signal.SIGTERM), None)
            os.kill(os.getpid(), signal.SIGTERM)
