"""A function as a module: names, keys, changes of its variables, copies, and refusals."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxdp

ALONE: dict[str, Any] = {"mesh": {"dp": 1}, "backend": "eager"}


def _net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 7), nn.Dropout(0.5), nn.Linear(7, 4))


def _data() -> tuple[Tensor, Tensor]:
    return torch.linspace(-1, 1, 48).view(8, 6), torch.arange(8) % 4


def test_a_lone_module_keeps_its_keys_and_several_have_the_names_of_variables(tmp_path: Path) -> None:
    first, second, criterion = _net(), _net(), nn.CrossEntropyLoss()
    one = fxdp.compile(lambda x, y: criterion(first(x), y), **ALONE)
    assert list(one.state_dict()) == list(first.state_dict())
    assert one.module is first
    assert [name for name, _ in one.named_parameters()] == [name for name, _ in first.named_parameters()]
    two = fxdp.compile(lambda x, y: criterion(first(x) + second(x), y), **ALONE)
    assert {key.partition(".")[0] for key in two.state_dict()} == {"first", "second"}
    for i, compiled in enumerate((one, two)):
        before = copy.deepcopy(compiled.state_dict())
        fxdp.save(tmp_path / f"saved {i}", compiled)
        with torch.no_grad():
            for parameter in compiled.parameters():
                parameter.zero_()
        fxdp.load(tmp_path / f"saved {i}", compiled)
        assert all(torch.equal(compiled.state_dict()[key], value) for key, value in before.items())
        fxdp.save_safetensors(tmp_path / f"{i}.safetensors", compiled)


def test_a_module_found_twice_is_registered_once() -> None:
    net = _net()

    def loss(x: Tensor, y: Tensor, again: nn.Module = net, head: nn.Module = net[2]) -> Tensor:
        return F.cross_entropy(net(x) + again(x) + head(x @ net[0].weight.t()), y)

    compiled = fxdp.compile(loss, **ALONE)
    assert list(compiled.state_dict()) == list(net.state_dict())


def test_modes_and_variables_of_the_function_are_those_of_the_call(caplog: pytest.LogCaptureFixture) -> None:
    net: nn.Module = _net()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(net(x), y)

    x, y = _data()
    compiled = fxdp.compile(loss, rng="single-device", **ALONE)
    for mode in (False, True, False):
        net.train(mode)
        assert compiled.training is mode
        torch.manual_seed(0)
        got = compiled(x, y)
        torch.manual_seed(0)
        assert torch.equal(got, loss(x, y))
    net = nn.Linear(6, 4)
    compiled(x, y).backward()
    assert "net of the model" in caplog.text
    assert torch.equal(net.weight.grad, torch.autograd.grad(loss(x, y), net.weight)[0])
    assert list(compiled.state_dict()) == ["weight", "bias"]


def test_modules_may_be_arguments(caplog: pytest.LogCaptureFixture) -> None:
    def step(models: dict[str, nn.Module], x: Tensor, y: Tensor, *, scale: float = 1.0) -> Tensor:
        return F.cross_entropy(models["head"](models["net"](x)), y) * scale

    x, y = _data()
    models: dict[str, nn.Module] = {"net": _net().eval(), "head": nn.Linear(4, 4)}
    compiled = fxdp.compile(step, **ALONE)
    for scale in (1.0, 2.0):
        loss = compiled(models, x, y, scale=scale)
        assert torch.equal(loss, step(models, x, y, scale=scale))
    loss.backward()
    assert models["head"].weight.grad is not None
    assert "compiled anew" not in caplog.text
    sharded = fxdp.compile(step, strategy="shard", **ALONE)
    with pytest.raises(fxdp.InputError, match=r"functools.partial\(function, module\)"):
        sharded(models, x, y)


def test_a_copy_computes_with_modules_of_its_own() -> None:
    net = _net().eval()
    head = net[2]
    x, _ = _data()
    compiled = fxdp.compile(functools.partial(lambda net, x: head(net[0](x)), net), **ALONE)
    twin = copy.deepcopy(compiled)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert not twin(x).any()
    assert torch.equal(compiled(x), head(net[0](x)))
    assert head(net[0](x)).any()


def test_a_plan_names_the_function_and_its_modules() -> None:
    net = _net()

    def my_loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(net(x), y)

    text = str(fxdp.plan(my_loss, _data(), mesh={"dp": 2}))
    assert text.startswith("my_loss on mesh(dp=2)")
    assert "gradient of net.*.weight" in text


def _backward(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(net(x), y)
    loss.backward()
    return loss


def _zeros(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    return F.cross_entropy(net(x), y)


def _steps(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    optimizer.step()
    return F.cross_entropy(net(x), y)


@pytest.mark.parametrize("step", [_backward, _zeros, _steps])
def test_what_belongs_outside_is_refused_with_its_line(step: Any) -> None:
    net = _net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    F.cross_entropy(net(_data()[0]), _data()[1]).backward()
    before = [(p.detach().clone(), None if p.grad is None else p.grad.clone()) for p in net.parameters()]
    compiled = fxdp.compile(functools.partial(step, net, optimizer), **ALONE)
    with pytest.raises(fxdp.CaptureError, match=r"test_function_module.py:\d+ (?s:.)*Return the loss"):
        compiled(*_data())
    for (value, grad), now in zip(before, net.parameters(), strict=True):
        assert torch.equal(value, now)
        assert grad is not None
        assert now.grad is not None
        assert torch.equal(grad, now.grad)


@pytest.mark.parametrize("model", [nn.Linear, 3, None])
def test_what_is_no_function_is_refused(model: Any) -> None:
    with pytest.raises(fxdp.InputError, match=r"expected a torch.nn.Module, .*, or a function"):
        fxdp.compile(model, **ALONE)


def test_a_compiled_module_inside_is_refused() -> None:
    compiled = fxdp.compile(_net(), **ALONE)
    with pytest.raises(fxdp.InputError, match="'compiled' is compiled by fxdp already"):
        fxdp.compile(lambda x: compiled(x).mean(), **ALONE)
