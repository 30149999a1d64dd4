"""Functions called by a staged program: micro-batches, transfers between stages, accumulation over a step.

Transfers are asynchronous: `send` and `receive` return at once, `wait` returns a received value, `wait_sent`
releases a sent value. All values are sent as bytes, so any dtype is supported. On CUDA, transfers are issued
on a separate stream (`runtime/streams.py`), for which the stream of the process group waits, and compute
waits for the transfers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fxdp.errors import RankFailedError
from fxdp.ir.network.raw_bytes import as_bytes, pack_strided, plain, strided_size, unpack_strided
from fxdp.ir.ops.moments import combine
from fxdp.ir.ops.rank_extrema import restored, sortable
from fxdp.runtime.streams import Streams

_LATE = "timed out waiting"  # from gloo's error message; torch has no exception class for this


@dataclass(frozen=True)
class Microbatch:
    """A micro-batch of this rank: number (None: the full local batch), inputs, and the seed of the step."""

    index: int | None
    inputs: tuple[Tensor, ...]
    seed: int


@dataclass(frozen=True)
class _Pending:
    """A transfer in flight, and the value that the transfer reads or fills, alive until the end."""

    work: Any
    value: Tensor
    copy: Tensor | None = None
    """The contiguous copy that is sent; the value itself if already contiguous."""
    peer: int = -1
    """The global rank of the peer."""
    shape: Sequence[int] | None = None
    """The shape of a received value that travels with its strides; None: `value` is the value."""
    dtype: torch.dtype = torch.uint8


@dataclass(frozen=True)
class Transport:
    """A process group of the pipeline's ranks, for transfers in one direction through the stages.

    With `strided` a value has the same strides and alignment on the receiver, on which the bits of some
    kernels depend; else a received value is contiguous.
    """

    group: dist.ProcessGroup
    ranks: Sequence[int]
    device: torch.device
    streams: Streams
    strided: bool = False

    def send(self, value: Tensor, peer: int, tag: int, *, stream: str) -> _Pending:
        """Start sending a value; `peer` counts along the pipeline axis; issued on `stream`."""
        if value.numel() == 0:
            return _Pending(None, value)
        with self.streams.on(stream):
            copy = pack_strided(value) if self.strided else plain(value)
            work = dist.isend(as_bytes(copy), self.ranks[peer], group=self.group, tag=tag)
        return _Pending(work, value, copy, self.ranks[peer])

    def receive(
        self, shape: Sequence[int], dtype: torch.dtype, peer: int, tag: int, *, stream: str
    ) -> _Pending:
        """Start receiving into a new buffer of compute's, filled when `wait` returns; issued on `stream`."""
        value = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        if value.numel() == 0:
            return _Pending(None, value)
        if self.strided:
            value = torch.empty(strided_size(shape, dtype), dtype=torch.uint8, device=self.device)
        with self.streams.on(stream):
            work = dist.irecv(as_bytes(value), self.ranks[peer], group=self.group, tag=tag)
        return _Pending(work, value, None, self.ranks[peer], shape if self.strided else None, dtype)


def wait(pending: _Pending) -> Tensor:
    """Return the received value; on CUDA the current stream waits for the transfer, not the host."""
    wait_sent(pending)
    if pending.shape is None:
        return pending.value
    return unpack_strided(pending.value, pending.shape, pending.dtype)


def wait_sent(pending: _Pending) -> None:
    """Wait until a sent value is no longer needed.

    Raises
    ------
    RankFailedError : the peer did not join the transfer before the timeout.
    """
    if pending.work is None:
        return
    try:
        pending.work.wait()
    except RuntimeError as error:
        if _LATE not in str(error).lower():
            raise
        raise RankFailedError(
            f"rank {pending.peer} did not come to a transfer between stages in time, though its process is "
            "alive; expected all ranks to make the same calls (set FXDP_TIMEOUT_S if one may need longer)"
        ) from error


def microbatch(full: Microbatch, index: int, start: int, size: int, dims: Sequence[int | None]) -> Microbatch:
    """Return the samples `start : start + size` of every input with a batch dim."""
    inputs = tuple(
        value if dim is None else value.narrow(dim, start, size).contiguous()
        for value, dim in zip(full.inputs, dims, strict=True)
    )
    return Microbatch(index, inputs, full.seed)


def ragged_microbatch(
    full: Microbatch, index: int, places: Sequence[tuple[int, int, int, int] | None]
) -> Microbatch:
    """Return the rows of a micro-batch of every input with a batch dim.

    `places` says of each: the dim, the first row, the number of rows, and the rows before the micro-batch of
    the axis into which the values point, which are subtracted.
    """
    inputs = []
    for value, place in zip(full.inputs, places, strict=True):
        if place is not None:
            dim, start, size, before = place
            value = value.narrow(dim, start, size).contiguous()
            value = value - before if before else value
        inputs.append(value)
    return Microbatch(index, tuple(inputs), full.seed)


def block(full: Microbatch, index: int, start: int, size: int, dims: Sequence[int | None]) -> Microbatch:
    """Return the samples of a block in new memory, with the same alignment on any mesh."""
    part = microbatch(full, index, start, size, dims)
    return Microbatch(index, tuple(value.clone() for value in part.inputs), full.seed)


def ragged_block(
    full: Microbatch, index: int, places: Sequence[tuple[int, int, int, int] | None]
) -> Microbatch:
    """Return the rows of a block in new memory, as `block` does."""
    part = ragged_microbatch(full, index, places)
    return Microbatch(index, tuple(value.clone() for value in part.inputs), full.seed)


def aligned(value: Tensor) -> Tensor:
    """Return a contiguous copy in memory of its own, which begins at the same alignment on any mesh."""
    return value.clone(memory_format=torch.contiguous_format)


def accumulate(total: Tensor, value: Tensor, op: str, own: bool) -> Tensor:
    """Return the accumulated value; in place if `own`, as the first value may be an alias of another tensor.

    `op` is the reduction of the Partial placement: `sum`, `max`, `min` or `moments`.
    """
    if op == "sum":
        return total.add_(value) if own else total + value
    if op == "moments":
        return combine(torch.stack([total, value]))
    return torch.maximum(total, value) if op == "max" else torch.minimum(total, value)


def accumulate_in_any_order(total: Tensor, value: Tensor, op: str, own: bool) -> Tensor:
    """Return the extremum by `op`, `max` or `min`, with signed zeros and nan in the order of `sortable`."""
    larger = torch.maximum if op == "max" else torch.minimum
    return restored(larger(sortable(total, op), sortable(value, op)), total.dtype)


def piece(value: Tensor, first: int, last: int) -> Tensor:
    """Return the rows `first` to `last` of a value."""
    return value[first:last]
