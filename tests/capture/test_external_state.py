"""What a model's code reads of Python beside its own attributes: a change is seen at the next call."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fxdp
from fxdp.capture.external_state import external_state
from fxdp.run.calls.observed_call import Effects


@dataclass
class Config:
    """Held by a model, as a library's configuration is."""

    scale: float = 1.0


class Base(nn.Module):
    scale = 1.0
    table = {"a": 1.0}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.values, self.by_name, self.nested = [1.0], {"a": 1.0}, {"a": {"b": [1.0]}}
        self.config, self.configs = Config(), [Config()]
        self.chosen, self.array = {"a"}, np.ones(2)
        self.number = torch.tensor(1.0)
        self.part = functools.partial(torch.mul, other=1.0)
        self.hidden = [nn.Dropout(1.0).eval()]

    def factor(self) -> Any:
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self.fc(x)).square().mean()

    def read(self, y: Tensor) -> Tensor:
        return y


SCALE, SCALES = 1.0, [1.0]


def helper(y: Tensor, by: float = 1.0) -> Tensor:
    return y * by


def _named(name: str, change: Callable[[Any], object], read: Callable[[Any, Tensor], Tensor]) -> Any:
    return pytest.param(change, read, id=name)


def _set_global(_: Any) -> None:
    global SCALE
    SCALE = 3.0


def _replace_function(_: Any) -> None:
    global helper
    helper = torch.sin  # type: ignore[assignment]


def _replace_gelu(_: Any) -> None:
    nn.functional.gelu = torch.sin


def _change_default(_: Any) -> None:
    helper.__defaults__ = (3.0,)


def _counter(start: float) -> tuple[Callable[[Tensor], Tensor], Callable[[], None]]:
    def scaled(y: Tensor) -> Tensor:
        return y * start

    def grow() -> None:
        nonlocal start
        start += 1.0

    return scaled, grow


SCALED, GROW = _counter(1.0)
NUMBER = torch.tensor(1.0)


@torch.no_grad()
def decorated() -> float:
    return SCALE


CHANGES = [
    _named("list", lambda m: m.values.append(2.0), lambda m, y: y * sum(m.values)),
    _named("dict", lambda m: m.by_name.update(a=3.0), lambda m, y: y * m.by_name["a"]),
    _named("new key", lambda m: m.by_name.update(b=3.0), lambda m, y: y * m.by_name.get("b", 1.0)),
    _named("nested", lambda m: m.nested["a"]["b"].append(3.0), lambda m, y: y * sum(m.nested["a"]["b"])),
    _named("set", lambda m: m.chosen.add("b"), lambda m, y: y.sin() if "b" in m.chosen else y),
    _named("object", lambda m: setattr(m.config, "scale", 3.0), lambda m, y: y * m.config.scale),
    _named("in a list", lambda m: setattr(m.configs[0], "scale", 3.0), lambda m, y: y * m.configs[0].scale),
    _named("array", lambda m: m.array.fill(3.0), lambda m, y: y * float(m.array[0])),
    _named("partial", lambda m: m.part.keywords.update(other=3.0), lambda m, y: m.part(y)),
    _named("new attribute", lambda m: setattr(m, "late", 3.0), lambda m, y: y * getattr(m, "late", 1.0)),
    _named("no attribute", lambda m: delattr(m, "array"), lambda m, y: y * (2 if hasattr(m, "array") else 1)),
    _named("hidden module", lambda m: m.hidden[0].train(), lambda m, y: m.hidden[0](y) + y),
    _named("class", lambda m: setattr(type(m), "scale", 3.0), lambda m, y: y * m.scale),
    _named("class's dict", lambda m: type(m).table.update(a=3.0), lambda m, y: y * m.table["a"]),
    _named("method", lambda m: setattr(type(m), "factor", lambda _: 3.0), lambda m, y: y * m.factor()),
    _named("other class", lambda m: setattr(m, "__class__", Other), lambda m, y: y),
    _named(
        "negative zero", lambda m: setattr(m, "zero", -0.0), lambda m, y: y * (2 + math.copysign(1.0, m.zero))
    ),
    _named("global", _set_global, lambda _, y: y * SCALE),
    _named("global list", lambda _: SCALES.append(2.0), lambda _, y: y * sum(SCALES)),
    _named("cell", lambda _: GROW(), lambda _, y: SCALED(y)),
    _named("default", _change_default, lambda _, y: helper(y)),
    _named("function", _replace_function, lambda _, y: helper(y)),
    _named("decorated", _set_global, lambda _, y: y * decorated()),
    _named("torch's function", _replace_gelu, lambda _, y: nn.functional.gelu(y)),
    _named("tensor", lambda m: m.number.fill_(3.0), lambda m, y: y * m.number.item()),
    _named("global tensor", lambda _: NUMBER.fill_(3.0), lambda _, y: y * float(NUMBER)),
]


