"""An error raised inside of another thread, and only while it is in a call."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType, SimpleNamespace
from typing import Any, cast

import pytest
import torch

from fxdp.ranks.liveness.interrupt import Caller, Interrupted, in_collective, prepare_signal
from tests.limits import HANG_S, SOON_S


@pytest.fixture
def signals() -> Iterator[None]:
    """The handler that wakes the main thread."""
    before = signal.getsignal(signal.SIGURG)
    prepare_signal()
    yield
    signal.signal(signal.SIGURG, before)


def _interrupted_in(caller: Caller, seconds: float) -> threading.Timer:
    timer = threading.Timer(seconds, caller.interrupt)
    timer.start()
    return timer


@pytest.mark.parametrize("where", ["a loop", "sleep", "a lock"])
def test_python_code_and_system_calls_end_with_the_error(signals: None, where: str) -> None:
    caller, begin, tidied = Caller(), time.monotonic(), []
    timer = _interrupted_in(caller, 0.05)

    def call() -> None:
        try:
            if where == "sleep":
                time.sleep(HANG_S)
            if where == "a lock":
                threading.Event().wait(HANG_S)
            while where == "a loop":
                pass
        finally:
            tidied.append(where)

    caller.enter()
    with pytest.raises(Interrupted, match="another rank has failed"):
        call()
    caller.leave()
    timer.join()
    assert tidied == [where]
    assert time.monotonic() - begin < SOON_S


def test_nothing_is_raised_outside_of_a_call(signals: None) -> None:
    caller = Caller()
    caller.interrupt()
    caller.enter()
    caller.leave()
    caller.interrupt()
    for _ in range(1000):
        pass
    assert not caller.interrupted
    caller.enter()
    assert caller.has_been(threading.get_ident())
    caller.leave()


def test_it_is_raised_again_where_it_was_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxdp.ranks.liveness.interrupt._AGAIN_S", 0.0)
    caller, caught = Caller(), 0
    caller.enter()
    for _ in range(2):
        try:
            caller.interrupt()
            for _ in range(1000):
                pass
        except Interrupted:
            caught += 1
    caller.leave()
    assert caught == 2


def _frame(file: str, back: Any = None, **local: Any) -> FrameType:
    code = compile("", file, "exec")
    return cast("FrameType", SimpleNamespace(f_code=code, f_locals=local, f_back=back))


def test_a_collective_is_told_from_other_code() -> None:
    op = torch.ops._c10d_functional.wait_tensor.default
    own = sys._getframe()
    assert not in_collective(own)
    assert not in_collective(None)
    assert in_collective(_frame("/x/torch/distributed/distributed_c10d.py"))
    assert in_collective(_frame("/x/fxdp/runtime/p2p.py"))
    assert in_collective(_frame("/x/torch/_library/autograd.py", _frame("/x/torch/_ops.py", self=op)))
    assert not in_collective(_frame("/x/torch/_ops.py", self=torch.ops.aten.mm.default))
    assert not in_collective(_frame("/x/torch/distributed/tensor/_api.py"))
