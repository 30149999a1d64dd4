"""`fxdp.compile(function)`: losses and steps that use modules around them equal one device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import fxdp
from tests.eager.running import EXACT, OnRanks, difference, on_one_device, plain
from tests.rank_pool import RankPool

Case: TypeAlias = "tuple[Callable[..., Any], list[nn.Module]]"


def _net(inputs: int, outputs: int, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(1)
    between = [nn.BatchNorm1d(7)] if norm else []
    return nn.Sequential(nn.Linear(inputs, 7), *between, nn.Tanh(), nn.Linear(7, outputs))


def _closure() -> Case:
    net = _net(6, 4, norm=True)

    def loss(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out = net(x)
        return F.cross_entropy(out, y), (out.argmax(1) == y).sum(), out

    return loss, [net]


def _two_networks() -> Case:
    encoder, decoder = _net(6, 3), _net(3, 6)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        z = encoder(x)
        return F.mse_loss(decoder(z), x) + 0.1 * z.pow(2).mean()

    return loss, [encoder, decoder]


class _Trainer:
    def __init__(self) -> None:
        self.model, self.scale, self.criterion = _net(6, 4), 2.0, nn.CrossEntropyLoss()

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        return self._loss(self.model(x), y) * self.scale

    def _loss(self, out: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = self.criterion(out, y)
        return loss


def _bound_method() -> Case:
    trainer = _Trainer()
    return trainer.step, [trainer.model]


GLOBAL = _net(6, 4)


def _with_global(x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(GLOBAL(x), y)


def _global() -> Case:
    for child in _net(6, 4).named_parameters():
        GLOBAL.get_parameter(child[0]).data.copy_(child[1])
    GLOBAL.zero_grad()
    return _with_global, [GLOBAL]


def _partial() -> Case:
    def loss(nets: list[nn.Module], x: Tensor, y: Tensor, *, head: nn.Module) -> Tensor:
        return F.cross_entropy(head(nets[0](x) + nets[1](x)), y)

    first, second, head = _net(6, 3), nn.Linear(6, 3), nn.Linear(3, 4)
    return functools.partial(loss, [first, second], head=head), [first, second, head]


def _default() -> Case:
    net = _net(6, 4)

    def loss(x: Tensor, y: Tensor, net: nn.Module = net) -> Tensor:
        return F.cross_entropy(net(x), y)

    return loss, [net]


def _module_method() -> Case:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = _net(6, 4)

        def training_step(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(self.net(x), y)

    model = Model()
    return model.training_step, [model]


def _penalty() -> Case:
    critic = _net(6, 1)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        x = x.detach().requires_grad_(True)
        (grad,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        return ((grad.norm(2, dim=1) - 1) ** 2).mean()

    return loss, [critic]


def _noise() -> Case:
    generator, critic = _net(5, 6), _net(6, 1)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        fake = generator(torch.randn(x.size(0), 5))
        real = critic(x).view(-1)
        labels = torch.full((x.size(0),), 1.0)
        loss = F.binary_cross_entropy_with_logits(real, labels)
        return loss + critic(fake.detach()).mean() + fake.square().mean()

    return loss, [generator, critic]


CASES = (
    _closure, _two_networks, _bound_method, _global, _partial, _default, _module_method, _penalty, _noise,
)  # fmt: skip


def _full(grad: Tensor) -> Tensor:
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def _step(batch: Any, case: Case, call: Callable[..., Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    x, y = batch(torch.randn(8, 6), torch.randint(0, 4, (8,)))
    torch.manual_seed(5)
    found = call(x, y)
    found = found if isinstance(found, tuple) else (found,)
    found[0].backward()
    named = [(f"{i}.{n}", p) for i, module in enumerate(case[1]) for n, p in module.named_parameters()]
    buffers = [(f"{i}.{n}", b.clone()) for i, module in enumerate(case[1]) for n, b in module.named_buffers()]
    return {
        **{f"result {i}": value for i, value in enumerate(found)},
        **{name: _full(p.grad) for name, p in named if p.grad is not None},
        **dict(buffers),
    }


def _errors(split: tuple[int, ...], names: tuple[str, ...], **options: Any) -> dict[str, tuple[float, str]]:
    torch.set_default_dtype(torch.float64)
    GLOBAL.double()
    found = {}
    for name in names:
        make = globals()[name]
        reference = make()
        expected = plain(_step(on_one_device, reference, reference[0]))
        case = make()
        compiled = fxdp.compile(case[0], backend="eager", rng="single-device", **options)
        got = _step(OnRanks(split), case, compiled)
        found[name] = difference(expected, plain(got))
    return found


@pytest.mark.parametrize(
    ("split", "strategy"), [((5, 3), "replicate"), ((5, 0, 3), "replicate"), ((5, 3), "shard")], ids=str
)
def test_functions_are_exact(ranks: RankPool, split: tuple[int, ...], strategy: str) -> None:
    names = tuple(case.__name__ for case in CASES if not (strategy == "shard" and case is _global))
    for found in ranks.run(len(split), _errors, split, names, strategy=strategy):
        wrong = {name: where for name, (error, where) in found.items() if error > EXACT}
        assert not wrong, f"{wrong} of {found}"
