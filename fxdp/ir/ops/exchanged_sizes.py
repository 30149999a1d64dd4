"""Sizes of axes born inside a program, which ranks exchange when the program reads these.

An axis has one part, or several that are concatenated. After the exchange a rank has one vector of integers:

    offset of each part, total of each part, largest rank, rows of rank 0 in each part, of rank 1, ...

Positions for gathers follow from these numbers: `gathered_rows` of real rows among the padded ones of all
ranks, `own_rows` of a rank's rows among the rows of all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxdp.ir.ops.library import composed

_c10d = torch.ops._c10d_functional


def start(sizes: Sequence[int], device: str, world: int, group: str) -> Tensor:
    """Start gathering the numbers of rows of all ranks."""
    return _c10d.all_gather_into_tensor(_numbers(sizes, device), world, group)  # type: ignore[no-any-return]


def of_one(sizes: Sequence[int], device: str) -> Tensor:
    """Return the vector of a single rank."""
    return _vector(_numbers(sizes, device)[None], 0)


def _numbers(sizes: Sequence[int], device: str) -> Tensor:
    return torch.cat([torch.full((1,), size, dtype=torch.int64, device=device) for size in sizes])


def finish(pending: Tensor, world: int, index: int) -> Tensor:
    """Wait for the numbers of rows, and return the vector of rank `index`."""
    return _vector(_c10d.wait_tensor(pending).view(world, -1), index)


def of_ranks(values: Sequence[Sequence[int]], sizes: Sequence[int]) -> list[Tensor]:
    """Return the vector of each rank, from all ranks' numbers of rows."""
    counts = torch.tensor(values, dtype=torch.int64)
    return [_vector(counts, rank) for rank in range(len(values))]


def _vector(counts: Tensor, index: int) -> Tensor:
    largest = counts.sum(1).amax(0, keepdim=True)
    return torch.cat([counts[:index].sum(0), counts.sum(0), largest, counts.flatten()])


def _gathered_rows(vector: Tensor, parts: int, total: int) -> Tensor:
    largest, counts = vector[2 * parts], vector[2 * parts + 1 :].view(-1, parts)
    ranks = torch.arange(counts.shape[0], device=vector.device)
    before = counts.cumsum(1) - counts  # rows of a rank in previous parts
    starts = (ranks[:, None] * largest + before).t().flatten()
    ends = counts.t().flatten().cumsum(0)
    rows = torch.arange(total, device=vector.device)
    block = torch.searchsorted(ends, rows, right=True)
    return rows - (ends - counts.t().flatten())[block] + starts[block]


def _own_rows(vector: Tensor, sizes: Sequence[int]) -> Tensor:
    parts = len(sizes)
    offsets, totals = vector[:parts], vector[parts : 2 * parts]
    first = offsets + totals.cumsum(0) - totals
    rows = [torch.arange(n, device=vector.device) + first[i] for i, n in enumerate(sizes)]
    return torch.cat(rows)


gathered_rows = composed("gathered_rows(Tensor vector, int parts, SymInt total) -> Tensor", _gathered_rows)
"""Returns the position of each global row in the gathered parts, padded to the largest."""
own_rows = composed("own_rows(Tensor vector, SymInt[] sizes) -> Tensor", _own_rows)
"""Returns the numbers of this rank's rows."""
