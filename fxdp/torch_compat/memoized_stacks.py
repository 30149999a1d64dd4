"""Of the stack that torch writes on each node of an export: a line of code is looked up once.

Torch takes apart the stacks of a trace, sixty frames deep and nearly all its own, once for each node, to keep
the two or three of the model. Inside `memoized_stacks` what a frame says is remembered by its code and the
place in it; the text on a node is torch's own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from traceback import FrameSummary, StackSummary
from types import CodeType, FrameType

from torch.fx import proxy

from fxdp.torch_compat.patch import Patch, patched
from fxdp.torch_compat.shortcuts import shortcut

__all__ = ["memoized_stacks"]


@shortcut("memoized_stacks")
def memoized_stacks() -> Iterator[None]:
    """Inside, nodes get their stacks from what was read of the same lines before."""
    with patched((Patch(proxy, "CapturedTraceback", lambda _: _Stacks()),)):
        yield


class _Stacks:
    """In the place of torch's class, of which tracers ask `extract().summary()`."""

    def __init__(self) -> None:
        # by the code's address, which is kept: its hash is that of all its constants
        self._known: dict[tuple[int, int], tuple[CodeType, FrameSummary]] = {}

    def extract(self) -> _Stack:
        """The stack of who asks."""
        return _Stack(self._summary(sys._getframe(1)))

    def _summary(self, innermost: FrameType | None) -> StackSummary:
        found, frame = StackSummary(), innermost
        while frame is not None:
            code = frame.f_code
            place = id(code), frame.f_lasti
            known = self._known.get(place)
            if known is None:
                line = -1 if frame.f_lineno is None else frame.f_lineno  # of code that no line has written
                said = FrameSummary(code.co_filename, line, code.co_name)
                known = self._known[place] = code, said
            found.append(known[1])
            frame = frame.f_back
        found.reverse()
        return found


class _Stack:
    """A stack at the time when it was asked for."""

    def __init__(self, summary: StackSummary) -> None:
        self._summary = summary

    def summary(self) -> StackSummary:
        """Its frames, the innermost last."""
        return self._summary
