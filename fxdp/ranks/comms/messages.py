"""Small tensors between all ranks, sent and read by the calling thread itself.

A gloo collective switches threads twice, which on busy cores takes longer than a small sum. Here the caller
writes a value to one connection per peer (`start`), continues to compute, and reads the peers' values where
needed (`finish`). All ranks start the same rounds in the same order, so the n-th message of a connection
belongs to the n-th round. The header has this number, the number of bytes that follow, and the call or
backward of the sender (`comms/sequence_log.py`): ranks that run backwards in different orders send rounds of
equal sizes.

    rank 0   start 1   start 2   finish 1   finish 2
    rank 1   start 1   finish 1  start 2    finish 2

A connection that ends makes every waiting `finish` raise; the control channel reports the rank at fault.
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
from fxdp.ranks.comms.frames import NO_SIGNAL
from fxdp.ranks.comms.sequence_log import SequenceLog
from fxdp.ranks.liveness.departure import LateError

HEADER = struct.Struct("<IIq")  # number of the round, bytes of the value, moment of the sequence log
_BUFFER = 1 << 20
_SAY_S = 1.0  # wait before this rank reports the missing ranks
_SPIN_S = 50e-6  # time of polling before sleeping: waking up takes about as long


class LinkBrokenError(RankFailedError):
    """Raised when a connection to a rank ends while this rank waits for a value."""


class OutOfOrderError(RankFailedError):
    """Raised for a value of a different call or backward; `args` are the sender's place and both moments."""


@dataclass(eq=False)
class Round:
    """One exchange in flight; once finished, `parts` are the values of all peers by rank.

    If `summed`, `parts` has one value instead, the sum over all ranks.
    """

    number: int
    size: int
    moment: int = 0
    parts: dict[int, memoryview] = field(default_factory=dict)
    done: bool = False
    summed: bool = False


@dataclass(eq=False)
class Correspondent:
    """This rank's connection to one peer, for values.

    `frame` is the next message, of which `got` bytes have arrived.
    """

    rank: int
    connection: socket.socket
    unsent: bytearray = field(default_factory=bytearray)
    frame: bytearray = field(default_factory=bytearray)
    got: int = 0

    def expect(self, size: int) -> None:
        """Prepare to receive a value of `size` bytes."""
        self.frame, self.got = bytearray(HEADER.size + size), 0

    @property
    def value(self) -> memoryview:
        """The received value."""
        return memoryview(self.frame)[HEADER.size :]


