"""Models that communicate themselves, captured and on global tensors: they see one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import get_world_size as number_of_ranks
from torch.distributed.nn import functional as differentiable
from torch.nn import functional as F

import fxdp
from tests.eager.running import EXACT, OnRanks, difference, on_one_device, plain
from tests.rank_pool import RankPool


class _Net(nn.Module):
    """A network with a loss that communicates, as people write it for DistributedDataParallel."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.fc = nn.Linear(6, 4)
        self.register_buffer("sums", torch.zeros(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        raise NotImplementedError


class _TimesWorldSize(_Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.fc(x), y) * dist.get_world_size() / (number_of_ranks() + dist.get_rank())


class _Boxes(_Net):
    """As DETR counts its boxes."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        boxes = (y > 1).sum().to(x.dtype)
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(boxes)
        boxes = torch.clamp(boxes / dist.get_world_size(), min=1)
        return self.fc(x)[:, :2].abs().sum() / boxes


class _Codebook(_Net):
    """Sums of its own in a buffer, as vector quantization keeps them."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out = self.fc(x)
        with torch.no_grad():
            counts = F.one_hot(y, 4).to(x.dtype).sum(0)
            work = dist.all_reduce(counts, op=dist.ReduceOp.SUM, async_op=True)
            work.wait()
            self.sums.mul_(0.9).add_(counts, alpha=0.1)
            dist.broadcast(self.sums, 0)
        return (out * self.sums.detach()).mean()


class _Gathered(torch.autograd.Function):
    """The gather of contrastive losses, with a sum of gradients in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, ...]:
        found = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(found, x)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        stacked = torch.stack(grads)
        dist.all_reduce(stacked)
        return stacked[dist.get_rank()]


class _Contrastive(_Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        own = F.normalize(self.fc(x), dim=1)
        others = torch.cat(_Gathered.apply(own))  # type: ignore[no-untyped-call]
        labels = torch.arange(len(own)) + len(own) * dist.get_rank()
        return F.cross_entropy(own @ others.t() / 0.1, labels)


class _OwnGradients(_Net):
    """A gather whose own part is put back for its gradient."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        own = self.fc(x)
        found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(found, own)
        found[dist.get_rank()] = own
        joined = torch.empty(own.shape, dtype=own.dtype)
        dist.all_gather_into_tensor(joined, own.detach())
        return (torch.cat(found) @ joined.t()).logsumexp(1).mean()


class _Differentiable(_Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        own = self.fc(x)
        mean = differentiable.all_reduce(own.mean(0)) / dist.get_world_size()
        return (torch.cat(differentiable.all_gather(own)) - mean).square().mean()


class _Norm(_Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.SyncBatchNorm(4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.norm(self.fc(x)), y)


HABITS = (_TimesWorldSize, _Boxes, _Codebook, _Contrastive, _OwnGradients, _Differentiable, _Norm)


def _step(batch: Any, model: nn.Module, call: Callable[..., Tensor]) -> dict[str, Any]:
    torch.manual_seed(0)
    x, y = batch(torch.randn(8, 6), torch.randint(0, 4, (8,)))
    loss = call(x, y)
    loss.backward()
    return {
        "loss": loss.item(),
        **{name: p.grad for name, p in model.named_parameters()},
        **{name: b.clone() for name, b in model.named_buffers()},
    }


def _local(split: tuple[int, ...]) -> Callable[..., Any]:
    return lambda *full: tuple(t.split(split)[dist.get_rank()] for t in full)


def _errors(split: tuple[int, ...]) -> dict[str, tuple[float, str]]:
    torch.set_default_dtype(torch.float64)
    found = {}
    for kind in HABITS:
        with fxdp.torch_compat.patched(fxdp.torch_compat.one_device()):
            expected = plain(_step(on_one_device, model := kind(), model))
        captured = kind()
        compiled = fxdp.compile(captured, backend="eager")
        got = plain(_step(_local(split), captured, compiled))
        found[f"{kind.__name__} captured"] = difference(expected, got)
        eager = kind()
        found[f"{kind.__name__} eager"] = difference(expected, plain(_step(OnRanks(split), eager, eager)))
    assert dist.get_world_size() == number_of_ranks() == len(split)
    assert dist.is_initialized()
    return found


def test_a_model_that_communicates_sees_one_device(ranks: RankPool) -> None:
    for found in ranks.run(3, _errors, (5, 0, 3)):
        wrong = {name: where for name, (error, where) in found.items() if error > EXACT}
        assert not wrong, f"{wrong} of {found}"


def _outside(split: tuple[int, ...]) -> tuple[float, float, str]:
    """Collectives outside of modules: those of global values that each rank has, and of parts."""
    x = OnRanks(split)(torch.arange(8.0))
    total, mean = x.sum(), x.mean()
    dist.all_reduce(total)
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    with pytest.raises(fxdp.InputError, match="is of all ranks already") as error:
        dist.all_gather([torch.zeros_like(x) for _ in split], x)
    return total.item(), mean.item(), str(error.value)


def test_collectives_outside_of_modules_are_the_users(ranks: RankPool) -> None:
    for total, mean, text in ranks.run(2, _outside, (5, 3)):
        assert (total, mean) == (2 * 28.0, 3.5)
        assert "test_one_device.py" in text


class _Sends(_Net):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        dist.send(x, 1)
        return x


class _NumberFromOutside(_Net):
    world_size = 2

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found = [torch.empty_like(x) for _ in range(self.world_size)]
        dist.all_gather(found, x)
        return x


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (_Sends, "torch.distributed.send was called by code that sees one device"),
        (_NumberFromOutside, "has a list of 2, expected 1: the model sees one device"),
    ],
)
def test_what_one_device_cannot_do_is_refused_with_its_line(model: type[_Net], text: str) -> None:
    compiled = fxdp.compile(model(), {"dp": 1}, backend="eager")
    with pytest.raises(fxdp.FxdpError, match=text) as error:
        compiled(torch.randn(4, 6), torch.zeros(4).long())
    assert "test_one_device.py" in str(error.value)


def test_verify_runs_the_model_so_without_a_process_group() -> None:
    inputs = torch.randn(7, 6), torch.arange(7) % 4
    assert fxdp.verify(_Codebook(), inputs, mesh={"dp": 3}).ok
