"""Convolutions of as many images as a mask takes, through Inductor."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import fxdp
from fxdp.module.compiled import CompiledModule
from tests.fallbacks import no_fallback

# torch warns when it imports Inductor
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")


class _Patches(nn.Module):
    """Images that are not all zero, as patches; their strides are seen by a view of the patches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 2, stride=2), nn.Conv2d(8, 8, 2)

    def forward(self, images: Tensor) -> Tensor:
        some = images[(images != 0.0).any(-1).any(-1).any(-1)]
        return self.second(self.first(some).tanh()).flatten(2).transpose(1, 2).square().sum()


def test_images_that_a_mask_takes() -> None:
    """Several, one, and none of them."""
    torch.manual_seed(0)
    model = _Patches().double()
    twin = copy.deepcopy(model)
    compiled: CompiledModule = fxdp.compile(model, backend="inductor")
    for taken in (3, 1, 0):
        images = torch.randn(4, 3, 8, 8, dtype=torch.float64)
        images[taken:] = 0.0
        with no_fallback():
            loss = compiled(images)
        expected = twin(images)
        for value in (loss, expected):
            value.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0.0)
        for own, other in zip(compiled.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(own.grad, other.grad, rtol=1e-12, atol=1e-14)
