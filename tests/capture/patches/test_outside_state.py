"""What code changes of Python beside its modules: put back after a trace, refused where it matters."""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxdp
from fxdp.errors import CaptureError

COUNT, KEPT, STATE = 0, list[Any](), {"step": 0}
LAST: Any = None


def _natural() -> Iterator[int]:
    at = 0
    while True:
        yield (at := at + 1)


NATURAL = _natural()


class _Model(nn.Module):
    calls = 0

    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.fc, self.body = nn.Linear(3, 4), body
        self.nested, self.counted, self.steps = {"a": {"n": 0}}, itertools.count(1), 0

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.fc(x)).square().mean()


def _global(_: Any, y: Tensor) -> Tensor:
    global COUNT
    COUNT += 1
    return y * COUNT


def _of_class(model: Any, y: Tensor) -> Tensor:
    type(model).calls += 1
    return y * model.calls


def _tensor(_: Any, y: Tensor) -> Tensor:
    global LAST
    y, LAST = (y if LAST is None else y + LAST), y.detach().mean()
    return y


def _nested(model: Any, y: Tensor) -> Tensor:
    model.nested["a"]["n"] += 1
    return y * model.nested["a"]["n"]


def _alternates(_: Any, y: Tensor) -> Tensor:
    STATE["step"] += 1
    return y * 2 if STATE["step"] % 3 == 0 else y


def _warms_up(model: Any, y: Tensor) -> Tensor:
    model.steps += 1
    return y * 2 if model.steps > 100 else y


def _gradient_alone(model: Any, y: Tensor) -> Tensor:
    model.steps += 1
    if model.steps < 100:
        return y
    return y + (y.sin() - y.sin().detach())


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (_global, r"the global COUNT at .*`COUNT \+= 1`.*its second"),
        (_of_class, r"calls of class _Model at .*`type\(model\).calls \+= 1`"),
        (_tensor, "the global LAST at"),
        (_nested, r"nested of the model \(_Model\) at"),
        (_alternates, "the global STATE at .*its third"),
        (_warms_up, r"steps of the model .*the other way at .*`return y \* 2 if model.steps > 100 else y`"),
        (_gradient_alone, "steps of the model .*the other way at .*`if model.steps < 100:`"),
        (lambda model, y: y * next(model.counted), r"counted of the model \(_Model\) at"),
        (lambda _, y: y * next(NATURAL), "the global NATURAL at"),
    ],
)
def test_what_later_calls_depend_on_is_refused(body: Callable[[Any, Tensor], Tensor], named: str) -> None:
    compiled = fxdp.compile(_Model(body), backend="eager")
    for _ in range(2):
        with pytest.raises(CaptureError, match=named):
            compiled(torch.randn(4, 3))
    assert (COUNT, LAST, STATE, _Model.calls) == (0, None, {"step": 0}, 0)


def _logs(model: Any, y: Tensor) -> Tensor:
    STATE["step"] += 1
    if STATE["step"] % 2 == 0:
        KEPT.append(y.detach())
    return y


@functools.cache
def _table(size: int) -> Tensor:
    return torch.ones(size, size).tril()


def _hook(module: nn.Module, args: Any, output: Tensor) -> None:
    KEPT.append({"mean": output.detach().mean()})


def test_what_does_not_matter_is_named_and_put_back(caplog: pytest.LogCaptureFixture) -> None:
    """A count that only decides what is logged, a hook that keeps what it sees, tables made once."""
    model = _Model(lambda model, y: _logs(model, y) @ _table(4))
    model.fc.register_forward_hook(_hook)
    compiled = fxdp.compile(model, backend="eager")
    with caplog.at_level(logging.WARNING, "fxdp"):
        for size in (4, 5):
            x = torch.randn(size, 3)
            torch.testing.assert_close(compiled(x), model(x))
    assert compiled._programs.compiled == 2
    said = caplog.messages[0]
    assert said.startswith("the forward sets the global KEPT at ")
    assert "the global STATE at " in said
    assert "call the model itself (compiled.module)" in said
    assert len(KEPT) == 3
    assert all(isinstance(kept, dict) or kept.isfinite().all() for kept in KEPT)
    KEPT.clear()
    STATE["step"] = 0


@dataclass
class _Config:
    kind: str | None = None
    step: int = 0


class _Classifier(nn.Module):
    """Chooses its loss at the first call, as classifiers of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.config = nn.Linear(3, 2), _Config()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        self.config.step += 1
        if self.config.kind is None:
            if labels.dtype == torch.int64:
                self.config.kind = "classes"
            else:
                self.config.kind = "numbers"
        if self.config.kind == "classes":
            return nn.functional.cross_entropy(self.fc(x), labels)
        return nn.functional.mse_loss(self.fc(x)[:, 0], labels)


def test_a_word_that_each_call_sets_is_there_afterwards(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = _Classifier()
    compiled = fxdp.compile(model, backend="eager")
    x, labels = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    with caplog.at_level(logging.WARNING, "fxdp"):
        for rows in (4, 4, 3):
            loss = compiled(x[:rows], labels[:rows])
            assert model.config == _Config("classes", 0)
            torch.testing.assert_close(loss, model(x[:rows], labels[:rows]))
            model.config.step = 0
    said = caplog.messages[0]
    assert "step of config" in said
    assert "kind of config" not in said
    assert compiled._programs.compiled == 2  # for 4 rows, and for any
