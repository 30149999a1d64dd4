"""Checks of data in the user's Python code, which become results of the program.

    if labels.max() >= self.vocab_size:     the program returns `labels.max() >= vocab_size` of the
        raise ValueError(...)               global batch; if true, the call raises

A statement that only raises (an `assert`, an `if` with a body that ends in `raise`) has one normal branch. So
has a branch on finite values (`if not torch.isfinite(x).all(): x = clamp(x)`), as long as values are finite.
Capture takes this branch, and each step verifies the decision. A branch on a flag of the batch (`flags.py`)
has a program for each decision; all other branches on data are refused elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from fxdp import torch_compat
from fxdp.capture.locations import is_user_file, location_of_frame
from fxdp.capture.patches.asked_checks import AskedChecks
from fxdp.capture.python.flags import Selections, found_places, is_flag, likely, rows_at
from fxdp.capture.python.raise_conditions import one_way
from fxdp.capture.python.unit_draws import integer_part
from fxdp.torch_compat import Patch, around, calling_frame


def checks(asked: AskedChecks) -> tuple[Patch, ...]:
    """Return patches that answer checks and flags while the user's code runs."""
    read = Tensor.__bool__  # torch's own: the patches below are not installed yet
    selections = Selections()

    def way(flag: Tensor, read: Callable[[Tensor], Any], frame: FrameType) -> bool:
        return asked.way(flag, read, frame, likely(flag))

    def truth(plain: Callable[[Tensor], bool], self: Tensor) -> bool:
        frame = calling_frame()
        found = one_way(frame) if self.numel() == 1 else None
        if found is not None:
            return asked.answer(self, *found, frame)
        return way(self, plain, frame) if is_flag(self) else plain(self)

    def item(plain: Callable[[Tensor], Any], self: Tensor) -> Any:
        frame = calling_frame()
        if self.numel() == 1 and one_way(frame) is not None:
            return self.reshape(())  # a number compared in the statement: compare the tensor instead
        if is_flag(self):
            return way(self, plain, frame)
        told = asked.told.value(self, location_of_frame(frame))
        return integer_part(self, plain(self)) if told is None else told

    def number(plain: Callable[[Tensor], Any], self: Tensor) -> Any:
        told = asked.told.value(self, location_of_frame(calling_frame()))
        return plain(self) if told is None else told

    def selected(plain: Any) -> Any:
        return _AskedOfSelections(plain, selections, lambda flag, frame: way(flag, read, frame))

    def rows(plain: Callable[[Tensor], Any], self: Tensor) -> Any:
        places = found_places(self) if asked.has_branches else None
        if places is None:
            return plain(self)
        return rows_at(places, lambda flag, frame: way(flag, read, frame))

    replacements = {"__bool__": truth, "item": item, "__iter__": rows}
    replacements |= dict.fromkeys(("__int__", "__index__", "tolist"), number)
    patches = (Patch(Tensor, name, around(made)) for name, made in replacements.items())
    traced = (Patch(kind, "tolist", around(number)) for kind in torch_compat.TRACED)  # with one of their own
    return (*patches, *traced, Patch(torch.SymBool, "__bool__", selected), *selections.patches())


class _AskedOfSelections:
    """Descriptor for the truth of sizes; decides on flags if a condition checks whether a mask selects any.

    A descriptor instead of a wrapping function, because torch looks up the calling line, and would find ours.
    """

    def __init__(self, plain: Any, selections: Selections, way: Callable[[Tensor, FrameType], bool]) -> None:
        self._plain, self._selections, self._way = plain, selections, way

    def __get__(self, asked: torch.SymBool | None, owner: type | None = None) -> Any:
        if asked is None or not self._selections.knows(asked):
            return self._plain.__get__(asked, owner)
        return partial(self._answer, asked)

    def _answer(self, asked: torch.SymBool) -> bool:
        frame = sys._getframe(1)
        if not is_user_file(frame.f_code.co_filename):
            return bool(self._plain(asked))
        flag, answer = self._selections.any_of(asked)
        return self._way(flag, frame) == answer
