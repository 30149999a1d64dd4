"""Optimizers on sharded parameters step as on one device: bitwise, whatever rows a rank holds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fxdp
from fxdp.errors import InputError
from fxdp.sharding.owner_update import _assigned_owners
from tests.rank_pool import RankPool

Maker = Callable[[Any], optim.Optimizer]


class Net(nn.Module):
    """Uneven rows, fewer rows than ranks, three dims, none."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 37)
        self.outer = nn.Linear(37, 7, bias=False)
        self.gain = nn.Parameter(torch.ones(1))
        self.wide = nn.Parameter(torch.randn(1, 7))
        self.cube = nn.Parameter(torch.randn(3, 2, 7))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Parameter(torch.ones(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.outer(torch.tanh(self.inner(x))) * self.scale * self.gain + self.wide
        return (h * self.cube.sum((0, 1))).square().mean()


class Halving(optim.Optimizer):
    """One that fxdp does not know."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-0.5)


def _matrices(parameters: Any) -> list[Tensor]:
    return [p for p in parameters if p.dim() == 2]


def _groups(parameters: Any) -> list[dict[str, Any]]:
    found = list(parameters)
    return [{"params": found[:2], "weight_decay": 0.1}, {"params": found[2:], "lr": 0.05}]


OPTIMIZERS: dict[str, Maker] = {
    "adamw fused": lambda ps: optim.AdamW(_groups(ps), 0.01, fused=True, amsgrad=True),
    "adamw foreach": lambda ps: optim.AdamW(ps, 0.01, foreach=True),
    "adamw": lambda ps: optim.AdamW(ps, 0.01, maximize=True),
    "adam fused": lambda ps: optim.Adam(ps, 0.01, weight_decay=0.1, fused=True),
    "adam foreach": lambda ps: optim.Adam(_groups(ps), 0.01, foreach=True),
    "adam": lambda ps: optim.Adam(ps, torch.tensor(0.01), amsgrad=True),
    "sgd": lambda ps: optim.SGD(ps, 0.01),
    "sgd momentum": lambda ps: optim.SGD(_groups(ps), 0.01, momentum=0.9, nesterov=True),
    "sgd fused": lambda ps: optim.SGD(ps, 0.01, momentum=0.9, fused=True),
    "rmsprop": lambda ps: optim.RMSprop(ps, 0.01, momentum=0.9, centered=True),
    "adagrad": lambda ps: optim.Adagrad(ps, 0.01),
    "adagrad fused": lambda ps: optim.Adagrad(ps, 0.01, fused=True),
    "adamax": lambda ps: optim.Adamax(ps, 0.01),
    "nadam": lambda ps: optim.NAdam(ps, 0.01),
    "radam": lambda ps: optim.RAdam(ps, 0.01),
    "asgd": lambda ps: optim.ASGD(ps, 0.01, t0=1),
    "adadelta": lambda ps: optim.Adadelta(ps, 0.5),
    "rprop": lambda ps: optim.Rprop(ps, 0.01),
    "rprop foreach": lambda ps: optim.Rprop(ps, 0.01, foreach=True),
    "adafactor": lambda ps: optim.Adafactor(_groups(ps), 0.05),
    "adafactor foreach": lambda ps: optim.Adafactor(ps, 0.05, foreach=True),
    "muon": lambda ps: optim.Muon(_matrices(ps), 0.01),
    "user's own": Halving,
}


def _mesh() -> Any:
    world = dist.get_world_size()
    if world == 4:
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    return init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))


def _model() -> Net:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    return Net()


def _shard(model: nn.Module, strategy: str = "shard") -> fxdp.CompiledModule:
    return fxdp.compile(model, _mesh(), strategy=strategy, backend="eager")


def _give_gradients(compiled: nn.Module, twin: nn.Module, step: int, *, all_of_them: bool = False) -> None:
    """The same for both, as a backward would leave them."""
    generator = torch.Generator().manual_seed(step)
    for own, one in zip(compiled.parameters(), twin.parameters(), strict=True):
        if one is twin.unused and not all_of_them:
            continue
        one.grad = torch.randn(one.shape, generator=generator, dtype=one.dtype)
        own.grad = torch.zeros_like(own)
        with torch.no_grad():
            _local(own.grad).copy_(_rows(own, one.grad))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _rows(parameter: Tensor, full: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return full
    axis = parameter.device_mesh.ndim - 1
    each = -(-len(full) // parameter.device_mesh.size(axis))
    first = each * parameter.device_mesh.get_local_rank(axis)
    return full[first : first + each]


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _worst(one: Any, other: Any) -> float:
    """The largest difference of two parameters' or optimizers' values."""
    pairs = [*zip(one, other, strict=True)]
    return max((float((_full(a) - b).detach().abs().max()) for a, b in pairs), default=0.0)


def _states(optimizer: optim.Optimizer) -> list[Tensor]:
    states = [optimizer.state.get(p, {}) for g in optimizer.param_groups for p in g["params"]]
    return [v for s in states for v in s.values() if isinstance(v, Tensor)]


def _all_optimizers() -> dict[str, tuple[float, float]]:
    found, compiled = {}, _shard(_model())
    for name, make in OPTIMIZERS.items():
        twin = _model()
        compiled.load_state_dict(twin.state_dict())
        optimizer, expected = make(compiled.parameters()), make(twin.parameters())
        for step in range(3):
            _give_gradients(compiled, twin, step)
            optimizer.step()
            expected.step()
        worst = _worst(compiled.parameters(), twin.parameters())
        found[name] = worst, _worst(_states(optimizer), _states(expected))
    return found


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_optimizer_equals_one_device(ranks: RankPool, world: int) -> None:
    for found in ranks.run(world, _all_optimizers):
        # a tensor's last elements, which fill no vector, are rounded otherwise by torch's fused kernels
        bounds = {name: 1e-15 if "fused" in name else 0.0 for name in OPTIMIZERS}
        assert {n: worst for n, worst in found.items() if max(worst) > bounds[n]} == {}


def _batches() -> list[tuple[Tensor, Tensor]]:
    """The batch of each step, and this rank's part."""
    generator = torch.Generator().manual_seed(3)
    fulls = [torch.randn(5, 5, generator=generator, dtype=torch.float64) for _ in range(4)]
    return [(full, full[:3] if dist.get_rank() == 0 else full[3:]) for full in fulls]


def _loop(make: Maker, strategy: str) -> tuple[float, float]:
    """Clipping, a scheduler, an average of the parameters and a gradient scaler, as on one device."""
    model, twin = _model(), _model()
    nets = (_shard(model, strategy), twin)
    optimizers = [make(net.parameters()) for net in nets]
    schedulers = [optim.lr_scheduler.StepLR(o, 2, 0.5) for o in optimizers]
    averages = [AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for net in nets]
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) for _ in nets]
    seen = []
    for full, own in _batches():
        for i, (net, x) in enumerate(zip(nets, (own, full), strict=True)):
            scalers[i].scale(net(x)).backward()
            scalers[i].unscale_(optimizers[i])
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            scalers[i].step(optimizers[i])
            scalers[i].update()
            optimizers[i].zero_grad()
            schedulers[i].step()
            averages[i].update_parameters(net)
    with torch.no_grad():
        for average, x in zip(averages, (own, full), strict=True):
            seen.append(average(x))
    assert scalers[0].get_scale() == scalers[1].get_scale() == 32.0
    assert float((seen[0] - seen[1]).abs()) <= 1e-12
    return _worst(nets[0].parameters(), twin.parameters()), _worst(
        averages[0].parameters(), averages[1].parameters()
    )


