"""Detect processes that end before their ranks have joined, by the connections of torch's own process group.

A rank that waits at start-up has no connection of fxdp yet, and torch's store does not report dead
processes. But gloo has connected all ranks to all, and closes its end of a connection when the other end is
closed:

    this rank has waited for some seconds         a process may have ended before: probe
    a connection of this process is gone          it belonged to gloo, the store, or the user: probe
    a byte to the next ranks that are missing     gloo raises at once if the connection is closed

No rank reads that byte. Each rank probes the ranks that follow it, and reports the results to all. If the
group does not use gloo, a rank that ends without a report is missed only at the timeout.
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
from fxdp.torch_compat import world_group

_TAG = 0x66786470
"""Tag of a message that no user code receives."""
_FIRST_S = 2.0
"""Seconds before the first probe; ranks seldom start so far apart."""
_NEXT = 32
"""Most ranks that one rank probes: among thousands, each rank is still probed by several."""


class Peers:
    """The processes of one mesh's ranks, while some have not joined.

    Parameters
    ----------
    ranks : the global ranks of the mesh.
    rank : this global rank.
    has_come : function that returns whether a rank has published an address. Then fxdp's connections detect
        the
        end of that process.
    """

    def __init__(self, ranks: Sequence[int], rank: int, has_come: Callable[[int], bool]) -> None:
        place = list(ranks).index(rank)
        self._next = [*ranks[place + 1 :], *ranks[:place]][:_NEXT]
        self._has_come = has_come
        self._first = time.monotonic() + _FIRST_S
        self._open = open_sockets() if "gloo" in dist.get_backend(world_group()) else None
        self._asked: list[Any] = []

    def look(self) -> None:
        """Probe the missing ranks if a process may have ended.

        Raises
        ------
        RankFailedError : the process of a missing rank has ended.
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
