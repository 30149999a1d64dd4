"""Stash and pop in one thread, without any parallel wrapper."""

from __future__ import annotations

import copy
import re
from collections.abc import Generator, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxdp.skip import Namespace, SkipTracker, pop, skippable, stash, use_skip_tracker

from .modules import Pop, Stash


@pytest.fixture(autouse=True)
def tracker() -> Iterator[SkipTracker]:
    found = SkipTracker()
    with use_skip_tracker(found):
        yield found


def test_a_skip_in_a_plain_sequential(tracker: SkipTracker) -> None:
    x = torch.randn(3, requires_grad=True)
    y = nn.Sequential(Stash(), nn.Identity(), Pop())(x)
    assert torch.equal(y, 3 * x)
    assert not tracker.tensors
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 3.0))


def test_attributes() -> None:
    layer = Stash()
    assert layer.module_cls.__name__ == type(layer).__name__ == "Stash"
    assert isinstance(layer.module, layer.module_cls)
    assert layer.stashable_names == {"skip"}
    assert layer.poppable_names == frozenset()
    assert repr(layer) == f"@skippable({layer.module!r})"


def test_the_stashed_tensor_waits_in_the_tracker(tracker: SkipTracker) -> None:
    x = torch.randn(3)
    Stash()(x)
    assert tracker.tensors == {(None, "skip"): x}
    assert tracker.tensors[None, "skip"] is x


def test_pop_gives_the_very_tensor() -> None:
    @skippable(pop=["skip"])
    class Take(nn.Module):
        def forward(self, x: Tensor) -> Generator[pop, Tensor, Tensor]:
            return (yield pop("skip"))

    x = torch.randn(3)
    assert nn.Sequential(Stash(), Take())(x) is x


@pytest.mark.parametrize("value", [None, torch.arange(3), torch.ones(3, requires_grad=True).detach()])
def test_skips_without_gradient(value: Tensor | None) -> None:
    @skippable(stash=["skip"])
    class Give(nn.Module):
        def forward(self, x: Tensor) -> Generator[stash, None, Tensor]:
            yield stash("skip", value)
            return x * 2

    @skippable(pop=["skip"])
    class Take(nn.Module):
        def forward(self, x: Tensor) -> Generator[pop, Any, Tensor]:
            skip = yield pop("skip")
            assert skip is value
            return x if skip is None else x + skip

    x = torch.randn(3, requires_grad=True)
    nn.Sequential(Give(), Take())(x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))


@pytest.mark.filterwarnings("ignore")  # Dynamo's own
def test_torch_compile_on_its_own() -> None:
    """Dynamo breaks its graph at a generator, and must not lose what that returns."""
    net = nn.Sequential(Stash(), nn.Linear(3, 3), Pop())
    x = torch.randn(2, 3)
    assert torch.equal(torch.compile(net, backend="eager")(x), net(x))


def test_a_forward_that_is_no_generator() -> None:
    @skippable()
    class Plain(nn.Module):
        def forward(self, x: Tensor, *, scale: int) -> Tensor:
            return x * scale

    assert torch.equal(Plain()(torch.ones(2), scale=3), torch.full((2,), 3.0))


def test_the_module_gets_the_very_objects_of_the_call() -> None:
    @skippable(pop=["skip"])
    class Collect(nn.Module):
        def forward(self, x: Tensor, found: list[Tensor]) -> Generator[pop, Tensor, Tensor]:
            found.append((yield pop("skip")))
            return x

    found: list[Tensor] = []
    x = torch.ones(1)
    Collect()(Stash()(x), found=found)
    assert found == [x]


def test_commands_from_a_helper_and_from_a_module_inside() -> None:
    @skippable(stash=["a", "b"])
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Stash()

        def _both(self, x: Tensor) -> Generator[stash, None, Tensor]:
            yield stash("a", x)
            yield stash("b", -x)
            return x + 1

        def forward(self, x: Tensor) -> Generator[stash, None, Tensor]:
            x = yield from self._both(x)
            return self.inner(x)

    @skippable(pop=["a", "b"])
    class Take(nn.Module):
        def forward(self, x: Tensor) -> Generator[pop, Tensor, tuple[Tensor, ...]]:
            b = yield pop("b")
            a = yield pop("a")
            return x, a, b

    found = nn.Sequential(Outer(), Pop(), Take())(torch.zeros(1))
    assert [float(value) for value in found] == [3, 0, 0]


