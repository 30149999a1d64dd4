"""Which Python values of a call decide on its program, and which are inputs of it or nobody's business.

    strings                 nobody's, unless the code reads them while it is captured
    numbers                 constants of the first program; where a second value comes, inputs of the second
    what the code decides   constants of a program for each value
    on, and all else

A number is such a constant, too, if a capture without its value fails or turns out as another program.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from torch import Tensor

from fxdp.ir.raw_bytes import number_of

_log = logging.getLogger("fxdp")

_WORTH_A_LINE, _TOO_MANY = 2, 5  # programs for values of one name, when a line says so


class Open(Enum):
    """What stands for a value in the key of a call on which it does not decide."""

    INPUT = "an input of the program"
    UNREAD = "not read"


@dataclass(slots=True)
class Values:
    """Of calls of one structure and mode: the numbers that are inputs, and what the code decides on.

    By what errors call them; all ranks change it together.
    """

    dynamic_inputs: set[str] = field(default_factory=set)
    deciding: set[str] = field(default_factory=set)

    def role(self, name: str, value: Any) -> Open | None:
        """What a value among the inputs is; None for a constant."""
        kind = type(value)
        if name in self.deciding:
            return None
        if kind is str or kind is list:
            return Open.UNREAD
        return Open.INPUT if name in self.dynamic_inputs and fits(value) else None

    def decide(self, names: Iterable[str]) -> None:
        """Make these constants."""
        self.deciding |= set(names)
        self.dynamic_inputs -= set(names)


def fits(value: Any) -> bool:
    """Whether a tensor can carry the value exactly."""
    return type(value) is float or (type(value) is int and -(2**63) <= value < 2**63)


def digest_of(numbers: Iterable[tuple[str, Any]]) -> int:
    """A number below 2**62, equal on all ranks for equal numbers."""
    return number_of(repr([value for _, value in numbers]).encode())


def liftable(own: Mapping[str, Any], other: Mapping[str, Any], values: Values) -> set[str]:
    """The names of numbers that have another value of the same type in a call before this one.

    `own` and `other` have the types and values of all names.
    """
    found = set()
    for name, (kind, value) in own.items():
        before = other.get(name, ("", None))
        if before[0] == kind and before[1] != value and fits(value) and fits(before[1]):
            found |= {name} - values.deciding - values.dynamic_inputs
    return found


class RecompileLog:
    """Says in the log which values a model is compiled for again and again: at the second and the fifth."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def compiled(self, own: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> None:
        """A program was compiled for these values, and others for those."""
        new = [
            (name, row)
            for name, row in own.items()
            if others and _may_have_many(*row) and all(other.get(name) != row for other in others)
        ]
        for name, _ in new:
            self._counts[name] = self._counts.get(name, 1) + 1
        again = [_shown(*row) for row in new if self._counts[row[0]] == _WORTH_A_LINE]
        if again:
            _log.warning(
                "%s has another value than before, which compiles the model anew: its code decides on it in "
                "Python (a branch, a shape, int(), a table), so each new value does",
                ", ".join(again),
            )
        many = [_shown(*row) for row in new if self._counts[row[0]] == _TOO_MANY]
        if many:
            _log.warning(
                "the model was compiled for %d values of %s, which takes seconds each time. Pass what "
                "changes often as a tensor among the inputs and compute with that (torch.where, torch.clamp)",
                _TOO_MANY,
                ", ".join(many),
            )


def _may_have_many(kind: str, value: Any) -> bool:
    """Whether a value is a constant of programs, and there may be more than a few of its type."""
    return not isinstance(value, Open) and kind not in ("bool", "NoneType")


def _shown(name: str, row: tuple[str, Any]) -> str:
    return f"{name} ({row[1]})" if row[0] in ("int", "float", "str") else f"{name} ({row[0]})"


def python_leaves(names: Sequence[str], leaves: Sequence[Any]) -> list[tuple[str, Any]]:
    """The leaves of a call that are no tensors, with their names."""
    pairs = zip(names, leaves, strict=True)
    return [(name, leaf) for name, leaf in pairs if not isinstance(leaf, Tensor)]
