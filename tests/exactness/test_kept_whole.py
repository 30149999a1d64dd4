"""`strategy="optimizer"`: one gather whenever rows have changed, whoever changed them, and none else."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fxdp
from fxdp.ir.graph.model_tensors import full_value, local_of
from fxdp.ir.tensor_difference import difference
from fxdp.runtime.unsharded_parameters import UnshardedParameters
from tests.captures import KNOWN, captured_once
from tests.exactness.models import part
from tests.exactness.test_sharded import Words, _batch, _data_rank
from tests.rank_pool import RankPool

Edit = Callable[[nn.Module], None]


class Doubling(torch.optim.Optimizer):
    """One that fxdp does not know, which writes by what counts no writes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        torch._foreach_mul_(self.param_groups[0]["params"], 2.0)


@contextmanager
def _gathers() -> Iterator[list[int]]:
    """Inside, a 1 for each time that this rank gathers."""
    counted, of = list[int](), UnshardedParameters.of

    def counting(self: UnshardedParameters, wanted: Any, gather: Callable[[], Any]) -> Any:
        def gathered() -> Any:
            counted.append(1)
            return gather()

        return of(self, wanted, gathered)

    with mock.patch.object(UnshardedParameters, "of", counting):
        yield counted


def _weights(net: nn.Module) -> list[Any]:
    return [net.get_parameter(name) for name in ("inner.weight", "norm.bias", "frozen.weight")]


def _scale_data(net: nn.Module) -> None:
    for weight in _weights(net):
        weight.data.mul_(1.5)


def _scale_many(net: nn.Module) -> None:
    with torch.no_grad():
        torch._foreach_mul_(_weights(net), 0.5)


def _scale_local(net: nn.Module) -> None:
    with torch.no_grad():
        for weight in _weights(net):
            (weight.to_local() if isinstance(weight, DTensor) else weight).add_(0.1)


def _scale_in_inference(net: nn.Module) -> None:
    with torch.inference_mode():
        local_of(_weights(net)[0]).mul_(3)


def _load(net: nn.Module) -> None:
    torch.manual_seed(7)
    with torch.device("cpu"):
        net.load_state_dict(Words().state_dict())


def _step(net: nn.Module) -> None:
    Doubling(_weights(net)).step()


def _first_row(net: nn.Module) -> None:
    """Rank 0 alone writes, beside all counters."""
    weight = _weights(net)[0]
    if not isinstance(weight, DTensor):
        weight.detach()[0] += 1
    elif dist.get_rank() == 0:
        local_of(weight).numpy()[0] += 1


EDITS: tuple[Edit, ...] = (
    _scale_data, _scale_many, _scale_local, _scale_in_inference, _load, _step, _first_row,
)  # fmt: skip


def _run(axes: tuple[str, ...], split: list[int], **options: Any) -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, twin = Words(), Words()
    twin.load_state_dict(model.state_dict())
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=axes)
    full = _batch(0, sum(split))
    own = tuple(part(t, split, _data_rank(axes, len(split))) for t in full)
    compiled = fxdp.compile(model, mesh, strategy="optimizer", backend="eager", **options)
    nets = compiled, twin
    optimizers = [torch.optim.AdamW(net.parameters(), 1e-2) for net in nets]
    with _gathers() as gathers, captured_once(KNOWN.setdefault(__name__, {})):

        def losses() -> tuple[Tensor, Tensor]:
            found = compiled(*own), twin(*full)
            assert difference(*(loss.detach() for loss in found)) <= 1e-12
            return found

        for step in range(1, 3):
            for _ in range(2):  # accumulates
                for loss in losses():
                    loss.backward()
            with torch.no_grad():
                losses()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert len(gathers) == step
        for count, edit in enumerate(EDITS, 4):
            with torch.inference_mode():
                losses()
            for net in nets:
                edit(net)
            for loss in losses():
                loss.backward()
            losses()
            assert len(gathers) == count, edit.__name__


def _runs() -> None:
    _run(("dp",), [4, 2], communication={"bucket_cap_mb": 0.0005})
    _run(("dp",), [3, 3], communication={"uneven": False})
    _run(("dp",), [4, 2], pipeline={"microbatches": 2})
    _run(("pp",), [6], pipeline={"microbatches": 2})
    _bare()


def _alone() -> None:
    """One rank has nothing to gather, and must not miss what was written either."""
    torch.set_default_dtype(torch.float64)
    axes = [("dp_shard",), ("pp", "dp")] if dist.is_initialized() else []
    meshes = [init_device_mesh("cpu", (1,) * len(a), mesh_dim_names=a) for a in axes]
    for mesh, strategy in product((None, *meshes), ("shard", "optimizer", "auto")):
        model, full = Words(), _batch(0, 6)
        twin = copy.deepcopy(model)
        with captured_once(KNOWN.setdefault(__name__, {})):
            compiled = fxdp.compile(model, mesh, strategy=strategy, backend="eager")
            for edit in EDITS:
                for net in (compiled, twin):
                    edit(net)
                with torch.no_grad():
                    assert difference(compiled(*full), twin(*full)) <= 1e-12, (strategy, edit.__name__)


class Bare(nn.Module):
    """Its second stage reads no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.then = nn.Linear(3, 2), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.first(x)).square().mean()


def _bare() -> None:
    model = Bare()
    twin = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    compiled = fxdp.compile(model, mesh, strategy="optimizer", backend="eager", pipeline={"stages": ["then"]})
    for size in (4, 3):
        x = torch.ones(size, 3)
        for net in (compiled, twin):
            net(x).backward()
    own, full = compiled.get_parameter("first.bias").grad, twin.first.bias.grad
    assert own is not None
    assert full is not None
    assert difference(full_value(own), full) <= 1e-6


def test_one_rank_sees_each_change(ranks: RankPool) -> None:
    _alone()
    ranks.run(1, _alone)


def test_a_gather_follows_each_change(ranks: RankPool) -> None:
    ranks.run(2, _runs)
