"""Parameters that lie side by side are stepped as one tensor: the numbers and states of one after another."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import fxdp
from fxdp.ir.graph.model_tensors import local_of, shard_like
from tests.sharding.test_sharded_optimizers import OPTIMIZERS, Maker

BY_MATRIX = ("adafactor", "adafactor foreach", "muon", "user's own")
ADAMW = OPTIMIZERS["adamw"]
TOGETHER = ("0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias", "6.weight", "6.bias")


@pytest.fixture(autouse=True, scope="module")
def _few_objects() -> None:
    """To find who holds a parameter all objects are asked: not what other tests have left, too."""
    gc.collect()


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """A process group of one rank, which holds all rows."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_default_dtype(before)


def _plain() -> nn.Module:
    """Of all parameters but the last any two neighbours may be joined: `6.bias` fills no vectors."""
    torch.manual_seed(0)
    widths = [(16, 16), (16, 16), (16, 16), (16, 3)]
    layers = [layer for pair in widths for layer in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*layers, nn.PReLU())


def _sharded() -> nn.Module:
    return fxdp.compile(_plain(), strategy="shard", backend="eager")


def _give(model: nn.Module, seed: int, *, without: tuple[str, ...] = (), apart: bool = False) -> None:
    """Gradients as a bucket leaves them: side by side as the parameters are, or each somewhere else."""
    own = dict(model.named_parameters())
    generator = torch.Generator().manual_seed(seed)
    line = torch.randn(sum(p.numel() for p in own.values()), generator=generator)
    for (name, p), part in zip(own.items(), line.split([p.numel() for p in own.values()]), strict=True):
        rows = part.view(p.shape).clone() if apart else part.view(p.shape)
        gradient = shard_like(p, rows) if isinstance(p, DTensor) else rows
        p.grad = None if name in without else gradient


def _full(value: Any) -> Any:
    return local_of(value) if isinstance(value, DTensor) else value


def _assert_same(
    model: nn.Module, optimizer: optim.Optimizer, other: nn.Module, expected: optim.Optimizer
) -> None:
    """The very same parameters and states, in the same order."""
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(_full(p), _full(q))
    states, wanted = (o.state_dict()["state"] for o in (optimizer, expected))
    assert list(states) == list(wanted)
    for own, one in zip(states.values(), wanted.values(), strict=True):
        assert list(own) == list(one)
        for a, b in zip(own.values(), one.values(), strict=True):
            assert torch.equal(_full(a), _full(b)) if isinstance(a, Tensor) else a == b


def _lines(model: nn.Module, optimizer: optim.Optimizer, state: str = "exp_avg") -> list[str]:
    """The names of parameters of which the states lie side by side, as those do that are stepped as one."""
    lines, end = list[str](), -1
    for name, p in model.named_parameters():
        if state in optimizer.state[p]:
            rows = _full(optimizer.state[p][state])
            lines[-1:] = [f"{lines[-1]} {name}"] if rows.data_ptr() == end else [*lines[-1:], name]
            end = rows.data_ptr() + rows.nbytes
    return lines


class Pair:
    """A sharded model and one that is not, trained alike."""

    def __init__(self, make: Maker = ADAMW) -> None:
        self.nets = _sharded(), _plain()
        self.optimizers = [make(net.parameters()) for net in self.nets]

    def step(self, seed: int, **given: Any) -> None:
        """One step of each with the same gradients."""
        for net, optimizer in zip(self.nets, self.optimizers, strict=True):
            _give(net, seed, **given)
            optimizer.step()

    def lines(self) -> list[str]:
        """What has been stepped as one."""
        return _lines(self.nets[0], self.optimizers[0])

    def assert_same(self) -> None:
        """Bitwise."""
        _assert_same(self.nets[0], self.optimizers[0], self.nets[1], self.optimizers[1])


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in BY_MATRIX])
def test_steps_as_one_equal_steps_one_by_one(name: str) -> None:
    make = OPTIMIZERS[name]
    pair, apart = Pair(make), _sharded()
    optimizer = make(apart.parameters())
    for step in range(3):
        pair.step(step)
        _give(apart, step, apart=True)
        optimizer.step()
    pair.assert_same()
    _assert_same(apart, optimizer, pair.nets[1], pair.optimizers[1])
    groups = (TOGETHER,) if len(pair.optimizers[0].param_groups) == 1 else (TOGETHER[:2], TOGETHER[2:])
    for state, value in next(iter(pair.optimizers[0].state.values()), {}).items():
        if isinstance(value, DTensor):
            lines = _lines(pair.nets[0], pair.optimizers[0], state)
            assert lines == [*map(" ".join, groups), "8.weight"]
            assert not any(" " in line for line in _lines(apart, optimizer, state))


