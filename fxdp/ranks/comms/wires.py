"""The connections of one rank to its peers, for frames in both directions (`comms/frames.py`).

Nothing here waits: unsent data is kept, and received data is read by any thread that looks.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from fxdp.ranks.comms.frames import NO_SIGNAL, FrameKind, NoFrameError, take_frame
from fxdp.ranks.liveness.departure import Departure, DepartureKind, sent_nonsense

_CHUNK = 1 << 16
_NO_ANSWER = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)
_UNHEARD = "does not answer any more: its machine, or the network to it, is lost"


@dataclass(eq=False)
class Peer:
    """This rank's connection to one peer."""

    rank: int
    connection: socket.socket
    unread: bytearray = field(default_factory=bytearray)
    unsent: bytearray = field(default_factory=bytearray)
    rounds: deque[tuple[FrameKind, bytes]] = field(default_factory=deque)
    ignore: int = 0  # rounds decided without the peer's part, which is dropped on arrival
    departure: Departure | None = None
    waits: tuple[int, bytes] | None = None
    """The round for which the peer has waited for a second, and the peer's position in the program."""
    closed: bool = False
    unheard: bool = False
    """True if the peer's machine left probes without an answer, and was given up."""

    def drop_round(self) -> None:
        """Drop the peer's part of one more round, now or on arrival."""
        if self.rounds:
            self.rounds.popleft()
        else:
            self.ignore += 1


class Wires:
    """Frames to and from the `peers`; safe from any thread."""

    def __init__(self, connections: dict[int, socket.socket]) -> None:
        self._lock = threading.RLock()
        self._is_awaited = False
        self.peers = [Peer(other, connections[other]) for other in sorted(connections)]
        self._by_descriptor = {peer.connection.fileno(): peer for peer in self.peers}
        self._poll = select.poll()
        for peer in self.peers:
            self._poll.register(peer.connection, select.POLLIN)

    def drain(self, peer: Peer) -> Departure | None:
        """Read all that `peer` has sent; return the departure if the peer has left."""
        with self._lock:
            self._read(peer)
            return peer.departure

    def drain_all(self) -> None:
        """Read all that peers have sent, unless a thread waits for that: it would not wake up any more."""
        with self._lock:
            for peer in [] if self._is_awaited else self.peers:
                self._read(peer)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Leave reading to this thread, which sleeps until there is something to read."""
        with self._lock:
            self._is_awaited = True
        try:
            yield
        finally:
            self._is_awaited = False

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            for peer in self.peers:
                peer.closed = True
                peer.departure = peer.departure or Departure(peer.rank, DepartureKind.ENDED)
                peer.connection.close()

    def leave_open(self) -> None:
        """Let the system close the connections when the process has ended, and not before."""
        with self._lock:
            for peer in self.peers:
                peer.closed = True
                peer.connection.detach()

    def abandon(self) -> None:
        """Close this process's copies of the connections after a fork, without a lock that may never open."""
        for peer in self.peers:
            peer.connection.close()

    def _take(self, peer: Peer, kind: FrameKind, about: int, content: bytes) -> None:
        """Handle a received frame."""
        raise NotImplementedError

    # -- sending -------------------------------------------------------------------------------------------

    def _send_all(self, frame: bytes, peers: Iterable[Peer]) -> None:
        for peer in peers:
            self._send_or_drain(peer, frame)

    def _send_or_drain(self, peer: Peer, frame: bytes) -> None:
        try:
            self._send(peer, frame)
        except OSError as error:
            self._lose(peer, error)

    def _tell(self, peers: Iterable[Peer], frame: bytes) -> None:
        """Send without error handling: a peer that is gone is noticed elsewhere."""
        for peer in peers:
            with contextlib.suppress(OSError):
                self._send(peer, frame)

    def _lose(self, peer: Peer, error: OSError) -> None:
        """Record a peer that is gone; a waiting thread reports it with the peer's last message."""
        _note_loss(peer, error)
        self.drain(peer)

    def _send(self, peer: Peer, frame: bytes) -> None:
        with self._lock:
            if peer.unsent:
                peer.unsent += frame
                return
            try:
                sent = peer.connection.send(frame, NO_SIGNAL)
            except BlockingIOError:
                sent = 0
            if sent < len(frame):
                peer.unsent += frame[sent:]
                self._poll.modify(peer.connection, select.POLLIN | select.POLLOUT)

    def _send_rest(self, peer: Peer) -> None:
        try:
            sent = peer.connection.send(peer.unsent, NO_SIGNAL)
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
        peer.departure = peer.departure or Departure(
            peer.rank, DepartureKind.KILLED, _UNHEARD if peer.unheard else ""
        )
        with contextlib.suppress(KeyError, ValueError):
            self._poll.unregister(peer.connection)

    def _parse(self, peer: Peer) -> None:
        try:
            while frame := take_frame(peer.unread):
                self._take(peer, *frame)
        except NoFrameError as error:
            self._turn_away(peer, str(error))

    def _turn_away(self, peer: Peer, fault: str) -> None:
        """Close the connection to a peer that sends invalid data, so that the watch notices."""
        peer.unread.clear()
        peer.departure = Departure(peer.rank, DepartureKind.OUT_OF_STEP, sent_nonsense(fault))
        with contextlib.suppress(OSError):
            peer.connection.shutdown(socket.SHUT_RDWR)


def _note_loss(peer: Peer, error: OSError) -> None:
    """Record a connection's error, which the system reports once to the first reader."""
    peer.unheard = peer.unheard or error.errno in _NO_ANSWER