class Other(Base):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize(("change", "read"), CHANGES)
def test_a_change_is_seen(
    change: Callable[[Any], object], read: Callable[[Any, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = globals()
    for name in ("SCALE", "helper"):
        monkeypatch.setitem(names, name, names[name])
    monkeypatch.setitem(names, "SCALES", [1.0])
    monkeypatch.setattr(nn.functional, "gelu", nn.functional.gelu)
    NUMBER.fill_(1.0)
    monkeypatch.setattr(helper, "__defaults__", (1.0,))
    for name, value in (("scale", 1.0), ("table", {"a": 1.0}), ("factor", Base.factor), ("zero", 0.0)):
        monkeypatch.setattr(Base, name, value, raising=False)
    kind = type("Kind", (Base,), {"read": read, "__module__": __name__})
    model: Any = kind()
    compiled = fxdp.compile(model, backend="eager")
    x = torch.randn(4, 3)
    torch.testing.assert_close(compiled(x), model(x))
    before = compiled(x).item()
    change(model)
    torch.testing.assert_close(compiled(x), model(x))
    assert compiled(x).item() != before
    assert compiled._programs.compiled == 2


class _Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.loss = nn.ModuleList([nn.Linear(3, 3)]), nn.CrossEntropyLoss()

    def forward(self, x: Tensor) -> Tensor:
        return sum(layer(x) for layer in self.layers)  # type: ignore[return-value]


def test_a_layer_that_is_added_runs() -> None:
    model = _Sum()
    compiled = fxdp.compile(model, backend="eager")
    x = torch.randn(4, 3)
    compiled(x)
    model.layers.append(nn.Linear(3, 3))
    torch.testing.assert_close(compiled(x), model(x))


def test_tensors_of_a_loss_that_are_replaced_are_used() -> None:
    loss_fn, model = nn.CrossEntropyLoss(), nn.Linear(3, 4)
    compiled = fxdp.compile(model, loss_fn=loss_fn, backend="eager")
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 2, 3])
    compiled(x, target=y)
    loss_fn.weight = torch.arange(1.0, 5.0)
    torch.testing.assert_close(compiled(x, target=y), loss_fn(model(x), y))


def test_a_hook_in_the_place_of_another_runs() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    compiled = fxdp.compile(model, backend="eager")
    x = torch.randn(4, 3)
    for factor in (2, 3):
        handle = model[0].register_forward_hook(lambda _, __, y, factor=factor: y * factor)
        torch.testing.assert_close(compiled(x), model(x))
        handle.remove()
    torch.testing.assert_close(compiled(x), model(x))
    assert compiled._programs.compiled == 3


class _Counting(nn.Module):
    calls = [0]  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.sequence_log = nn.Linear(3, 3), [0.0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        return self.fc(x).mean()


def test_what_does_not_matter_compiles_nothing() -> None:
    """A list that no code of the forward names, and a count that the forward itself changes."""
    model = _Counting()
    compiled = fxdp.compile(model, backend="eager")
    for size in (4, 4, 5, 6, 4, 5):
        compiled(torch.randn(size, 3))
        model.sequence_log.append(1.0)
    assert compiled._programs.compiled == 2


def test_buffers_that_are_written_as_data_are_read_again() -> None:
    class Rolled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)
            self.register_buffer("by", torch.tensor(1))

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x).roll(int(self.by), 1)

    model = Rolled()
    compiled = fxdp.compile(model, backend="eager")
    x = torch.randn(4, 3)
    compiled(x)
    model.by.data.add_(1)
    torch.testing.assert_close(compiled(x), model(x))


def test_names_of_code_say_what_is_read() -> None:
    read = external_state(Base())
    assert {"fc", "read", "factor"} & read.names == {"fc", "read"}
    assert all("factor" not in place.name for place in read.places)


class _Irreps(tuple[int, ...]):
    """A tuple that does not want to be counted, as a library of representations has it."""

    def __len__(self) -> int:
        raise NotImplementedError


def test_a_tuple_without_a_length_is_read_by_its_items() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.irreps = nn.Linear(3, 3), _Irreps((1, 2))

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) * sum(self.irreps)

    layer, x = Layer(), torch.randn(4, 3)
    compiled = fxdp.compile(layer, backend="eager")
    for values in ((1, 2), (3, 4)):
        layer.irreps = _Irreps(values)
        torch.testing.assert_close(compiled(x), layer(x))
    effects = Effects()
    with effects.of(layer):
        layer(x)
    assert not effects.found
