"""Collective sequence log: this rank's calls of compiled modules, and their backwards, in order.

All ranks must begin the same calls in the same order; otherwise sums of equal size would be matched with one
another.

    rank 0   call 1   call 2   backward of 1   backward of 2   call 3
    rank 1   call 1   call 2   backward of 2 <- refused here, by the number that each small message carries;
                                               or at call 3, by the hash of the order so far

A moment is one integer (module, call, forward or backward), so a step pays for no more than an addition.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from types import CodeType, FrameType
from typing import TypeAlias

_Place: TypeAlias = "tuple[CodeType, int]"
"""A line of the user's code."""

SAME_ORDER = "expected all ranks to make the same calls and to run their backwards in the same order"
_BACKWARD = 1
_CALLS = 1 << 40  # calls per module, before their numbers would overlap
_KEPT = 64  # moments that can still be named
_MIX, _MASK = 0x5851F42D4C957F2D, (1 << 62) - 1
_OWN = ("fxdp", "torch")


class SequenceLog:
    """The calls and backwards that one rank has begun; written by the main thread, read by the watch.

    Attributes
    ----------
    now : the last moment; 0 before the first.
    order : a hash of all moments so far.
    began : number of moments so far; `backwards` is the number of backwards among them.
    """

    def __init__(self) -> None:
        self.now = self.order = self.began = self.backwards = 0
        self._names: list[str] = []
        self._last: deque[int] = deque(maxlen=_KEPT)
        self._places: dict[int, _Place] = {}

    def add_module(self, name: str) -> int:
        """Return the number of a new module; all ranks call this before the module's first call."""
        self._names.append(name)
        return len(self._names)

    def begin_call(self, module: int, call: int) -> None:
        """Record the beginning of a module's call."""
        moment = (module * _CALLS + call) << 1
        places = self._places
        places[moment] = _user_place()
        if len(places) > _KEPT:
            del places[next(iter(places))]
        self._begin(moment)

    def begin_backward(self, call: int) -> None:
        """Record the beginning of the backward of the call with this moment."""
        self.backwards += 1
        self._begin(call | _BACKWARD)

    def leave_out(self, outputs: int) -> None:
        """Record the outputs (as bits) that the loss of this backward does not read, as a separate moment."""
        self._add(-1 - (outputs & _MASK))

    def _begin(self, moment: int) -> None:
        self.now = moment
        self._add(moment)

    def _add(self, moment: int) -> None:
        self.order = (self.order * _MIX + moment) & _MASK
        self.began += 1
        self._last.append(moment)

    def recent(self) -> tuple[int, ...]:
        """Return the number of moments before the remembered ones, followed by the remembered moments."""
        return (self.began - len(self._last), *self._last)

    @staticmethod
    def is_backward(moment: int) -> bool:
        """Return whether a moment is a backward."""
        return moment > 0 and bool(moment & _BACKWARD)

    def words(self, moment: int) -> str:
        """Describe a moment, as in `the backward of call 3 of Net (called at train.py:31)`."""
        if not moment:
            return "no call of a compiled module"
        if moment < 0:
            outputs = [i for i in range(_MASK.bit_length()) if -1 - moment >> i & 1]
            return f"a backward of a loss that does not read output {', '.join(map(str, outputs))}"
        number, call = divmod(moment >> 1, _CALLS)
        name = self._names[number - 1] if 0 < number <= len(self._names) else f"module {number}"
        if self._names.count(name) > 1:
            name += f" (the compiled module number {number})"
        place = self._places.get(moment & ~_BACKWARD)
        line = "" if place is None else f" (called at {place[0].co_filename}:{place[1]})"
        return f"{'the backward of ' if moment & _BACKWARD else ''}call {call} of {name}{line}"


def differing(histories: Sequence[Sequence[int]]) -> Mapping[int, int] | None:
    """Return each rank's moment at the first difference, by place; None if no difference is remembered.

    Each history is a result of `recent`. A rank without a moment at this position has 0.
    """
    first = max(sequence_log[0] for sequence_log in histories)
    last = max(sequence_log[0] + len(sequence_log) - 1 for sequence_log in histories)
    for at in range(first, last):
        found = {rank: _at(sequence_log, at) for rank, sequence_log in enumerate(histories)}
        if len(set(found.values())) > 1:
            return found
    return None


def _at(sequence_log: Sequence[int], at: int) -> int:
    index = at - sequence_log[0] + 1
    return sequence_log[index] if 0 < index < len(sequence_log) else 0


def _user_place() -> _Place:
    """Return the innermost line outside fxdp and torch."""
    frame = user_frame(sys._getframe(2))
    return frame.f_code, frame.f_lineno


def user_frame(frame: FrameType) -> FrameType:
    """Return the innermost frame, from this one on, outside fxdp and torch; else the outermost."""
    while frame.f_globals.get("__name__", "").partition(".")[0] in _OWN and frame.f_back is not None:
        frame = frame.f_back
    return frame
