"""Run a function on several ranks of this machine, from a script or a notebook cell (`launch`).

    parent ── store ──┬── rank 0   fn(*args), in the environment that torchrun would provide
                      ├── rank 1   fn(*args)
                      └── ...      each answers with a result, or the text of an error

Ranks are forks. So a function of a notebook cell, which cannot be imported, runs with everything that the
function refers to.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from fxdp.errors import InputError, RankFailedError, StateError, a_kind
from fxdp.ranks.forked_store import ForkedStore
from fxdp.ranks.liveness.failure import report_errors
from fxdp.settings import Settings
from fxdp.settings.launch import Launch, become

_GRACE_S = 2.0
"""Seconds to wait for all ranks after one has failed: all may fail, and the first is not always the cause."""

_AFTER_BACKWARD = (
    "This process has run a backward, for which torch started threads, as there are GPUs; forks would lack "
    "them. Expected launch before any backward, plan or compiled model (restart the notebook), or torchrun"
)


@dataclass(frozen=True)
class _Answer:
    result: bytes = b""
    error: str = ""
    follows: bool = False
    """True if the error only reports that another rank failed."""
    at: float = 0.0
    """Time of the error by this machine's clock; for a death, the time of detection."""


@dataclass(frozen=True)
class _Child:
    process: Any
    answers: Connection


def launch(
    fn: Callable[..., Any], *args: Any, nproc: int = 2, timeout: float | None = None, **kwargs: Any
) -> list[Any]:
    """Run `fn(*args, **kwargs)` on `nproc` ranks of this machine; return the results in rank order.

    `fn` runs in a process group, as under torchrun: `fxdp.compile(model)` uses all ranks. The ranks are
    forks of this process: they see copies of all variables. On a machine with GPUs each rank has a GPU.

    Raises
    ------
    RankFailedError : a rank raised an error or died (named with its traceback), or the time was up.
    StateError : this process is a rank already, or uses CUDA, which does not work in forks.
    InputError : `fn` is no function, or `nproc` is below 1.
    """
    _check(fn, nproc)
    store = ForkedStore()
    places = [Launch(rank, nproc, rank, "127.0.0.1", store.port) for rank in range(nproc)]
    with _terminated_as_exit(), _started(places, store, lambda: fn(*args, **kwargs)) as children:
        store.serve()
        answers = _collected(children, timeout)
        failed = {rank: answer for rank, answer in answers.items() if answer.error}
        if failed:
            rank = min(failed, key=lambda rank: (failed[rank].follows, failed[rank].at))
            error = failed[rank].error
            remedy = _AFTER_BACKWARD if "in combination with fork" in error else ""
            raise RankFailedError(f"rank {rank} of {nproc} {error}{remedy}")
        late = [str(rank) for rank in range(nproc) if rank not in answers]
        if late:
            raise RankFailedError(
                f"stopped after {timeout:g} s, as ranks {', '.join(late)} of {nproc} had no result yet"
            )
        return [pickle.loads(answers[rank].result) for rank in range(nproc)]


def _check(fn: Any, nproc: Any) -> None:
    if not callable(fn):
        raise InputError(
            f"launch was given {a_kind(fn)}, expected a function and its arguments: launch(train, 3, nproc=2)"
        )
    if not isinstance(nproc, int) or nproc < 1:
        raise InputError(f"nproc is {nproc!r}, expected a number of at least 1")
    if sys.platform != "linux":
        raise StateError(f"launch forks ranks as Linux does, and this is {sys.platform}; expected torchrun")
    place = Settings.from_environment().launch
    if place is not None or dist.is_initialized():
        who = f"rank {place.rank} of {place.world_size}" if place else f"rank {dist.get_rank()}"
        raise StateError(
            f"this process is {who} already (of torchrun, or of a process group); expected one that is no "
            "rank: call the function itself"
        )
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise StateError(
            "this process uses CUDA, which its forks could not; expected launch before anything is on a GPU "
            "(restart the notebook), or torchrun"
        )


@contextlib.contextmanager
def _started(places: Sequence[Launch], store: ForkedStore, run: Callable[[], Any]) -> Iterator[list[_Child]]:
    """Start the ranks; on exit, kill all that are still running."""
    context = multiprocessing.get_context("fork")
    children: list[_Child] = []
    try:
        for place in places:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_be_rank, args=(place, store, run, theirs), name=f"rank {place.rank}"
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks with threads
                process.start()
            theirs.close()
            children.append(_Child(process, ours))
        yield children
    finally:
        for child in children:
            child.answers.close()
            if child.process.is_alive():
                child.process.kill()
            child.process.join()


@contextlib.contextmanager
def _terminated_as_exit() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that no rank is left running; keep an existing handler."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    ):
        yield
        return
    signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit(number: int, _: Any) -> NoReturn:
    sys.exit(128 + number)


def _be_rank(place: Launch, store: ForkedStore, run: Callable[[], Any], answers: Connection) -> None:
    store.leave()
    if signal.getsignal(signal.SIGTERM) is _exit:  # a rank handles SIGTERM by itself, and reports the signal
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    become(place)
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // place.world_size))
    try:
        with report_errors():
            cuda = torch.cuda.is_available()
            if cuda:
                torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
            dist.init_process_group("nccl" if cuda else "gloo")
            answer = _Answer(pickle.dumps(run()))
    except BaseException as error:
        at = time.monotonic()
        text = f"raised {type(error).__name__}: {error}\n{traceback.format_exc()}"
        answer = _Answer(error=text, follows=isinstance(error, (RankFailedError, dist.DistError)), at=at)
    with contextlib.suppress(BrokenPipeError):
        answers.send(answer)
    if dist.is_initialized():
        dist.destroy_process_group()


def _collected(children: Sequence[_Child], timeout: float | None) -> dict[int, _Answer]:
    """Return each rank's answer; after an error, wait only briefly for the remaining ranks."""
    answers: dict[int, _Answer] = {}
    deadline = float("inf") if timeout is None else time.monotonic() + timeout
    while len(answers) < len(children):
        waiting = {child.answers: rank for rank, child in enumerate(children) if rank not in answers}
        left = deadline - time.monotonic()
        ready = wait(list(waiting), None if left == float("inf") else max(0.0, left))
        if not ready:
            break
        for connection in ready:
            rank = waiting[connection]  # type: ignore[index]
            answers[rank] = _received(children[rank])
        if any(answer.error for answer in answers.values()):
            deadline = min(deadline, time.monotonic() + _GRACE_S)
    return answers


def _received(child: _Child) -> _Answer:
    try:
        answer = child.answers.recv()
    except (EOFError, OSError):
        child.process.join()
        code = child.process.exitcode
        how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return _Answer(error=how, at=time.monotonic())
    assert isinstance(answer, _Answer)
    return answer
