"""Compiled modules that feed one another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import fxdp
from tests.exactness.models import counterpart_of, gradient_errors, part
from tests.rank_pool import RankPool


class _Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(3, 6), nn.BatchNorm1d(6)

    def forward(self, z: Tensor) -> Tensor:
        return self.norm(self.fc(z)).tanh()


class _Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 1))

    def forward(self, x: Tensor, real: float) -> Tensor:
        judged = self.body(x)
        return F.binary_cross_entropy_with_logits(judged, torch.full_like(judged, real))


def _gan(split: list[int], **critic_options: Any) -> list[float]:
    """A step of the critic, then one of the generator, with arithmetic between the two modules."""
    torch.set_default_dtype(torch.float64)
    generator, critic = _Generator(), _Critic()
    twins = counterpart_of(generator), counterpart_of(critic)
    judging = fxdp.compile(critic, backend="eager", **critic_options)
    pairs = [(fxdp.compile(generator, backend="eager"), judging), twins]
    z, x = torch.randn(sum(split), 3), torch.randn(sum(split), 6)

    def mine(t: Tensor) -> Tensor:
        return part(t, split, dist.get_rank())

    cuts: list[Callable[[Tensor], Tensor]] = [mine, lambda t: t]
    for (make, judge), cut in zip(pairs, cuts, strict=True):
        fake = make(cut(z))
        (judge(cut(x), 1.0) + judge(fake.detach(), 0.0)).backward()
        (2 * judge(0.5 * fake + 1, 1.0)).backward()
    return gradient_errors(generator, twins[0]) + gradient_errors(critic, twins[1])


def test_a_generator_and_its_critic(ranks: RankPool) -> None:
    """Two ranks: with micro-batches."""
    for errors in ranks.run(4, _gan, [2, 0, 1, 3]):
        assert max(errors) <= 1e-9


def test_a_critic_in_microbatches(ranks: RankPool) -> None:
    for errors in ranks.run(2, _gan, [4, 3], pipeline={"microbatches": 2}):
        assert max(errors) <= 1e-9
