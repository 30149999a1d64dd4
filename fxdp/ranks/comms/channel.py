"""This rank's connections to others of its mesh, on which ranks say why they leave, whatever else they say.

A collective over gloo passes through three threads and answers a dead peer with "connection closed". Here
the calling thread itself writes and reads one connection per peer, and a rank that goes away says why:

    each call        one DATA or REFUSED on each connection: what they mean, subclasses say
    at the end       why: FAILED, KILLED, ENDED or ASTRAY, then end of stream; nothing, if it was killed

All frames are in `comms/frames.py`.
"""

from __future__ import annotations

import contextlib
import math
import socket
import time
from collections.abc import Callable, Sequence

from fxdp.errors import RankFailedError, StateError
from fxdp.ranks.comms.departure import Departure, DepartureKind, LateError, as_bytes, as_text
from fxdp.ranks.comms.frames import DATA_BYTES, PLACE_BYTES, ROUND, FrameKind, framed
from fxdp.ranks.comms.wires import Peer, Wires

_PING_S = 0.05
_AGAIN_S = 3.0  # before a rank says again where it is: mostly all ranks ask at about the same time


class RefusedError(RankFailedError):
    """Another rank refused this round; the next rounds are not affected."""


class Channel(Wires):
    """The connections of one rank. A round is for one thread; the rest is safe from any thread.

    Attributes
    ----------
    size : how many ranks take part, this one included.
    names : what errors call the ranks: once somebody has set them, their global numbers, and their hosts
        where there are several.
    round : how many rounds this rank has begun or refused.
    silent : whether last words were said.
    left : a rank without a connection to this one that has ended its process without an error.
    waits_for : gives what the others are told when this rank has waited for them for a second.
    is_at : gives what they are told when one of them asks where this rank is.
    places : when and what the others have said of that, by rank.
    hops : how many connections lie between two ranks at most.

    Raises
    ------
    RankFailedError : (all methods that wait) another rank refused, failed, ended, was killed, or did not
        come in time.
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
        """Every rank's bytes, in rank order."""
        self.start(data)
        return self.finish()

    def start(self, data: bytes) -> None:
        """Send this rank's part of a round; `finish` must follow."""
        raise NotImplementedError

    def finish(self) -> Sequence[bytes]:
        """Wait for the other ranks' parts of the round that `start` began."""
        raise NotImplementedError

    def refuse(self, text: str) -> None:
        """Tell all ranks that this one cannot take part in the next round; does not wait for theirs."""
        raise NotImplementedError

    def _wait(self, missing: Callable[[], list[Peer]]) -> None:
        """Read and send until nobody is `missing` any more."""
        deadline = 0.0
        told = False
        waiting = missing()
        while waiting:
            events = self._poll.poll(1000)
            for descriptor, _ in events:
                self._progress(self._by_descriptor[descriptor])
            waiting = missing()
            if not waiting:
                return
            if departure := self._departure(waiting):
                raise RankFailedError(self.words(departure))
            if not events and not told:
                told = True
                self._send_where(waiting)
            deadline = deadline or time.monotonic() + self._timeout_s
            if time.monotonic() > deadline:
                raise LateError(self._late_words(self._late(waiting)))

    def _check_size(self, data: bytes) -> None:
        if len(data) > DATA_BYTES:
            raise StateError(f"{len(data)} bytes are more than ranks tell each other; this is a bug in fxdp")

    def _send_where(self, waiting: list[Peer]) -> None:
        """Tell those for whom this rank waits where it is: they may wait for it elsewhere."""
        self._tell(waiting, framed(FrameKind.WAITS, ROUND.pack(self.round) + self.waits_for(), self.rank))

    def _departure(self, waiting: list[Peer]) -> Departure | None:
        """Why this round will never be complete: a rank that failed, or one that left before its part."""
        endings = [peer.departure for peer in self.peers if peer.departure]
        failed = [departure for departure in endings if departure.kind is not DepartureKind.ENDED]
        return next(iter(failed + [peer.departure for peer in waiting if peer.departure]), None)

    def _late(self, waiting: Sequence[Peer]) -> Sequence[int]:
        """The ranks for which this one waits in vain."""
        return [peer.rank for peer in waiting]

    def _late_words(self, ranks: Sequence[int]) -> str:
        late = ", ".join(str(self.names[rank]) for rank in ranks)
        return (
            f"rank {late} did not come within {self._timeout_s:g} s, though its process is alive; expected "
            "all ranks to make the same calls (set FXDP_TIMEOUT_S if one may need longer)"
        )

    # -- who is where --------------------------------------------------------------------------------------

    def ask(self) -> None:
        """Ask all ranks where they are, and say it of this one."""
        self._placed = -math.inf
        self._say_place(None)

    def _say_place(self, source: Peer | None) -> None:
        """Answer a rank that asks; `source` is the one from which that came."""
        now = time.monotonic()
        if now - self._placed < _AGAIN_S:
            return
        self._placed = now
        asked = [peer for peer in self.peers if peer is not source and (source is None or self.hops > 1)]
        self._tell(asked, framed(FrameKind.ASKS, b"", self.rank))
        self._tell(self.peers, framed(FrameKind.PLACE, self.is_at(), self.rank))

    def _hear_place(self, source: Peer, about: int, content: bytes) -> None:
        """A rank has said where it is."""
        if 0 <= about < self.size and about != self.rank:
            self.places[about] = time.monotonic(), content

    # -- endings -------------------------------------------------------------------------------------------

    def words(self, departure: Departure) -> str:
        """An ending in words, with the rank's name."""
        known = 0 <= departure.rank < len(self.names)  # it came from another rank
        return departure.words(self.names[departure.rank]) if known else str(departure)

    def broadcast_failure(self, departure: Departure) -> None:
        """Tell all ranks why this one stops, and send nothing any more. Later calls do nothing."""
        with self._lock:
            if self.silent:
                return
            self.silent = True
        frame = framed(departure.kind, as_bytes(departure.text), departure.rank)
        for peer in self.peers:
            with contextlib.suppress(OSError):
                self._send(peer, frame)
                if not self._is_way_to(peer, departure.rank):  # `outlast` goes on to ask that one
                    peer.connection.shutdown(socket.SHUT_WR)

    def _is_way_to(self, peer: Peer, rank: int) -> bool:
        """Whether news of a rank come by this peer."""
        return peer.rank == rank

    def news(self) -> Departure | None:
        """Why another rank no longer takes part; asked outside of a round."""
        endings = [departure for peer in self.peers if (departure := self.drain(peer))]
        return next(
            (e for e in endings if e.kind is not DepartureKind.ENDED), endings[0] if endings else self.left
        )

    def outlast(self, rank: int, end: float) -> None:
        """Wait until the process of another rank has ended: then its machine refuses what is sent."""
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
