"""Tracebacks at the user's lines: frames of generated code are replaced by frames of the model.

    File "fxdp/runtime/bound.py", line 166           File "fxdp/runtime/bound.py", line 166
    File "<eval_with_key>.45", line 14, in forward   ->   File "model.py", line 31, in forward
    File "torch/...", line 875                       File "torch/...", line 875

Each line of a generated graph begins with the name of its node, and the node knows its location. So a running
program needs to record nothing for this.

An error of fxdp says line, cause and remedy itself: below the outermost call its traceback, and that of its
cause, leave out the lines of torch and fxdp, hundreds where a model is traced. TORCH_LOGS="+fxdp" shows them.
"""

from __future__ import annotations

import linecache
import logging
import sys
from types import CodeType, TracebackType

from torch import fx

from fxdp.errors import FxdpError, RuleError, TorchMismatchError, VerifierError, add_note
from fxdp.ir.graph.metadata import Location, meta

_GENERATED = "<eval_with_key>"
_INDUCTOR = "torchinductor_"  # the folder to which Inductor writes its code
_NO_LINE = 'raised by code that Inductor compiled: backend="eager" of fxdp.compile shows the model\'s line'
_INNER = ("fxdp", "torch", "contextlib", "")  # "": code that a trace makes, which is in no module
_BUGS = (RuleError, TorchMismatchError, VerifierError)

_log = logging.getLogger("fxdp")


def show_user_lines(error: BaseException) -> None:
    """Put the user's lines into the traceback of an error, and leave others out of one of fxdp."""
    if isinstance(error, FxdpError) and not isinstance(error, _BUGS):
        _leave_inner_lines_out(error)
        return
    frames = _frames(error.__traceback__)
    files = [frame.tb_frame.f_code.co_filename for frame in frames]
    if any(file.startswith(_GENERATED) for file in files):
        shown: TracebackType | None = None
        for frame, file in zip(reversed(frames), reversed(files), strict=True):
            own = _in_the_model(frame) if file.startswith(_GENERATED) else frame
            if own is not None:
                shown = _linked(own, shown)
        error.__traceback__ = shown
    elif any(_INDUCTOR in file for file in files) and _NO_LINE not in getattr(error, "__notes__", ()):
        add_note(error, _NO_LINE)


def _leave_inner_lines_out(error: BaseException) -> None:
    """Keep the outermost line of an error, and lines of the user, in it and in its causes."""
    _log.debug("before lines of torch and fxdp are left out", exc_info=error)
    kept, known = _frames(error.__traceback__)[:1], list[BaseException]()
    link: BaseException | None = error
    while link is not None and link not in known:
        known.append(link)
        shown: TracebackType | None = None
        for frame in reversed(_frames(link.__traceback__)):
            module = frame.tb_frame.f_globals.get("__name__", "")
            if frame in kept or module.partition(".")[0] not in _INNER:
                shown = _linked(frame, shown)
        link.__traceback__ = shown
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _frames(here: TracebackType | None) -> list[TracebackType]:
    frames = []
    while here is not None:
        frames.append(here)
        here = here.tb_next
    return frames


def _linked(frame: TracebackType, rest: TracebackType | None) -> TracebackType:
    return TracebackType(rest, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)


def _in_the_model(frame: TracebackType) -> TracebackType | None:
    """Return a frame of the user's file for a frame of a generated graph, or None if no line is known."""
    module = frame.tb_frame.f_locals.get("self")
    if not isinstance(module, fx.GraphModule):
        return None
    line = linecache.getline(frame.tb_frame.f_code.co_filename, frame.tb_lineno, frame.tb_frame.f_globals)
    name = line.partition("=")[0].partition(":")[0].strip()
    node = next((node for node in module.graph.nodes if node.name == name), None)
    if node is None:
        return None
    known = meta(node)
    return _raised_at(known.location if known.location.file or known.cause is None else known.cause.location)


def _raised_at(location: Location) -> TracebackType | None:
    """Return a traceback of one frame, at a line of a file."""
    if location.line < 1:
        return None
    code: CodeType = compile("raise Exception", location.file, "exec")
    code = code.replace(co_name="forward", co_firstlineno=location.line)
    if sys.version_info >= (3, 11):
        code = code.replace(co_qualname="forward")
    try:
        exec(code, {"__name__": "model"})
    except Exception as raised:
        ours = raised.__traceback__
        return None if ours is None else ours.tb_next
    return None