class Messages:
    """Rounds of equally long values between all ranks; for one thread at a time, except `cut`.

    Parameters
    ----------
    connections : a non-blocking socket to each other rank.
    timeout_s : seconds that `finish` waits for the other ranks.

    Attributes
    ----------
    rounds : number of rounds started.
    names : names of the ranks in errors.
    sequence_log : current call or backward of this rank, sent with each message.
    """

    def __init__(self, rank: int, connections: dict[int, socket.socket], timeout_s: float) -> None:
        self.rank = rank
        self.rounds = 0
        self.sequence_log = SequenceLog()
        self.names: Sequence[int | str] = range(len(connections) + 1)
        self._timeout_s = timeout_s
        self._peers = [Correspondent(other, connections[other]) for other in sorted(connections)]
        self._in_flight: deque[Round] = deque()
        for connection in connections.values():  # so that `start` seldom leaves a rest for `finish` to send
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)

    def start(self, value: memoryview) -> Round:
        """Send this rank's value (flat bytes) to all ranks without waiting; `finish` must follow."""
        self.rounds += 1
        moment = self.sequence_log.now
        header = HEADER.pack(self.rounds & 0xFFFFFFFF, len(value), moment)
        for peer in self._peers:
            send_value(peer, header, value)
        begun = Round(self.rounds, len(value), moment)
        self._in_flight.append(begun)
        return begun

    def finish(self, wanted: Round) -> dict[int, memoryview]:
        """Return the values of all peers in a round, by rank.

        Raises
        ------
        LinkBrokenError : a connection ended.
        OutOfOrderError : a rank sent a value of a different call or backward.
        RankFailedError : a rank was late, or sent invalid data.
        """
        while not wanted.done:  # earlier rounds arrive earlier
            self._receive(self._in_flight.popleft())
        return wanted.parts

    def cut(self) -> None:
        """End all connections, so that a waiting `finish` raises; safe from any thread."""
        for peer in self._peers:
            with contextlib.suppress(OSError):
                peer.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connections; no wait may follow."""
        self.cut()
        self.abandon()

    def abandon(self) -> None:
        """Close this process's copies of the connections; after a fork the parent's stay open."""
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
        """Read a round; this rank's part must go out, too, as the next wait may be for something else."""
        waiting, read = peers, self._read
        start = 0.0
        while True:
            try:
                waiting = [peer for peer in waiting if not read(peer)]
            except LinkBrokenError:
                for peer in peers:  # the peer may have ended because of a value of a different call
                    check_header(peer, expected)
                raise
            if not waiting and not any(len(peer.unsent) > self._sent_ahead for peer in self._peers):
                return
            for peer in self._peers:
                _send_rest(peer)
            now = time.perf_counter()
            start = start or now
            if now > start + self._timeout_s:
                raise LateError(self._late_words(self._late(waiting or self._peers, expected)))
            if now > start + _SPIN_S:
                for peer in waiting:  # waiting for a peer that sent less would be in vain
                    check_header(peer, expected)
                if now > start + _SAY_S:
                    self._say_who_is_missing(waiting, expected)
                self._sleep(waiting)

    @property
    def _sent_ahead(self) -> int:
        """The bytes to each peer of rounds that are in flight beyond the current one.

        A peer reads them when it comes to these rounds: perhaps not before this rank has done something else.
        """
        return sum(HEADER.size + begun.size for begun in self._in_flight)

    def _late(self, waiting: Sequence[Correspondent], expected: Round) -> Sequence[int]:
        """Return the ranks for which this rank waits in vain."""
        return [peer.rank for peer in waiting]

    def _late_words(self, places: Sequence[int]) -> str:
        late = ", ".join(str(self.names[place]) for place in places)
        return (
            f"rank {late} did not come to a sum within {self._timeout_s:g} s, though its process is alive; "
            "expected all ranks to make the same calls (set FXDP_TIMEOUT_S if one may need longer)"
        )

    def _say_who_is_missing(self, waiting: Sequence[Correspondent], expected: Round) -> None:
        """Do nothing: all to all, every rank sees for itself which ranks are missing."""

    def _read(self, peer: Correspondent) -> bool:
        """Read the available bytes of the peer's message; return whether the message is complete."""
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
        """Sleep until a connection can be read or written, at most a second."""
        poll = select.poll()
        for peer in self._peers:
            events = (select.POLLIN if peer in waiting else 0) | (select.POLLOUT if peer.unsent else 0)
            if events:
                poll.register(peer.connection, events)
        poll.poll(1000)


def check_header(peer: Correspondent, expected: Round) -> None:
    """Refuse a value of a different round or size than expected."""
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
    """Send as much as possible now; keep the rest."""
    sent = 0
    if not peer.unsent:
        try:
            sent = peer.connection.sendmsg((header, value), (), NO_SIGNAL)
        except BlockingIOError:
            sent = 0
        except OSError:
            return  # the peer is gone; reading from it reports this
    if sent < len(header) + len(value):
        peer.unsent += (header + bytes(value))[sent:]


def _send_rest(peer: Correspondent) -> None:
    if not peer.unsent:
        return
    try:
        sent = peer.connection.send(peer.unsent, NO_SIGNAL)
    except BlockingIOError:
        return
    except OSError:
        sent = len(peer.unsent)
    del peer.unsent[:sent]
