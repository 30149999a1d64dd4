"""Short messages between all ranks of a mesh: integers each step, and a rank's last words.

A collective over gloo passes through three threads and answers a dead peer with "connection closed". Here
the calling thread itself writes and reads one connection per peer, and a rank that goes away says why:

    each call        one DATA or REFUSED from each rank
    at the end       why: FAILED, KILLED, ENDED or ASTRAY, then end of stream; nothing, if it was killed

All frames are in `links/frames.py`. As each rank sends exactly one DATA or REFUSED in each round, rounds stay
in step without numbers.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fxdp.errors import RankFailedError, StateError
from fxdp.ranks.links.ending import UNHEARD, Ending, EndKind, as_bytes, as_text, sent_nonsense
from fxdp.ranks.links.frames import DATA_BYTES, ROUND, FrameKind, NoFrameError, framed, take_frame

_CHUNK = 1 << 16
_PING_S = 0.05
_UNHEARD = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)


class RefusedError(RankFailedError):
    """Another rank refused this round; the next rounds are not affected."""


@dataclass(eq=False)
class Peer:
    """This rank's connection to one other rank."""

    rank: int
    connection: socket.socket
    unread: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    rounds: deque[tuple[FrameKind, bytes]] = field(default_factory=deque)
    ignore: int = 0  # rounds that this rank refused: the peer's parts are dropped
    ending: Ending | None = None
    waits: tuple[int, bytes] | None = None
    """The round for which it waits since a second, and where it is in its program."""
    closed: bool = False
    unheard: bool = False
    """Whether its machine left questions without an answer, and so was given up."""


