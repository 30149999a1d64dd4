"""Look up each line of code once for the stacks that torch writes on the nodes of an export.

Torch summarizes the stack of a trace, sixty frames deep and nearly all in torch, once per node, to keep the
two or three frames of the model. Inside `memoized_stacks`, the summary of a frame is cached by code object
and position; the text on a node is the same as torch's.
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
    """Build the stacks of nodes from cached frame summaries inside the block."""
    with patched((Patch(proxy, "CapturedTraceback", lambda _: _Stacks()),)):
        yield


class _Stacks:
    """Replacement for `CapturedTraceback`, which tracers use as `extract().summary()`."""

    def __init__(self) -> None:
        # keyed by the code's address, and the code is kept alive: hashing a code object hashes all its
        # constants
        self._known: dict[tuple[int, int], tuple[CodeType, FrameSummary]] = {}

    def extract(self) -> _Stack:
        """Return the stack of the caller."""
        return _Stack(self._summary(sys._getframe(1)))

    def _summary(self, innermost: FrameType | None) -> StackSummary:
        found, frame = StackSummary(), innermost
        while frame is not None:
            code = frame.f_code
            place = id(code), frame.f_lasti
            known = self._known.get(place)
            if known is None:
                line = -1 if frame.f_lineno is None else frame.f_lineno  # code without source lines
                said = FrameSummary(code.co_filename, line, code.co_name)
                known = self._known[place] = code, said
            found.append(known[1])
            frame = frame.f_back
        found.reverse()
        return found


class _Stack:
    """A stack, as it was when extracted."""

    def __init__(self, summary: StackSummary) -> None:
        self._summary = summary

    def summary(self) -> StackSummary:
        """Return the frames, innermost last."""
        return self._summary
