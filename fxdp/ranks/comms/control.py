"""Control rounds of a few ranks, all to all: each rank sends its part to each other rank.

As each rank sends exactly one DATA or REFUSED in each round, rounds stay in step without numbers. More than
`FXDP_TREE_ABOVE` ranks use a tree (`ranks/tree/tree_control.py`). Processor time per round: with 8 ranks
0.16 ms for each rank all to all, 0.27 ms for the root of a tree; with 16 ranks 0.39 ms for each rank all to
all and for the root of a tree, a fifth for the remaining ranks (`benchmarks/speed/control_plane.py`).
"""

from __future__ import annotations

import socket

from fxdp.ranks.comms.channel import Channel, RefusedError
from fxdp.ranks.comms.frames import FrameKind, framed
from fxdp.ranks.comms.wires import Peer
from fxdp.ranks.liveness.departure import as_bytes, as_text


class Control(Channel):
    """The control channel of one rank."""

    def __init__(self, rank: int, connections: dict[int, socket.socket], timeout_s: float) -> None:
        super().__init__(rank, len(connections) + 1, connections, timeout_s)
        self._own = b""

    def start(self, data: bytes) -> None:
        """Send this rank's part of a round; `finish` must follow."""
        self._check_size(data)
        self._own = data
        self.round += 1
        self._send_all(framed(FrameKind.DATA, data, self.rank), self.peers)

    def finish(self) -> list[bytes]:
        """Wait for all ranks' parts of the round that `start` began."""
        self._wait(self._missing)
        with self._lock:
            parts = [(peer.rank, *peer.rounds.popleft()) for peer in self.peers]
        refused = [(rank, as_text(part)) for rank, kind, part in parts if kind is FrameKind.REFUSED]
        if refused:
            raise RefusedError("\n".join(f"rank {self.names[r]} failed: {text}" for r, text in refused))
        data = [part for _, _, part in parts]
        data.insert(self.rank, self._own)
        return data

    def _missing(self) -> list[Peer]:
        return [peer for peer in self.peers if not peer.rounds or peer.unsent]

    def refuse(self, text: str) -> None:
        """Tell all ranks that this one cannot take part in the next round; does not wait for their parts."""
        self.round += 1
        with self._lock:
            for peer in self.peers:
                peer.drop_round()
        self._send_all(framed(FrameKind.REFUSED, as_bytes(text), self.rank), self.peers)
