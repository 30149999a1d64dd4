"""Rows by masks that become one, through Inductor."""

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


class _Adapters(nn.Module):
    """Each sample goes through the linear of its kind; all are of kind 0 where none is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, kind: Tensor | None = None) -> Tensor:
        kind = 0 * torch.ones(x.shape[0]) if kind is None else kind
        for _ in range(2):
            new = torch.zeros_like(x)
            for i, linear in enumerate(self.linears):
                new[kind == i] = linear(x[kind == i])
            x = x + new.relu()
        return x.square().mean()


@pytest.mark.parametrize("kind", [None, torch.tensor([0, 1, 1, 2, 1])])
def test_equal_masks(kind: Tensor | None) -> None:
    """Inductor makes one of those of both layers, and of all that are False."""
    torch.manual_seed(0)
    model, x = _Adapters().double(), torch.randn(5, 4, dtype=torch.float64)
    twin = copy.deepcopy(model)
    compiled: CompiledModule = fxdp.compile(model, backend="inductor")
    with no_fallback():
        loss = compiled(x, kind)
    expected = twin(x, kind)
    for value in (loss, expected):
        value.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0.0)
    for own, other in zip(compiled.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-12, atol=1e-15)
