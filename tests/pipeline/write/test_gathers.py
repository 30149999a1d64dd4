"""Gathered parameters have the same alignment on any mesh, where bits are promised."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxdp
from fxdp.ir.graph.model_tensors import full_value
from tests.rank_pool import RankPool


class Pixels(nn.Module):
    """A convolution of single pixels, whose kernel depends on where its weight begins in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.conv = nn.Parameter(torch.ones(1)), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return (self.conv(x) * self.scale).sin().mean()


def _of_pixels(parts: tuple[int, ...], strategy: str) -> list[Tensor]:
    torch.manual_seed(0)
    compiled = fxdp.compile(Pixels(), numerics=fxdp.Bitwise(block=2), backend="eager", strategy=strategy)
    loss = compiled(torch.randn(sum(parts), 8, 1, 1).split(parts)[dist.get_rank()])
    loss.backward()
    return [loss.detach(), *(full_value(p.grad) for p in compiled.parameters() if p.grad is not None)]


def test_gathered_weights_begin_where_those_of_one_device_do(ranks: RankPool) -> None:
    (alone,) = ranks.run(1, _of_pixels, (6,), "replicate")
    for found in ranks.run(3, _of_pixels, (2, 4, 0), "shard"):
        assert all(map(torch.equal, found, alone))
