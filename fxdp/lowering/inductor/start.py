"""The order in which a program's forward and backward are compiled.

A `Start` builds each kernel separately, as Inductor does, and compiles the forward, then the backward, on
every rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from fxdp.wings import seam


def go_on() -> None:
    """Return at once: the barrier of a single rank."""


@dataclass
class Start:
    """The order in which a rank compiles a program's forward and backward, and the contexts for compiling."""

    barrier: Callable[[], None] = go_on
    """Waits until all ranks have called."""
    _waited: bool = field(default=False, init=False)

    def building(self) -> AbstractContextManager[None]:
        """Return a context for the compilation of a graph."""
        return contextlib.nullcontext()

    def run(self, forward: Callable[[], None], backward: Callable[[], None], *, independent: bool) -> None:
        """Compile forward and backward; `independent`: the backward does not need the forward's code."""
        forward()
        backward()

    def finish(self) -> None:
        """Wait once for all ranks; also call after a failure."""
        # each rank waits exactly once with any settings, otherwise the wait of one rank would be matched with
        # the next exchange of another
        if not self._waited:
            self._waited = True
            self.barrier()


@seam("startup")
def start_of(rank: int = 0, barrier: Callable[[], None] = go_on) -> Start:
    """Return the order in which a rank compiles a program: the forward, then the backward."""
    return Start(barrier)
