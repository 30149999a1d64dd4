"""A step whose backward is done: what it gives to the caller."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fxdp.ir.slots import Gradient, Output, Parameter
from fxdp.runtime.step import Step


def _received(_: Any) -> tuple[Tensor, Tensor]:
    """A loss that is part of what another rank sent, and a gradient."""
    return torch.arange(2.0)[1], torch.full((3,), 2.0)


def test_a_loss_may_be_changed_in_place() -> None:
    weight, slot = nn.Parameter(torch.ones(3)), Parameter("weight")
    program: Any = _received
    step = Step(program, (Output(0), Gradient(slot)), {slot: weight}, {}, 0, frozenset(), int)
    (loss,) = step.run([])
    loss /= 4
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [0.5] * 3
