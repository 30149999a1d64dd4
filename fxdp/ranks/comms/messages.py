"""Small tensors between all ranks, sent and read by the calling thread itself.

A gloo collective hands over to another thread twice, which on busy cores takes longer than a small sum. Here
the caller writes its value to one connection per peer (`start`), computes on, and reads the others' values
where it needs them (`finish`). All ranks start the same rounds in the same order, so the n-th message of a
connection belongs to the n-th round; its header says so, how many bytes follow, and in which call or backward
the sender is (`comms/sequence_log.py`): ranks that run backwards in different orders send rounds of equal
sizes.

    rank 0   start 1   start 2   finish 1   finish 2
    rank 1   start 1   finish 1  start 2    finish 2

A connection that ends makes every waiting `finish` raise; who is at fault and why, the control channel says.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from fxdp.errors import RankFailedError
from fxdp.ranks.comms.departure import LateError
from fxdp.ranks.comms.sequence_log import SequenceLog

HEADER = struct.Struct("<IIq")  # number of the round, bytes of the value, the moment it belongs to
_BUFFER = 1 << 20
_SAY_S = 1.0  # how long to wait before others are told for whom
_SPIN_S = 50e-6  # how long to ask again before sleeping: waking up takes about as long


class LinkBrokenError(RankFailedError):
    """A connection to another rank ended while this one waited for its value."""


class OutOfOrderError(RankFailedError):
    """Another rank sent a value of another call or backward; `args` are its place here and both moments."""


@dataclass(eq=False)
class Round:
    """One exchange under way; `parts` are the other ranks' values, by rank, once it is finished.

    `summed` : they are one value instead, the sum of all.
    """

    number: int
    size: int
    moment: int = 0
    parts: dict[int, memoryview] = field(default_factory=dict)
    done: bool = False
    summed: bool = False


@dataclass(eq=False)
class Correspondent:
    """This rank's connection to one other rank, for values; `frame` is what comes next, `got` bytes of it."""

    rank: int
    connection: socket.socket
    unsent: bytearray = field(default_factory=bytearray)
    frame: bytearray = field(default_factory=bytearray)
    got: int = 0

    def expect(self, size: int) -> None:
        """A value of so many bytes comes next."""
        self.frame, self.got = bytearray(HEADER.size + size), 0

    @property
    def value(self) -> memoryview:
        """The value that has come."""
        return memoryview(self.frame)[HEADER.size :]


