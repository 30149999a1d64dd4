"""Branches on flags of the batch: a program for each way that calls go, all of them one device's."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fxdp
from tests.rank_pool import RankPool


class Padded(nn.Module):
    """Leaves out the mask where nothing is padded, counts its calls, and draws."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        self.calls.add_(1)
        y = self.drop(self.fc(x))
        if not padding.any():
            return y.square().mean()
        if padding.all(1).any().item():
            y = y + 1
        return y.masked_fill(padding, 0.0).square().mean()


def _padding(kind: str, batch: int = 6) -> Tensor:
    found = torch.zeros(batch, 4, dtype=torch.bool)
    found[-1, : {"none": 0, "some": 2, "all": 4}[kind]] = True
    return found


KINDS = ("none", "some", "all", "some", "none", "none", "all")


@pytest.mark.parametrize("kind", ["none", "some", "all"])
def test_each_way_is_one_devices(kind: str) -> None:
    x = torch.randn(6, 4)
    for rng in ("sharded", "single-device"):
        report = fxdp.verify(Padded(), (x, _padding(kind)), splits=[[3, 2, 0, 1], [0, 0, 6, 0]], rng=rng)
        assert report.ok, str(report)


def test_a_split_of_fewer_samples_that_goes_another_way() -> None:
    with pytest.raises(fxdp.InputError, match=r"first 5 samples go another way.*\n.*if not padding.any"):
        fxdp.verify(Padded(), (torch.randn(6, 4), _padding("some")), splits=[[3, 2, 0, 0]])


def _steps(compiled: nn.Module, model: nn.Module, rank: int, world: int) -> list[tuple[float, float]]:
    found = []
    for step, kind in enumerate(KINDS):
        torch.manual_seed(step)
        x, padding = torch.randn(6, 4, dtype=torch.float64), _padding(kind)
        part = slice(0, 5) if rank == 0 and world > 1 else slice(5 if world > 1 else 0, 6)
        losses = []
        for module, where in ((compiled, part), (model, slice(None))):
            torch.manual_seed(step)
            module.zero_grad()
            loss = module(x[where], padding[where])
            loss.backward()
            losses.append(loss.item())
        found.append(tuple(losses))
        for own, wanted in zip(compiled.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(own.grad, wanted.grad, rtol=1e-9, atol=1e-12)
        for own, wanted in zip(compiled.buffers(), model.buffers(), strict=True):
            torch.testing.assert_close(own, wanted)
    return found


def _trained(compute: str) -> tuple[list[tuple[float, float]], int]:
    torch.manual_seed(0)
    model, twin = Padded().double(), Padded().double()
    twin.load_state_dict(model.state_dict())
    compiled = fxdp.compile(model, rng="single-device", compute=compute)
    losses = _steps(compiled, twin, dist.get_rank(), dist.get_world_size())
    return losses, compiled._programs.compiled


@pytest.mark.parametrize("compute", ["eager", "inductor"])
def test_ranks_go_the_way_of_the_whole_batch(compute: str, ranks: RankPool) -> None:
    """Only the second rank has padding: both take the mask. What was begun the wrong way leaves nothing."""
    for losses, compiled in ranks.run(2, _trained, compute):
        for own, wanted in losses:
            assert own == pytest.approx(wanted, rel=1e-12)
        assert compiled == 3, "a program for each way, none twice"


def test_a_step_in_micro_batches_has_no_ways() -> None:
    with pytest.raises(fxdp.CaptureError, match=r"test_other_ways.py:\d+ `if not padding.any\(\):`"):
        fxdp.plan(Padded(), (torch.randn(6, 4), _padding("some")), mesh={"dp": 2}, microbatches=2)


class Dropped(nn.Module):
    """peft's adapters with a `module_dropout` of 0: they are left out where the number drawn is 0 itself."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.adapter = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        if (not self.training) or (self.training and torch.rand(1) > 0.0):
            y = y + self.adapter(x)
        return y.square().mean()


def test_what_is_as_good_as_sure_is_taken_for_sure() -> None:
    model, x = Dropped(), torch.randn(6, 4)
    assert fxdp.verify(model, (x,), splits=[[3, 2, 0, 1]]).ok
    compiled = fxdp.compile(model, {"dp": 1}, compute="eager")
    torch.testing.assert_close(compiled(x), (model.fc(x) + model.adapter(x)).square().mean())
    assert compiled._programs.compiled == 1


class Compared(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean() if (x > 0).sum() > 3 else x.sum()


def test_what_is_no_flag_is_refused() -> None:
    with pytest.raises(fxdp.CaptureError, match="data-dependent control flow"):
        fxdp.plan(Compared(), (torch.randn(6, 4),), mesh={"dp": 2})
