"""`Comparison`: one guard as data, checked without a Python call of its own.

Comparison(partial(map, len, registries), eq, [2, 0, 1])      as many parameters, buffers, modules as before
Comparison(partial(map, type, modules), is_, [Linear, ReLU])  modules of the same classes
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import is_
from typing import Any, NamedTuple


class Reading(NamedTuple):
    """How a guard reads its items, and how it compares two readings of one item."""

    read: Callable[[], Iterable[Any]]
    same: Callable[[Any, Any], Any] = is_

    def now(self) -> Comparison:
        """Return the guard that all items stay as they are now."""
        return Comparison(self.read, self.same, [*self.read()])


class Comparison(NamedTuple):
    """A guard: items are read and must equal the expected ones, one by one; their number is fixed."""

    read: Callable[[], Iterable[Any]]
    same: Callable[[Any, Any], Any]
    expected: Sequence[Any]


def all_hold(comparisons: Iterable[Comparison]) -> bool:
    """Return whether all guards hold; stop reading at the first guard that fails."""
    for read, same, expected in comparisons:  # noqa: SIM110  (a generator is entered once for each)
        if not all(map(same, read(), expected)):
            return False
    return True
