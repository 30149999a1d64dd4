"""Recurrent layers: captured as steps, not as one opaque call of a fused kernel, and with their dropout."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxdp.reports.coverage import replicated_ops
from tests.lockstep import check


class _Deep(nn.Module):
    """Layers with dropout between them; returns the sequence and the last states."""

    def __init__(
        self, kind: Callable[..., nn.RNNBase], layers: int, bidirectional: bool, batch_first: bool
    ) -> None:
        super().__init__()
        self.layers = kind(5, 6, layers, dropout=0.4, bidirectional=bidirectional, batch_first=batch_first)

    def forward(self, x: Tensor) -> Any:
        return self.layers(x)


KINDS: dict[str, Callable[..., nn.RNNBase]] = {
    "lstm": nn.LSTM,
    "projected": partial(nn.LSTM, proj_size=2),
    "gru": partial(nn.GRU, bias=False),
    "rnn": nn.RNN,
}


@pytest.mark.parametrize(
    ("kind", "layers", "bidirectional", "batch_dim"),
    [("lstm", 3, False, 0), ("projected", 2, True, 1), ("gru", 2, False, 1), ("rnn", 2, True, 0)],
)
def test_recurrent_layers(kind: str, layers: int, bidirectional: bool, batch_dim: int) -> None:
    """With dropout between them, which torch's decomposition would leave out; in evaluation without."""
    model = _Deep(KINDS[kind], layers, bidirectional, batch_first=batch_dim == 0).double()
    x = torch.randn((8, 2, 5) if batch_dim == 0 else (2, 8, 5), dtype=torch.float64)
    local = check(model, (x,), splits=[(8,), (5, 2, 0, 1)], batch_dims=batch_dim, rng="single-device")
    assert sum("dropout_default" in str(node.target) for node in local.gm.graph.nodes) == layers - 1
    assert replicated_ops(local.gm) == ()
    local = check(model.eval(), (x,), splits=[(5, 2, 0, 1)], batch_dims=batch_dim, rng="single-device")
    assert replicated_ops(local.gm) == ()
