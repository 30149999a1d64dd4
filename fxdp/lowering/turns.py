"""Share the work of compiling among ranks on one machine, through Inductor's cache on disk.

Ranks with the same program would all compile the same two halves at the same time. Instead the even ones
begin with the forward and the odd ones with the backward; when all are done with their first half, each
finds the other in the cache.

    rank 0:  forward   | backward (cached)
    rank 1:  backward  | forward (cached)

Where the cache is not shared, or the ranks' programs differ, each compiles both: slower, never wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def _go_on() -> None:
    """Nobody to wait for."""


@dataclass(frozen=True)
class Turn:
    """Which half comes first on this rank, and how it waits for the others between the halves."""

    backward_first: bool = False
    barrier: Callable[[], None] = _go_on

    def run(self, forward: Callable[[], None], backward: Callable[[], None], *, independent: bool) -> None:
        """Compile both halves; one after the other if the backward depends on the forward's code."""
        if not independent:
            forward()
            self.barrier()
            backward()
            return
        first, second = (backward, forward) if self.backward_first else (forward, backward)
        first()
        self.barrier()
        second()
