"""What a staged program calls besides its stages: micro-batches, transfers between stages, sums over a step.

Transfers are asynchronous: `send` and `receive` return at once, `wait` gives a received value, `wait_sent`
lets go of a sent one. All values travel as bytes, so every dtype does. On CUDA they are issued on a stream of
their own (`runtime/streams.py`), for which the process group's stream waits, and waited for by compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fxdp.errors import RankFailedError
from fxdp.ir.ops.moments import combine
from fxdp.ir.raw_bytes import as_bytes, plain
from fxdp.runtime.streams import Streams

_LATE = "timed out waiting"  # gloo's words; torch has no class for it


@dataclass(frozen=True)
class Microbatch:
    """One part of this rank's batch: its number (None: the global batch), its inputs, the step's seed."""

    index: int | None
    inputs: tuple[Tensor, ...]
    seed: int


@dataclass(frozen=True)
class Pending:
    """A transfer under way, and the value that it reads or fills, which must live until it is done."""

    work: Any
    value: Tensor
    copy: Tensor | None = None
    """What travels of a sent value: itself where its memory is plain."""
    peer: int = -1
    """The other rank, by its number among all."""


@dataclass(frozen=True)
class Transport:
    """One process group of the pipeline's ranks; what is issued on it goes one way through the stages."""

    group: dist.ProcessGroup
    ranks: Sequence[int]
    device: torch.device
    streams: Streams

    def send(self, value: Tensor, peer: int, tag: int, *, stream: str) -> Pending:
        """Start sending a value; `peer` counts along the pipeline axis; issued on `stream`."""
        if value.numel() == 0:
            return Pending(None, value)
        with self.streams.on(stream):
            copy = plain(value)
            work = dist.isend(as_bytes(copy), self.ranks[peer], group=self.group, tag=tag)
        return Pending(work, value, copy, self.ranks[peer])

    def receive(
        self, shape: Sequence[int], dtype: torch.dtype, peer: int, tag: int, *, stream: str
    ) -> Pending:
        """A buffer of that shape, memory of compute's, filled when `wait` returns; issued on `stream`."""
        value = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        if value.numel() == 0:
            return Pending(None, value)
        with self.streams.on(stream):
            work = dist.irecv(as_bytes(value), self.ranks[peer], group=self.group, tag=tag)
        return Pending(work, value, peer=self.ranks[peer])


def wait(pending: Pending) -> Tensor:
    """The received value; on CUDA the current stream waits for it, not the host."""
    wait_sent(pending)
    return pending.value


def wait_sent(pending: Pending) -> None:
    """Wait until a sent value is no longer needed.

    Raises
    ------
    RankFailedError : the other rank did not come in time.
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
    """The samples `start : start + size` of every input that has a batch dim."""
    inputs = tuple(
        value if dim is None else value.narrow(dim, start, size).contiguous()
        for value, dim in zip(full.inputs, dims, strict=True)
    )
    return Microbatch(index, inputs, full.seed)


def accumulate(total: Tensor, value: Tensor, op: str, own: bool) -> Tensor:
    """The sum so far; in place once it is the step's own buffer (the first value may be an alias).

    `op` is that of the Partial placement: `sum`, `max`, `min` or `moments`.
    """
    if op == "sum":
        return total.add_(value) if own else total + value
    if op == "moments":
        return combine(torch.stack([total, value]))
    return torch.maximum(total, value) if op == "max" else torch.minimum(total, value)


def piece(value: Tensor, first: int, last: int) -> Tensor:
    """Rows `first` to `last` of a data rank's rows."""
    return value[first:last]
