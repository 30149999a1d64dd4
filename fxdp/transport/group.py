"""A process group on CPU: small values use rounds of `Messages`, large sums use shared memory.

Functional collectives find the group by name, so a program names this group like a gloo group, and
everything that understands functional collectives (above all Inductor's ordering of communication) works
here, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial, reduce
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fxdp.errors import StateError
from fxdp.ir.network.transports import fits_messages
from fxdp.ranks.comms.messages import LinkBrokenError, Messages, OutOfOrderError, Round
from fxdp.ranks.tree.tree_messages import Adder, TreeMessages
from fxdp.torch_compat import Work
from fxdp.transport.direct_sums import Reduction
from fxdp.transport.host_sums import HostSums
from fxdp.transport.shared_memory import SharedMemory, put_together
from fxdp.transport.shared_windows import SharedWindows

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""A dtype that numpy supports, for each item size."""

_Begun = TypeVar("_Begun")

_REDUCTIONS: tuple[tuple[Any, Reduction], ...] = (
    (dist.ReduceOp.SUM, torch.add),
    (dist.ReduceOp.MAX, torch.maximum),
    (dist.ReduceOp.MIN, torch.minimum),
)


class MessageGroup(dist.ProcessGroup):
    """All-reduce (sum, max, min) and all-gather of contiguous CPU tensors.

    Values are reduced in rank order, or in the order of the tree, so all ranks have the same bits.

    Parameters
    ----------
    messages : the connections.
    size : the number of ranks.
    explain : function that turns a broken connection, or a value of a different call, into the error that
        names the rank.
    memory : for reductions too large for messages; if None, these use messages, too.
    hosts : for large sums, where only the ranks of each of several hosts share memory.
    region_windows : for zero-copy all-gathers of parameters, if there is `memory`.

    Attributes
    ----------
    handed_bytes : bytes of this rank's own values in all collectives so far.
    """

    def __init__(
        self,
        messages: Messages,
        size: int,
        explain: Callable[[LinkBrokenError | OutOfOrderError], Exception],
        memory: SharedMemory | None = None,
        hosts: HostSums | None = None,
        region_windows: SharedWindows | None = None,
    ) -> None:
        super().__init__(messages.rank, size)  # type: ignore[call-arg]
        self.handed_bytes = 0
        self._messages = messages
        self._memory = memory
        self._hosts = hosts
        self._windows = region_windows
        self._explain = explain
        self._size = size

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the backend's name, as `dist.get_backend` would."""
        return "fxdp"

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:  # type: ignore[override]
        """Start the sum or extremum over ranks, in place."""
        wanted = dist.ReduceOp.SUM if opts is None else opts.reduceOp
        function = next((f for op, f in _REDUCTIONS if wanted == op), None)
        if function is None:
            raise StateError(f"small values cannot be reduced by {wanted}; this is a bug in fxdp")
        (tensor,) = tensors
        return self._reduced(tensor, function)

    def start_sum(self, values: Sequence[Tensor]) -> tuple[Tensor, Work]:
        """Start the sum over ranks of flat values, end to end, packed where all ranks read them.

        The returned tensor may be empty before the wait.
        """
        size, memory = sum(value.nbytes for value in values), self._memory
        if memory is None or fits_messages(size, self._size, summed=True):
            full = torch.cat(list(values))
            return full, self._reduced(full, torch.add)
        self.handed_bytes += size
        full = values[0].new_empty(0)
        return full, _Large(self, lambda: memory.start_packed(values, full), memory.finish)

    def start_sums(self, values: Sequence[Tensor]) -> Work:
        """Start the sum over ranks of several values of one dtype, each in place."""
        size, memory = sum(value.nbytes for value in values), self._memory
        if memory is None or not memory.direct or fits_messages(size, self._size, summed=True):
            full = torch.cat([value.view(-1) for value in values])
            return _TakenApart(self._reduced(full, torch.add), full, values)
        self.handed_bytes += size
        return _Large(self, lambda: memory.start_in_place(values), memory.finish)

    def _reduced(self, tensor: Tensor, function: Reduction) -> Work:
        """Start a reduction in place, by the transport that fits the size."""
        self.handed_bytes += tensor.nbytes
        memory, hosts = self._memory, self._hosts
        if not fits_messages(tensor.nbytes, self._size, summed=True):
            if memory is not None:
                return _Large(self, lambda: memory.start(tensor, function), memory.finish)
            if hosts is not None and function is torch.add:
                return _Large(self, lambda: hosts.start(tensor), hosts.finish)
        return _Pending(self, tensor, lambda parts: tensor.copy_(reduce(function, parts)), function)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Start gathering the ranks' tensors along the first dim, each into a separate output."""
        size = sum(tensor.nbytes for tensor in inputs)
        self.handed_bytes += size
        memory = self._memory
        if memory is None or fits_messages(size, self._size, summed=False):
            own = torch.cat([tensor.reshape(-1) for tensor in inputs])
            return _Pending(self, own, lambda parts: put_together(parts, outputs))
        return _Large(self, lambda: memory.start_gather(inputs, outputs), memory.finish)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Start a sum over the ranks; each rank gets one chunk of the result along the first dim."""
        (output,), (tensor,) = outputs, inputs
        self.handed_bytes += tensor.nbytes
        memory = self._memory
        if memory is None or fits_messages(tensor.nbytes, self._size, summed=True):
            own, size = self.rank(), self._size

            def complete(parts: list[Tensor]) -> None:
                output.copy_(reduce(torch.add, [part.chunk(size)[own] for part in parts]))

            return _Pending(self, tensor, complete, torch.add)
        return _Large(self, lambda: memory.start_scatter(tensor, output), memory.finish)

    def publish_shards(self, values: Sequence[Tensor]) -> tuple[Tensor, Work]:
        """Start a zero-copy all-gather of several shards, as full values end to end."""
        region_windows = self._windows
        if region_windows is None:
            raise StateError("rows are to be seen where they lie, but no memory is shared; a bug in fxdp")
        self.handed_bytes += sum(value.nbytes for value in values)
        with self.explained():
            full, begun = region_windows.start(values)
        return full, _Large(self, lambda: begun, region_windows.finish)

    def room_to_send(self, like: Tensor, count: int) -> Tensor:
        """Return memory for the input of the next reduce-scatter, which then copies nothing."""
        size, memory = count * like.itemsize, self._memory
        if memory is None or fits_messages(size, self._size, summed=True):
            return like.new_empty(count)
        with self.explained():
            return memory.room(size).view(like.dtype)

    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    """torch's name before 2.13"""
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]
    """torch's name before 2.13"""

    def start(self, tensor: Tensor, function: Reduction | None = None) -> Round:
        """Send a tensor's elements; with a `function`, only their reduction is needed."""
        value = _bytes_of(tensor)
        if function is None or not isinstance(self._messages, TreeMessages):
            return self._messages.start(value)
        return self._messages.start_sum(value, _adder(tensor, function))

    def finish(self, begun: Round, own: Tensor) -> list[Tensor]:
        """Return every rank's elements in `own`'s shape, in rank order.

        With a tree, a reduction returns only one result.
        """
        with self.explained():
            parts = self._messages.finish(begun)
        if not begun.size:
            return [own] * self._size
        if begun.summed:
            return [torch.frombuffer(parts[self.rank()], dtype=own.dtype).view(own.shape)]
        return [
            torch.frombuffer(parts[rank], dtype=own.dtype).view(own.shape) if rank in parts else own
            for rank in range(self._size)
        ]

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Turn broken connections and values of different calls into the error of the rank at fault."""
        try:
            yield
        except (LinkBrokenError, OutOfOrderError) as error:
            raise self._explain(error) from error


class _Large(Work):
    """A started collective through shared memory; `wait` finishes the collective."""

    def __init__(
        self, group: MessageGroup, start: Callable[[], _Begun], finish: Callable[[_Begun], None]
    ) -> None:
        super().__init__()
        self._group = group
        with group.explained():
            begun = start()
        self._finish: Callable[[], None] = partial(finish, begun)

    def wait(self, timeout: Any = None) -> bool:
        with self._group.explained():
            self._finish()
        return True


class _TakenApart(Work):
    """A started sum of concatenated tensors; `wait` copies the results back to the tensors."""

    def __init__(self, begun: Work, full: Tensor, parts: Sequence[Tensor]) -> None:
        super().__init__()
        self._begun, self._full, self._parts = begun, full, parts

    def wait(self, timeout: Any = None) -> bool:
        self._begun.wait()
        flat = [part.view(-1) for part in self._parts]
        torch.split_with_sizes_copy(self._full, [*map(len, flat)], out=flat)
        return True


class _Pending(Work):
    """A started collective by messages; `wait` completes the result from all ranks' values."""

    def __init__(
        self, group: MessageGroup, tensor: Tensor, complete: Callable[[list[Tensor]], object],
        function: Reduction | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self._group = group
        self._tensor = tensor
        self._complete = complete
        self._begun = group.start(tensor, function)
        self._finished = False

    def wait(self, timeout: Any = None) -> bool:
        if not self._finished:
            self._complete(self._group.finish(self._begun, self._tensor))
            self._finished = True
        return True


def _adder(like: Tensor, function: Reduction) -> Adder:
    """Return a function that reduces several values like this tensor, as bytes."""

    def add(values: Sequence[memoryview]) -> memoryview:
        if not like.numel():
            return values[0]
        return _bytes_of(reduce(function, [torch.frombuffer(value, dtype=like.dtype) for value in values]))

    return add


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    flat = tensor.view(_SAME_SIZE[tensor.element_size()]).view(-1)
    return memoryview(flat.numpy()).cast("B") if tensor.numel() else memoryview(b"")  # type: ignore[arg-type]
