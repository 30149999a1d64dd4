"""A step may write into parameters: weights that are clipped, a second encoder that follows the first."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import functional as F

import fxdp
from fxdp.ir.graph.model_tensors import full_value
from tests.rank_pool import RankPool


class Follower(nn.Module):
    """MoCo's encoders, of which one follows the other, before a clipped layer and a table of short rows."""

    def __init__(self) -> None:
        super().__init__()
        self.fast, self.slow = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)
        self.clipped, self.table = nn.Linear(4, 4), nn.Embedding(6, 4, max_norm=0.5)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        for slow, fast in zip(self.slow.parameters(), self.fast.parameters(), strict=True):
            slow.data = 0.9 * slow.data + 0.1 * fast.data
        with torch.no_grad():
            self.clipped.weight.clamp_(-0.2, 0.2)
            keys = self.slow(x)
        return (self.fast(x) - keys + self.clipped(x) * self.table(ids)).square().mean()


def _data(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(6, 4, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 6, (6,), generator=generator)


def _trained(backend: str) -> float:
    """The largest difference of any parameter after steps on two ranks and on one device."""
    torch.manual_seed(0)
    twin, model = Follower().double(), Follower().double()
    model.load_state_dict(twin.state_dict())
    compiled = fxdp.compile(model, backend=backend)
    part = slice(5, 6) if dist.get_rank() else slice(0, 5)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (compiled, twin)]
    for step in range(3):
        x, ids = _data(step)
        for module, where, optimizer in zip((compiled, twin), (part, slice(None)), optimizers, strict=True):
            optimizer.zero_grad()
            module(x[where], ids[where]).backward()
            optimizer.step()
    pairs = zip(compiled.parameters(), twin.parameters(), strict=True)
    return max(float((own - wanted).detach().abs().max()) for own, wanted in pairs)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_training_is_one_devices(backend: str, ranks: RankPool) -> None:
    assert max(ranks.run(2, _trained, backend)) < 1e-12


def test_verify_compares_what_was_written() -> None:
    report = fxdp.verify(Follower(), _data(0), splits=[[3, 2, 0, 1]])
    assert report.ok, str(report)


@pytest.mark.parametrize("options", [{"pipeline": {"microbatches": 2}}, {"strategy": "shard"}])
def test_a_part_of_a_parameter_is_not_written(options: dict[str, object]) -> None:
    with pytest.raises(fxdp.MeshError, match=r"changes parameters in place \(.*slow.weight.*register_buffer"):
        fxdp.plan(Follower().double(), _data(0), mesh={"dp": 2}, **options)


def _read_and_written(rows: int) -> None:
    """What a training loop does to weights and gradients, of uneven rows, or fewer than ranks."""
    torch.manual_seed(0)
    model = nn.Linear(3, rows, bias=False).double()
    twin = copy.deepcopy(model)
    compiled = fxdp.compile(model, strategy="shard", loss_fn=F.mse_loss, backend="eager")
    own = slice(2, 4) if dist.get_rank() else slice(0, 2)
    x, y = torch.randn(4, 3).double(), torch.randn(4, rows).double()
    compiled(x[own], target=y[own]).backward()
    F.mse_loss(twin(x), y).backward()
    found = []
    elsewhere = init_device_mesh("cpu", (2,), mesh_dim_names=("elsewhere",))
    assert type(distribute_tensor(y, elsewhere, [Shard(0)])[0]) is DTensor, "others' are torch's"
    assert type(model.weight.detach()[0]) is not DTensor
    for weight in (model.weight, twin.weight):
        assert weight.grad is not None
        with torch.no_grad():
            for value in (weight, weight.grad):
                value[-1].mul_(3)
                value[:1] *= 2
                value[0, 1] = 0.5
                value[:, 0] = 0.25
        numbers = [weight.grad.norm().item(), weight.abs().max().item(), float(weight.detach().argmin())]
        numbers += [float(nn.utils.clip_grad_norm_([weight], 0.1, norm_type=float("inf")))]
        values, weight.grad = [full_value(weight.detach()), full_value(weight.grad)], None
        penalty = F.mse_loss(weight, weight.detach() * 0.5) + weight[0].square().sum()
        full_value(penalty).backward()
        found.append((torch.tensor(numbers), *values, full_value(weight.grad)))
    for mine, expected in zip(*found, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows", [1, 4, 5])
def test_sharded_weights_are_read_and_written_as_plain_ones(rows: int, ranks: RankPool) -> None:
    ranks.run(2, _read_and_written, rows)
