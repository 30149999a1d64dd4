"""Layerdrop by a number that torch draws: of 0 and 1 the way is known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxdp
from fxdp.errors import CaptureError


class LayerDrop(nn.Module):
    """Asks in the four ways whether to skip a layer, then drops elements."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.dropout, self.probability = nn.Dropout(0.5), probability

    def forward(self, x: Tensor) -> Tensor:
        first, second, third, fourth = self.layers
        if torch.rand([]) >= self.probability:
            x = first(x)
        skip = self.training and (torch.rand(1) < self.probability)
        x = x if skip else second(x)
        if not torch.rand(()) <= self.probability - 1e-9:
            x = third(x)
        x = torch.where(torch.rand([]) > self.probability - 1e-9, fourth(x), x)
        return self.dropout(x).square().mean()


@pytest.mark.parametrize("probability", [0.0, 1.0 + 1e-6])
def test_the_way_is_taken_and_all_numbers_are_drawn(probability: float) -> None:
    report = fxdp.verify(LayerDrop(probability), (torch.randn(4, 4),), mesh={"dp": 2}, rng="single-device")
    assert report.ok, report


def test_between_them_it_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"`if torch.rand.* >= self.probability:`.*Switch off what draws"):
        fxdp.verify(LayerDrop(0.1), (torch.randn(4, 4),), mesh={"dp": 2})
