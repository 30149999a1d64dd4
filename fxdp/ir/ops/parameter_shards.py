"""Sharded parameters as the ranks hold them: rows of dim 0, gathered in full and scattered as sums.

    parameters    a [5, 2]        b [3]                 of 2 ranks each holds ceil(5 / 2) = 3 and 2 rows
    rank 0        a0 a1 a2        b0 b1                 its rows, one parameter after another, padded
    rank 1        a3 a4 --        b2 --
    gathered      a0 a1 a2 a3 a4 -- b0 b1 b2 --         parameter by parameter, so each entire one is a view

In a pipeline the rows of a data rank are sharded once more, over its pipeline ranks, as DTensor deals a dim
along two axes: rank 0's a0 a1 a2 as a0 a1 and a2. The ranks of a stage have them sent before they gather.

Both ops are opaque to a compiler. Each `start_*` reads what must be there before it begins (`after`):
the one before it, so that all ranks start them in one order, and a value of the computation, so that nobody
gathers earlier than planned. Only data keeps a compiler from changing an order, or from taking a gather of
the backward for the equal one of the forward and keeping its result.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from fxdp.ir.adjoining import line_of
from fxdp.ir.ops.library import aten, opaque
from fxdp.torch_compat import room_to_send, start_gathers, start_scatter, start_zero_copy


def shard_rows(rows: int, ranks: int) -> int:
    """How many rows a rank holds, padding included."""
    return -(-rows // ranks)


def shard_bounds(rows: int, ranks: int, rank: int) -> tuple[int, int]:
    """The first row of a rank and the one after its last, as DTensor's `Shard(0)` cuts them."""
    each = shard_rows(rows, ranks)
    return min(rank * each, rows), min((rank + 1) * each, rows)


