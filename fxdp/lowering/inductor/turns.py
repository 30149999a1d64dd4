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
from dataclasses import dataclass, field


def _go_on() -> None:
    """Nobody to wait for."""


@dataclass
class Turn:
    """Which half comes first on this rank, and how it waits for the others between the halves: once."""

    backward_first: bool = False
    barrier: Callable[[], None] = _go_on
    _waited: bool = field(default=False, init=False)

    def run(self, forward: Callable[[], None], backward: Callable[[], None], *, independent: bool) -> None:
        """Compile both halves; one after the other if the backward depends on the forward's code."""
        first, second = (backward, forward) if independent and self.backward_first else (forward, backward)
        first()
        self.finish()
        second()

    def finish(self) -> None:
        """Wait for the others if this rank has not done so yet, as it compiled one half only or failed."""
        if not self._waited:
            self._waited = True
            self.barrier()
