"""Large sums between hosts of several ranks: first through memory within each host, to relieve the network.

On each host as many ranks have a share as the smallest host has ranks. A rank with a share sums this share
of all values on the host, and exchanges the result by gloo with the rank of each other host that has the
same share:

    host a   rank 0   own value | ready | share 0 := sum of a's ──gloo── with rank 2 | there | read share 1
             rank 1   own value | ready | share 1 := sum of a's ──gloo── with rank 3 | there | read share 0
    host b   ranks 2 and 3 likewise

For these four ranks gloo's ring sends 1.5 times the value through each host's link in each direction, this
method sends the value once; for k ranks on each of two hosts the ring sends (2k - 1) / k times the value.

gloo works in the background, but needs the values of the entire host as input. `start` does not wait for
these: a share is given to gloo when the next sum starts, or when a wait begins.

    start of 3     2 has arrived from all ranks of this host: give 2's share to gloo; finish 1; write value

So two sums are in flight, and three buffers alternate: a rank that is ready with 2 has finished 0, whose
buffer is used by 3. Values are summed in rank order, then by gloo's ring, which gives all ranks the same
result: all ranks have the same bits.
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
from fxdp.ranks.comms.messages import Messages, Round
from fxdp.ranks.liveness.departure import LateError
from fxdp.torch_compat import Work
from fxdp.transport.host_places import HostPlaces
from fxdp.transport.shared_buffers import BufferRotation, chunk, elements

_IN_FLIGHT = 2
_BUFFERS = _IN_FLIGHT + 1


@dataclass(eq=False)
class _HostSum:
    """A sum in flight; `value` holds the result once finished."""

    value: Tensor
    iteration: int = 0
    ready: Round | None = None
    shared: dict[int, Tensor] | None = None
    """The values in the buffers of this host's ranks, by place, once all have arrived."""
    across: Work | None = None
    finished: bool = False


class HostSums:
    """Sums of large contiguous CPU tensors over all ranks of a row; for one thread at a time, except `cut`.

    All ranks start and finish the same sums in the same order.

    Parameters
    ----------
    messages : the connections to the ranks of this host, by place in the row.
    places : the ranks of each host.
    across : process group of the ranks with this rank's share on all hosts; None without a share.
    """

    def __init__(self, messages: Messages, places: HostPlaces, across: dist.ProcessGroup | None) -> None:
        self.messages = messages
        self._rank = messages.rank
        self._mates = places.of(self._rank)
        self._shares = places.shares
        # torch alone owns groups: destroying them frees them at once
        self._across = None if across is None else weakref.ref(across)
        self._buffers = BufferRotation(_BUFFERS)
        self._in_flight: deque[_HostSum] = deque()

    def start(self, value: Tensor) -> _HostSum:
        """Write this rank's value where the ranks of this host find it; `finish` must follow.

        Raises
        ------
        LinkBrokenError : a connection to a rank of this host ended.
        RuntimeError : from gloo, about ranks of other hosts.
        """
        if self._in_flight:
            self._send_share(self._in_flight[-1])
        while len(self._in_flight) >= _IN_FLIGHT:
            self.finish(self._in_flight[0])
        begun = _HostSum(torch.view_as_real(value) if value.is_complex() else value)
        flat = begun.value.view(-1)
        if len(self._mates) == 1:
            begun.across = self._sum_across(flat)
        else:
            begun.iteration, buffer = self._buffers.next(value.nbytes)
            elements(buffer.data, flat).copy_(flat)
            begun.ready = self.messages.start(self._buffers.meta(begun.iteration, flat))
        self._in_flight.append(begun)
        return begun

    def finish(self, begun: _HostSum) -> None:
        """Wait for the sum, and for all sums that were started earlier.

        Raises
        ------
        LinkBrokenError : a connection to a rank of this host ended.
        RankFailedError : a rank of this host came with a value of a different size.
        RuntimeError : from gloo, about ranks of other hosts, or because a rank of this host was late.
        """
        while not begun.finished:
            self._finish(self._in_flight[0])
            self._in_flight.popleft()

    def _finish(self, begun: _HostSum) -> None:
        for one in self._in_flight:  # including later ones, while this one is in flight
            self._send_share(one)
        if begun.across is not None:
            begun.across.wait()
        if begun.ready is not None:
            self._wait_for_mates(self.messages.start(memoryview(b"there")))
            self._read(begun)
        begun.finished = True

    def _send_share(self, begun: _HostSum) -> None:
        """Sum this rank's share once all ranks of this host have written, and give the share to gloo."""
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
            # no rank reads the own share of this rank's buffer before the sum is complete
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
            # they may wait for another host: `ranks/liveness/failure.py` finds the late rank, as with gloo
            raise RuntimeError(f"timed out waiting for ranks of this host: {error}") from error

    def _read(self, begun: _HostSum) -> None:
        assert begun.shared is not None
        flat = begun.value.view(-1)
        for share in range(self._shares):
            part = chunk(flat.numel(), share, self._shares)
            flat[part] = begun.shared[self._mates[share]][part]

    def close(self) -> None:
        """Release connections and buffers."""
        self.messages.close()
        self._buffers.close()


def _added(terms: Sequence[Tensor], out: Tensor) -> Tensor:
    first = terms[0]
    for other in terms[1:]:
        first = torch.add(first, other, out=out)
    return out
