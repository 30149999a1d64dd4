"""Control rounds of many ranks over a tree, with the same results as all to all (`comms/control.py`).

    round     a child sends DATA up once its own children's parts have arrived; the root sends the answer down
    refusal   goes up and down at once; each direction of each connection carries exactly one DATA or REFUSED
              per round, so frames for a round that is decided are dropped: rounds stay in step
    ending    each rank passes a departure on at once, to all neighbors except the source

Frames are passed on by the thread that reads them, in the order of arrival. A rank that leaves has finished
all earlier rounds. So a rank that learns of the departure before an answer will never get that answer.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Sequence

import numpy as np

from fxdp.ranks.comms.channel import Channel, RefusedError
from fxdp.ranks.comms.frames import DATA_BYTES, ROUND, FrameKind, framed
from fxdp.ranks.comms.wires import Peer
from fxdp.ranks.liveness.departure import (
    TEXT_BYTES,
    TEXT_LIMIT,
    Departure,
    DepartureKind,
    as_bytes,
    as_text,
    harmless,
)
from fxdp.ranks.tree.rank_parts import RankParts
from fxdp.ranks.tree.tree_shape import TreePlace

_NAMED = 16  # most ranks named as missing
_RANK = struct.Struct("<i")


class TreeControl(Channel):
    """The control channel of one rank in the tree."""

    def __init__(
        self, rank: int, place: TreePlace, connections: dict[int, socket.socket], timeout_s: float
    ) -> None:
        super().__init__(rank, place.size, connections, timeout_s)
        by_rank = {peer.rank: peer for peer in self.peers}
        self._place = place
        self._parent = None if place.parent is None else by_rank[place.parent]
        self._children = [by_rank[child] for child in place.children]
        self.hops = min(place.size - 1, 2 * place.size.bit_length())  # of a tree of two children each
        self._arrived = np.argsort(np.array(place.order, np.int64))  # position of each rank's value
        self._own = b""
        self._open = self._risen = self._telling = False
        self._answer: RankParts | None = None
        self._refusals: list[tuple[int, str]] = []
        self._absent: dict[int, tuple[int, tuple[int, ...]]] = {}  # by neighbor: a round, and missing ranks
        self._told: dict[int, tuple[int, ...]] = {}

    # -- rounds --------------------------------------------------------------------------------------------

    def start(self, data: bytes) -> None:
        """Send this rank's part of a round, if all children's parts have arrived; `finish` must follow."""
        self._check_size(data)
        with self._lock:
            self._begin(data)
            self._advance()

    def finish(self) -> Sequence[bytes]:
        """Wait for the answer of the round that `start` began."""
        self._wait(self._missing)
        if self._refusals:
            raise RefusedError("\n".join(f"rank {self.names[r]} failed: {t}" for r, t in self._refusals))
        assert self._answer is not None
        return self._answer

    def refuse(self, text: str) -> None:
        """Tell all ranks that this one cannot take part in the next round; does not wait for their parts."""
        with self._lock:
            self._begin(b"")
            self._decide_refused([(self.rank, text)])

    def _begin(self, data: bytes) -> None:
        self.round += 1
        self._own, self._answer, self._refusals = data, None, []
        self._open, self._risen, self._telling = True, False, False
        self._told.clear()

    def _missing(self) -> list[Peer]:
        """Return the ranks for which this rank waits, and all ranks with unsent data."""
        with self._lock:  # the watch may be passing on a frame
            unsent = [peer for peer in self.peers if peer.unsent]
            return unsent + [peer for peer in self._awaited() if peer not in unsent]

    def _awaited(self) -> list[Peer]:
        if not self._open:
            return []
        if self._risen and self._parent is not None:
            return [self._parent]
        return [child for child in self._children if not child.rounds]

    def _advance(self) -> None:
        """Advance the open round as far as possible."""
        above = [] if self._parent is None else [self._parent]
        outstanding = above if self._risen else [*self._children, *above]
        refusals = [peer for peer in outstanding if peer.rounds and peer.rounds[0][0] is FrameKind.REFUSED]
        if refusals:
            self._decide_refused([found for peer in refusals for found in self._read_refusals(peer)])
            return
        if not self._risen and all(child.rounds for child in self._children):
            self._rise()
        if self._risen and self._parent is not None and self._parent.rounds:
            self._descend(self._parent)

    def _rise(self) -> None:
        parts = [RankParts.of(self._own)]
        for child, count in zip(self._children, self._place.counts, strict=True):
            try:
                parts.append(RankParts.decode(child.rounds[0][1], count))
            except ValueError as error:
                child.rounds.clear()
                self._turn_away(child, str(error))
                return
        joined = RankParts.join(parts)
        if self._parent is None:
            joined = joined.ordered(self._arrived)
        data = joined.encode()
        if len(data) > DATA_BYTES:
            text = f"{len(data)} bytes are more than so many ranks tell each other at once; a bug in fxdp"
            self._decide_refused([(self.rank, text)])
            return
        for child in self._children:
            child.rounds.popleft()
        if self._parent is None:
            self._answer, self._open = joined, False
            self._send_all(framed(FrameKind.DATA, data, self.rank), self._children)
        else:
            self._risen = True
            self._send_or_drain(self._parent, framed(FrameKind.DATA, data, self.rank))

    def _descend(self, parent: Peer) -> None:
        _, content = parent.rounds.popleft()
        try:
            self._answer = RankParts.decode(content, self.size)
        except ValueError as error:
            self._turn_away(parent, str(error))
            return
        self._open = False
        self._send_all(framed(FrameKind.DATA, content, self.rank), self._children)

    def _decide_refused(self, refusals: list[tuple[int, str]]) -> None:
        """Refuse this round: drop further frames of the round, and send every REFUSED frame still due."""
        self._refusals, self._open = refusals, False
        for peer in self.peers:
            if not self._risen or peer is self._parent:  # else its part was taken already
                peer.drop_round()
        owed = self._children if self._risen else self.peers
        self._send_all(framed(FrameKind.REFUSED, _written(refusals), self.rank), owed)

    def _read_refusals(self, peer: Peer) -> list[tuple[int, str]]:
        try:
            found = json.loads(peer.rounds[0][1])
            return [(int(rank) % self.size, harmless(str(text))) for rank, text in found]
        except (ValueError, TypeError, RecursionError):
            return [(peer.rank, "refused this call, in words that this rank does not understand")]

    # -- endings -------------------------------------------------------------------------------------------

    def _take(self, peer: Peer, kind: FrameKind, about: int, content: bytes) -> None:
        if kind is FrameKind.MISSING:
            named = content[ROUND.size :][: _RANK.size * _NAMED]
            ranks = [rank for (rank,) in _RANK.iter_unpack(named[: len(named) & -_RANK.size])]
            known = tuple(rank for rank in ranks if 0 <= rank < self.size)
            self._absent[peer.rank] = ROUND.unpack_from(content)[0], known
            self._send_missing()
            return
        if kind is FrameKind.ENDED and about != peer.rank:  # the peer itself continues
            self._pass_on(Departure(about, DepartureKind.ENDED, as_text(content)), peer)
            return
        super()._take(peer, kind, about, content)
        if kind in (FrameKind.DATA, FrameKind.REFUSED):
            if self._open:
                self._advance()
                self._send_missing()
        elif peer.departure is not None:
            self._pass_on(peer.departure, peer)

    def _hear_place(self, source: Peer, about: int, content: bytes) -> None:
        super()._hear_place(source, about, content)
        self._tell(self._besides(source), framed(FrameKind.PLACE, content, about))

    def _hang_up(self, peer: Peer) -> None:
        super()._hang_up(peer)
        assert peer.departure is not None
        self._pass_on(peer.departure, peer)

    def _turn_away(self, peer: Peer, fault: str) -> None:
        super()._turn_away(peer, fault)
        assert peer.departure is not None
        self._pass_on(peer.departure, peer)

    def _pass_on(self, departure: Departure, source: Peer) -> None:
        """Pass a departure on to all neighbors except the source; only the first one without an error."""
        if departure.kind is not DepartureKind.ENDED:
            self.broadcast_failure(departure)
            return
        if self.left is not None or self.silent:
            return
        self.left = departure
        self._tell(self._besides(source), framed(FrameKind.ENDED, as_bytes(departure.text), departure.rank))

    def _besides(self, source: Peer) -> list[Peer]:
        return [peer for peer in self.peers if peer is not source]

    def _is_way_to(self, peer: Peer, rank: int) -> bool:
        return peer.rank == rank or (peer.departure is not None and peer.departure.rank == rank)

    def _departure(self, waiting: list[Peer]) -> Departure | None:
        return super()._departure(waiting) or self.left

    # -- who is late ---------------------------------------------------------------------------------------

    def _send_where(self, waiting: list[Peer]) -> None:
        """Send the position of this rank to all neighbors, as the missing rank may be far away."""
        super()._send_where(self.peers)
        with self._lock:
            self._telling = True
            self._send_missing()

    def _send_missing(self) -> None:
        """Tell each neighbor which ranks are missing on the remaining sides, if this has changed."""
        if not (self._telling and self._open):
            return
        for peer in self.peers:
            missing = self._missed(besides=peer)
            if missing and self._told.get(peer.rank) != missing:
                self._told[peer.rank] = missing
                content = ROUND.pack(self.round) + b"".join(map(_RANK.pack, missing))
                self._tell([peer], framed(FrameKind.MISSING, content, self.rank))

    def _missed(self, besides: Peer | None = None) -> tuple[int, ...]:
        """Return the missing ranks: a neighbor, or the ranks that this neighbor reports as missing."""
        found: set[int] = set()
        for peer in self._awaited():
            number, ranks = self._absent.get(peer.rank, (0, ()))
            if peer is not besides:
                found.update(ranks if number == self.round and ranks else (peer.rank,))
        return tuple(sorted(found)[:_NAMED])

    def _late(self, waiting: Sequence[Peer]) -> Sequence[int]:
        return self._missed() or super()._late(waiting)


def _written(refusals: Sequence[tuple[int, str]]) -> bytes:
    """Encode as many refusals as fit into a frame."""
    kept = [(rank, as_bytes(text[:TEXT_LIMIT]).decode(errors="replace")) for rank, text in refusals]
    while len(data := json.dumps(kept).encode()) > TEXT_BYTES:
        kept = kept[:-1] or [(refusals[0][0], "")]
    return data
