"""Frameworks read which arguments a forward takes."""

from __future__ import annotations

import copy
import gc
import inspect
import weakref

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxdp


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 2)

    def forward(self, ids: Tensor, *, mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """Says what it does."""
        return self.fc(ids)


def test_the_forward_has_the_models_own_signature() -> None:
    model = Net()
    compiled = fxdp.compile(model, backend="eager")
    for module in (compiled, copy.deepcopy(compiled)):
        assert inspect.signature(module.forward) == inspect.signature(model.forward)
    assert "global" in inspect.getdoc(compiled.forward)  # what it returns is said by fxdp


def test_a_loss_function_adds_its_target() -> None:
    compiled = fxdp.compile(Net(), backend="eager", loss_fn=F.cross_entropy)
    assert [*inspect.signature(compiled.forward).parameters] == ["ids", "mask", "labels", "target"]


def test_a_forward_that_cannot_be_read_is_shown_as_any() -> None:
    model = nn.Linear(3, 2)
    model.forward = dict.fromkeys  # type: ignore[assignment]
    compiled = fxdp.compile(nn.Sequential(model), backend="eager")
    assert "input" in inspect.signature(compiled.forward).parameters


def test_a_forward_may_be_replaced() -> None:
    compiled = fxdp.compile(nn.Linear(3, 2), backend="eager")
    plain = compiled.forward
    compiled.forward = lambda x: plain(x) * 0
    assert compiled(torch.randn(4, 3)).abs().sum() == 0
    del compiled.forward
    assert compiled(torch.randn(4, 3)).abs().sum() > 0


def test_a_compiled_module_is_freed_at_once() -> None:
    gc.disable()
    try:
        compiled = fxdp.compile(nn.Linear(3, 2), backend="eager")
        compiled.forward  # noqa: B018
        gone = weakref.ref(compiled)
        del compiled
        assert gone() is None
    finally:
        gc.enable()