def test_isolated_names_do_not_meet() -> None:
    inner, outer = Namespace(), Namespace()
    net = nn.Sequential(
        Stash().isolate(outer),
        Stash(),
        Stash().isolate(inner),
        Pop().isolate(inner),
        Pop(),
        Pop().isolate(outer),
    )
    assert float(net(torch.ones(()))) == 8 + 4 + 2 + 1
    assert list(net[0].stashable()) == [(outer, "skip")]
    assert list(net[3].poppable()) == [(inner, "skip")]
    assert net[1].namespaced("skip") == (None, "skip")


def test_isolating_some_names_only() -> None:
    ns = Namespace()
    layer = skippable(stash=["b", "a"], pop=["d", "c"])(nn.Identity)()
    assert layer.isolate(ns, only=["a", "c"]) is layer
    assert list(layer.stashable()) == [(ns, "a"), (None, "b")]
    assert list(layer.poppable()) == [(ns, "c"), (None, "d")]
    assert list(layer.isolate(None).stashable()) == [(None, "a"), (None, "b")]


def _forward(stashes: Any, pops: Any, commands: list[Any]) -> nn.Module:
    @skippable(stash=stashes, pop=pops)
    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Generator[Any, Any, Tensor]:
            for command in commands:
                _answer = yield command
            return x

    return Layer()


X = torch.zeros(1)
RUN_TIME_FAULTS = {
    "pop what was not stashed": ((), ["a"], [pop("a")], "'a' has not been stashed"),
    "stash undeclared": ((), (), [stash("a", X)], "'a' has not been declared as stashable"),
    "pop undeclared": ((), (), [pop("a")], "'a' has not been declared as poppable"),
    "not stashed": (["b", "a"], (), [], "'a', 'b' must be stashed but have not"),
    "not popped": ((), ["x"], [], "'x' must be popped but have not"),
    "stashed twice": (["a"], (), [stash("a", X), stash("a", None)], "'a' has already been stashed"),
    "popped twice": ((), ["x"], [pop("x"), pop("x")], "'x' has already been popped"),
}


@pytest.mark.parametrize("fault", RUN_TIME_FAULTS)
def test_run_time_faults(fault: str, tracker: SkipTracker) -> None:
    stashes, pops, commands, message = RUN_TIME_FAULTS[fault]
    tracker.tensors[None, "x"] = X
    with pytest.raises(RuntimeError, match=f"^{re.escape(message)}$"):
        _forward(stashes, pops, commands)(X)


def test_other_commands() -> None:
    with pytest.raises(TypeError, match=r"^3 is not a command from @skippable$"):
        _forward((), (), [3])(X)


def test_a_bare_string_is_refused() -> None:
    with pytest.raises(TypeError, match=re.escape("stash='skip' would be the names ['s', 'k', 'i', 'p']")):
        skippable(stash="skip")
    with pytest.raises(TypeError, match="pop='s'"):
        skippable(pop="s")
    with pytest.raises(TypeError, match=r"write only=\['skip'\]"):
        Stash().isolate(Namespace(), only="skip")
    with pytest.raises(TypeError, match="strings, got 3"):
        skippable(pop=[3])


def test_only_modules_are_decorated_and_only_namespaces_isolate() -> None:
    with pytest.raises(TypeError, match="decorates subclasses"):
        skippable(stash=["a"])(int)
    with pytest.raises(TypeError, match="needs a Namespace, got 'ns'"):
        Stash().isolate("ns")


def test_state_dict_keys_have_the_inner_module() -> None:
    @skippable(stash=["skip"])
    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Generator[stash, None, Tensor]:
            yield stash("skip", x)
            return super().forward(x)

    net = nn.Sequential(Layer(2, 2), Pop())
    assert list(net.state_dict()) == ["0.module.weight", "0.module.bias"]
    twin = copy.deepcopy(net)
    twin.load_state_dict(net.state_dict())
    x = torch.randn(1, 2)
    assert torch.equal(twin(x), net(x))
