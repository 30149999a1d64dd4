"""Parameters that sharded ones replaced: all that still holds them comes to the sharded ones by them."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor

import fxdp
from fxdp.errors import InputError
from fxdp.sharding.superseded import _SupersededParameter
from tests.rank_pool import RankPool


class Doubling(optim.Optimizer):
    """An optimizer of a user's, which counts how often it was made and keeps its own list of parameters."""

    made = 0

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.own = list(self.param_groups[0]["params"])
        Doubling.made += 1

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.own:
            state = self.state[parameter]
            state["sum"] = state.get("sum", torch.zeros_like(parameter)) + parameter.grad
            parameter.add_(parameter.grad, alpha=-2.0)


def _model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 5).double()


def _sharded(model: nn.Module) -> fxdp.CompiledModule:
    return fxdp.compile(model, strategy="shard", backend="eager")


def _backward(*models: nn.Module) -> None:
    x = torch.arange(12.0, dtype=torch.float64).view(4, 3)
    for model in models:
        compiled = isinstance(model, fxdp.CompiledModule)
        model(x[2 * dist.get_rank() :][:2] if compiled else x).square().mean().backward()


def _full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _worst(some: Any, others: Any) -> float:
    return max(float((_full(a) - b).detach().abs().max()) for a, b in zip(some, others, strict=True))


def _is_followed() -> None:
    """Whatever is asked of the old parameters, before an optimizer has stepped."""
    model, twin = _model(), _model()
    old = list(model.parameters())
    _backward(twin)
    old[0].grad = torch.ones_like(old[0])
    compiled = _sharded(model)
    new = list(compiled.parameters())
    assert {type(p) for p in old} == {_SupersededParameter}
    assert all(isinstance(p, nn.Parameter) and p.shape == q.shape for p, q in zip(old, new, strict=True))
    assert bool((_full(old[0].grad) == 1).all()), "a gradient comes along"
    old[0].grad = None
    assert new[0].grad is None
    _backward(compiled)
    assert all(p.grad is q.grad is not None for p, q in zip(old, new, strict=True))
    norms = [nn.utils.clip_grad_norm_(params, 0.1) for params in (old, twin.parameters())]
    assert float((_full(norms[0]) - norms[1]).abs()) < 1e-12
    assert _worst([p.grad for p in new], [p.grad for p in twin.parameters()]) < 1e-12
    old[1].requires_grad_(False)
    assert not new[1].requires_grad
    old[1].data = torch.arange(5.0, dtype=torch.float64)
    assert _full(new[1]).tolist() == [0, 1, 2, 3, 4]
    copied = copy.deepcopy(old[0])
    assert type(copied) is DTensor
    assert copied is not new[0]
    assert bool((copied.to_local() == new[0].to_local()).all())
    file = io.BytesIO()
    torch.save(old[1], file)
    file.seek(0)
    assert type(torch.load(file, weights_only=False)) is DTensor


def test_what_is_asked_of_them_is_asked_of_the_sharded_ones(ranks: RankPool) -> None:
    ranks.run(2, _is_followed)


def _loops() -> list[float]:
    """An optimizer that was made before, of any class: with a scaler, a scheduler, gradients that add up."""
    worst = []
    for make in (Doubling, lambda ps: optim.SGD(ps, 0.1), lambda ps: optim.AdamW(ps, 0.1, foreach=True)):
        model, twin = _model(), _model()
        optimizers = [make(net.parameters()) for net in (model, twin)]
        made = Doubling.made
        schedulers = [optim.lr_scheduler.StepLR(o, 1, 0.5) for o in optimizers if "lr" in o.param_groups[0]]
        scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in optimizers]
        compiled = _sharded(model)
        for step in range(3):
            for net, optimizer, scaler in zip((compiled, twin), optimizers, scalers, strict=True):
                _backward(net)
                if step == 0:
                    optimizer.zero_grad(set_to_none=False)
                    _backward(net)
                scaler.scale(torch.ones(()))
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            for scheduler in schedulers:
                scheduler.step()
        groups = [o.param_groups[0]["params"] for o in optimizers]
        assert [id(p) for p in groups[0]] == [id(p) for p in compiled.parameters()]
        assert Doubling.made == made
        worst.append(_worst(*groups))
    return worst


def test_optimizers_of_any_class_go_on(ranks: RankPool) -> None:
    for worst in ranks.run(2, _loops):
        assert max(worst) < 1e-12


def _saves(folder: Path) -> tuple[list[bool], list[bool]]:
    """Trained, sharded, and saved before the next step."""
    model = _model()
    optimizer = optim.Adam(model.parameters())
    model(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
    optimizer.step()
    expected = [optimizer.state[p]["exp_avg"].clone() for p in model.parameters()]
    compiled = _sharded(model)
    fxdp.save(folder / "run", compiled, optimizer)
    same = [bool((_full(optimizer.state[p]["exp_avg"]) == e).all()) for p, e in _pairs(compiled, expected)]
    fresh = _model()
    other = optim.Adam(fresh.parameters())
    again = _sharded(fresh)
    fxdp.load(folder / "run", again, other)
    loaded = [bool((_full(other.state[p]["exp_avg"]) == e).all()) for p, e in _pairs(again, expected)]
    third = _model()
    last = optim.Adam(third.parameters())
    assert len(get_optimizer_state_dict(_sharded(third), last)["state"]) == 2
    return same, loaded


def _pairs(compiled: nn.Module, values: list[Tensor]) -> list[tuple[Any, Tensor]]:
    return [*zip(compiled.parameters(), values, strict=True)]


def test_a_checkpoint_before_the_first_step(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, _saves, tmp_path) == [([True] * 2, [True] * 2)] * 2


class _Slotted(nn.Parameter):
    __slots__ = ("mark",)


def _refused() -> None:
    model = nn.Linear(3, 5)
    model.bias = _Slotted(torch.ones(5))
    model.weight.grad, values = torch.ones(5, 3), [p.detach().clone() for p in model.parameters()]
    with pytest.raises(InputError, match=r"__slots__ cannot be sharded: bias \(_Slotted\); expected"):
        _sharded(model)
    assert [type(p) for p in model.parameters()] == [nn.Parameter, _Slotted]  # nothing was changed
    assert all(map(torch.equal, model.parameters(), values))
    assert model.weight.grad.sum() == 15


def test_a_class_with_slots_is_refused(ranks: RankPool) -> None:
    ranks.run(2, _refused)
