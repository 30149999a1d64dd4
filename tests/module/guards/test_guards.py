"""What is guarded: each change of it is seen at the next call, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from fxdp.capture.external_state import external_state
from fxdp.module.guards.attribute_guards import Comparison, Reading, all_hold
from fxdp.module.guards.guards import Guards

FACTOR = 2.0


def _closure() -> Callable[[Tensor], Tensor]:
    shift = 1.0

    def add(x: Tensor) -> Tensor:
        return x + shift

    return add


class Net(nn.Module):
    decay = 0.1

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(3))
        self.beta, self.sizes, self.add = 0.5, [1, 2], _closure()

    def forward(self, x: Tensor) -> Tensor:
        x = self.add(self.last(self.first(x)) * self.beta * FACTOR * self.decay)
        return x * self.scale * self.sizes[0]


def _guards(net: nn.Module, **options: Any) -> Guards:
    guards = Guards(net, "cpu", **options)
    guards._attributes.watch_read(external_state(net))
    return guards


@contextmanager
def _set(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    yield
    setattr(owner, name, before)


@contextmanager
def _default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@contextmanager
def _hook(register: Callable[[Any], Any]) -> Iterator[None]:
    handle = register(lambda *_: None)
    yield
    handle.remove()


@contextmanager
def _longer(net: Net) -> Iterator[None]:
    net.sizes.append(3)
    yield
    net.sizes.pop()


@contextmanager
def _global() -> Iterator[None]:
    global FACTOR
    FACTOR = 3.0
    yield
    FACTOR = 2.0


def _cell(net: Net) -> Any:
    return net.add.__closure__[0]  # type: ignore[attr-defined]


CHANGES: dict[str, Callable[[Net], AbstractContextManager[None]]] = {
    "gradients": lambda net: torch.no_grad(),
    "autocast": lambda net: torch.autocast("cpu", torch.bfloat16),
    "default dtype": lambda net: _default_dtype(),
    "training": lambda net: _set(net.last, "training", False),
    "requires_grad": lambda net: _set(net.last.weight, "requires_grad", False),
    "attribute": lambda net: _set(net, "beta", 0.25),
    "container": _longer,
    "global": lambda net: _global(),
    "cell": lambda net: _set(_cell(net), "cell_contents", 2.0),
    "class attribute": lambda net: _set(Net, "decay", 0.2),
    "code": lambda net: _set(Net, "forward", lambda self, x: x),
    "hook": lambda net: _hook(net.last.register_forward_hook),
    "hook of all modules": lambda net: _hook(nn.modules.module.register_module_forward_hook),
    "class": lambda net: _set(net.last, "__class__", type("Other", (nn.Linear,), {})),
}
"""What makes another program necessary, as a context in which it is so."""


@pytest.mark.parametrize("name", CHANGES)
def test_what_needs_another_program_is_another_state_until_it_is_undone(name: str) -> None:
    guards = _guards(net := Net())
    before = guards.state()
    assert guards.state() is before
    with CHANGES[name](net):
        changed = guards.state()
        assert changed != before
        assert guards.state() is changed
    assert guards.state() == before
    assert guards.tensors.unchanged()


def test_a_hook_in_the_place_of_another_is_a_change() -> None:
    net = Net()
    handle = net.last.register_forward_hook(lambda *_: None)
    guards = _guards(net)
    before = guards.state()
    handle.remove()
    net.last.register_forward_hook(lambda *_: None)
    assert guards.state() != before


def test_an_empty_cell_is_guarded_like_any_other() -> None:
    guards = _guards(net := Net())
    before = guards.state()
    del _cell(net).cell_contents
    assert guards.state() != before
    _cell(net).cell_contents = 1.0
    assert guards.state() == before


def _delete(net: Net) -> None:
    del net.last.bias
    net.last.bias = None  # type: ignore[assignment]


REPLACED: dict[str, tuple[Callable[[Net], Any], str]] = {
    "parameter": (lambda net: setattr(net.last, "weight", nn.Parameter(torch.ones(3, 3))), "last.weight"),
    "buffer": (lambda net: setattr(net, "scale", torch.ones(3)), "scale"),
    "module": (lambda net: setattr(net, "last", nn.Linear(3, 3)), "last"),
    "added": (lambda net: net.last.register_buffer("more", torch.ones(3)), "last.more"),
    "deleted": (_delete, "last.bias"),
    "converted": (lambda net: net.double(), "scale"),
}


@pytest.mark.parametrize("name", REPLACED)
def test_replaced_tensors_and_modules_are_named(name: str) -> None:
    guards, (change, named) = _guards(net := Net()), REPLACED[name]
    assert guards.tensors.unchanged()
    change(net)
    assert not guards.tensors.unchanged()
    assert named in guards.tensors.changes()
    assert guards.tensors.words().endswith("replaced, added or converted")


def test_values_that_move_or_change_in_place_are_no_change() -> None:
    guards = _guards(net := Net())
    state = guards.state()
    with torch.no_grad():
        net.last.weight.mul_(2)
        net.scale.zero_()  # type: ignore[operator]
    assert guards.tensors.unchanged()
    net.last.weight.data = net.last.weight.detach().clone()
    assert guards.tensors.unchanged()
    assert guards.tensors.unchanged()
    assert guards.state() is state


def test_a_plan_of_a_fake_model_asks_for_no_addresses(recwarn: pytest.WarningsRecorder) -> None:
    with FakeTensorMode():
        guards = _guards(Net())
    guards.state()
    assert not recwarn.list


def test_other_strides_are_a_change() -> None:
    guards = _guards(net := Net())
    net.last.weight.data = net.last.weight.detach().t().contiguous().t()
    assert not guards.tensors.unchanged()


def test_strides_of_inputs_count_for_one_devices_random_numbers() -> None:
    strided = [torch.ones(3, 2).t()]
    assert _guards(Net(), full_batch_draws=True).strided(strided)
    assert not _guards(Net(), full_batch_draws=True).strided([torch.ones(2, 3)])
    assert not _guards(Net()).strided(strided)


def test_how_often_tensors_were_replaced_is_part_of_the_state() -> None:
    net = Net()
    assert _guards(net, generation=1).state() != _guards(net).state()


def test_guards_after_the_first_that_fails_are_not_read() -> None:
    values, read = [1], []
    first = Reading(lambda: values).now()
    second = Comparison(lambda: read.append(1) or [], lambda a, b: True, [])
    assert all_hold([first, second])
    values[0] = 2
    assert not all_hold([first, second])
    assert read == [1]