class Control:
    """The control channel of one rank. `exchange` is for one thread; the rest is safe from any thread.

    Attributes
    ----------
    names : what errors call the ranks: once somebody has set them, their global numbers, and their hosts
        where there are several.
    round : how many rounds this rank has begun or refused.
    silent : whether last words were said.
    waits_for : gives what the others are told when this rank has waited for them for a second.

    Raises (all methods that wait):
        RankFailedError: another rank refused, failed, ended, was killed, or did not come in time.
    """

    def __init__(self, rank: int, connections: dict[int, socket.socket], timeout_s: float) -> None:
        self.rank = rank
        self.size = len(connections) + 1
        self.names: Sequence[int | str] = range(self.size)
        self.round = 0
        self.waits_for: Callable[[], bytes] = bytes
        self._timeout_s = timeout_s
        self._lock = threading.RLock()
        self._own = b""
        self.silent = False
        self.peers = [Peer(other, connections[other]) for other in sorted(connections)]
        self._by_descriptor = {peer.connection.fileno(): peer for peer in self.peers}
        self._poll = select.poll()
        for peer in self.peers:
            self._poll.register(peer.connection, select.POLLIN)

    def exchange(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, in rank order."""
        self.start(data)
        return self.finish()

    def start(self, data: bytes) -> None:
        """Send this rank's part of a round; `finish` must follow."""
        if len(data) > DATA_BYTES:
            raise StateError(f"{len(data)} bytes are more than ranks tell each other; this is a bug in fxdp")
        self._own = data
        self.round += 1
        self._send_all(framed(FrameKind.DATA, data, self.rank))

    def finish(self) -> list[bytes]:
        """Wait for the other ranks' parts of the round that `start` began."""
        deadline = 0.0
        told = False
        waiting = [peer for peer in self.peers if not peer.rounds or peer.unsent]
        while waiting:
            events = self._poll.poll(1000)
            for descriptor, _ in events:
                self._progress(self._by_descriptor[descriptor])
            waiting = [peer for peer in waiting if not peer.rounds or peer.unsent]
            if waiting and (ending := self._ending(waiting)):
                raise RankFailedError(self.words(ending))
            if waiting and not events and not told:
                told = True
                self._tell_where(waiting)
            deadline = deadline or time.monotonic() + self._timeout_s
            if waiting and time.monotonic() > deadline:
                raise RankFailedError(self._late(waiting))
        return self._collect()

    def words(self, ending: Ending) -> str:
        """An ending in words, with the rank's name."""
        known = 0 <= ending.rank < len(self.names)  # it came from another rank
        return ending.words(self.names[ending.rank]) if known else str(ending)

    def refuse(self, text: str) -> None:
        """Tell all ranks that this one cannot take part in the next round; does not wait for theirs."""
        self.round += 1
        with self._lock:
            for peer in self.peers:
                if peer.rounds:
                    peer.rounds.popleft()
                else:
                    peer.ignore += 1
        self._send_all(framed(FrameKind.REFUSED, as_bytes(text), self.rank))

    def _tell_where(self, waiting: list[Peer]) -> None:
        """Tell those for whom this rank waits where it is: they may wait for it elsewhere."""
        frame = framed(FrameKind.WAITS, ROUND.pack(self.round) + self.waits_for(), self.rank)
        for peer in waiting:
            with contextlib.suppress(OSError):
                self._send(peer, frame)

    def last_words(self, ending: Ending) -> None:
        """Tell all ranks why this one stops, and send nothing any more. Later calls do nothing."""
        with self._lock:
            if self.silent:
                return
            self.silent = True
        frame = framed(ending.kind, as_bytes(ending.text), ending.rank)
        for peer in self.peers:
            with contextlib.suppress(OSError):
                self._send(peer, frame)
                if peer.rank != ending.rank:  # `outlast` goes on to ask that one
                    peer.connection.shutdown(socket.SHUT_WR)

    def drain(self, peer: Peer) -> Ending | None:
        """Read all that `peer` has sent; its ending, if it has ended."""
        with self._lock:
            self._read(peer)
            return peer.ending

    def news(self) -> Ending | None:
        """Why another rank no longer takes part; asked outside of a round."""
        endings = [ending for peer in self.peers if (ending := self.drain(peer))]
        return next((e for e in endings if e.kind is not EndKind.ENDED), endings[0] if endings else None)

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            for peer in self.peers:
                peer.closed = True
                peer.ending = peer.ending or Ending(peer.rank, EndKind.ENDED)
                peer.connection.close()

    def leave_open(self) -> None:
        """Let the system close the connections when the process has ended, and not before."""
        with self._lock:
            for peer in self.peers:
                peer.closed = True
                peer.connection.detach()

    def outlast(self, rank: int, end: float) -> None:
        """Wait until the process of another rank has ended: then its machine refuses what is sent."""
        frame = framed(FrameKind.PING, b"", self.rank)
        for peer in [peer for peer in self.peers if peer.rank == rank]:
            while time.monotonic() < end:
                try:
                    self._send(peer, frame)
                except OSError:
                    return
                time.sleep(_PING_S)

    def abandon(self) -> None:
        """Let go of this process's copies of the connections after a fork, in which a lock may never open."""
        for peer in self.peers:
            peer.connection.close()

    # -- sending -------------------------------------------------------------------------------------------

    def _send_all(self, frame: bytes) -> None:
        for peer in self.peers:
            try:
                self._send(peer, frame)
            except OSError as error:
                _note_loss(peer, error)
                self.drain(peer)  # the peer is gone; `finish` reports it with its last words

    def _send(self, peer: Peer, frame: bytes) -> None:
        with self._lock:
            if peer.unsent:
                peer.unsent += frame
                return
            try:
                sent = peer.connection.send(frame, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                sent = 0
            if sent < len(frame):
                peer.unsent += frame[sent:]
                self._poll.modify(peer.connection, select.POLLIN | select.POLLOUT)

    def _send_rest(self, peer: Peer) -> None:
        try:
            sent = peer.connection.send(peer.unsent, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return
        except OSError as error:
            _note_loss(peer, error)
            sent = len(peer.unsent)
        del peer.unsent[:sent]
        if not peer.unsent and not peer.closed:
            self._poll.modify(peer.connection, select.POLLIN)

    # -- receiving -----------------------------------------------------------------------------------------

    def _progress(self, peer: Peer) -> None:
        with self._lock:
            if peer.unsent:
                self._send_rest(peer)
            self._read(peer)

    def _read(self, peer: Peer) -> None:
        while not peer.closed:
            try:
                data = peer.connection.recv(_CHUNK)
            except BlockingIOError:
                break
            except OSError as error:
                _note_loss(peer, error)
                data = b""
            if not data:
                self._hang_up(peer)
                break
            peer.unread += data
            if len(data) < _CHUNK:
                break
        self._parse(peer)

    def _hang_up(self, peer: Peer) -> None:
        peer.closed = True
        self._parse(peer)
        peer.ending = peer.ending or Ending(peer.rank, EndKind.KILLED, UNHEARD if peer.unheard else "")
        with contextlib.suppress(KeyError, ValueError):
            self._poll.unregister(peer.connection)

    def _parse(self, peer: Peer) -> None:
        try:
            while frame := take_frame(peer.unread):
                self._take(peer, *frame)
        except NoFrameError as error:
            self._turn_away(peer, str(error))

    def _turn_away(self, peer: Peer, fault: str) -> None:
        """Hear no more from what does not speak as a rank does; ended here, so that the watch notices."""
        peer.unread.clear()
        peer.ending = Ending(peer.rank, EndKind.ASTRAY, sent_nonsense(fault))
        with contextlib.suppress(OSError):
            peer.connection.shutdown(socket.SHUT_RDWR)

    def _take(self, peer: Peer, kind: FrameKind, about: int, content: bytes) -> None:
        if kind in (FrameKind.DATA, FrameKind.REFUSED):
            if peer.ignore:
                peer.ignore -= 1
            else:
                peer.rounds.append((kind, content))
            return
        if kind is FrameKind.PING:
            return
        if kind is FrameKind.WAITS:
            peer.waits = ROUND.unpack_from(content)[0], content[ROUND.size :]
            return
        peer.ending = Ending(about, EndKind(kind), as_text(content))

    def _collect(self) -> list[bytes]:
        """The parts of a complete round, in rank order."""
        with self._lock:
            parts = [(peer.rank, *peer.rounds.popleft()) for peer in self.peers]
        refused = [(rank, as_text(part)) for rank, kind, part in parts if kind is FrameKind.REFUSED]
        if refused:
            raise RefusedError("\n".join(f"rank {self.names[r]} failed: {text}" for r, text in refused))
        data = [part for _, _, part in parts]
        data.insert(self.rank, self._own)
        return data

    def _ending(self, waiting: list[Peer]) -> Ending | None:
        """Why this round will never be complete: a rank that failed, or one that left before its part."""
        endings = [peer.ending for peer in self.peers if peer.ending]
        failed = [ending for ending in endings if ending.kind is not EndKind.ENDED]
        return next(iter(failed + [peer.ending for peer in waiting if peer.ending]), None)

    def _late(self, waiting: list[Peer]) -> str:
        late = ", ".join(str(self.names[peer.rank]) for peer in waiting)
        return (
            f"rank {late} did not come within {self._timeout_s:g} s, though its process is alive; expected "
            "all ranks to make the same calls (set FXDP_TIMEOUT_S if one may need longer)"
        )


def _note_loss(peer: Peer, error: OSError) -> None:
    """The system tells a connection's error once: here or to whoever asks first."""
    peer.unheard = peer.unheard or error.errno in _UNHEARD