class Deep(nn.Module):
    """Its gradients are made in the other order than its parameters lie in."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def _side_by_side(make: Maker) -> float:
    """Gradients of a bucket stand as parameters do, so states come to stand so."""
    torch.manual_seed(0)
    twin = Deep()
    compiled = _shard(copy.deepcopy(twin))
    optimizers = [make(net.parameters()) for net in (compiled, twin)]
    for step in range(3):
        full = torch.randn(5, 32, generator=torch.Generator().manual_seed(step))
        for net, x in ((compiled, full[:3] if dist.get_rank() == 0 else full[3:]), (twin, full)):
            net(x).backward()
        for optimizer in optimizers:
            optimizer.step()
    parameters = sorted(compiled.parameters(), key=lambda p: _local(p).data_ptr())
    averages = [optimizers[0].state[p]["exp_avg"] for p in parameters]
    for values in ([p.grad for p in parameters], averages):
        at = [_local(value).data_ptr() for value in values]
        assert at == [at[0] + sum(_local(v).nbytes for v in values[:i]) for i in range(6)]
    return _worst(compiled.parameters(), twin.parameters())


def _overflow() -> float:
    """A gradient that is not finite in one rank's rows lets every rank leave the step out."""
    nets = _shard(_model()), _model()
    optimizers = [optim.AdamW(net.parameters(), 0.01) for net in nets]
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in nets]
    for step in range(3):
        _give_gradients(*nets, step)
        for net, optimizer, scaler in zip(nets, optimizers, scalers, strict=True):
            gradient = net.get_parameter("inner.weight").grad
            assert gradient is not None
            if step == 1 and (dist.get_rank() == 0 or not isinstance(gradient, DTensor)):
                _local(gradient)[0, 0] = torch.inf
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()
    assert [scaler.get_scale() for scaler in scalers] == [4.0, 4.0]
    return _worst(nets[0].parameters(), nets[1].parameters())