def test_without_a_gradient_neighbours_are_stepped_by_themselves() -> None:
    pair = Pair()
    for step, without in enumerate([(), ("2.bias",), (), ("0.weight", "4.weight"), ()]):
        pair.step(step, without=without)
        pair.assert_same()
    # steps differ by now: only neighbours that have as many behind them are joined
    steps = [int(pair.optimizers[0].state[p]["step"]) for p in pair.nets[0].parameters()]
    assert steps == [4, 5, 5, 4, 4, 5, 5, 5, 5]


def test_a_parameter_that_joins_later_is_stepped_by_itself() -> None:
    pair = Pair()
    late = ("2.weight",)
    pair.step(0, without=late)
    assert pair.lines() == ["0.weight 0.bias", "2.bias 4.weight 4.bias 6.weight 6.bias", "8.weight"]
    pair.step(1)
    pair.assert_same()
    pair.step(2)
    pair.assert_same()
    behind = "2.bias 4.weight 4.bias 6.weight 6.bias"
    assert pair.lines() == ["0.weight 0.bias", "2.weight", behind, "8.weight"]


def test_groups_that_come_later_and_schedulers() -> None:
    pair = Pair(lambda ps: optim.AdamW([{"params": list(ps)[:3]}], 0.1))
    schedulers = [optim.lr_scheduler.StepLR(o, 1, 0.5) for o in pair.optimizers]
    for step in range(4):
        pair.step(step)
        for scheduler in schedulers:
            scheduler.step()
        if step == 1:
            for net, optimizer in zip(pair.nets, pair.optimizers, strict=True):
                optimizer.add_param_group({"params": list(net.parameters())[3:], "lr": 0.3, "amsgrad": True})
    pair.assert_same()
    assert pair.lines() == ["0.weight 0.bias 2.weight", "2.bias 4.weight 4.bias 6.weight 6.bias", "8.weight"]


def test_a_parameter_that_goes_into_another_group() -> None:
    pair = Pair(OPTIMIZERS["sgd momentum"])
    pair.step(0)
    for optimizer in pair.optimizers:
        first, second = optimizer.param_groups
        first["params"].append(second["params"].pop(0))
    pair.step(1)
    pair.assert_same()


def test_in_any_order_states_stand_as_on_one_device() -> None:
    """Ranks gather them one after another, and on another rank other rows may be joined."""
    pair = Pair(lambda ps: optim.AdamW(reversed(list(ps)), 0.1))
    pair.step(0, without=("6.bias",))
    pair.assert_same()
    assert [id(p) for p in pair.optimizers[0].state] == [
        id(p) for p in reversed(list(pair.nets[0].parameters())) if p.grad is not None
    ]


def test_what_is_written_from_outside_is_gone_on_with() -> None:
    """Numbers in place, states replaced, gradients scaled, replaced by full tensors or kept and zeroed."""
    pair = Pair()
    pair.step(0)
    for net, optimizer in zip(pair.nets, pair.optimizers, strict=True):
        one, other = list(net.parameters())[2:4]
        optimizer.state[one]["step"].fill_(7.0)
        optimizer.state[other]["exp_avg"] = torch.ones_like(optimizer.state[other]["exp_avg"])
    pair.step(1)
    pair.assert_same()
    for net, optimizer in zip(pair.nets, pair.optimizers, strict=True):
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        _give(net, 2)
        nn.utils.clip_grad_norm_(list(net.parameters())[:3], 0.1)
        optimizer.step()
        first = next(net.parameters())
        ones = torch.ones(16, 16)
        first.grad = shard_like(first, ones) if isinstance(first, DTensor) else ones
        optimizer.step()
    pair.assert_same()


def test_a_step_that_raises_leaves_what_users_see() -> None:
    pair = Pair()
    for net, optimizer in zip(pair.nets, pair.optimizers, strict=True):
        _give(net, 0)
        optimizer.param_groups[0]["betas"] = "two"
        with pytest.raises(ValueError, match="unpack"):
            optimizer.step()
        optimizer.param_groups[0]["betas"] = (0.9, 0.99)
    assert len(pair.optimizers[0].state) == 0
    for step in range(2):
        pair.step(step)
    pair.assert_same()


