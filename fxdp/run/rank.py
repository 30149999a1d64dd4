"""One rank of a script, from joining the ranks to the exit code."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from fxdp.errors import FxdpError, RankFailedError
from fxdp.ranks.agreement import gather_objects
from fxdp.ranks.liveness.failure import broadcast_all
from fxdp.run.entropy import Entropy
from fxdp.run.exact_types import look_like_torchs
from fxdp.run.files.native_calls import native_calls
from fxdp.run.files.open_files import write_open_files
from fxdp.run.generators import share
from fxdp.run.hidden_ranks import hide_ranks, join
from fxdp.run.loaders import compare_apart
from fxdp.run.own_log import keep_log_apart
from fxdp.run.process_groups import add_remedy
from fxdp.run.ranks import log_of, write_into
from fxdp.run.replacements import file_calls, replacements
from fxdp.run.script import run_script
from fxdp.run.session import RunOptions, Session
from fxdp.settings.launch import Launch, log_into
from fxdp.torch_compat import patched_everywhere, replace_for_good

_OURS = ("fxdp.run.", "fxdp.ranks.", "fxdp.cli", "fxdp.__main__", "fxdp.torch_compat.patch")
"""Modules whose lines stand between the script and its errors."""
_RANK_0_FIRST_S = 1.0
"""Seconds until a rank above 0 tells its error: of all ranks alike, rank 0 shows its own."""


def be_rank(launch: Launch, options: RunOptions) -> NoReturn:
    """Run the script as one of the ranks, and end the process with the script's exit code."""
    hook = sys.excepthook
    ranks = join(launch)
    chained = sys.excepthook
    logs = Path(gather_objects(ranks.process_mesh, str(options.logs))[0])  # torchrun's ranks made one each
    options = replace(options, logs=logs)
    if launch.rank:
        write_into(log_of(launch.rank, logs))
        log_into(str(logs / f"rank{launch.rank}.files"))
    keep_log_apart()
    look_like_torchs()
    share(ranks)
    entropy = Entropy(ranks)
    session = Session(ranks, options)
    replace_for_good("threading:excepthook", lambda hook: partial(_thread_failed, hook))
    code = 0
    calls = file_calls(session)
    patches = [*entropy.patches(), *replacements(session, calls)]
    with hide_ranks(), patched_everywhere(patches), native_calls(calls):
        try:
            try:
                run_script(options)
            except SystemExit as error:
                code = _exit_code(error)
            if not code:
                compare_apart(session)
        except BaseException as error:
            add_remedy(error)
            if launch.rank and not isinstance(error, RankFailedError):
                time.sleep(_RANK_0_FIRST_S)
            _show(error, hook if sys.excepthook is chained else sys.excepthook)
            code = 130 if isinstance(error, KeyboardInterrupt) else 1
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        write_open_files()
    end_at_once(code)


def end_at_once(code: int) -> NoReturn:
    """End the process; tearing the interpreter down would take a second, and free nothing."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def _thread_failed(hook: Callable[..., Any], failed: threading.ExceptHookArgs) -> None:
    """Show the error of a thread; end the rank by one of ours, for whose result the script would wait."""
    hook(failed)
    if isinstance(failed.exc_value, FxdpError):
        with contextlib.suppress(Exception):
            broadcast_all(failed.exc_value)
        end_at_once(1)


def _exit_code(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return error.code or 0
    sys.stderr.write(f"{error.code}\n")
    return 1


def _show(error: BaseException, hook: Callable[..., Any]) -> None:
    """Tell all ranks of an error, and show it with the script's own lines alone, without a rank's number."""
    with contextlib.suppress(Exception):
        broadcast_all(error)
    frames, trace = list[TracebackType](), error.__traceback__
    while trace is not None:
        if not trace.tb_frame.f_globals.get("__name__", "").startswith(_OURS):
            frames.append(trace)
        trace = trace.tb_next
    for frame in reversed(frames):
        trace = TracebackType(trace, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    if trace is not None or isinstance(error, SyntaxError):  # of the script itself: it has no line of ours
        error.__traceback__ = trace
    hook(type(error), error, error.__traceback__)
