"""Large collectives between ranks of one host, through memory that all of them see.

gloo sends every value through the loopback network, which copies it four times and wakes threads. Here each
rank writes its value into a buffer that the others can read, sums one chunk of all ranks' values, and reads
the other chunks' sums; two rounds of messages say when:

    rank 0   write own value | ready | chunk 0 := sum of all ranks' | summed | read chunk 1 from rank 1
    rank 1   write own value | ready | chunk 1 := sum of all ranks' | summed | read chunk 0 from rank 0

Two ranks on two cores sum 10 MiB in 1.4 ms so, by gloo in 5.2 ms. Where a rank may read the others' values in
their own memory, sums need no buffers (`ranks/comms/direct_sums.py`).

Rows of sharded parameters need the first round alone: a rank reads the others' rows, or sums its own.

A collective that starts lets those before it go on first (`ranks/comms/in_flight.py`), and they take turns in
three buffers. So when a rank writes into a buffer again, everybody has read what was there: whoever was ready
for the last one had let the one before it sum, and the one before that read. No rank ever needs more than
three buffers of its largest value, or two where sums need none.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from fxdp.ir.adjoining import line_of
from fxdp.ir.transports import rotating_buffers
from fxdp.ranks.comms.direct_sums import DirectSums, Reduction
from fxdp.ranks.comms.in_flight import Begun, InFlight, Step
from fxdp.ranks.comms.messages import Messages, Round
from fxdp.ranks.comms.shared_buffers import BufferRotation, chunk, elements


class SharedMemory:
    """All-reduces, gathers and scatters of large contiguous CPU tensors; for one thread at a time.

    All ranks start and finish the same collectives in the same order. Values are reduced in rank order, each
    chunk on one rank, so all ranks hold the same bits.

    Parameters
    ----------
    messages : the connections between the ranks.
    size : how many ranks there are.
    direct : whether all-reduces need no buffers, as ranks may read each other's values where they lie.
    """

    def __init__(self, messages: Messages, size: int, direct: bool = False) -> None:
        self._messages = messages
        self._rank = messages.rank
        self._size = size
        self._direct = DirectSums(messages, size) if direct else None
        self._buffers = BufferRotation(rotating_buffers(direct=direct))
        self._in_flight = InFlight()

    @property
    def direct(self) -> bool:
        """Whether all-reduces need no buffers."""
        return self._direct is not None

    def start(self, value: Tensor, function: Reduction) -> Begun:
        """Write this rank's value where the others find it; `finish` must follow.

        Raises
        ------
        RankFailedError : another rank ended before the collective before this one.
        """
        if self._direct is not None:
            self._in_flight.go_on()
            return self._in_flight.begin(self._direct.start([value], function))
        iteration, ready = self._write_what_others_sum(value)
        return self._in_flight.begin(partial(self._sum, value.view(-1), function, iteration, ready))

    def start_packed(self, values: Sequence[Tensor], total: Tensor) -> Begun:
        """The same for the sum of flat values, end to end; `total` will hold it, and is empty before."""
        count = sum(value.numel() for value in values)
        if self._direct is not None:
            return self.start(torch.cat(list(values), out=total.resize_(count)), torch.add)
        iteration, data = self._next(count * total.itemsize)
        shared = data[: count * total.itemsize].view(total.dtype)
        torch.cat(list(values), out=shared)
        ready = self._say(iteration, shared)
        return self._in_flight.begin(partial(self._sum, total, torch.add, iteration, ready, packed=count))

    def start_in_place(self, values: Sequence[Tensor]) -> Begun:
        """The same for the sum of several values, each where it lies; only where it is `direct`."""
        assert self._direct is not None
        self._in_flight.go_on()
        return self._in_flight.begin(self._direct.start(values, torch.add))

    def start_gather(self, values: Sequence[Tensor], outputs: Sequence[Tensor]) -> Begun:
        """The same for values of which all ranks want everybody's: of each all ranks' in one output."""
        counts = [value.numel() for value in values]
        size = sum(counts) * values[0].itemsize
        iteration, data = self._next(size)
        shared, line = data[:size].view(values[0].dtype), line_of(values, counts)
        if line is None:
            torch.cat([value.view(-1) for value in values], out=shared)
        else:
            shared.copy_(line)
        ready = self._say(iteration, shared)
        return self._in_flight.begin(lambda: put_together(self._shared(shared, iteration, ready), outputs))

    def room(self, size: int) -> Tensor:
        """So many bytes where the others will look: for the value of the collective that starts next.

        Raises
        ------
        RankFailedError : another rank ended before the collective before this one.
        """
        self._in_flight.go_on()
        return self._buffers.coming(size).data[:size]

    def start_scatter(self, value: Tensor, output: Tensor) -> Begun:
        """The same for a sum of which a rank wants in `output` the chunk of its number."""
        iteration, ready = self._write_what_others_sum(value)

        def complete() -> None:
            own = chunk(value.numel(), self._rank, self._size)
            first, second, *others = [part[own] for part in self._shared(value.view(-1), iteration, ready)]
            torch.add(first, second, out=output.view(-1))
            for other in others:
                output.view(-1).add_(other)

        return self._in_flight.begin(complete)

    def _write_what_others_sum(self, value: Tensor) -> tuple[int, Round]:
        """Put all but the own chunk into the next buffer, and say so; the buffer's turn, and the round."""
        iteration, data = self._next(value.nbytes)
        flat, shared = value.view(-1), elements(data, value)
        own = chunk(len(flat), self._rank, self._size)
        if shared.data_ptr() != flat.data_ptr():  # else it was written into `room`
            shared[: own.start] = flat[: own.start]
            shared[own.stop :] = flat[own.stop :]
        return iteration, self._say(iteration, value)

    def _next(self, size: int) -> tuple[int, Tensor]:
        """The turn, and its buffer with room for `size` bytes, once nobody reads it."""
        self._in_flight.go_on()
        iteration, buffer = self._buffers.next(size)
        return iteration, buffer.data

    def _say(self, iteration: int, value: Tensor) -> Round:
        """Tell the others that a value is there."""
        return self._messages.start(self._buffers.meta(iteration, value))

    def finish(self, begun: Begun) -> None:
        """Wait for all ranks' values and put the result where it belongs.

        Raises
        ------
        LinkBrokenError : a connection ended.
        RankFailedError : a rank did not come in time, or with a value of another size.
        """
        self._in_flight.finish(begun)

    def _shared(self, own: Tensor, iteration: int, ready: Round) -> list[Tensor]:
        """All ranks' values in rank order, once they are there: this rank's own, and the others' buffers."""
        metadata = self._messages.finish(ready)
        return [
            elements(self._buffers.theirs(r, iteration, metadata[r], own), own) if r in metadata else own
            for r in range(self._size)
        ]

    def _sum(self, flat: Tensor, function: Reduction, iteration: int, ready: Round, packed: int = 0) -> Step:
        """Sum this rank's chunk into the flat value; those of the others are read in the next step.

        `packed` are its elements, if all of it is in this rank's buffer: until now it is empty then.
        """
        if packed:
            flat.resize_(packed)
        shared, own = self._shared(flat, iteration, ready), chunk(flat.numel(), self._rank, self._size)
        inside = elements(self._buffers.own(iteration).data, flat)[
            own
        ]  # nobody else reads it before it is summed
        # the own value is in one of both, so the sum begins in the other
        mine, total = (inside, flat[own]) if packed else (flat[own], inside)
        first, *others = [mine if r == self._rank else part[own] for r, part in enumerate(shared)]
        for other in others:
            function(first, other, out=total)
            first = total
        if packed:
            inside.copy_(total)
        summed = self._messages.start(memoryview(b"summed"))
        if not packed:
            flat[own] = total
        return partial(self._read, flat, shared, summed)

    def _read(self, flat: Tensor, shared: Sequence[Tensor], summed: Round) -> None:
        self._messages.finish(summed)
        for r, part in enumerate(shared):
            if r != self._rank:
                theirs = chunk(flat.numel(), r, self._size)
                flat[theirs] = part[theirs]

    def close(self) -> None:
        """Give the buffers back."""
        self._buffers.close()


def put_together(parts: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """Write values of all ranks, of each rank several one after another, along the first dim of outputs."""
    ranks = len(parts)
    line = line_of(outputs, [output.numel() for output in outputs])
    if line is None:
        rows = [row for output in outputs for row in output.view(ranks, -1).unbind()]
    else:
        rows = [*torch.split(line, [output.numel() // ranks for output in outputs for _ in parts])]
    for place, part in enumerate(parts):
        own = rows[place::ranks]
        torch.split_with_sizes_copy(part.view(-1), [one.numel() for one in own], out=own)
