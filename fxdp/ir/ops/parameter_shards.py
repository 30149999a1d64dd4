"""Local shards of parameters: rows of dim 0, all-gathered in full, and reduce-scattered as gradients.

    parameters    a [5, 2]        b [3]                 of 2 ranks each holds ceil(5 / 2) = 3 and 2 rows
    rank 0        a0 a1 a2        b0 b1                 its rows, one parameter after another, padded
    rank 1        a3 a4 --        b2 --
    gathered      a0 a1 a2 a3 a4 -- b0 b1 b2 --         parameter by parameter, so each entire one is a view

In a pipeline the rows of a data rank are sharded once more, over its pipeline ranks, as DTensor shards a dim
along two axes: rank 0's a0 a1 a2 as a0 a1 and a2. The ranks of a stage receive these before they gather.

Both ops are opaque to a compiler. Each `start_*` reads values that must be ready before it begins (`after`):
the previous start, so that all ranks start collectives in one order, and a value of the computation, so that
no gather starts earlier than planned. Only data dependencies keep a compiler from changing an order, or from
replacing a gather of the backward by the result of the equal one in the forward.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from fxdp.ir.network.adjoining import line_of
from fxdp.ir.ops.library import aten, opaque
from fxdp.torch_compat import room_to_send, start_gathers, start_scatter, start_zero_copy


def shard_rows(rows: int, ranks: int) -> int:
    """Return the number of rows on a rank, padding included."""
    return -(-rows // ranks)


def _shard_bounds(rows: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return the first row of a rank and the end of its range, as for DTensor's `Shard(0)`."""
    each = shard_rows(rows, ranks)
    return min(rank * each, rows), min((rank + 1) * each, rows)


