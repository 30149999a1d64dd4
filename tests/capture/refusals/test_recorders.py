"""Hooks that keep what they see."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxdp

KEPT: list[Any] = []


def _keeps_output(module: nn.Module, args: Any, output: Tensor) -> None:
    KEPT.append(output)


def _keeps_detached(module: nn.Module, args: Any, output: Tensor) -> None:
    KEPT.append({"mean": output.detach().mean()})


def _keeps_input(module: nn.Module, args: Any) -> None:
    KEPT.append(args)


def _changes(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def _looks(module: nn.Module, args: Any, output: Tensor) -> None:
    assert output.exp().ndim == 2


def _looks_at_inputs(module: nn.Module, args: Any, kwargs: Any) -> None:
    assert args[0].exp().ndim == 2


@pytest.mark.parametrize("hook", [_keeps_output, _keeps_detached, _keeps_input, _changes, _looks])
@pytest.mark.parametrize("grad", [True, False])
def test_a_hook_that_keeps_tensors_is_told_so(
    hook: Callable[..., Any], grad: bool, caplog: pytest.LogCaptureFixture
) -> None:
    KEPT.clear()
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    if hook is _keeps_input:
        model[1].register_forward_pre_hook(hook)
    else:
        model[1].register_forward_hook(hook)
        model.register_forward_pre_hook(_looks_at_inputs, with_kwargs=True)
    compiled = fxdp.compile(model, compute="eager")
    with caplog.at_level(logging.WARNING, "fxdp"), torch.set_grad_enabled(grad):
        for _ in range(2):
            compiled(torch.randn(4, 3))
    said = [r.getMessage() for r in caplog.records]
    if hook in (_changes, _looks):
        assert said == []
        return
    assert len(said) == 1
    place = f"{__file__}:{hook.__code__.co_firstlineno}"
    assert f"the hook {hook.__name__} at {place} on 1 (ReLU) keeps" in said[0]
    assert "call the model itself (compiled.module)" in said[0]


def test_the_model_itself_records(caplog: pytest.LogCaptureFixture) -> None:
    KEPT.clear()
    model = nn.Sequential(nn.Linear(3, 4))
    model[0].register_forward_hook(_keeps_output)
    compiled = fxdp.compile(model, compute="eager")
    x = torch.randn(4, 3)
    with torch.no_grad():
        compiled.module(x)
    assert torch.equal(KEPT[0], model[0](x))
