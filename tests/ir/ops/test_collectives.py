from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fxdp.ir.ops import collectives
from fxdp.ir.ops.parts import join_parts, take_part
from fxdp.module.calls.call_sizes import _row_numbers
from tests.rank_pool import RankPool

CASES = [((7, 2), 0, 1), ((2, 14, 3), 1, 1), ((2, 28), 1, 2), ((42, 2), 0, 3)]
"""Shape, dim and outer factor, all for a batch of 7."""


@pytest.mark.parametrize(("shape", "dim", "outer"), CASES)
def test_front_and_back_are_inverse(shape: tuple[int, ...], dim: int, outer: int) -> None:
    full = torch.arange(torch.Size(shape).numel()).view(shape)
    rows = collectives._front(full, dim, outer, shape[dim] // (7 * outer))
    assert rows.shape[0] == 7
    assert rows.is_contiguous()
    assert torch.equal(collectives._back(rows, dim), full)


def test_row_numbers_skip_the_padding() -> None:
    assert _row_numbers((2, 0, 1)).tolist() == [0, 1, 4]
    assert _row_numbers((3,)).tolist() == [0, 1, 2]


def test_shard_and_partial() -> None:
    full = torch.tensor([0, 1, 2, 10, 11, 12])
    assert collectives.shard(full, 0, 2, 3, 1, 2).tolist() == [1, 2, 11, 12]
    assert torch.equal(collectives.partial(full, 0), full)
    assert collectives.partial(full, 1).tolist() == [0] * 6


# ---- on ranks --------------------------------------------------------------------------------------------


def _exchange(
    sizes: list[int], shape: tuple[int, ...], dim: int, outer: int, dtype: torch.dtype
) -> tuple[Any, Any]:
    group: Any = dist.group.WORLD
    name, rank, world, batch = group.group_name, dist.get_rank(), dist.get_world_size(), sum(sizes)
    full = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
    inner = shape[dim] // (batch * outer)
    uneven = len(set(sizes)) > 1
    largest, rows = (max(sizes), _row_numbers(tuple(sizes))) if uneven else (None, None)
    part = take_part(full, dim, outer, batch, sum(sizes[:rank]), sizes[rank])
    pending = collectives.start_all_gather(part, dim, outer, inner, world, largest, name)
    gathered = collectives.finish_all_gather(pending, dim, rows)
    if dtype == torch.bool:
        return gathered.tolist(), None
    term = full * (rank + 1)
    pending = collectives.start_reduce_scatter(term, dim, outer, inner, world, largest, rows, name)
    return gathered.tolist(), collectives.finish_reduce_scatter(pending, dim, sizes[rank]).tolist()


@pytest.mark.parametrize(("shape", "dim", "outer"), CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool])
def test_uneven_parts(
    ranks: RankPool, shape: tuple[int, ...], dim: int, outer: int, dtype: torch.dtype
) -> None:
    _check(ranks, [4, 2, 0, 1], shape, dim, outer, dtype)


def test_even_parts(ranks: RankPool) -> None:
    _check(ranks, [2, 2, 2, 2], (2, 16, 2), 1, 1, torch.float32)
    _check(ranks, [4, 4], (48,), 0, 3, torch.bfloat16)


def _check(
    ranks: RankPool, sizes: list[int], shape: tuple[int, ...], dim: int, outer: int, dtype: torch.dtype
) -> None:
    full = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
    results = ranks.run(len(sizes), _exchange, sizes, shape, dim, outer, dtype)
    assert all(gathered == full.tolist() for gathered, _ in results)
    if dtype != torch.bool:
        per_sample = shape[dim] // sum(sizes)
        shapes = [(*shape[:dim], n * per_sample, *shape[dim + 1 :]) for n in sizes]
        found = [part for _, part in results]
        parts = [torch.tensor(f, dtype=dtype).view(s) for f, s in zip(found, shapes, strict=True)]
        total = sum(range(1, len(sizes) + 1))
        assert torch.equal(join_parts(parts, dim, outer, sizes), full * total)


def _reduce() -> tuple[list[float], list[float]]:
    group: Any = dist.group.WORLD
    mine = torch.tensor([1.0, 2.0]).t() * (dist.get_rank() + 1)
    total = collectives.finish(collectives.start_all_reduce(mine, "sum", group.group_name))
    first = collectives.finish(collectives.start_broadcast(mine, group.group_name))
    assert mine.tolist() == [dist.get_rank() + 1.0, 2.0 * (dist.get_rank() + 1)], (
        "operands are left as they are"
    )
    return total.tolist(), first.tolist()


def test_all_reduce_and_broadcast(ranks: RankPool) -> None:
    assert ranks.run(3, _reduce) == [([6.0, 12.0], [1.0, 2.0])] * 3