def shard_range(rows: int, sharding: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the first row of a rank and the end of its range, if rows are sharded several times.

    `sharding` has (number of ranks, index of this rank) for each time.
    """
    first, last = 0, rows
    for ranks, rank in sharding:
        start, end = _shard_bounds(last - first, ranks, rank)
        first, last = first + start, first + end
    return first, last


def largest_shard(rows: int, sharding: Sequence[tuple[int, int]]) -> int:
    """Return the number of rows of the first rank, the maximum, if rows are sharded several times."""
    for ranks, _ in sharding:
        rows = shard_rows(rows, ranks)
    return rows


def own_shard(value: Tensor, ranks: int, rank: int) -> Tensor:
    """Return a rank's rows of a full value, as a view."""
    first, last = _shard_bounds(value.shape[0], ranks, rank)
    return value[first:last]


def _with_padding(rows: Tensor, size: int) -> Tensor:
    """Return a rank's rows as a flat tensor of `size` elements; a view if more memory follows the rows.

    Rows that fill their storage are copied: they may be a cast, whose memory compiled code reuses for another
    value while a gather is in flight.
    """
    (line,) = _with_paddings([rows], [size])
    return line


def _with_paddings(rows: Sequence[Tensor], sizes: Sequence[int]) -> Sequence[Tensor]:
    """Return `_with_padding` of each tensor."""
    line = line_of(rows, sizes)
    if line is not None and _goes_on(line):
        return torch.split(line, list(sizes))
    if len(rows) > 1:
        return [_with_padding(each, size) for each, size in zip(rows, sizes, strict=True)]
    padded = rows[0].new_zeros(sizes[0])
    padded[: rows[0].numel()] = rows[0].reshape(-1)
    return [padded]


def _goes_on(line: Tensor) -> bool:
    """Return whether the storage continues after the end of a flat tensor."""
    return (line.storage_offset() + line.numel()) * line.itemsize < line.untyped_storage().nbytes()


def _start_gather(
    rows: Sequence[Tensor], sizes: Sequence[int], world: int, group: str, after: Sequence[Tensor]
) -> Tensor:
    full = rows[0].new_empty(world * sum(sizes))
    own = _with_paddings(rows, sizes)
    # separate outputs in one call: transports put each parameter's rows into their final place
    start_gathers(full, torch.split(full, [world * size for size in sizes]), own, group)
    return full


def _start_scatter(
    values: Sequence[Tensor], sizes: Sequence[int], world: int, group: str, after: Sequence[Tensor]
) -> Tensor:
    packed = room_to_send(group, values[0], world * sum(sizes))
    packed_shards(values, packed.view(world, -1))
    return start_scatter(packed, group)


def packed_shards(values: Sequence[Tensor], packed: Tensor) -> Tensor:
    """Fill the row of each rank in `packed` with the rank's rows of each value in turn, padded by zeros."""
    if filled := [value for value in values if value.numel()]:  # the kernel does not accept empty ones
        aten._chunk_cat.out(filled, 0, len(packed), out=packed)
    return packed


def _gather_shape(rows: Sequence[Tensor], sizes: Sequence[int], world: int, *_: Any) -> Tensor:
    return rows[0].new_empty(world * sum(sizes))


start_all_gather_shards = opaque(
    "start_all_gather_shards(Tensor[] rows, int[] sizes, int world, str group, Tensor[] after) -> Tensor",
    _start_gather, _gather_shape,
)  # fmt: skip
"""Starts gathering the ranks' shards of several parameters, with `sizes` elements from each rank.

The result of the wait has the unsharded parameters one after another, each with padding at its end.
"""
start_reduce_scatter_shards = opaque(
    "start_reduce_scatter_shards(Tensor[] values, int[] sizes, int world, str group, Tensor[] after) -> "
    "Tensor",
    _start_scatter, lambda values, sizes, *_: values[0].new_empty(sum(sizes)),
)  # fmt: skip
"""Starts the sum of several values over the ranks, each of which gets a shard of `sizes` elements.

The result of the wait has this rank's rows of the sums, one after another, padded.
"""

publish_shards = opaque(
    "publish_shards(Tensor[] rows, int[] sizes, int world, str group, Tensor[] after) -> Tensor",
    lambda rows, sizes, world, group, after: start_zero_copy(_with_paddings(rows, sizes), group),
    _gather_shape,
)  # fmt: skip
"""Starts a zero-copy gather of several parameters, for ranks that share memory.

The result of the wait is like the one of `start_all_gather_shards`, but read-only. It has the values of the
parameters as long as one forward or backward runs.
"""

slice_shard = opaque(
    "slice_shard(Tensor value, int ranks, int rank) -> Tensor",
    lambda *args: _padded_shard(*args),
    lambda value, ranks, rank: value.new_empty(shard_rows(value.shape[0], ranks), *value.shape[1:]),
)
"""Computes `_padded_shard`, opaque to compilers: as a view it would keep the full value alive."""

GATHERS = frozenset({start_all_gather_shards, publish_shards})
STARTS = frozenset({*GATHERS, start_reduce_scatter_shards})
"""The ops of this file that start a collective."""

for _start in STARTS:
    # a rank without samples does not use the unsharded parameter, but all remaining ranks wait for its shard
    torch.fx.node.has_side_effect(_start)


def fills_pages(shape: Sequence[int], itemsize: int, ranks: int) -> bool:
    """Return whether a rank's shard of this shape fills entire pages of memory, which ranks can map."""
    size = elements_each(shape, ranks) * itemsize if shape else 0
    return size > 0 and size % mmap.PAGESIZE == 0


# -- on a list of ranks --------------------------------------------------------------------------------------


def unsharded_values(
    values: Sequence[Any], sizes: Sequence[int], each: Sequence[int] = (), after: object = ()
) -> list[Tensor]:
    """Return a parameter in full; for lists, the result of `start_all_gather_shards`."""
    world = len(values)
    if not each:
        return [torch.cat(list(values))] * world
    parts = [_with_padding(own[place], size) for place, size in enumerate(each) for own in values]
    return [torch.cat(parts)] * world


def reduced_shards(
    values: Sequence[Any], sizes: Sequence[int], each: Sequence[int] = (), after: object = ()
) -> list[Tensor]:
    """Return each rank's padded shard of a sum.

    For lists of values, return the result of `start_reduce_scatter_shards`.
    """
    world = len(values)
    if not each:
        total = torch.stack(list(values)).sum(0)
        return [_padded_shard(total, world, rank) for rank in range(world)]
    sums = [torch.stack([own[place] for own in values]).sum(0) for place in range(len(each))]
    return list(packed_shards(sums, sums[0].new_empty(world, sum(each))))


def all_reduced_shards(values: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """Return the sum over ranks that hold equal shards."""
    return [torch.stack(list(values)).sum(0)] * len(values)


def sliced_shards(values: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """Return each rank's shard of its full value, padded like the shard of a sum."""
    world = len(values)
    return [_padded_shard(value, world, rank) for rank, value in enumerate(values)]


def _padded_shard(value: Tensor, ranks: int, rank: int) -> Tensor:
    """Return a copy of a rank's rows of a full value, padded by zeros to the first rank's number."""
    each, own = shard_rows(value.shape[0], ranks), own_shard(value, ranks, rank)
    padding = value.new_zeros((each - own.shape[0], *value.shape[1:]))
    return torch.cat([own, padding])


def elements_each(shape: Sequence[int], ranks: int) -> int:
    """Return the number of elements of a value on a rank, padding included."""
    return shard_rows(shape[0], ranks) * prod(shape[1:])
