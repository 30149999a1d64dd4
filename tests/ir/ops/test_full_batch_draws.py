"""Draws of one device's numbers go through Inductor, whatever their ops call their arguments."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxdp
from tests.fallbacks import no_fallback


class Scaled(nn.Module):
    """By numbers that are drawn into memory of their own."""

    def __init__(self, draw: str) -> None:
        super().__init__()
        self.draw = draw
        self.line = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        drawn = torch.empty(4)
        drawn = drawn.random_(1, 9) if self.draw == "random_" else drawn.uniform_(-0.5, 0.5)
        return (self.line(x) * drawn).sum()


@pytest.mark.parametrize("draw", ["uniform_", "random_"])
def test_ops_whose_argument_is_named_as_a_keyword(draw: str) -> None:
    torch.manual_seed(0)
    model, x = Scaled(draw), torch.randn(6, 4)
    torch.manual_seed(1)
    expected = model(x)
    with no_fallback():
        torch.manual_seed(1)
        assert torch.allclose(fxdp.compile(model, rng="single-device")(x), expected)
