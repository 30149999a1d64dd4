"""Fresh processes of this machine, one per rank, in the environment that torchrun would give them.

The parent holds the store, so no port is guessed, and it knows each child by its process id:

    parent ── store ──┬── rank 0   its output is the user's
                      ├── rank 1   its output is kept, and shown if it fails
                      └── ...
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from torch.distributed import TCPStore

_POLL_SECONDS = 0.05
_GRACE_SECONDS = 10.0
_SHOWN_LINES = 40


@dataclass(frozen=True, slots=True)
class _Child:
    rank: int
    process: subprocess.Popen[bytes]
    errors: Path

    @property
    def failed(self) -> bool:
        return self.process.poll() not in (None, 0)


def launch(
    command: Sequence[str],
    ranks: int,
    *,
    environment: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> int:
    """Run `command` once per rank and return the first failure's exit code, or 0.

    If one fails, or `timeout` seconds have passed, the others are stopped and its error is shown.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // ranks)),
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        **(environment or {}),
    }
    with tempfile.TemporaryDirectory(prefix="fxdp-") as folder:
        children: list[_Child] = []
        with _terminate_as_exit():
            try:
                for rank in range(ranks):
                    children.append(_start(command, rank, shared, Path(folder)))
                return _wait(children, timeout)
            finally:
                _stop(children)


@contextmanager
def _terminate_as_exit() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that the children are not left behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _start(command: Sequence[str], rank: int, shared: Mapping[str, str], folder: Path) -> _Child:
    errors = folder / f"rank{rank}"
    with errors.open("wb") as log:
        process = subprocess.Popen(
            command,
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=None if rank == 0 else log,
            stderr=log,
        )
    return _Child(rank, process, errors)


def _wait(children: Sequence[_Child], timeout: float | None) -> int:
    deadline = float("inf") if timeout is None else time.monotonic() + timeout
    while any(child.process.poll() is None for child in children):
        if any(child.failed for child in children):
            return _blame(children)
        if time.monotonic() > deadline:
            _say(f"the ranks were stopped after {timeout:.0f} s")
            return 124
        time.sleep(_POLL_SECONDS)
    return _blame(children) if any(child.failed for child in children) else 0


def _blame(children: Sequence[_Child]) -> int:
    """Show the error of the rank that failed first: the others only lost their peer."""
    time.sleep(1)  # one error makes the other ranks fail too: let those who must be compared end
    first = min((child for child in children if child.failed), key=lambda child: child.errors.stat().st_mtime)
    code = first.process.returncode
    how = f"exit code {code}" if code > 0 else f"signal {-code}"
    lines = first.errors.read_text(errors="replace").splitlines()
    _say(f"rank {first.rank} ended with {how}{':' if lines else ''}", *lines[-_SHOWN_LINES:])
    return code if code > 0 else 128 - code


def _say(*lines: str) -> None:
    Console(stderr=True).print("\n".join(lines), style="red", markup=False, highlight=False, soft_wrap=True)


def _stop(children: Sequence[_Child]) -> None:
    """End what still runs, by process id: ask first, then insist."""
    for child in children:
        if child.process.poll() is None:
            child.process.terminate()
    deadline = time.monotonic() + _GRACE_SECONDS
    for child in children:
        try:
            child.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()
