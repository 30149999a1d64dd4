"""Large sums between hosts of several ranks: within a host through memory, so that the network does less.

Of as many ranks of each host as the smallest one has, each sums its share of all values of its host, and
exchanges that by gloo with the one of each other host that has the same share:

    host a   rank 0   own value | ready | share 0 := sum of a's ──gloo── with rank 2 | there | read share 1
             rank 1   own value | ready | share 1 := sum of a's ──gloo── with rank 3 | there | read share 0
    host b   ranks 2 and 3 the same

gloo's ring of all four ranks sends 1.5 times the value through each host's link in each direction, this the
value once; of k ranks on each of two hosts (2k - 1) / k times.

gloo works while the calling thread goes on, but what it is given needs the values of the entire host. Nobody
waits for those in `start`: a share begins to travel when the next sum starts, or when somebody waits for it.

    start of 3     2 is there of all ranks of this host: give its share to gloo; finish 1; write own value

So two are under way, and three buffers take turns: who is ready with 2 has finished 0, in whose buffer 3 is
written. Values are summed in rank order, then by gloo's ring, whose result all ranks of it get: all ranks
hold the same bits.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fxdp.errors import StateError
from fxdp.ranks.comms.departure import LateError
from fxdp.ranks.comms.host_places import HostPlaces
from fxdp.ranks.comms.messages import Messages, Round
from fxdp.ranks.comms.shared_buffers import BufferRotation, chunk, elements
from fxdp.torch_compat import Work

_IN_FLIGHT = 2
_BUFFERS = _IN_FLIGHT + 1


@dataclass(eq=False)
class HostSum:
    """A sum under way; `value` holds the result once it is finished."""

    value: Tensor
    iteration: int = 0
    ready: Round | None = None
    shared: dict[int, Tensor] | None = None
    """The values in the buffers of this host's ranks, by place, once all are there."""
    across: Work | None = None
    finished: bool = False


class HostSums:
    """Sums of large contiguous CPU tensors over all ranks of a row; for one thread at a time, except `cut`.

    All ranks start and finish the same sums in the same order.

    Parameters
    ----------
    messages : the connections to the other ranks of this host, by their place in the row.
    places : who is on which host.
    across : joins this rank to those of the other hosts that have its share; None for one without a share.
    """

    def __init__(self, messages: Messages, places: HostPlaces, across: dist.ProcessGroup | None) -> None:
        self.messages = messages
        self._rank = messages.rank
        self._mates = places.of(self._rank)
        self._shares = places.shares
        # torch alone owns groups: destroying them frees them at once
        self._across = None if across is None else weakref.ref(across)
        self._buffers = BufferRotation(_BUFFERS)
        self._in_flight: deque[HostSum] = deque()

    def start(self, value: Tensor) -> HostSum:
        """Write this rank's value where the others of its host find it; `finish` must follow.

        Raises
        ------
        LinkBrokenError : a connection to a rank of this host ended.
        RuntimeError : of gloo, for those across.
        """
        if self._in_flight:
            self._send_share(self._in_flight[-1])
        while len(self._in_flight) >= _IN_FLIGHT:
            self.finish(self._in_flight[0])
        begun = HostSum(torch.view_as_real(value) if value.is_complex() else value)
        flat = begun.value.view(-1)
        if len(self._mates) == 1:
            begun.across = self._sum_across(flat)
        else:
            begun.iteration, buffer = self._buffers.next(value.nbytes)
            elements(buffer.data, flat).copy_(flat)
            begun.ready = self.messages.start(self._buffers.meta(begun.iteration, flat))
        self._in_flight.append(begun)
        return begun

    def finish(self, begun: HostSum) -> None:
        """Wait for the sum, and for those that were started before it.

        Raises
        ------
        LinkBrokenError : a connection to a rank of this host ended.
        RankFailedError : one came with a value of another size.
        RuntimeError : of gloo, for those across, or because a rank of this host did not come in time.
        """
        while not begun.finished:
            self._finish(self._in_flight[0])
            self._in_flight.popleft()

    def _finish(self, begun: HostSum) -> None:
        for one in self._in_flight:  # those that were started later, too, while this one travels
            self._send_share(one)
        if begun.across is not None:
            begun.across.wait()
        if begun.ready is not None:
            self._wait_for_mates(self.messages.start(memoryview(b"there")))
            self._read(begun)
        begun.finished = True

    def _send_share(self, begun: HostSum) -> None:
        """Sum this rank's share once all ranks of this host have written their values, and let it travel."""
        if begun.ready is None or begun.shared is not None:
            return
        flat, iteration, buffers = begun.value.view(-1), begun.iteration, self._buffers
        metadata = self._wait_for_mates(begun.ready)
        found = {place: buffers.theirs(place, iteration, meta, flat) for place, meta in metadata.items()}
        found[self._rank] = buffers.own(iteration).data
        shared = begun.shared = {place: elements(data, flat) for place, data in found.items()}
        share = self._mates.index(self._rank)
        if share < self._shares:
            own = chunk(flat.numel(), share, self._shares)
            terms = [flat[own] if place == self._rank else shared[place][own] for place in self._mates]
            # nobody else reads the own share of this rank's buffer before it is the sum
            begun.across = self._sum_across(_added(terms, shared[self._rank][own]))

    def _sum_across(self, value: Tensor) -> Work | None:
        """Start the sum, in place, over the ranks of all hosts that have this share."""
        assert self._across is not None
        group = self._across()
        if group is None:
            raise StateError("the process group was destroyed while a sum over ranks was under way")
        return group.allreduce([value]) if value.numel() else None

    def _wait_for_mates(self, wanted: Round) -> dict[int, memoryview]:
        try:
            return self.messages.finish(wanted)
        except LateError as error:
            # they may wait for another host: `ranks/failure.py` asks who is late, as it does for gloo
            raise RuntimeError(f"timed out waiting for ranks of this host: {error}") from error

    def _read(self, begun: HostSum) -> None:
        assert begun.shared is not None
        flat = begun.value.view(-1)
        for share in range(self._shares):
            part = chunk(flat.numel(), share, self._shares)
            flat[part] = begun.shared[self._mates[share]][part]

    def close(self) -> None:
        """Give connections and buffers back."""
        self.messages.close()
        self._buffers.close()


def _added(terms: Sequence[Tensor], out: Tensor) -> Tensor:
    first = terms[0]
    for other in terms[1:]:
        first = torch.add(first, other, out=out)
    return out
