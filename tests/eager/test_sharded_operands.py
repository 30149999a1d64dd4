"""DTensors among global tensors: parameters that fxdp shards, and DTensors of a mesh of two axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

import fxdp
from tests.rank_pool import RankPool

_X = torch.arange(24.0, dtype=torch.float64).view(8, 3) / 10


def _parts(mesh: Any = None) -> Any:
    rank = dist.get_rank()
    first = sum((5, 0, 2, 1)[:rank]) if dist.get_world_size() == 4 else 5 * rank
    sizes = (5, 0, 2, 1) if dist.get_world_size() == 4 else (5, 3)
    return fxdp.global_batch(_X[first : first + sizes[rank]].clone(), mesh)


def _penalized(call: Callable[[Any], Tensor], parameters: list[Tensor], x: Any) -> list[float]:
    loss = call(x).square().mean() + 0.1 * sum(p.square().sum() for p in parameters)
    loss = loss + F.linear(x, parameters[0]).var(0).sum()
    loss.backward()
    grads = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in parameters]
    with torch.no_grad():
        more = (parameters[0] @ x.t()).sum() + F.linear(x, parameters[0]).max()
    found = [loss.detach(), more, *(grad for grad in grads if grad is not None)]
    return [
        float(n)
        for one in found
        for n in (one.full() if isinstance(one, fxdp.GlobalTensor) else one).reshape(-1)
    ]


def _model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2).double()


def _with_fxdps_parameters() -> tuple[list[float], str]:
    compiled = fxdp.compile(_model(), strategy="shard", backend="eager")
    x, parameters = _parts(), list(compiled.parameters())
    assert isinstance(parameters[0], DTensor)
    found = _penalized(compiled, [*parameters], x)
    try:
        with torch.no_grad():
            parameters[0].add_(x.sum())
    except fxdp.InputError as error:
        return found, str(error)
    return found, ""


def _on_two_axes() -> list[float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    model = _model()
    parameters: list[Tensor] = [
        distribute_tensor(p.detach(), mesh, [Replicate(), Shard(0)]).requires_grad_()
        for p in model.parameters()
    ]
    return _penalized(lambda x: F.linear(x, *parameters), parameters, _parts(mesh))


def _expected() -> list[float]:
    model = _model()
    return _penalized(model, list(model.parameters()), _X)


def test_parameters_that_fxdp_shards_enter_whole(ranks: RankPool) -> None:
    for found, refused in ranks.run(2, _with_fxdps_parameters):
        torch.testing.assert_close(found, _expected())
        assert "test_sharded_operands.py:" in refused
        assert "add_ writes a global tensor into a DTensor" in refused


def test_dtensors_of_a_mesh_of_two_axes_enter_whole(ranks: RankPool) -> None:
    for found in ranks.run(4, _on_two_axes):
        torch.testing.assert_close(found, _expected())