def _hooks_and_closures() -> float:
    """A user's hooks see the gradients and values that are stepped on, whoever steps them."""
    model, twin = _model(), _model()
    nets = (_shard(model), twin)
    averages: list[list[Tensor]] = [[], []]
    optimizers = [optim.Adafactor(net.parameters(), 0.05) for net in nets]

    def halve(optimizer: optim.Optimizer, *_: Any) -> None:
        for p in optimizer.param_groups[0]["params"]:
            if p.grad is not None:
                p.grad.mul_(0.5)

    for optimizer, average in zip(optimizers, averages, strict=True):
        optimizer.register_step_pre_hook(halve)
        optimizer.register_step_post_hook(
            lambda o, *_, kept=average: kept.extend(p.detach().clone() for p in o.param_groups[0]["params"])
        )
    for step in range(2):
        _give_gradients(*nets, step)
        for optimizer in optimizers:
            optimizer.step()
    assert _worst(*averages) == 0.0
    steps = [optim.NAdam(net.parameters(), 0.01) for net in nets]
    for optimizer in steps:
        optimizer.zero_grad()
    losses = [o.step(lambda: _give_gradients(*nets, 9) or 3.5) for o in steps]
    assert losses == [3.5, 3.5]
    return _worst(nets[0].parameters(), twin.parameters())


