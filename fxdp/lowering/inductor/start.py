"""How a program's halves come to be compiled; `cold_start` is a shorter way to the same code.

The main line knows a `Start` only. The plain one builds each kernel by itself, as Inductor does, and compiles
the forward, then the backward, on every rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from fxdp.torch_compat import is_on


def _go_on() -> None:
    """Nobody to wait for."""


@dataclass
class Start:
    """The order in which a rank compiles both halves of one program, and what is in force meanwhile."""

    barrier: Callable[[], None] = _go_on
    """Waits until all ranks have come so far."""
    _waited: bool = field(default=False, init=False)

    def building(self) -> AbstractContextManager[None]:
        """Around the compilation of a half."""
        return contextlib.nullcontext()

    def run(self, forward: Callable[[], None], backward: Callable[[], None], *, independent: bool) -> None:
        """Compile both halves, one after the other if the backward depends on the forward's code."""
        forward()
        backward()

    def finish(self) -> None:
        """Wait for the others once, however far this rank has come: also if it failed."""
        # each rank waits exactly once whatever its settings, else one rank's wait would meet
        # another's next exchange
        if not self._waited:
            self._waited = True
            self.barrier()


def start_of(rank: int = 0, barrier: Callable[[], None] = _go_on) -> Start:
    """The way to compile a program: the shorter one where that shortcut is on."""
    if not is_on("cold_start"):
        return Start(barrier)
    # here, so that nothing of it is loaded where it is left out
    from fxdp.lowering.inductor.cold_start import ColdStart

    return ColdStart(barrier, backward_first=rank % 2 == 1)
