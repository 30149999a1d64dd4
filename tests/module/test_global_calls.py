"""Compiled modules between global tensors: the loss outside is exact, in every strategy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import fxdp
from tests.eager.running import EXACT, OnRanks, difference, on_one_device, plain
from tests.rank_pool import RankPool


class _Several(nn.Module):
    """Outputs in several placements: by sample, samples times positions in one dim, and of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.head = nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 4)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        h = self.norm(self.fc(x)).tanh()
        out = self.head(h)
        return {"out": out, "flat": out.view(-1, 2), "loss": F.cross_entropy(out, y), "name": "several"}


def _step(batch: Any, net: nn.Module, call: Any) -> dict[str, Any]:
    torch.manual_seed(3)
    x, y = batch(torch.randn(8, 6), torch.randint(0, 4, (8,)))
    y = torch.where(y == 3, -100, y)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        found = call(x, y)
        loss = found["loss"] + F.cross_entropy(found["out"], y, label_smoothing=0.1)
        loss = loss + found["flat"].square().sum(1).std() + found["out"].var(0).sum()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    parameters = {name: getattr(p, "full_tensor", lambda p=p: p)() for name, p in net.named_parameters()}
    return {
        "losses": torch.tensor(losses), "right": (found["out"].argmax(1) == y).sum().item(),
        "shapes": str((*found["out"].shape, *found["flat"].shape)), "name": found["name"], **parameters,
        **{f"buffer {name}": b for name, b in net.named_buffers()},
    }  # fmt: skip


def _model() -> _Several:
    torch.manual_seed(1)
    return _Several()


def _errors(split: tuple[int, ...], **options: Any) -> tuple[float, str]:
    torch.set_default_dtype(torch.float64)
    expected, net = plain(_step(on_one_device, reference := _model(), reference)), _model()
    compiled = fxdp.compile(net, backend="eager", **options)
    return difference(expected, plain(_step(OnRanks(split), net, compiled)))


@pytest.mark.parametrize("strategy", ["replicate", "shard"])
def test_a_loss_outside_is_one_devices(ranks: RankPool, strategy: str) -> None:
    for split in ((5, 3), (5, 0, 3)):
        for error, where in ranks.run(len(split), _errors, split, strategy=strategy):
            assert error <= EXACT, where


def _generator_and_critic(batch: Any, wrap: Any) -> dict[str, Any]:
    torch.manual_seed(1)
    nets = nn.Sequential(nn.Linear(3, 6), nn.Tanh()), nn.Linear(6, 1)
    generator, critic = map(wrap, nets)
    x = batch(torch.randn(8, 6))
    torch.manual_seed(2)
    fake = generator(torch.randn(x.size(0), 3))
    loss = F.softplus(critic(fake)).mean() - critic(x).mean() + (fake.mean(0) - x.mean(0)).square().sum()
    loss.backward()
    return {
        "loss": loss.item(),
        **{f"{i}.{n}": p.grad for i, m in enumerate(nets) for n, p in m.named_parameters()},
    }


def _chained(split: tuple[int, ...]) -> tuple[float, str]:
    torch.set_default_dtype(torch.float64)
    expected = plain(_generator_and_critic(on_one_device, lambda net: net))
    got = _generator_and_critic(OnRanks(split), lambda net: _entering(fxdp.compile(net, backend="eager")))
    return difference(expected, plain(got))


def _entering(compiled: Any) -> Any:
    """A compiled module that also takes plain noise, equal on all ranks, as a global tensor."""

    def call(x: Tensor) -> Any:
        if not isinstance(x, fxdp.GlobalTensor):
            x = x + fxdp.global_batch(torch.zeros(len(x) * (dist.get_rank() == 0), 1))
        return compiled(x)

    return call


def test_modules_that_feed_one_another(ranks: RankPool) -> None:
    for error, where in ranks.run(2, _chained, (5, 3)):
        assert error <= EXACT, where
