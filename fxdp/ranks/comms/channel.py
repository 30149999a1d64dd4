"""Connections between the ranks of a mesh, on which every rank that leaves reports the reason.

A collective over gloo passes through three threads and answers a dead peer with "connection closed". Here
the calling thread itself writes and reads one connection per peer, and a rank that leaves sends a reason:

    each call        one DATA or REFUSED on each connection, with a meaning defined by the subclass
    at the end       a reason (FAILED, KILLED, ENDED or OUT_OF_STEP), then end of stream; only the latter
                     if the process was killed

`comms/frames.py` lists all frames.
"""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections.abc import Callable, Sequence

from fxdp.errors import RankFailedError, StateError
from fxdp.ranks.comms.frames import DATA_BYTES, PLACE_BYTES, ROUND, FrameKind, framed
from fxdp.ranks.comms.wires import Peer, Wires
from fxdp.ranks.liveness.departure import ALONE, Departure, DepartureKind, LateError, as_bytes, as_text

_PING_S = 0.05
_AGAIN_S = 3.0  # before a rank reports its position again: most ranks ask at about the same time


class RefusedError(RankFailedError):
    """Raised when another rank refuses this round; the next rounds are not affected."""


class Channel(Wires):
    """The connections of one rank. A round is for one thread; everything else is safe from any thread.

    Attributes
    ----------
    size : number of ranks, including this one.
    names : names of the ranks in errors: initially indices, later global numbers, with hosts if there are
        several.
    round : number of rounds that this rank has begun or refused.
    silent : True once this rank has reported a reason to leave.
    left : departure of a rank without a connection to this one that has ended without an error.
    waits_for : function for the content of WAITS, sent when this rank has waited for a second.
    is_at : function for the content of PLACE, sent when a rank asks for the position of this rank.
    places : time and content of the last PLACE of each rank.
    hops : most connections between any two ranks.

    Raises
    ------
    RankFailedError : (all methods that wait) a rank refused, failed, ended, was killed, or was late.
    """

    def __init__(self, rank: int, size: int, connections: dict[int, socket.socket], timeout_s: float) -> None:
        super().__init__(connections)
        self.rank = rank
        self.size = size
        self.names: Sequence[int | str] = range(size)
        self.round = 0
        self.waits_for: Callable[[], bytes] = bytes
        self.is_at: Callable[[], bytes] = lambda: bytes(PLACE_BYTES)
        self.places: dict[int, tuple[float, bytes]] = {}
        self.hops = 1
        self._placed = -math.inf
        self._timeout_s = timeout_s
        self.silent = False
        self.left: Departure | None = None

    # -- rounds --------------------------------------------------------------------------------------------

    def exchange(self, data: bytes) -> Sequence[bytes]:
        """Return every rank's bytes, in rank order."""
        self.start(data)
        return self.finish()

    def start(self, data: bytes) -> None:
        """Send this rank's part of a round; `finish` must follow."""
        raise NotImplementedError

    def finish(self) -> Sequence[bytes]:
        """Wait for all ranks' parts of the round that `start` began."""
        raise NotImplementedError

    def refuse(self, text: str) -> None:
        """Tell all ranks that this one cannot take part in the next round; does not wait for their parts."""
        raise NotImplementedError

    def _wait(self, missing: Callable[[], list[Peer]]) -> None:
        """Read and send until no rank is `missing`."""
        deadline = math.inf
        told = is_quiet = False
        with self._reading():
            while waiting := missing():
                if departure := self._departure(waiting):
                    raise RankFailedError(self.words(departure))
                if is_quiet and not told:
                    told = True
                    self._send_where(waiting)
                now = time.monotonic()
                deadline = min(deadline, now + self._timeout_s)
                if now > deadline:
                    raise LateError(self._late_words(self._late(waiting)))
                events = self._poll.poll(1000)
                is_quiet = not events
                for descriptor, _ in events:
                    self._progress(self._by_descriptor[descriptor])

    def _check_size(self, data: bytes) -> None:
        if len(data) > DATA_BYTES:
            raise StateError(f"{len(data)} bytes are more than ranks tell each other; this is a bug in fxdp")

    def _send_where(self, waiting: list[Peer]) -> None:
        """Send this rank's position to the awaited ranks, which may wait for this one elsewhere."""
        self._tell(waiting, framed(FrameKind.WAITS, ROUND.pack(self.round) + self.waits_for(), self.rank))

    def _departure(self, waiting: list[Peer]) -> Departure | None:
        """Return why this round cannot complete: a rank has failed, or has left before this round."""
        endings = [peer.departure for peer in self.peers if peer.departure]
        failed = [departure for departure in endings if departure.kind is not DepartureKind.ENDED]
        return next(iter(failed + [peer.departure for peer in waiting if peer.departure]), None)

    def _late(self, waiting: Sequence[Peer]) -> Sequence[int]:
        """Return the ranks for which this rank waits in vain."""
        return [peer.rank for peer in waiting]

    def _late_words(self, ranks: Sequence[int]) -> str:
        late = ", ".join(str(self.names[rank]) for rank in ranks)
        return (
            f"rank {late} did not come within {self._timeout_s:g} s, though its process is alive; expected "
            f"all ranks to make the same calls (set FXDP_TIMEOUT_S if one may need longer); {ALONE}"
        )

    # -- who is where --------------------------------------------------------------------------------------

    def ask(self) -> None:
        """Ask all ranks for their positions, and send the position of this rank."""
        self._placed = -math.inf
        self._say_place(None)

    def _say_place(self, source: Peer | None) -> None:
        """Answer a question for this rank's position, which has arrived from the neighbor `source`."""
        now = time.monotonic()
        if now - self._placed < _AGAIN_S:
            return
        self._placed = now
        asked = [peer for peer in self.peers if peer is not source and (source is None or self.hops > 1)]
        self._tell(asked, framed(FrameKind.ASKS, b"", self.rank))
        self._tell(self.peers, framed(FrameKind.PLACE, self.is_at(), self.rank))

    def _hear_place(self, source: Peer, about: int, content: bytes) -> None:
        """Record the position of a rank."""
        if 0 <= about < self.size and about != self.rank:
            self.places[about] = time.monotonic(), content

    # -- endings -------------------------------------------------------------------------------------------

    def words(self, departure: Departure) -> str:
        """Return a departure as text, with the rank's name."""
        known = 0 <= departure.rank < len(self.names)  # the number came from another rank
        return departure.words(self.names[departure.rank]) if known else str(departure)

    def broadcast_failure(self, departure: Departure) -> None:
        """Tell all ranks why this one stops, and send nothing more. Later calls do nothing."""
        with self._lock:
            if self.silent:
                return
            self.silent = True
        frame = framed(departure.kind, as_bytes(departure.text), departure.rank)
        for peer in self.peers:
            with contextlib.suppress(OSError):
                self._send(peer, frame)
                if not self._is_way_to(peer, departure.rank):  # `outlast` continues to ask that one
                    peer.connection.shutdown(socket.SHUT_WR)

    def _is_way_to(self, peer: Peer, rank: int) -> bool:
        """Return whether news of a rank arrive from this peer."""
        return peer.rank == rank

    def news(self) -> Departure | None:
        """Return the departure of a rank that no longer takes part, if any; for use outside a round."""
        endings = [departure for peer in self.peers if (departure := self.drain(peer))]
        return next(
            (e for e in endings if e.kind is not DepartureKind.ENDED), endings[0] if endings else self.left
        )

    def outlast(self, rank: int, end: float) -> None:
        """Wait until the process of another rank has ended: then that machine refuses everything sent."""
        frame = framed(FrameKind.PING, b"", self.rank)
        branches = [peer for peer in self.peers if self._is_way_to(peer, rank)]
        for peer in sorted(branches, key=lambda peer: peer.rank != rank)[:1]:
            while time.monotonic() < end:
                try:
                    self._send(peer, frame)
                except OSError:
                    return
                time.sleep(_PING_S)

    # -- receiving -----------------------------------------------------------------------------------------

    def _take(self, peer: Peer, kind: FrameKind, about: int, content: bytes) -> None:
        if kind in (FrameKind.DATA, FrameKind.REFUSED):
            if peer.ignore:
                peer.ignore -= 1
            else:
                peer.rounds.append((kind, content))
            return
        if kind is FrameKind.PING:
            return
        if kind is FrameKind.ASKS:
            self._say_place(peer)
            return
        if kind is FrameKind.PLACE:
            self._hear_place(peer, about, content)
            return
        if kind is FrameKind.WAITS:
            peer.waits = ROUND.unpack_from(content)[0], content[ROUND.size :]
            return
        peer.departure = Departure(about, DepartureKind(kind), as_text(content))
