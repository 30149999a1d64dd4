"""Errors that end a process are told, whoever shows them."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from fxdp.ranks import hooks
from fxdp.ranks.liveness.interrupt import Caller
from fxdp.torch_compat import replace_for_good
from tests.limits import HANG_S


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What other ranks would hear."""
    said: list[str] = []
    monkeypatch.setattr(hooks, "broadcast_all", lambda error: said.append(str(error)))
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: said.append(f"shown {error}"))
    monkeypatch.setattr(threading, "excepthook", lambda args: said.append(f"shown {args.exc_value}"))
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    monkeypatch.setattr(hooks._Termination, "install", lambda _: None)
    before = signal.getsignal(signal.SIGURG)
    hooks.install_hook.cache_clear()
    yield said
    signal.signal(signal.SIGURG, before)
    hooks.install_hook.cache_clear()


def test_hook_is_chained_once(told: list[str]) -> None:
    hooks.install_hook()
    hooks.install_hook()
    sys.excepthook(ValueError, ValueError("x"), None)
    assert told == ["x", "shown x"]


def test_a_replaced_hook_is_made_up_for_at_exit(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    hooks.install_hook()
    monkeypatch.setattr(sys, "last_value", ValueError("x"), raising=False)
    hooks._broadcast_uncaught()
    assert told == ["x"]
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)  # an error of a cell does not end a notebook
    hooks._broadcast_uncaught()
    assert told == ["x"]


def test_an_error_in_a_thread_is_told_if_the_thread_trains(
    told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    comms: Any = SimpleNamespace(liveness=SimpleNamespace(caller=Caller()))
    monkeypatch.setattr(hooks, "speaking_comms", lambda: [comms])
    hooks.install_hook()

    def run(trains: bool) -> None:
        if trains:
            comms.liveness.caller.enter()
            comms.liveness.caller.leave()
        raise ValueError(f"trains {trains}")

    for trains in (False, True):
        thread = threading.Thread(target=run, args=(trains,))
        thread.start()
        thread.join()
    assert told == ["shown trains False", "trains True", "shown trains True"]


class _Dropped:
    def __del__(self) -> None:
        raise KeyboardInterrupt


def _drop_and_wait() -> None:
    dropped = _Dropped()
    del dropped
    time.sleep(HANG_S)


def test_ctrl_c_inside_of_a_destructor_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    replace_for_good("sys:unraisablehook", hooks._unraisable_hook)
    known = signal.signal(signal.SIGINT, signal.default_int_handler)  # what a shell starts by & ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            _drop_and_wait()  # the second one may come at once, on a busy machine
    finally:
        signal.signal(signal.SIGINT, known)
    assert not seen


def test_other_errors_of_destructors_are_shown_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    replace_for_good("sys:unraisablehook", hooks._unraisable_hook)
    monkeypatch.setattr(_Dropped, "__del__", lambda _: 1 / 0)
    dropped = _Dropped()
    del dropped
    assert len(seen) == 1


_OWN_HANDLER = """
import os, signal, time
from fxdp.ranks.hooks import _Termination
_Termination().install()
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
child = os.fork()
if not child:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.2)
    os._exit(len(told))
_, status = os.waitpid(child, 0)
assert told == []
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.2)
print(len(told), os.waitstatus_to_exitcode(status))
"""


def test_a_script_s_own_handler_of_sigterm_is_obeyed_by_it_and_its_children() -> None:
    command = [sys.executable, "-W", "ignore", "-c", _OWN_HANDLER]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=True)
    assert ended.stdout.split() == ["1", "1"]