def _made_before() -> tuple[float, float]:
    """An optimizer with some steps behind it goes on with the sharded parameters."""
    model, twin = _model(), _model()
    optimizers = [optim.AdamW(_groups(net.parameters()), 0.01) for net in (model, twin)]
    _give_gradients(model, twin, 0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    compiled = _shard(model)
    for step in (1, 2):
        _give_gradients(compiled, twin, 7)
        for optimizer in optimizers:
            optimizer.zero_grad()
        assert all(p.grad is None for p in compiled.parameters())
        _give_gradients(compiled, twin, step)
        for optimizer in optimizers:
            optimizer.step()
    worst = _worst(compiled.parameters(), twin.parameters())
    return worst, _worst(*map(_states, optimizers))


def _resumed(make: Maker) -> float:
    """State goes through torch's checkpoints, and through full values of one device."""
    compiled, twin = _shard(_model()), _model()
    optimizer, expected = make(compiled.parameters()), make(twin.parameters())
    _give_gradients(compiled, twin, 0, all_of_them=True)
    optimizer.step()
    expected.step()
    assert all(isinstance(v, DTensor) for v in _states(optimizer) if v.dim() and len(v) == 7)
    state = get_optimizer_state_dict(compiled, optimizer, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        of = {name: expected.state[p] for name, p in twin.named_parameters() if p in expected.state}
        mine = [states[k] for name, states in state["state"].items() for k in of[name]]
        assert _worst(mine, [v for name in state["state"] for v in of[name].values()]) == 0.0
    fresh = make(compiled.parameters())
    set_optimizer_state_dict(compiled, fresh, get_optimizer_state_dict(compiled, optimizer))
    third = make(compiled.parameters())
    third.load_state_dict(copy.deepcopy(expected.state_dict()))
    for step, again in enumerate((fresh, third)):
        _give_gradients(compiled, twin, step, all_of_them=True)
        again.step()
        expected.step()
        if again is fresh:
            third.load_state_dict(copy.deepcopy(expected.state_dict()))
    return max(_worst(compiled.parameters(), twin.parameters()), _worst(_states(third), _states(expected)))


def _refused() -> None:
    compiled = _shard(_model())
    optimizer = optim.LBFGS(compiled.parameters())
    with pytest.raises(InputError, match="LBFGS cannot step on sharded parameters"):
        optimizer.step(lambda: 0.0)


def _several() -> float:
    """One optimizer of two modules, one of them a copy; groups that come later, no state, a failing step."""
    one, first = _shard(_model()), _model()
    other, second = copy.deepcopy(one), _model()
    for make in (OPTIMIZERS["adamw"], OPTIMIZERS["adafactor foreach"]):
        both = [make([*a.parameters(), *b.parameters()]) for a, b in ((one, other), (first, second))]
        _give_gradients(one, first, 0)
        _give_gradients(other, second, 1)
        for optimizer in both:
            optimizer.step()
    later = [optim.AdamW(list(net.parameters())[:2]) for net in (one, first)]
    for optimizer, net in zip(later, (one, first), strict=True):
        optimizer.step()
        optimizer.add_param_group({"params": list(net.parameters())[2:]})
        optimizer.step()
        optimizer.state.clear()
        optimizer.step()
    options = later[0].param_groups[0]
    options["betas"] = "two"
    with pytest.raises(ValueError, match="unpack"):
        later[0].step()
    assert all(any(p is own for own in one.parameters()) for p in options["params"])
    pairs = (one, first), (other, second)
    return max(_worst(a.parameters(), b.parameters()) for a, b in pairs)


def _around() -> None:
    assert _several() == 0.0
    assert max(_loop(OPTIMIZERS["adamw"], "shard")) <= 1e-12
    for name in ("adamw", "adafactor", "muon"):
        assert max(_loop(OPTIMIZERS[name], "optimizer")) <= 1e-12, name
    assert max(_side_by_side(OPTIMIZERS[name]) for name in ("adamw", "adam fused")) <= 1e-12
    assert _overflow() == 0.0
    assert _hooks_and_closures() == 0.0
    assert max(_made_before()) == 0.0
    for name in ("adamw", "adafactor", "muon"):
        assert _resumed(OPTIMIZERS[name]) == 0.0
    _refused()


def test_what_is_around_a_step(ranks: RankPool) -> None:
    ranks.run(2, _around)


def test_owners_have_alike_much() -> None:
    assert _assigned_owners([3, 9, 4, 1, 5], 2) == [0, 0, 1, 1, 1]
    assert _assigned_owners([], 2) == []
    assert _assigned_owners([1, 1], 4) == [0, 1]