class Messages:
    """Rounds of equally long values between all ranks; for one thread at a time, except `cut`.

    Parameters
    ----------
    connections : a non-blocking socket to each other rank.
    timeout_s : how long `finish` waits for the other ranks.

    Attributes
    ----------
    rounds : how many rounds were started.
    names : what errors call the ranks.
    history : what this rank is in, which each message tells.
    """

    def __init__(self, rank: int, connections: dict[int, socket.socket], timeout_s: float) -> None:
        self.rank = rank
        self.rounds = 0
        self.sequence_log = SequenceLog()
        self.names: Sequence[int | str] = range(len(connections) + 1)
        self._timeout_s = timeout_s
        self._peers = [Correspondent(other, connections[other]) for other in sorted(connections)]
        self._in_flight: deque[Round] = deque()
        for connection in connections.values():  # `start` should rarely leave a rest for `finish` to send
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)

    def start(self, value: memoryview) -> Round:
        """Send this rank's value (flat bytes) to all others without waiting; `finish` must follow."""
        self.rounds += 1
        moment = self.sequence_log.now
        header = HEADER.pack(self.rounds & 0xFFFFFFFF, len(value), moment)
        for peer in self._peers:
            send_value(peer, header, value)
        begun = Round(self.rounds, len(value), moment)
        self._in_flight.append(begun)
        return begun

    def finish(self, wanted: Round) -> dict[int, memoryview]:
        """The other ranks' values of a round, by rank.

        Raises
        ------
        LinkBrokenError : a connection ended.
        OutOfOrderError : a rank sent a value of another call or backward.
        RankFailedError : a rank did not come in time, or sent something else.
        """
        while not wanted.done:  # rounds that were begun earlier arrive earlier
            self._receive(self._in_flight.popleft())
        return wanted.parts

    def cut(self) -> None:
        """End all connections, so that a `finish` that waits raises; safe from any thread."""
        for peer in self._peers:
            with contextlib.suppress(OSError):
                peer.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the connections back; nobody may wait for them any more."""
        self.cut()
        self.abandon()

    def abandon(self) -> None:
        """Let go of this process's copies of the connections; after a fork the parent's stay open."""
        for peer in self._peers:
            peer.connection.close()

    def _receive(self, expected: Round) -> None:
        for peer in self._peers:
            peer.expect(expected.size)
        self._wait(self._peers, expected)
        for peer in self._peers:
            check_header(peer, expected)
            expected.parts[peer.rank] = memoryview(peer.frame)[HEADER.size :]
        expected.done = True

    def _wait(self, peers: Sequence[Correspondent], expected: Round) -> None:
        """Read the oldest round. What is still to be sent must go out before this rank stops reading."""
        waiting, read = peers, self._read
        start = 0.0
        while True:
            try:
                waiting = [peer for peer in waiting if not read(peer)]
            except LinkBrokenError:
                for peer in peers:  # it may have ended as it came with a value of another call
                    check_header(peer, expected)
                raise
            last = not self._in_flight and any(peer.unsent for peer in self._peers)
            if not waiting and not last:
                return
            for peer in self._peers:
                _send_rest(peer)
            now = time.perf_counter()
            start = start or now
            if now > start + self._timeout_s:
                raise LateError(self._late_words(self._late(waiting or self._peers, expected)))
            if now > start + _SPIN_S:
                for peer in waiting:  # one that sent less would be waited for in vain
                    check_header(peer, expected)
                if now > start + _SAY_S:
                    self._say_who_is_missing(waiting, expected)
                self._sleep(waiting)

    def _late(self, waiting: Sequence[Correspondent], expected: Round) -> Sequence[int]:
        """The ranks for which this one waits in vain."""
        return [peer.rank for peer in waiting]

    def _late_words(self, places: Sequence[int]) -> str:
        late = ", ".join(str(self.names[place]) for place in places)
        return (
            f"rank {late} did not come to a sum within {self._timeout_s:g} s, though its process is alive; "
            "expected all ranks to make the same calls (set FXDP_TIMEOUT_S if one may need longer)"
        )

    def _say_who_is_missing(self, waiting: Sequence[Correspondent], expected: Round) -> None:
        """All to all, everybody sees for himself."""

    def _read(self, peer: Correspondent) -> bool:
        """Read what is there of the peer's message; whether all of it is."""
        connection, frame = peer.connection, peer.frame
        while peer.got < len(frame):
            try:
                count = connection.recv_into(memoryview(frame)[peer.got :] if peer.got else frame)
            except BlockingIOError:
                return False
            except OSError:
                count = 0
            if count == 0:
                raise LinkBrokenError(f"the connection to rank {peer.rank} was closed by peer")
            peer.got += count
        return True

    def _sleep(self, waiting: Sequence[Correspondent]) -> None:
        """Until something can be read or sent, at most a second."""
        poll = select.poll()
        for peer in self._peers:
            events = (select.POLLIN if peer in waiting else 0) | (select.POLLOUT if peer.unsent else 0)
            if events:
                poll.register(peer.connection, events)
        poll.poll(1000)


def check_header(peer: Correspondent, expected: Round) -> None:
    """Refuse a value of another round, or of another size than is expected."""
    if peer.got < HEADER.size:
        return
    wanted = len(peer.frame) - HEADER.size
    number, size, moment = HEADER.unpack_from(peer.frame)
    if moment != expected.moment:
        raise OutOfOrderError(peer.rank, moment, expected.moment)
    if (number, size) != (expected.number & 0xFFFFFFFF, wanted):
        raise RankFailedError(
            f"rank {peer.rank} sent round {number} of {size} bytes; expected round {expected.number} of "
            f"{wanted} bytes: the ranks' programs have come apart, which is a bug in fxdp"
        )


def send_value(peer: Correspondent, header: bytes, value: memoryview) -> None:
    """Send what can be sent now; the rest is kept."""
    sent = 0
    if not peer.unsent:
        try:
            sent = peer.connection.sendmsg((header, value), (), socket.MSG_NOSIGNAL)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # the peer is gone; reading from it says so
    if sent < len(header) + len(value):
        peer.unsent += (header + bytes(value))[sent:]


def _send_rest(peer: Correspondent) -> None:
    if not peer.unsent:
        return
    try:
        sent = peer.connection.send(peer.unsent, socket.MSG_NOSIGNAL)
    except BlockingIOError:
        return
    except OSError:
        sent = len(peer.unsent)
    del peer.unsent[:sent]
