"""Tracebacks at the user's lines: frames of generated code are replaced by frames of the model.

    File "fxdp/runtime/bound.py", line 166           File "fxdp/runtime/bound.py", line 166
    File "<eval_with_key>.45", line 14, in forward   ->   File "model.py", line 31, in forward
    File "torch/...", line 875                       File "torch/...", line 875

Each line of a generated graph begins with the name of its node, and the node knows its location. So a running
program needs to record nothing for this.
"""

from __future__ import annotations

import linecache
import sys
from types import CodeType, TracebackType

from torch import fx

from fxdp.errors import add_note
from fxdp.ir.graph.metadata import Location, meta

_GENERATED = "<eval_with_key>"
_INDUCTOR = "torchinductor_"  # the folder to which Inductor writes its code
_NO_LINE = 'raised by code that Inductor compiled: backend="eager" of fxdp.compile shows the model\'s line'


def show_user_lines(error: BaseException) -> None:
    """Put the user's lines into the traceback of an error that generated code raised."""
    frames = []
    here = error.__traceback__
    while here is not None:
        frames.append(here)
        here = here.tb_next
    files = [frame.tb_frame.f_code.co_filename for frame in frames]
    if any(file.startswith(_GENERATED) for file in files):
        shown: TracebackType | None = None
        for frame, file in zip(reversed(frames), reversed(files), strict=True):
            own = _in_the_model(frame) if file.startswith(_GENERATED) else frame
            if own is not None:
                shown = TracebackType(shown, own.tb_frame, own.tb_lasti, own.tb_lineno)
        error.__traceback__ = shown
    elif any(_INDUCTOR in file for file in files) and _NO_LINE not in getattr(error, "__notes__", ()):
        add_note(error, _NO_LINE)


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
