"""Recurrent layers in float32: torch's fused CPU kernel must not be captured as one opaque call."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fxdp.plan import replicated_ops
from tests.lockstep import check


class _Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], batch_first: bool) -> None:
        super().__init__()
        self.layers = kind(5, 6, 2, batch_first=batch_first)
        self.head = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)[0]).pow(2).mean()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("batch_dim", [0, 1])
def test_recurrent_layers(kind: type[nn.RNNBase], batch_dim: int) -> None:
    shape = (8, 4, 5) if batch_dim == 0 else (4, 8, 5)
    model = _Recurrent(kind, batch_first=batch_dim == 0)
    local = check(model, (torch.randn(shape),), splits=[(5, 2, 0, 1)], tolerance=1e-5, batch_dims=batch_dim)
    assert replicated_ops(local.gm) == ()