@pytest.mark.parametrize("how", ["copied", "saved", "from one device", "to one device"])
def test_states_go_on_elsewhere(how: str) -> None:
    pair = Pair()
    pair.step(0)
    own, expected = pair.optimizers
    match how:
        case "copied":
            own.zero_grad()
            pair.optimizers[0] = ADAMW(pair.nets[0].parameters())
            pair.optimizers[0].load_state_dict(copy.deepcopy(own).state_dict())
        case "saved":
            torch.save(own.state_dict(), file := io.BytesIO())
            assert file.tell() < 4 * sum(p.nbytes for p in pair.nets[1].parameters())
            file.seek(0)
            pair.optimizers[0] = ADAMW(pair.nets[0].parameters())
            pair.optimizers[0].load_state_dict(torch.load(file, weights_only=False))
        case "from one device":
            pair.optimizers[0] = ADAMW(pair.nets[0].parameters())
            pair.optimizers[0].load_state_dict(copy.deepcopy(expected.state_dict()))
        case "to one device":
            state = copy.deepcopy(own.state_dict())
            for each in state["state"].values():
                each.update({name: _full(value) for name, value in each.items()})
            pair.optimizers[1] = ADAMW(pair.nets[1].parameters())
            pair.optimizers[1].load_state_dict(state)
    for step in (1, 2):
        pair.step(step)
    pair.assert_same()
    assert pair.lines() == [" ".join(TOGETHER), "8.weight"]


def test_process_groups_of_other_names() -> None:
    """DTensor remembers what ops make of meshes that compare equal, even if their groups are gone."""
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",), backend_override={"dp": "gloo"})
    own = fxdp.compile(_plain(), mesh, strategy="shard", backend="eager")
    assert all(p.full_tensor().shape == p.shape for p in own.parameters() if isinstance(p, DTensor))
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    pair = Pair()
    pair.step(0)
    state = pair.optimizers[0].state
    for p in pair.nets[0].parameters():
        assert isinstance(p, DTensor)
        assert p.device_mesh.get_group(0) is state[p]["exp_avg"].device_mesh.get_group(0) is dist.group.WORLD


def test_neighbours_that_are_not_joined() -> None:
    """Of other dtypes, complex, and those of optimizers that fxdp does not know."""

    class Mine(optim.AdamW):
        pass

    torch.manual_seed(0)
    model = nn.ParameterList(
        nn.Parameter(torch.randn(4, 16, dtype=dtype))
        for dtype in (torch.complex128, torch.complex128, torch.float32, torch.float64, torch.float32)
    )
    nets = fxdp.compile(copy.deepcopy(model), strategy="shard", backend="eager"), model
    optimizers = [optim.AdamW(net.parameters()) for net in nets]
    for net, optimizer in zip(nets, optimizers, strict=True):
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
    _assert_same(nets[0], optimizers[0], nets[1], optimizers[1])
    own = Pair(lambda ps: Mine(ps, 0.1))
    own.step(0)
    own.assert_same()
    assert not any(" " in line for line in own.lines())


def test_a_scaler_finds_what_is_not_finite() -> None:
    pair = Pair(OPTIMIZERS["adam fused"])
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0) for _ in pair.nets]
    for step in range(3):
        for net, optimizer, scaler in zip(pair.nets, pair.optimizers, scalers, strict=True):
            _give(net, step)
            if step == 1:
                with torch.no_grad():
                    _full(next(net.parameters()).grad)[0, 0] = torch.inf
            scaler.scale(torch.ones(()))
            scaler.step(optimizer)
            scaler.update()
    pair.assert_same()
    assert [float(s["step"]) for s in pair.optimizers[0].state.values()] == [2.0] * 9


@pytest.mark.parametrize("fused", [False, True])
def test_what_no_cache_holds_is_stepped_line_by_line(fused: bool) -> None:
    def wide() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(20)))  # of 32 KiB each

    nets, names = (fxdp.compile(wide(), strategy="shard"), wide()), [f"{i}.weight" for i in range(20)]
    optimizers = [optim.AdamW(net.parameters(), fused=fused) for net in nets]
    for step in range(3):
        for net, optimizer in zip(nets, optimizers, strict=True):
            _give(net, step)
            optimizer.step()
    lines = [names] if fused else [names[:8], names[8:16], names[16:]]
    assert _lines(nets[0], optimizers[0]) == [*map(" ".join, lines)]
    _assert_same(nets[0], optimizers[0], nets[1], optimizers[1])