def shard_range(rows: int, sharding: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The same where rows are sharded several times: by how many ranks, and to which of them, each time."""
    first, last = 0, rows
    for ranks, rank in sharding:
        start, end = shard_bounds(last - first, ranks, rank)
        first, last = first + start, first + end
    return first, last


def largest_shard(rows: int, sharding: Sequence[tuple[int, int]]) -> int:
    """The rows of the first rank where they are sharded several times: no other has more."""
    for ranks, _ in sharding:
        rows = shard_rows(rows, ranks)
    return rows


def own_shard(value: Tensor, ranks: int, rank: int) -> Tensor:
    """A rank's rows of a full value, as a view."""
    first, last = shard_bounds(value.shape[0], ranks, rank)
    return value[first:last]


def with_padding(rows: Tensor, size: int) -> Tensor:
    """A rank's rows in a line of `size` elements: the very memory, where that goes on behind them.

    Rows that have their memory for themselves are copied: they may be a cast, whose memory compiled code
    gives to another value while a gather is under way.
    """
    (line,) = _with_paddings([rows], [size])
    return line


def _with_paddings(rows: Sequence[Tensor], sizes: Sequence[int]) -> Sequence[Tensor]:
    """`with_padding` of each."""
    line = line_of(rows, sizes)
    if line is not None and _goes_on(line):
        return torch.split(line, list(sizes))
    if len(rows) > 1:
        return [with_padding(each, size) for each, size in zip(rows, sizes, strict=True)]
    padded = rows[0].new_zeros(sizes[0])
    padded[: rows[0].numel()] = rows[0].reshape(-1)
    return [padded]


def _goes_on(line: Tensor) -> bool:
    """Whether a line's memory does not end with it."""
    return (line.storage_offset() + line.numel()) * line.itemsize < line.untyped_storage().nbytes()


def _start_gather(
    rows: Sequence[Tensor], sizes: Sequence[int], world: int, group: str, after: Sequence[Tensor]
) -> Tensor:
    full = rows[0].new_empty(world * sum(sizes))
    own = _with_paddings(rows, sizes)
    # each parameter by itself, in one call: carriers put its rows where they stay
    start_gathers(full, torch.split(full, [world * size for size in sizes]), own, group)
    return full


def _start_scatter(
    values: Sequence[Tensor], sizes: Sequence[int], world: int, group: str, after: Sequence[Tensor]
) -> Tensor:
    packed = room_to_send(group, values[0], world * sum(sizes))
    _packed_shards(values, packed.view(world, -1))
    return start_scatter(packed, group)


def _packed_shards(values: Sequence[Tensor], packed: Tensor) -> Tensor:
    """A line of elements per rank: its rows of each value, one after another, padded by zeros."""
    if filled := [value for value in values if value.numel()]:  # the kernel wants no empty ones
        aten._chunk_cat.out(filled, 0, len(packed), out=packed)
    return packed


def _gather_shape(rows: Sequence[Tensor], sizes: Sequence[int], world: int, *_: Any) -> Tensor:
    return rows[0].new_empty(world * sum(sizes))


start_all_gather_shards = opaque(
    "start_all_gather_shards(Tensor[] rows, int[] sizes, int world, str group, Tensor[] after) -> Tensor",
    _start_gather, _gather_shape,
)  # fmt: skip
"""Start gathering the ranks' rows of several parameters, of which each rank gives `sizes` elements.

What is waited for are the unsharded parameters one after another, each with its padding at its end.
"""
start_reduce_scatter_shards = opaque(
    "start_reduce_scatter_shards(Tensor[] values, int[] sizes, int world, str group, Tensor[] after) -> "
    "Tensor",
    _start_scatter, lambda values, sizes, *_: values[0].new_empty(sum(sizes)),
)  # fmt: skip
"""Start summing several values over the ranks, each of which gets `sizes` elements: its rows.

What is waited for are this rank's rows of the sums, one after another, padded.
"""

publish_shards = opaque(
    "publish_shards(Tensor[] rows, int[] sizes, int world, str group, Tensor[] after) -> Tensor",
    lambda rows, sizes, world, group, after: start_zero_copy(_with_paddings(rows, sizes), group),
    _gather_shape,
)  # fmt: skip
"""The same as `start_all_gather_shards` where the ranks see each other's rows: nothing is copied.

What is waited for can only be read, and holds what the parameters are while one forward or backward runs.
"""

slice_shard = opaque(
    "slice_shard(Tensor value, int ranks, int rank) -> Tensor",
    lambda *args: padded_shard(*args),
    lambda value, ranks, rank: value.new_empty(shard_rows(value.shape[0], ranks), *value.shape[1:]),
)
"""`padded_shard`, of which no compiler makes a view: that would keep the full value."""

GATHERS = frozenset({start_all_gather_shards, publish_shards})
STARTS = frozenset({*GATHERS, start_reduce_scatter_shards})
"""What begins a collective among these ops."""

for _start in STARTS:
    # a rank without samples has no use for the unsharded parameter, but the others wait for its rows
    torch.fx.node.has_side_effect(_start)


def fills_pages(shape: Sequence[int], itemsize: int, ranks: int) -> bool:
    """Whether a rank's rows of such a value fill pages of memory, which can be shown to others."""
    size = elements_each(shape, ranks) * itemsize if shape else 0
    return size > 0 and size % mmap.PAGESIZE == 0


# -- the same on a list of ranks ----------------------------------------------------------------------------


def unsharded_values(
    values: Sequence[Any], sizes: Sequence[int], each: Sequence[int] = (), after: object = ()
) -> list[Tensor]:
    """The entire of a parameter; of lists of them what is waited for after `start_all_gather_shards`."""
    world = len(values)
    if not each:
        return [torch.cat(list(values))] * world
    parts = [with_padding(own[place], size) for place, size in enumerate(each) for own in values]
    return [torch.cat(parts)] * world


def reduced_shards(
    values: Sequence[Any], sizes: Sequence[int], each: Sequence[int] = (), after: object = ()
) -> list[Tensor]:
    """Each rank's shard of a sum, padded; of lists of values the result of `start_reduce_scatter_shards`."""
    world = len(values)
    if not each:
        total = torch.stack(list(values)).sum(0)
        return [padded_shard(total, world, rank) for rank in range(world)]
    sums = [torch.stack([own[place] for own in values]).sum(0) for place in range(len(each))]
    return list(_packed_shards(sums, sums[0].new_empty(world, sum(each))))


def all_reduced_shards(values: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """The sum over ranks that hold equal rows."""
    return [torch.stack(list(values)).sum(0)] * len(values)


def sliced_shards(values: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """Each rank's rows of its full value, padded as the rows of a sum are."""
    world = len(values)
    return [padded_shard(value, world, rank) for rank, value in enumerate(values)]


def padded_shard(value: Tensor, ranks: int, rank: int) -> Tensor:
    """A rank's rows of a full value in memory of their own, zeros where it has fewer than others."""
    each, own = shard_rows(value.shape[0], ranks), own_shard(value, ranks, rank)
    padding = value.new_zeros((each - own.shape[0], *value.shape[1:]))
    return torch.cat([own, padding])


def elements_each(shape: Sequence[int], ranks: int) -> int:
    """How many elements of a value a rank holds, padding included."""
    return shard_rows(shape[0], ranks) * prod(shape[1:])
