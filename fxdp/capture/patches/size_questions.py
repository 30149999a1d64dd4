"""Questions about sizes that the user's Python code asks, with those that torch answers without a guard.

if x.shape[0] > 1: ...      torch traces sizes of at least 2, knows the answer, and leaves no guard
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import sympy
import torch

from fxdp.capture.locations import asking_frame, is_user_file, location_of_frame
from fxdp.ir.graph.metadata import Location
from fxdp.torch_compat import Patch


class SizeQuestions:
    """Record of the conditions on sizes that become Python bools in lines of the user's code."""

    def __init__(self) -> None:
        self.asked: dict[sympy.Basic, Location] = {}
        """The first line that asks each, in torch's symbols."""

    def patch(self) -> Patch:
        """Return the patch that records questions while the user's code is traced."""
        return Patch(torch.SymBool, "__bool__", lambda plain: _Recorded(plain, self))

    def note(self, asked: torch.SymBool, frame: FrameType) -> None:
        """Record a question, unless a library asks by itself."""
        if is_user_file(frame.f_code.co_filename):
            self.asked.setdefault(asked.node.expr, location_of_frame(frame))


class _Recorded:
    """Descriptor for the truth of sizes: a function would be taken for the line that asks by torch."""

    def __init__(self, plain: Any, questions: SizeQuestions) -> None:
        self._plain, self._questions = plain, questions

    def __get__(self, asked: torch.SymBool | None, owner: type | None = None) -> Any:
        if asked is None:  # for a replacement that is installed on top
            return self
        self._questions.note(asked, asking_frame(sys._getframe(1)))
        return self._plain.__get__(asked, owner)

    def __call__(self, asked: torch.SymBool) -> bool:
        return bool(self._plain(asked))
