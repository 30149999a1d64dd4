"""A step whose backward is done: what it gives to the caller."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fxdp.ir.graph.signature import Gradient, Output, Parameter
from fxdp.runtime.step import Step


def _received(_: Any) -> tuple[Tensor, Tensor, None]:
    """A loss that is part of what another rank sent, a gradient, and one that another rank has."""
    return torch.arange(2.0)[1], torch.full((3,), 2.0), None


def test_a_loss_may_be_changed_in_place_and_hooks_hear_of_own_gradients() -> None:
    weight, elsewhere = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    elsewhere.register_hook(lambda gradient: gradient.mul(2))  # type: ignore[no-untyped-call]
    leaves: dict[Parameter, Tensor] = {Parameter("weight"): weight, Parameter("elsewhere"): elsewhere}
    program: Any = _received
    step = Step(program, (Output(0), *map(Gradient, leaves)), leaves, {}, 0, frozenset(), int)
    (loss,) = step.run([])
    loss /= 4
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [0.5] * 3
    assert elsewhere.grad is None
