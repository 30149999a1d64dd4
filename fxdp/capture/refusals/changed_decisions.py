"""Find decisions of the code on numbers that the code changes, and compute with one decision inverted.

    self.step += 1
    if self.step > self.warm_up: ...        equal decisions in two consecutive calls, a different one later

For a run of the model such numbers are replaced by recording ones, which note each line that decides on a
number. At one of these lines the first decision can be inverted.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

_Line: TypeAlias = "tuple[str, int]"


class Decisions:
    """The lines at which the code decided; at the line `turned` the first decision is inverted."""

    def __init__(self, turned: _Line | None = None) -> None:
        self._turned = turned
        self.lines: dict[_Line, None] = {}

    def watched(self, value: Any) -> Any:
        """Return a recording number for a number; in a list or dict, replace the numbers in place."""
        if type(value) in _WATCHED:
            number = _WATCHED[type(value)](value)
            number.decisions = self
            return number
        pairs = value.items() if isinstance(value, dict) else enumerate(value) if type(value) is list else ()
        for key, item in list(pairs):
            if type(item) in _WATCHED:
                value[key] = self.watched(item)
        return value

    def decide(self, answer: Any) -> Any:
        """Record the calling line and return the result of a comparison, inverted if the line is `turned`."""
        if not isinstance(answer, bool):  # a comparison with a tensor
            return answer
        frame = sys._getframe(2)
        line = frame.f_code.co_filename, frame.f_lineno
        is_first = line not in self.lines
        self.lines[line] = None
        return not answer if is_first and line == self._turned else answer


class _Int(int):
    decisions: Decisions


class _Float(float):
    decisions: Decisions


_WATCHED: dict[type, type] = {int: _Int, float: _Float}


def _computing(compute: Callable[..., Any], kind: type, *, swapped: bool = False) -> Callable[..., Any]:
    def method(self: Any, *others: Any) -> Any:
        own = kind(self)
        return self.decisions.watched(compute(*others, own) if swapped else compute(own, *others))

    return method


def _deciding(compare: Callable[..., Any], kind: type) -> Callable[..., Any]:
    return lambda self, *others: self.decisions.decide(compare(kind(self), *others))


for _kind, _number in _WATCHED.items():
    for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
        setattr(_number, f"__{_name}__", _computing(getattr(operator, _name), _kind))
        setattr(_number, f"__r{_name}__", _computing(getattr(operator, _name), _kind, swapped=True))
    for _name in ("neg", "abs"):
        setattr(_number, f"__{_name}__", _computing(getattr(operator, _name), _kind))
    for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(_number, f"__{_name}__", _deciding(getattr(operator, _name), _kind))
    setattr(_number, "__bool__", _deciding(bool, _kind))  # noqa: B010
    setattr(_number, "__hash__", _kind.__hash__)  # noqa: B010
