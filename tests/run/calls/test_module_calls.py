"""Modules of a script run compiled from some call on, and the numbers stay one device's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fxdp.eager.data_ranks import data_ranks
from fxdp.run.calls import called_module
from fxdp.run.calls.called_module import CompileRule
from fxdp.run.calls.module_calls import ModuleCalls, _pays
from fxdp.run.session import RunOptions, Session
from fxdp.torch_compat import Patch, around, patched_everywhere
from tests.eager.running import EXACT, OnRanks, difference, on_one_device, plain
from tests.rank_pool import RankPool

LOG: list[int] = []
_AGAIN = "its gradients are differentiated again (create_graph=True)"
_SECOND = "its outputs have a second backward (retain_graph=True)"


class _Net(nn.Module):
    def __init__(self, *, effect: str = "") -> None:
        super().__init__()
        self.fc, self.norm, self.head = nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Linear(7, 4)
        nn.utils.parametrizations.spectral_norm(self.head)  # a forward writes buffers that it reads
        self.effect, self.calls, self.last = effect, 0, None

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        h = F.dropout(self.norm(self.fc(x)).tanh(), 0.2, self.training)
        if self.effect == "count":
            self.calls += 1
        if self.effect == "keep":
            self.last = h
        if self.effect == "log":
            LOG.append(len(x))
        return self.head(h if scale is None else h * scale)


def _loop(batch: Any, net: nn.Module, step: Callable[..., Tensor]) -> dict[str, Any]:
    torch.manual_seed(3)
    if isinstance(step, _Late):
        step.steps = 0
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    found: dict[str, Any] = {}
    for i in range(4):
        x = batch(torch.randn(8, 6))
        optimizer.zero_grad()
        loss = step(net, x)
        loss.backward()
        optimizer.step()
        found[f"loss {i}"] = loss.detach()
    return found | {name: value.clone() for name, value in net.state_dict().items()}


def _training(net: nn.Module, x: Tensor) -> Tensor:
    net.eval()
    with torch.no_grad():
        before = net(x)
    with torch.inference_mode():
        net(x * 1.0)
    net.train()
    scale = torch.linspace(0.5, 1, 7)  # plain, beside a global one
    net.head.requires_grad_(x.sum().item() > 0)
    return (net(x, scale=scale) - before).square().mean() + copy.deepcopy(net)(x).mean()


def _plain(net: nn.Module, x: Tensor) -> Tensor:
    return net(x).square().mean()


def _without_loader(net: nn.Module, x: Tensor) -> Tensor:
    noise = net(torch.randn(8, 6))  # plain, as in a script without a loader
    return (noise - net(x)).square().mean() + noise.var(0).sum()


def _penalty(net: nn.Module, x: Tensor) -> Tensor:
    out = net(x * 1.0)
    (grad,) = torch.autograd.grad(out.square().sum(), net.get_parameter("fc.weight"), create_graph=True)
    return grad.square().mean()


def _twice(net: nn.Module, x: Tensor) -> Tensor:
    out = net(x)
    out.mean().backward(retain_graph=True)
    return out.var(0).sum()


def _scaled(net: nn.Module, x: Tensor) -> Tensor:
    return x * net.get_parameter("fc.weight").sum()


def _chained(net: nn.Module, x: Tensor) -> Tensor:
    """Derive by an argument that was computed from a parameter of the module, and by that parameter."""
    hidden = _scaled(net, x)
    wanted = [hidden, *net.parameters()]
    grads = torch.autograd.grad(net(hidden).square().sum(), wanted, create_graph=True)
    return sum((grad.square().mean() for grad in grads), torch.zeros(()))


_WHY = {_penalty: _AGAIN, _twice: _SECOND}
"""Steps each of which has a backward that no program has: calls of such a kind run op by op in the end."""


def _first_order(net: nn.Module, x: Tensor) -> Tensor:
    out = net(x * 1.0)
    (grad,) = torch.autograd.grad(out.mean(), net.get_parameter("fc.weight"), create_graph=True)
    return out.square().mean() + grad.detach().square().sum()


class _Late:
    """A step whose first two are plain, so that the third, compiled, has a backward that no program has."""

    def __init__(self, then: Callable[..., Tensor], why: str) -> None:
        self.then, self.why, self.steps, self.__name__ = then, why, 0, f"late {then.__name__}"

    def __call__(self, net: nn.Module, x: Tensor) -> Tensor:
        self.steps += 1
        if self.steps < 3:  # the calls are of the kind that comes later
            return _plain(net, _scaled(net, x) if self.then is _chained else x)
        return self.then(net, x)


def _functional(net: nn.Module, x: Tensor) -> Tensor:
    moved = {name: p * 1.01 for name, p in net.named_parameters()}
    return torch.func.functional_call(net, moved, (x,)).square().mean() + net(x).mean()


def _parts(net: nn.Module, x: Tensor) -> Tensor:
    return net(torch.cat([x, -x])).square().mean()  # another part of the batch: op by op


@contextmanager
def _compiling(calls: ModuleCalls) -> Iterator[None]:
    patches = [
        Patch(nn.Module, "__call__", around(calls.call)),
        Patch(torch, "compile", around(calls.compile)),
    ]
    with patched_everywhere(patches):
        yield


def _made(effect: str = "") -> nn.Module:
    torch.manual_seed(1)
    return _Net(effect=effect)


def _compared(split: tuple[int, ...], step: Callable[..., Tensor], effect: str = "") -> tuple[Any, ...]:
    """Return the difference from one device, the modules with programs, and state of Python beside it."""
    torch.set_default_dtype(torch.float64)
    LOG.clear()
    expected = plain(_loop(on_one_device, reference := _made(effect), step))
    logged = list(LOG)
    LOG.clear()
    ranks = data_ranks(None, "cpu")
    calls, net = ModuleCalls(CompileRule(2, "eager", lambda _: ranks.axis(split), 1)), _made(effect)
    with _compiling(calls):
        found = plain(_loop(OnRanks(split), net, step))
    state = reference.calls == net.calls and logged == LOG and (net.last is None) == (reference.last is None)
    served = [one.name for one in calls.compiled if one.programs]
    kinds = [kind for one in calls._known.values() for kind in one.kinds.values()]
    is_late = isinstance(step, _Late)
    why = step.why if is_late else _WHY.get(step, "")
    told = not why or (
        why in {kind.difference for kind in kinds} and (why in {kind.refused for kind in kinds}) != is_late
    )
    return (*difference(expected, found), served, state and told)


def _all_compared(split: tuple[int, ...]) -> list[tuple[Any, ...]]:
    cases: list[tuple[Any, ...]] = [
        (_training,), (_without_loader,), (_penalty,), (_twice,), (_functional,), (_parts,),
        *((_Late(then, _AGAIN),) for then in (_penalty, _first_order, _chained)), (_Late(_twice, _SECOND),),
        (_plain, "count"), (_plain, "keep"), (_plain, "log"),
    ]  # fmt: skip
    return [(f"{case[0].__name__} {case[1:]}", *_compared(split, *case)) for case in cases]


def test_numbers_and_python_state_are_one_devices(ranks: RankPool) -> None:
    for found in ranks.run(2, _all_compared, (5, 3)):
        for case, error, where, _, state in found:
            assert error <= EXACT, (case, where)
            assert state, case
        names = {case: compiled for case, _, _, compiled, _ in found}
        served = [case for case in names if names[case]]
        assert len(served) == 7, names


def test_torch_compile_leaves_nothing_to_dynamo() -> None:
    net, x = _made().eval(), torch.randn(4, 6)
    with _compiling(ModuleCalls(CompileRule(2, "eager", data_ranks(None, "cpu").axis))):
        made, function = torch.compile(net), torch.compile(len)
        assert torch.equal(made(x), net(x))
        assert function is len
    assert next(iter(made.state_dict())) == "_orig_mod.fc.weight"


def test_a_lazy_module_runs_op_by_op_until_it_has_sizes() -> None:
    net, x = nn.Sequential(nn.LazyLinear(3), nn.Tanh()), torch.randn(4, 6)
    with _compiling(ModuleCalls(CompileRule(50, "eager", data_ranks(None, "cpu").axis))):
        assert torch.equal(net(x), net(x))
    assert net[0].weight.shape == (3, 6)


class _Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh())

    def forward(self, x: Tensor, times: int) -> Tensor:
        for _ in range(times):
            x = self.layers(x)
        return x


def test_a_module_that_compiles_at_each_call_runs_op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(called_module, "_ANEW", 1)
    net, x = _Repeated(), torch.randn(4, 6)
    ranks = data_ranks(None, "cpu")
    calls = ModuleCalls(CompileRule(2, "eager", lambda total: ranks.axis((total,)), 1))
    with torch.no_grad():
        expected = [net(x, times) for times in range(1, 7)]
        with _compiling(calls):
            found = [net(x, times) for times in range(1, 7)]
    assert all(map(torch.allclose, found, expected))
    assert [one.refused.partition(",")[0] for one in calls.compiled] == ["each call compiles anew"]


class _Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).softmax(-1) / x.shape[0] + x.mean()


@pytest.mark.parametrize(
    ("sizes", "programs"),
    [
        ([(8, 4), (8, 4), (3, 4), (8, 4), (8, 4), (3, 4), (5, 4), (3, 4), (7, 4)], 2),
        ([(4, 3), (5, 6), (6, 7), (7, 2), (9, 5)], 1),
    ],
    ids=["seldom a smaller batch", "ever new sizes"],
)
def test_programs_are_made_for_sizes_that_come_often(sizes: list[tuple[int, int]], programs: int) -> None:
    net, ranks = _Scores(), data_ranks(None, "cpu")
    calls = ModuleCalls(CompileRule(3, "eager", lambda total: ranks.axis((total,)), 1))
    batches = [torch.randn(size) for size in sizes]
    with torch.no_grad():
        expected = [net(x) for x in batches]
        with _compiling(calls):
            found = [net(x) for x in batches]
    assert all(map(torch.allclose, found, expected))
    assert [program.compiled for one in calls.compiled for program in one.programs.values()] == [programs]


def test_calls_that_ran_shortly_stay_op_by_op_until_they_took_as_long_as_compiling() -> None:
    net, ranks, asked = _Scores(), data_ranks(None, "cpu"), list[float]()

    def pays(seconds: float) -> bool:
        asked.append(seconds)
        return len(asked) == 3

    calls = ModuleCalls(CompileRule(2, "eager", lambda total: ranks.axis((total,)), 1, pays))
    x, compiled = torch.randn(4, 6), list[int]()
    with torch.no_grad():
        expected = net(x)
        with _compiling(calls):
            for _ in range(9):
                assert torch.allclose(net(x), expected)
                compiled.append(sum(len(one.programs) for one in calls.compiled))
    assert compiled == [0] * 7 + [1, 1]  # asked at calls 2, 4 and 8
    assert 0 < asked[0] < asked[1] < asked[2]


def _slow_on_one(least: float) -> bool:
    ranks = data_ranks(None, "cpu")
    options = RunOptions("", compile_from=1, compile_after_s=least)
    return _pays(Session(ranks, options), 10.0 if ranks.mesh.rank else 1.0)


def test_the_slowest_rank_decides_for_all(ranks: RankPool) -> None:
    assert ranks.run(2, _slow_on_one, 9.0) == [True, True]
    assert ranks.run(2, _slow_on_one, 11.0) == [False, False]
