"""Work that may crash, or never end, in a process of its own, with a time limit."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

Result = dict[str, Any]


def in_own_process(parts: Sequence[str], work: Callable[[str], Result], timeout: float) -> dict[str, Result]:
    """The results of some parts, in order; one that was not reached in so many CPU seconds says so."""
    context = multiprocessing.get_context("fork")  # torch and the libraries are imported once
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work_on, args=(parts, work, theirs, int(timeout)))
    process.start()
    theirs.close()
    found: dict[str, Result] = {}
    end = time.monotonic() + 8 * timeout  # on a busy machine; the process limits itself
    while len(found) < len(parts) and ours.poll(max(0.0, end - time.monotonic())):
        try:
            part, result = ours.recv()
        except EOFError:
            break
        found[part] = result
    if process.is_alive() and len(found) < len(parts) and process.pid is not None:
        os.kill(process.pid, signal.SIGKILL)
    process.join()
    late = process.exitcode in (-signal.SIGKILL, -signal.SIGXCPU)
    reason = f"no result within {timeout} s" if late else "the process died"
    return {part: found.get(part, {"failed": "not measured", "why": reason}) for part in parts}


def _work_on(parts: Sequence[str], work: Callable[[str], Result], answers: Any, limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit + 5))
    for part in parts:
        start = time.process_time()
        result = work(part)
        answers.send((part, {**result, "seconds": round(time.process_time() - start, 1)}))
