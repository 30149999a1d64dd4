"""What torch's process groups do for a program, between real ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fxdp.torch_compat import start_scatter
from tests.rank_pool import RankPool

_DTYPES = (torch.float64, torch.float32, torch.complex64, torch.int64)
_HALVES = (torch.bfloat16, torch.float16)


def _terms(dtype: torch.dtype, count: int, ranks: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(count, generator=generator) * 10**i).to(dtype) for i in range(ranks)]


def _scattered() -> list[bool]:
    name, rank, ranks = dist.group.WORLD.group_name, dist.get_rank(), dist.get_world_size()
    equal = []
    for dtype in (*_DTYPES, *_HALVES):
        for each in (0, 1, 50):
            terms = _terms(dtype, each * ranks, ranks)
            pending = start_scatter(terms[rank], name)
            exact = torch.float32 if dtype in _HALVES else dtype
            wanted = terms[0].to(exact)
            for term in terms[1:]:
                wanted = wanted + term.to(exact)
            own = wanted[rank * each : (rank + 1) * each].to(dtype)
            equal.append(torch.equal(torch.ops._c10d_functional.wait_tensor(pending), own))
    return equal


def test_a_scattered_sum_is_in_rank_order_and_halves_are_rounded_once(ranks: RankPool) -> None:
    assert ranks.run(3, _scattered) == [[True] * 3 * len(_DTYPES + _HALVES)] * 3


def _by_gloo() -> set[str]:
    with torch.profiler.profile(acc_events=True) as seen:
        pending = start_scatter(torch.ones(8), dist.group.WORLD.group_name)
        torch.ops._c10d_functional.wait_tensor(pending)
    return {event.name for event in seen.events() if event.name.startswith("gloo:")}


def test_gloo_is_not_asked_for_the_sum_of_all_parts(ranks: RankPool) -> None:
    """Its reduce-scatter is an all-reduce: twice the bytes."""
    assert ranks.run(2, _by_gloo) == [{"gloo:all_to_all"}] * 2
