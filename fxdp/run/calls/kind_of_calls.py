"""`KindOfCalls`: calls that differ in sizes alone, and which of them is the next to compile a program.

    calls of sizes                     compiled, with `compile_from=50`
    32 32 32 7 32 32 32 7 ...          the 50th, or the next of 32: for 32 alone; each 7 runs op by op
                                       the 50th of the others: for any size
    31 27 44 29 ...                    the 50th: for any size

A program is made when so many calls that need it have run op by op that it costs about as much as these did.
Each one after the second waits for twice as many as the one before, and so does one that does not pay yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

Sizes: TypeAlias = "tuple[torch.Size, ...]"
"""The global shapes of a call's tensors."""

_RARE = 4
"""A kind stays compiled while at most one call in so many runs again."""


@dataclass(eq=False)
class KindOfCalls:
    """Calls of one kind.

    Attributes
    ----------
    calls, looks : their number, and the number of those that were looked at.
    derived : whether one had a backward.
    unlike : the number of calls whose backwards were unlike those of a program.
    difference : what was unlike in the last one.
    effect : what the last call did beside its result; the first one alone may make what all others find.
    hooks : whether the module's hooks were looked at.
    refused : why the calls run op by op.
    programs : the number of programs that were compiled for the calls.
    seconds : what the calls took op by op since the last program was made, about.
    """

    calls: int = 0
    looks: int = 0
    derived: bool = False
    unlike: int = 0
    difference: str = ""
    effect: str = ""
    hooks: bool = False
    refused: str = ""
    programs: int = 0
    seconds: float = 0.0
    _postponed: int = 0
    _known: set[Sizes] = field(default_factory=set)
    _takes_any: bool = False
    _waiting: Counter[Sizes] = field(default_factory=Counter)
    """The calls since the last program was made that none takes, by their sizes."""

    def add(self, sizes: Sizes) -> None:
        """Count a call of these sizes."""
        self.calls += 1
        if not (self.takes(sizes) or self.refused):
            self._waiting[sizes] += 1

    def waits(self, sizes: Sizes, first: int) -> int:
        """Return after how many calls one of these sizes is compiled; `first` is the number of the first."""
        if self.takes(sizes):
            return 0
        return max(0, (first << max(0, self.programs - 1) + self._postponed) - self._waiting.total())

    def postpone(self) -> None:
        """Wait for twice as many calls, as those so far have taken less than a program costs."""
        self._postponed += 1

    def is_turn(self, sizes: Sizes) -> bool:
        """Return whether a call of these sizes may be compiled; the first has the most frequent ones."""
        if self.takes(sizes) or self.programs or self.is_varied:
            return True
        return self._waiting[sizes] == max(self._waiting.values())

    def takes(self, sizes: Sizes) -> bool:
        """Return whether a program takes calls of these sizes."""
        return self._takes_any or sizes in self._known

    @property
    def is_varied(self) -> bool:
        """Whether no sizes are those of most calls."""
        return 2 * max(self._waiting.values(), default=0) < self._waiting.total()

    def has_varied_dims(self, batch_dims: Sequence[int | None]) -> bool:
        """Return whether calls are of several sizes that are not the batch's."""
        return self.is_varied and len({_others(sizes, batch_dims) for sizes in self._waiting}) > 1

    def compiled(self, sizes: Sizes, *, anew: bool, for_any: bool) -> None:
        """Note that a program ran a call of these sizes: one made `anew`, one `for_any` size."""
        if anew:
            self.programs += 1
            self.seconds, self._postponed = 0.0, 0
            self._waiting.clear()
            # of which one was made nevertheless: the next one waits
            self._takes_any = for_any and not self._takes_any
        else:
            self._takes_any = self._takes_any or for_any
        if not self._takes_any:
            self._known.add(sizes)

    def note(self, difference: str) -> None:
        """Note what was unlike a program's backward in those of a call; nothing if empty."""
        self.unlike += bool(difference)
        self.difference = difference or self.difference

    @property
    def replays_pay(self) -> bool:
        """Whether calls whose backwards are unlike a program's are rare enough to run them twice."""
        return (self.unlike - 1) * _RARE <= self.calls


def _others(sizes: Sizes, batch_dims: Sequence[int | None]) -> tuple[tuple[int, ...], ...]:
    """Return all sizes but those of the batch."""
    return tuple(
        tuple(size for dim, size in enumerate(shape) if dim != batch)
        for shape, batch in zip(sizes, batch_dims, strict=True)
    )
