"""States of recurrent layers have the shape that they have on one device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.lockstep import check


class Last(nn.Module):
    """The last state of the last layer, beside the last row of the input."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, layers, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        _, (state, cell) = self.lstm(x)
        return torch.cat([state[-1], cell[-1], x[:, -1]], 1).square().mean()


@pytest.mark.parametrize("layers", [1, 2])
def test_states_join_rows_of_the_batch(layers: int) -> None:
    check(Last(layers).double(), (torch.randn(6, 5, 3, dtype=torch.float64),), splits=((4, 2),))
