"""Start the ranks of a script as forks, wait for them, and end all when one fails.

    parent ──┬── rank 0    has the terminal: input, output, exit code
             ├── rank 1    writes into logs/rank1.txt
             └── ...

A rank is a fork that returns from `start_ranks` and ends as any Python program does, `atexit` included. The
parent waits: for a rank that ends, for Ctrl-C (which a terminal sends to all), for SIGTERM.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxdp.errors import StateError
from fxdp.ranks.forked_store import ForkedStore
from fxdp.settings.launch import Launch, become

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_POLL_S = 0.05
_TOLD_S, _TERMINATED_S = 2.5, 1.0
"""Seconds after the first failure until SIGTERM, and from there until SIGKILL."""
_TAIL_LINES = 30
_PR_SET_PDEATHSIG = 1


@dataclass
class _Rank:
    pid: int
    code: int | None = None
    """The exit code; minus the signal's number if it died of a signal."""


def start_ranks(nproc: int, logs: Path) -> int | None:
    """Fork the ranks; return None in each rank, and the exit code for the script in the parent, when all end.

    In a rank the environment is as under torchrun.

    Raises
    ------
    StateError : on another system than Linux, whose `prctl` ends ranks with their parent.
    """
    if sys.platform != "linux":
        raise StateError(
            f"fxdp run forks ranks that Linux ends with their parent, and this is {sys.platform}; expected "
            "Linux, or fxdp.compile in a script under torchrun"
        )
    store = ForkedStore()
    parent, received = os.getpid(), list[int]()
    before = {number: signal.signal(number, lambda n, _: received.append(n)) for number in _SIGNALS}
    ranks: list[_Rank] = []
    for rank in range(nproc):
        pid = os.fork()
        if not pid:
            _die_with(parent)
            store.leave()
            _restore(before)
            become(Launch(rank, nproc, rank, "127.0.0.1", store.port))
            return None
        ranks.append(_Rank(pid))
    try:
        store.serve()
        asked = _wait(ranks, received)
    finally:
        _kill(ranks, signal.SIGKILL)
        _restore(before)
        _clear(logs)
    return _told(ranks, logs, asked)


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _restore(handlers: Mapping[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _wait(ranks: Sequence[_Rank], received: list[int]) -> int:
    """Return when all ranks have ended; end them all if one fails or the user interrupts.

    Returns the last signal that this process was sent, 0 if none.
    """
    deadline, harder, number = float("inf"), False, 0
    while any(rank.code is None for rank in ranks):
        time.sleep(_POLL_S)
        if received:
            number = received.pop(0)
            if number != signal.SIGINT or not _in_foreground():
                _kill(ranks, signal.Signals(number))
            deadline = min(deadline, time.monotonic() + _TOLD_S)
        _reap(ranks)
        if any(rank.code for rank in ranks):
            deadline = min(deadline, time.monotonic() + _TOLD_S)
        if time.monotonic() >= deadline:
            _kill(ranks, signal.SIGKILL if harder else signal.SIGTERM)
            deadline, harder = time.monotonic() + _TERMINATED_S, True
    return number


def _in_foreground() -> bool:
    """Return whether a terminal's Ctrl-C reaches the ranks, too."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _reap(ranks: Sequence[_Rank]) -> None:
    for rank in ranks:
        if rank.code is None:
            pid, status = os.waitpid(rank.pid, os.WNOHANG)
            if pid:
                rank.code = os.waitstatus_to_exitcode(status)


def _kill(ranks: Sequence[_Rank], number: signal.Signals) -> None:
    for rank in ranks:
        if rank.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, number)


def _told(ranks: Sequence[_Rank], logs: Path, asked: int) -> int:
    """Return the exit code, after words on each rank that alone has failed.

    Ranks that had to be ended after Ctrl-C, or another signal `asked`, died of that one for who has sent it.
    """
    codes = [rank.code or 0 for rank in ranks]
    if not any(codes):
        return 0
    if asked and codes[0] < 0:
        sys.stderr.write(f"fxdp run: ended by {signal.Signals(asked).name}\n")
    for rank, code in enumerate(() if asked else codes):
        if code and (code < 0 or not codes[0]):
            how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            sys.stderr.write(f"fxdp run: rank {rank} of {len(codes)} {how}{_tail(rank, logs)}\n")
    code = codes[0] or next(code for code in codes if code)
    return code if code > 0 else 128 + (asked or -code)


def _tail(rank: int, logs: Path) -> str:
    if rank == 0:
        return ""
    path = log_of(rank, logs)
    with contextlib.suppress(OSError):
        lines = path.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        if lines:
            return f"; the end of {path}:\n" + "\n".join(f"  {line}" for line in lines)
    return ""


def _clear(logs: Path) -> None:
    """Remove what the ranks above 0 have written, and copies of files that rank 0 has changed."""
    (logs / "new_files").unlink(missing_ok=True)
    for folder in (logs / "before", *logs.glob("rank*.files")):
        shutil.rmtree(folder, ignore_errors=True)


def log_of(rank: int, logs: Path) -> Path:
    """Return the file with a rank's output."""
    return logs / f"rank{rank}.txt"


def write_into(path: Path) -> None:
    """Let this process and its children write standard output and error into a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    path.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
