"""Collectives of an emitted program, as functional ops on flat local tensors.

`start_*` returns at once with a pending tensor; `finish_*` waits for the pending tensor and restores the
shape. All are plain compositions of aten and `_c10d_functional` ops, so Inductor can compile all of these.

Sharded values travel with their batch factor first: `_front` turns a part with `outer x b x inner` along
`dim` into `[b, ..., outer, inner, ...]`, whose rows can be concatenated over ranks; `_back` inverts that.
Uneven parts are padded to the largest one (`largest` rows); `rows` then has the positions of real rows in
the gathered buffer.

The effect of each on a list of ranks is defined below, for the oracle.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from fxdp.ir.ops.moments import combine
from fxdp.ir.ops.parts import join_parts, take_part, unflatten
from fxdp.ir.ops.rank_extrema import restored, sortable

_c10d = torch.ops._c10d_functional


def _front(value: Tensor, dim: int, outer: int, inner: int) -> Tensor:
    """Move the batch factor first.

    This turns `[.., outer * b * inner, ..]` into contiguous `[b, .., outer, inner, ..]`.
    """
    blocks = unflatten(value, dim, outer, value.shape[dim] // (outer * inner), inner)
    return blocks.movedim(dim + 1, 0).contiguous()


def _back(value: Tensor, dim: int) -> Tensor:
    """Invert `_front`; the result is contiguous, because some kernels depend on strides."""
    return value.movedim(0, dim + 1).flatten(dim, dim + 2).contiguous()


def start_all_reduce(value: Tensor, op: str, group: str) -> Tensor:
    """Start the sum, `max` or `min` over all ranks."""
    if op in ("max", "min"):
        value = sortable(value, op)
    return _c10d.all_reduce(value, op, group)  # type: ignore[no-any-return]


def start_moments(value: Tensor, world: int, group: str) -> Tensor:
    """Start gathering every rank's moments `[3, *kept]`, which each rank then combines."""
    return _c10d.all_gather_into_tensor(value.contiguous(), world, group)  # type: ignore[no-any-return]


def finish_moments(pending: Tensor, world: int) -> Tensor:
    """Wait for the ranks' moments and combine these in rank order."""
    gathered = _c10d.wait_tensor(pending)
    return combine(gathered.unflatten(0, (world, 3)))


def start_broadcast(value: Tensor, group: str) -> Tensor:
    """Start sending rank 0's value."""
    return _c10d.broadcast(value, 0, group)  # type: ignore[no-any-return]


def finish(pending: Tensor) -> Tensor:
    """Wait for an all-reduce, a broadcast, or shards of parameters or gradients."""
    return _c10d.wait_tensor(pending)  # type: ignore[no-any-return]


def finish_extremum(pending: Tensor, dtype: torch.dtype) -> Tensor:
    """Wait for an all-reduce by `max` or `min`."""
    return restored(_c10d.wait_tensor(pending), dtype)


def start_all_gather(
    value: Tensor, dim: int, outer: int, inner: int, world: int, largest: int | None, group: str
) -> Tensor:
    """Start gathering all parts; `largest` is None if all parts are equal."""
    part = _front(value, dim, outer, inner)
    if largest is not None:
        padding = part.new_zeros((largest - part.shape[0], *part.shape[1:]))
        part = torch.cat([part, padding])
    return _c10d.all_gather_into_tensor(part, world, group)  # type: ignore[no-any-return]


def finish_all_gather(pending: Tensor, dim: int, rows: Tensor | None) -> Tensor:
    """Wait for the parts and return the joined value."""
    gathered = _c10d.wait_tensor(pending)
    if rows is not None:
        gathered = gathered.index_select(0, rows)
    return _back(gathered, dim)


def start_reduce_scatter(
    value: Tensor,
    dim: int,
    outer: int,
    inner: int,
    world: int,
    largest: int | None,
    rows: Tensor | None,
    group: str,
) -> Tensor:
    """Start the sum over ranks, scattered so that each rank gets its part."""
    full = _front(value, dim, outer, inner)
    if rows is not None and largest is not None:
        padded = full.new_zeros((world * largest, *full.shape[1:]))
        full = padded.index_copy(0, rows, full)
    return _c10d.reduce_scatter_tensor(full, "sum", world, group)  # type: ignore[no-any-return]


def finish_reduce_scatter(pending: Tensor, dim: int, size: int) -> Tensor:
    """Wait for this rank's part of `size` samples."""
    part = _c10d.wait_tensor(pending)
    return _back(part.narrow(0, 0, size), dim)


def shard(value: Tensor, dim: int, outer: int, batch: int, start: int, size: int) -> Tensor:
    """Return this rank's part of a replicated value."""
    return take_part(value, dim, outer, batch, start, size)


def shard_range(value: Tensor, dim: int, outer: int, inner: int, start: int, size: int) -> Tensor:
    """Return this rank's part of a replicated value: `size` rows of the batch factor of `dim`."""
    return _back(_front(value, dim, outer, inner).narrow(0, start, size), dim)


def shard_rows(value: Tensor, dim: int, outer: int, inner: int, rows: Tensor) -> Tensor:
    """Return this rank's part of a replicated value: these rows of the batch factor of `dim`."""
    return _back(_front(value, dim, outer, inner).index_select(0, rows), dim)


def partial(value: Tensor, rank: int) -> Tensor:
    """Return the value as a term of a sum over ranks: rank 0 keeps it, all remaining ranks get zeros.

    All ranks read the value. Otherwise these ranks would drop the computation of the value, and collectives
    in it.
    """
    return torch.where(value.new_full((), rank == 0, dtype=torch.bool), value, 0)


# -- on a list of ranks: every rank's result, from all ranks' values and batch sizes -------------------------


def all_reduced(values: Sequence[Tensor], sizes: Sequence[int], op: str) -> list[Tensor]:
    """Return the reduction, on all ranks."""
    stacked = torch.stack(tuple(values))
    match op:
        case "sum":
            total = stacked.sum(0).to(values[0].dtype)
        case "avg":  # no pass inserts it: a wrong op must be found by its result, not by an unknown name
            total = stacked.sum(0).to(values[0].dtype) / len(values)
        case "max" | "min":
            total = stacked.amax(0) if op == "max" else stacked.amin(0)
        case "moments":
            total = combine(stacked)
        case _:
            raise NotImplementedError(f"all_reduce by {op}")
    return [total] * len(values)


def reduce_scattered(
    values: Sequence[Tensor], sizes: Sequence[int], dim: int, outer: int, inner: int
) -> list[Tensor]:
    """Return each rank's part of the sum."""
    return sharded(all_reduced(values, sizes, "sum"), sizes, dim, outer)


def all_gathered(
    values: Sequence[Tensor], sizes: Sequence[int], dim: int, outer: int, inner: int
) -> list[Tensor]:
    """Return the joined parts, on all ranks."""
    return [join_parts(values, dim, outer, sizes)] * len(values)


def broadcasted(values: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """Return the first rank's value, on all ranks."""
    return [values[0]] * len(values)


def sharded(values: Sequence[Tensor], sizes: Sequence[int], dim: int, outer: int) -> list[Tensor]:
    """Return each rank's part of a replicated value."""
    starts = [0, *accumulate(sizes)]
    return [
        take_part(value, dim, outer, starts[-1], start, size)
        for value, start, size in zip(values, starts[:-1], sizes, strict=True)
    ]


def made_partial(values: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """Return the value on the first rank, zeros on all remaining ranks."""
    return [values[0], *(torch.zeros_like(v) for v in values[1:])]
