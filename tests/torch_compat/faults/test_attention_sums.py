"""Attention in float64 through Inductor, whose log-sum-exps are float64, too."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import fxdp
from fxdp.module.compiled import CompiledModule
from tests.fallbacks import no_fallback

# torch warns when it imports Inductor
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning")


class _Heads(nn.Module):
    """Two heads over (batch, 6, 16)."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.all(x).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        mixed: Tensor = scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed.transpose(1, 2).flatten(2).sin().sum()


def test_the_gradient_reads_sums_of_the_dtype_that_they_have() -> None:
    torch.manual_seed(0)
    model = _Heads().double()
    twin = copy.deepcopy(model)
    compiled: CompiledModule = fxdp.compile(model, backend="inductor")
    for batch in (2, 3):
        x = torch.randn(batch, 6, 16, dtype=torch.float64)
        with no_fallback():
            loss = compiled(x)
        expected = twin(x)
        for value in (loss, expected):
            value.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0.0)
        for own, other in zip(compiled.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(own.grad, other.grad, rtol=1e-12, atol=1e-14)
