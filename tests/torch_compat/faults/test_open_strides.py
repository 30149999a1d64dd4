"""Views by strides that the data decides, through Inductor."""

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


class _LastOfTheMasked(nn.Module):
    """BART's classes: of each sample the last row that a mask takes, however many it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        rows = self.linear(x)
        return rows[mask].view(len(x), -1, 4)[:, -1].square().mean()


def test_the_last_row_of_those_that_a_mask_takes() -> None:
    torch.manual_seed(0)
    model = _LastOfTheMasked().double()
    twin = copy.deepcopy(model)
    compiled: CompiledModule = fxdp.compile(model, backend="inductor")
    mask = torch.tensor([False, True, False, True, True])
    for batch in (4, 3):  # the second by the program of any size
        given = torch.randn(batch, 5, 4, dtype=torch.float64), mask.expand(batch, 5).clone()
        with no_fallback():
            loss = compiled(*given)
        expected = twin(*given)
        for value in (loss, expected):
            value.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0.0)
    for own, other in zip(compiled.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-12, atol=1e-15)
