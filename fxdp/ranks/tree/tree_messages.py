"""Rounds of small values over a tree of many ranks, like those of `comms/messages.py`, summed on the way.

    sum      a child sends the sum of its subtree up, own + first child + second child; the root's goes down
    gather   a child sends the values of its subtree up, each rank's before those of the children

Every rank gets the root's bytes, so all ranks have the same bits; each rank adds its children's values in
one fixed order, so a second run has the same bits, too.

A rank that waits for long reports the missing rank, which may be far away: a header without a value, with
the missing rank as number, an impossible size, and the round as moment.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fxdp.ranks.comms.messages import (
    HEADER,
    Correspondent,
    Messages,
    OutOfOrderError,
    Round,
    check_header,
    send_value,
)
from fxdp.ranks.tree.tree_shape import TreePlace

_NOTE = 0xFFFFFFFF  # in place of a size

Adder = Callable[[Sequence[memoryview]], memoryview]
"""Function that sums (or takes the extremum of) values of several ranks."""


@dataclass(eq=False)
class _TreeRound(Round):
    """A round in the tree; `value` is this rank's own value, and `add` is None for a gather."""

    value: memoryview = field(default_factory=lambda: memoryview(b""))
    add: Adder | None = None


class TreeMessages(Messages):
    """Rounds of equally long values between all ranks of a tree; for one thread at a time, except `cut`."""

    def __init__(
        self, rank: int, place: TreePlace, connections: dict[int, socket.socket], timeout_s: float
    ) -> None:
        super().__init__(rank, connections, timeout_s)
        by_rank = {peer.rank: peer for peer in self._peers}
        self.names = range(place.size)
        self._place = place
        self._parent = None if place.parent is None else by_rank[place.parent]
        self._children = [by_rank[child] for child in place.children]
        self._absent: dict[int, tuple[int, int]] = {}  # by neighbor: a round, and the rank it misses
        self._said: dict[int, tuple[int, int]] = {}

    def start(self, value: memoryview) -> Round:
        """Begin to gather all ranks' values (flat bytes); `finish` must follow."""
        return self._begin(value, None)

    def start_sum(self, value: memoryview, add: Adder) -> Round:
        """Begin to sum; in the finished round, `parts` has the sum under this rank."""
        return self._begin(value, add)

    def _begin(self, value: memoryview, add: Adder | None) -> Round:
        self.rounds += 1
        moment, summed = self.sequence_log.now, add is not None
        begun = _TreeRound(self.rounds, len(value), moment, summed=summed, value=value, add=add)
        if not self._children:
            self._send_up(begun, value)
        self._in_flight.append(begun)
        return begun

    def _receive(self, expected: Round) -> None:
        assert isinstance(expected, _TreeRound)
        if self._children:
            sizes = [expected.size if expected.add else expected.size * n for n in self._place.counts]
            try:
                self._read_from(self._children, sizes, expected)
            except OutOfOrderError:
                self._answer_out_of_step(expected)
                raise
            values = [expected.value, *(child.value for child in self._children)]
            joined = expected.add(values) if expected.add else memoryview(b"".join(values))
        else:
            joined = expected.value
        if self._parent is None:
            found = joined if expected.add else self._by_rank(joined, expected.size)
        else:
            if self._children:
                self._send_up(expected, joined)
            full = expected.size if expected.add else expected.size * self._place.size
            self._read_from([self._parent], [full], expected)
            found = self._parent.value
        header = _header(expected, len(found))
        for child in self._children:
            send_value(child, header, found)
        if self._children:
            self._wait([], expected)  # until this round is sent
        self._keep(expected, found)

    @property
    def _sent_ahead(self) -> int:
        return 0 if self._children else super()._sent_ahead

    def _read_from(self, peers: Sequence[Correspondent], sizes: Sequence[int], expected: Round) -> None:
        """Read one value of the expected round from each of `peers`."""
        for peer, size in zip(peers, sizes, strict=True):
            peer.expect(size)
        self._wait(peers, expected)
        for peer in peers:
            check_header(peer, expected)

    def _answer_out_of_step(self, expected: Round) -> None:
        """Send this rank's position to each child in a different round, so that the child can report this."""
        for child in self._children:
            if child.got >= HEADER.size and HEADER.unpack_from(child.frame)[2] != expected.moment:
                send_value(child, _header(expected, 0), memoryview(b""))

    def _keep(self, expected: _TreeRound, found: memoryview) -> None:
        if expected.add:
            expected.parts[self.rank] = found
        else:
            size = expected.size
            for rank in range(self._place.size):
                if rank != self.rank:
                    expected.parts[rank] = found[rank * size : (rank + 1) * size]
        expected.done = True

    def _by_rank(self, joined: memoryview, size: int) -> memoryview:
        """Reorder values from the order of the tree to the order of ranks."""
        values = [b""] * self._place.size
        for i, rank in enumerate(self._place.order):
            values[rank] = bytes(joined[i * size : (i + 1) * size])
        return memoryview(bytearray().join(values))  # tensors need writable memory

    def _send_up(self, begun: Round, value: memoryview) -> None:
        if self._parent is not None:
            send_value(self._parent, _header(begun, len(value)), value)

    # -- who is late ---------------------------------------------------------------------------------------

    def _say_who_is_missing(self, waiting: Sequence[Correspondent], expected: Round) -> None:
        for peer in self._peers:
            missing = [self._missed(other, expected.number) for other in waiting if other is not peer]
            if missing and self._said.get(peer.rank) != (expected.number, missing[0]):
                self._said[peer.rank] = expected.number, missing[0]
                send_value(peer, HEADER.pack(missing[0], _NOTE, expected.number), memoryview(b""))

    def _missed(self, peer: Correspondent, number: int) -> int:
        """Return the missing rank on the side of this neighbor."""
        said, missing = self._absent.get(peer.rank, (0, peer.rank))
        return missing if said == number and missing < self._place.size else peer.rank

    def _late(self, waiting: Sequence[Correspondent], expected: Round) -> Sequence[int]:
        return sorted({self._missed(peer, expected.number) for peer in waiting})

    def _read(self, peer: Correspondent) -> bool:
        while True:
            full = super()._read(peer)
            if peer.got < HEADER.size:
                return full
            missing, size, about = HEADER.unpack_from(peer.frame)
            if size != _NOTE:
                return full
            self._absent[peer.rank] = about, missing
            rest = peer.frame[HEADER.size : peer.got]
            peer.expect(len(peer.frame) - HEADER.size)
            peer.frame[: len(rest)], peer.got = rest, len(rest)


def _header(begun: Round, size: int) -> bytes:
    return HEADER.pack(begun.number & 0xFFFFFFFF, size, begun.moment)
