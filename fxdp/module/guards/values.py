"""Roles of the Python values of a call: specialized constants, dynamic scalar inputs, or unread.

    strings                 unread, unless the code reads them during capture
    numbers                 constants of the first program; inputs of the second program
    values that the code    constants, one program for each value
    decides on, objects

A number stays a constant if a capture without its value fails or gives a different program.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from fxdp.capture.snapshot import spelled
from fxdp.errors import InputError, a_kind
from fxdp.ir.network.raw_bytes import number_of

_log = logging.getLogger("fxdp")

_WORTH_A_LINE, _TOO_MANY = 2, 5  # numbers of programs for values of one name that are logged


class Open(Enum):
    """Placeholder in the key of a call for a value that does not decide on the program."""

    INPUT = "an input of the program"
    UNREAD = "not read"


@dataclass(slots=True)
class Values:
    """Names of the numbers that are inputs, and of the values that the code decides on.

    Shared by all calls of one structure and mode; all ranks change it together.
    """

    dynamic_inputs: set[str] = field(default_factory=set)
    deciding: set[str] = field(default_factory=set)

    def in_key(self, name: str, value: Any) -> tuple[str, Any]:
        """Return the type of a value among the inputs, and its role or, of a constant, the value.

        Raises
        ------
        InputError : a constant that cannot be compared with that of another call.
        """
        kind = type(value)
        if name not in self.deciding:
            if kind is str or kind is list:
                return kind.__name__, Open.UNREAD
            if name in self.dynamic_inputs and fits(value):
                return kind.__name__, Open.INPUT
        if kind is list:  # of strings
            return "list", tuple(value)
        try:
            hash(value)
        except TypeError:
            raise InputError(
                f"the input {name} is {a_kind(value)}, which is neither a tensor, a container of tensors "
                "nor a hashable Python value; register it with torch.utils._pytree or pass plain values"
            ) from None
        return kind.__name__, spelled(value)

    def decide(self, names: Iterable[str]) -> None:
        """Make constants of these names."""
        self.deciding |= set(names)
        self.dynamic_inputs -= set(names)


def fits(value: Any) -> bool:
    """Return whether a tensor can hold the value exactly."""
    return type(value) is float or (type(value) is int and -(2**63) <= value < 2**63)


def digest_of(numbers: Iterable[tuple[str, Any]]) -> int:
    """Return a number below 2**62, equal on all ranks for equal numbers."""
    return number_of(repr([value for _, value in numbers]).encode())


def liftable(own: Mapping[str, Any], other: Mapping[str, Any], values: Values) -> set[str]:
    """Return the names of numbers that differ between two calls and have one type.

    `own` and `other` map all names to types and values.
    """
    found = set()
    for name, (kind, value) in own.items():
        before = other.get(name, ("", None))
        if before[0] == kind and before[1] != value and fits(value) and fits(before[1]):
            found |= {name} - values.deciding - values.dynamic_inputs
    return found


class RecompileLog:
    """Logs values for which a model is compiled repeatedly: at the second and at the fifth program."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}

    def compiled(self, own: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> None:
        """Note that a program was compiled for these values, after programs for further values."""
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
    """Return whether a value is a constant of programs, of a type with more than a few values."""
    return not isinstance(value, Open) and kind not in ("bool", "NoneType")


def _shown(name: str, row: tuple[str, Any]) -> str:
    return f"{name} ({row[1]})" if row[0] in ("int", "float", "str") else f"{name} ({row[0]})"
