"""Small tensors between all ranks, sent and read by the calling thread itself.

A gloo collective hands over to another thread twice, which on busy cores takes longer than a small sum. Here
the caller writes its value to one connection per peer (`start`), computes on, and reads the others' values
where it needs them (`finish`). All ranks start the same rounds in the same order, so the n-th message of a
connection belongs to the n-th round; its header says so, how many bytes follow, and in which call or backward
the sender is (`links/history.py`): ranks that run backwards in different orders send rounds of equal sizes.

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
from fxdp.ranks.links.history import History

_HEADER = struct.Struct("<IIq")  # number of the round, bytes of the value, the moment it belongs to
_BUFFER = 1 << 20
_SPIN_S = 50e-6  # how long to ask again before sleeping: waking up takes about as long


class LinkBrokenError(RankFailedError):
    """A connection to another rank ended while this one waited for its value."""


class OutOfOrderError(RankFailedError):
    """Another rank sent a value of another call or backward; `args` are its place here and both moments."""


@dataclass(eq=False)
class Round:
    """One exchange under way; `parts` are the other ranks' values, by rank, once it is finished."""

    number: int
    size: int
    moment: int = 0
    parts: dict[int, memoryview] = field(default_factory=dict)
    done: bool = False


@dataclass(eq=False)
class _Peer:
    rank: int
    connection: socket.socket
    unsent: bytearray = field(default_factory=bytearray)
    frame: bytearray = field(default_factory=bytearray)
    got: int = 0


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
        self.history = History()
        self.names: Sequence[int | str] = range(len(connections) + 1)
        self._timeout_s = timeout_s
        self._peers = [_Peer(other, connections[other]) for other in sorted(connections)]
        self._under_way: deque[Round] = deque()
        for connection in connections.values():  # `start` should rarely leave a rest for `finish` to send
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)

    def start(self, value: memoryview) -> Round:
        """Send this rank's value (flat bytes) to all others without waiting; `finish` must follow."""
        self.rounds += 1
        moment = self.history.now
        header = _HEADER.pack(self.rounds & 0xFFFFFFFF, len(value), moment)
        for peer in self._peers:
            _send(peer, header, value)
        begun = Round(self.rounds, len(value), moment)
        self._under_way.append(begun)
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
            self._receive(self._under_way.popleft())
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
            peer.frame, peer.got = bytearray(_HEADER.size + expected.size), 0
        self._wait(expected)
        for peer in self._peers:
            _check_header(peer, expected)
            expected.parts[peer.rank] = memoryview(peer.frame)[_HEADER.size :]
        expected.done = True

    def _wait(self, expected: Round) -> None:
        """Read the oldest round. What is still to be sent must go out before this rank stops reading."""
        waiting = self._peers
        start = 0.0
        while True:
            waiting = [peer for peer in waiting if not _read(peer)]
            last = not self._under_way and any(peer.unsent for peer in self._peers)
            if not waiting and not last:
                return
            for peer in self._peers:
                _send_rest(peer)
            now = time.perf_counter()
            start = start or now
            if now > start + self._timeout_s:
                late = ", ".join(str(self.names[peer.rank]) for peer in waiting or self._peers)
                raise RankFailedError(
                    f"rank {late} did not come to a sum within {self._timeout_s:g} s, though its process is "
                    "alive; expected all ranks to make the same calls (set FXDP_TIMEOUT_S if one may need "
                    "longer)"
                )
            if now > start + _SPIN_S:
                for peer in waiting:  # one that sent less would be waited for in vain
                    _check_header(peer, expected)
                self._sleep(waiting)

    def _sleep(self, waiting: list[_Peer]) -> None:
        """Until something can be read or sent, at most a second."""
        poll = select.poll()
        for peer in self._peers:
            events = (select.POLLIN if peer in waiting else 0) | (select.POLLOUT if peer.unsent else 0)
            if events:
                poll.register(peer.connection, events)
        poll.poll(1000)


def _check_header(peer: _Peer, expected: Round) -> None:
    if peer.got < _HEADER.size:
        return
    number, size, moment = _HEADER.unpack_from(peer.frame)
    if moment != expected.moment:
        raise OutOfOrderError(peer.rank, moment, expected.moment)
    if (number, size) != (expected.number & 0xFFFFFFFF, expected.size):
        raise RankFailedError(
            f"rank {peer.rank} sent round {number} of {size} bytes; expected round {expected.number} of "
            f"{expected.size} bytes: the ranks' programs have come apart, which is a bug in fxdp"
        )


def _send(peer: _Peer, header: bytes, value: memoryview) -> None:
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


def _send_rest(peer: _Peer) -> None:
    if not peer.unsent:
        return
    try:
        sent = peer.connection.send(peer.unsent, socket.MSG_NOSIGNAL)
    except BlockingIOError:
        return
    except OSError:
        sent = len(peer.unsent)
    del peer.unsent[:sent]


def _read(peer: _Peer) -> bool:
    """Read what is there of the peer's message; whether all of it is."""
    while peer.got < len(peer.frame):
        try:
            count = peer.connection.recv_into(memoryview(peer.frame)[peer.got :])
        except BlockingIOError:
            return False
        except OSError:
            count = 0
        if count == 0:
            raise LinkBrokenError(f"the connection to rank {peer.rank} was closed by peer")
        peer.got += count
    return True
