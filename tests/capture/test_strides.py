"""`as_strided` as the view it spells."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxdp
from tests.rank_pool import RankPool


class Strided(nn.Module):
    """Layers around a strided read."""

    def __init__(self, size: tuple[int, ...], stride: tuple[int, ...]) -> None:
        super().__init__()
        self.size, self.stride = size, stride
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        read = y.as_strided((x.shape[0], *self.size), self.stride)
        return (read.sin() * torch.arange(1.0, 1 + read[0].numel()).view(read.shape[1:])).sum()


CASES = [
    ((2, 4), (8, 4, 1)),
    ((8, 1, 1), (8, 1, 5, 7)),  # dims of size 1 may have any strides
]


@pytest.mark.parametrize(("size", "stride"), CASES, ids=str)
def test_views_split(size: tuple[int, ...], stride: tuple[int, ...]) -> None:
    model, x = Strided(size, stride).double(), torch.randn(7, 8, dtype=torch.float64)
    fxdp.verify(model, (x,), mesh={"dp": 4}).raise_if_wrong()
    assert not fxdp.plan(model, (x,), mesh={"dp": 4}).coverage()


def test_windows_run_whole() -> None:
    model, x = Strided((3, 4), (8, 2, 1)).double(), torch.randn(7, 8, dtype=torch.float64)
    fxdp.verify(model, (x,), mesh={"dp": 4}).raise_if_wrong()
    assert "as_strided" in str(fxdp.plan(model, (x,), mesh={"dp": 4}).coverage())


def test_a_pooled_plane_splits() -> None:
    """torch lays the mean of a plane out by strides, forward and backward."""
    model = nn.Sequential(nn.Conv1d(3, 4, 3), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 2)).double()
    x = torch.randn(7, 3, 6, dtype=torch.float64)
    fxdp.verify(model, (x,), mesh={"dp": 4}).raise_if_wrong()
    assert not fxdp.plan(model, (x,), mesh={"dp": 4}).coverage()


class Chunks(nn.Module):
    """Longformer's heads: rows of all samples lie between those of one, and chunks of these overlap."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        heads = self.fc(x.transpose(0, 1)).view(s, b, 2, 2).permute(1, 2, 0, 3).reshape(b * 2, s, 2)
        first, row, last = heads.stride()
        return heads.as_strided((b * 2, 3, 4, 2), (first, 2 * row, row, last)).square().cumsum(1).mean()


def test_strides_that_depend_on_the_batch() -> None:
    model, x = Chunks().double(), torch.randn(6, 8, 4, dtype=torch.float64)
    fxdp.verify(model, (x,), splits=[[5, 0, 1, 0], [3, 3, 0, 0]]).raise_if_wrong()


def _loss_and_gradient(backend: str) -> tuple[float, float, float]:
    torch.manual_seed(0)
    model, x = Chunks().double(), torch.randn(6, 8, 4, dtype=torch.float64)
    full = model(x)
    full.backward()
    wanted = model.fc.weight.grad.clone()
    model.zero_grad()
    loss = fxdp.compile(model, backend=backend)(x[5:] if dist.get_rank() else x[:5])
    loss.backward()
    return loss.item(), full.item(), float((model.fc.weight.grad - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_strides_that_depend_on_the_batch_on_ranks(backend: str, ranks: RankPool) -> None:
    for loss, full, error in ranks.run(2, _loss_and_gradient, backend):
        assert loss == pytest.approx(full, rel=1e-12)
        assert error < 1e-12
