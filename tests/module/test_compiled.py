"""Habits of DistributedDataParallel that a compiled module takes part in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxdp
from tests.rank_pool import RankPool


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


def test_without_a_target_evaluation_gives_the_models_output() -> None:
    model = _net()
    compiled = fxdp.compile(model, backend="eager", loss_fn=F.cross_entropy)
    x, y = torch.randn(4, 3).double(), torch.tensor([0, 1, 1, 0])
    with pytest.raises(fxdp.InputError, match=r"in training.*target=.*eval\(\)"):
        compiled(x)
    assert compiled(x, target=y).shape == ()
    compiled.eval()
    torch.testing.assert_close(compiled(x), model(x))
    torch.testing.assert_close(compiled(x, target=y), F.cross_entropy(model(x), y))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
    report = fxdp.verify(model, (x,), loss_fn=F.cross_entropy)
    assert report.ok, report


def _steps(compiled: Any, parts: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    with compiled.no_sync():
        for x, y in parts[:-1]:
            (compiled(x, target=y) / len(parts)).backward()
    x, y = parts[-1]
    (compiled(x, target=y) / len(parts)).backward()
    return [p.grad for p in compiled.parameters()]


def _accumulated(parts: list[list[tuple[Tensor, Tensor]]]) -> list[Tensor]:
    compiled = fxdp.compile(_net(), backend="eager", loss_fn=F.cross_entropy)
    return _steps(compiled, parts[torch.distributed.get_rank()])


def _evaluated(parts: list[Tensor]) -> Tensor:
    compiled = fxdp.compile(_net(), backend="eager", loss_fn=F.cross_entropy)
    compiled.eval()
    with torch.no_grad():
        return compiled(parts[torch.distributed.get_rank()])


def test_gradients_under_no_sync_are_one_devices(ranks: RankPool) -> None:
    batches = [(torch.randn(5, 3).double(), torch.randint(2, (5,))) for _ in range(3)]
    model = _net()
    for x, y in batches:
        (F.cross_entropy(model(x), y) / 3).backward()
    parts = [[(x[:3], y[:3]) for x, y in batches], [(x[3:], y[3:]) for x, y in batches]]
    for gradients in ranks.run(2, _accumulated, parts):
        for own, parameter in zip(gradients, model.parameters(), strict=True):
            torch.testing.assert_close(own, parameter.grad, rtol=1e-12, atol=1e-14)
    full = torch.randn(5, 3).double()
    outputs = ranks.run(2, _evaluated, [full[:4], full[4:]])
    torch.testing.assert_close(torch.cat(outputs), _net().eval()(full).detach())
