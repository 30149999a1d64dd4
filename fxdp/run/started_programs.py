"""Programs that a script starts: rank 0 alone runs them, all ranks get output and return code.

    subprocess.run(["git", "rev-parse", "HEAD"])    os.system("mkdir -p out")    os.popen("hostname").read()

So a program that writes or downloads does so once. Of a process that goes on beside the script,
`wait`, `poll`, `communicate` and the lines of its output are rank 0's. Programs that libraries start, or that
a thread or a data set starts, are run on each rank.
"""

from __future__ import annotations

import io
import logging
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from typing import Any

from fxdp.errors import StateError
from fxdp.run.process_groups import refuse_launcher
from fxdp.run.rank_zero import RankZero
from fxdp.run.script_lines import is_asked_by_script, script_line
from fxdp.run.standard_input import SharedReader
from fxdp.torch_compat import Patch, around

_log = logging.getLogger("fxdp")
_THROUGH = ("os", "subprocess", "contextlib")
_SHARED = "_fxdp_shared"
"""The attribute of a process that rank 0 alone has started; its value is the line."""


def program_patches(rank_zero: RankZero) -> Iterator[Patch]:
    """Yield the replacements of calls that start programs."""
    calls = _Programs(rank_zero)
    yield Patch(os, "system", around(calls.system))
    yield Patch(os, "popen", around(calls.popen))
    yield Patch(subprocess.Popen, "__init__", around(calls.start))
    for name in ("wait", "poll", "communicate"):
        yield Patch(subprocess.Popen, name, around(calls.waiting(name)))
    yield Patch(subprocess.Popen, "send_signal", around(calls.send_signal))


class _Programs:
    def __init__(self, rank_zero: RankZero) -> None:
        self._rank_zero = rank_zero
        self._told: set[str] = set()

    def system(self, plain: Callable[..., int], command: Any) -> int:
        if not self._shares():
            return plain(command)
        return int(self._rank_zero.call(f"os.system at {script_line()}", lambda: plain(command)))

    def popen(self, plain: Callable[..., Any], cmd: str, mode: str = "r", buffering: int = -1) -> Any:
        if not self._shares():
            return plain(cmd, mode, buffering)
        where = script_line()
        if mode != "r":
            raise StateError(
                f"{where} writes to a program by os.popen; expected subprocess.run(command, input=text), "
                "which rank 0 runs alone"
            )

        def act() -> tuple[str, int | None]:
            stream = plain(cmd, mode, buffering)
            return stream.read(), stream.close()

        return _Output(*self._rank_zero.call(f"os.popen at {where}", act))

    def start(self, plain: Callable[..., None], process: Any, args: Any, *more: Any, **options: Any) -> None:
        refuse_launcher(args, options.get("env"))
        if not self._shares():
            plain(process, args, *more, **options)
            return
        where = script_line()

        def act() -> tuple[int, bool, bool, bool]:
            plain(process, args, *more, **options)
            return process.pid, *(stream is not None for stream in _streams(process))

        vars(process)[_SHARED] = where
        pid, stdin, stdout, stderr = self._rank_zero.call(f"the start of a process at {where}", act)
        if not self._rank_zero.is_rank_0:
            _be_absent(process, args, pid)
            process.stdin = _Sink() if stdin else None
        process.stdout = self._reader(process.stdout, "stdout") if stdout else None
        process.stderr = self._reader(process.stderr, "stderr") if stderr else None

    def waiting(self, name: str) -> Callable[..., Any]:
        def call(plain: Callable[..., Any], process: Any, *args: Any, **options: Any) -> Any:
            where = vars(process).get(_SHARED)
            if where is None or not self._rank_zero.can_share():
                return plain(process, *args, **options)

            def act() -> tuple[Any, int | None]:
                found = plain(process, *args, **options)
                return found, process.returncode

            try:
                found, code = self._rank_zero.call(f"{name} of the process of {where}", act)
            except subprocess.TimeoutExpired as error:
                error.cmd = process.args
                raise
            if not self._rank_zero.is_rank_0:
                process.returncode = code
            return found

        return call

    def send_signal(self, plain: Callable[..., None], process: Any, sig: int) -> None:
        where = vars(process).get(_SHARED)
        if where is None or not self._rank_zero.can_share():
            plain(process, sig)
            return
        self._rank_zero.call(f"a signal to the process of {where}", lambda: plain(process, sig))

    def _reader(self, stream: Any, name: str) -> SharedReader:
        return SharedReader(stream, self._rank_zero, f"Popen.{name}")

    def _shares(self) -> bool:
        if self._rank_zero.inside or not is_asked_by_script(_THROUGH):
            return False
        if self._rank_zero.can_share():
            return True
        where = script_line()
        if where not in self._told and self._rank_zero.is_rank_0:
            self._told.add(where)
            _log.warning("%s starts a program on each rank: not in the script's main thread", where)
        return False


class _Output(io.StringIO):
    """The output of a program that has ended, as `os.popen` returns it."""

    def __init__(self, text: str, status: int | None) -> None:
        super().__init__(text)
        self._status = status

    def close(self) -> int | None:  # type: ignore[override]
        super().close()
        return self._status


class _Sink:
    """The input of a program that runs on another rank."""

    def write(self, data: Any) -> int:
        return len(data)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


def _streams(process: Any) -> tuple[Any, Any, Any]:
    return process.stdin, process.stdout, process.stderr


def _be_absent(process: Any, args: Any, pid: int) -> None:
    """Give a process of another rank the attributes that Python's library reads."""
    process.args, process.pid, process.returncode = args, pid, None
    process.stdin = process.stdout = process.stderr = None
    process._waitpid_lock, process._sigint_wait_secs = threading.Lock(), 0.0
    process._communication_started, process.text_mode = False, False
