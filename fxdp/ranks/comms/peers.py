"""Processes that end before their ranks have come: noticed by the connections of torch's own process group.

A rank that waits at start-up has no connection of fxdp's yet, and torch's store tells of no process that is
gone. But gloo has joined all ranks to all, and closes its end of a connection whose other end is closed:

    this rank has waited for some seconds         a process may have ended before: ask
    a connection of this process is gone          of gloo, of the store, or of the user's own: ask
    a byte to the next ranks that have not come   gloo refuses at once where the connection is closed

Nobody reads that byte. A rank asks those that follow it, as all others do, and tells all what it finds. Where
the group has no gloo, a rank that ends without a word is missed when the time is up.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fxdp.errors import RankFailedError
from fxdp.ranks.comms.sockets import open_sockets

_TAG = 0x66786470
"""Of a message that no user's code waits for."""
_FIRST_S = 2.0
"""Ranks seldom start so far apart: else there is nothing to ask."""
_NEXT = 32
"""Ranks that one asks: of thousands each is still asked by several that wait."""


class Peers:
    """The processes of other ranks of one mesh, while some have not come.

    Parameters
    ----------
    ranks : the global ranks of the mesh.
    rank : this global rank.
    has_come : whether a rank has said where it is; from then on its own connections tell of it.
    """

    def __init__(self, ranks: Sequence[int], rank: int, has_come: Callable[[int], bool]) -> None:
        place = list(ranks).index(rank)
        self._next = [*ranks[place + 1 :], *ranks[:place]][:_NEXT]
        self._has_come = has_come
        self._first = time.monotonic() + _FIRST_S
        self._open = open_sockets() if "gloo" in dist.get_backend() else None
        self._asked: list[Any] = []

    def look(self) -> None:
        """Notice processes that have ended since.

        Raises
        ------
        RankFailedError : the process of a rank that has not come has ended.
        """
        if self._open is None:
            return
        now = open_sockets()
        lost, self._open = self._open - now, now
        if not lost and time.monotonic() < self._first:
            return
        self._first = math.inf
        ended = [rank for rank in self._next if not self._has_come(rank) and not self._reaches(rank)]
        if ended:
            raise RankFailedError(
                f"rank {', '.join(map(str, ended))} failed: its process ended without an error message "
                "(killed, out of memory, or its program was over) before it had called fxdp.compile; see its "
                "output"
            )

    def _reaches(self, rank: int) -> bool:
        mark = torch.zeros(1, dtype=torch.uint8)
        try:
            self._asked.append((mark, dist.isend(mark, rank, tag=_TAG)))
        except RuntimeError:
            return False
        return True
