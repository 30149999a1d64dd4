"""Writes up to places that the data says are exact, in a loop over the samples, too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests import lockstep


class _Masked(nn.Module):
    """Attention over as many tokens as each sample has."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        batch = x.shape[0]
        mask = torch.zeros(batch, x.shape[1], dtype=torch.bool)
        if batch == 1:
            mask[:] = True
        else:
            for i in range(batch):
                mask[i, : lengths[i]] = True
        y = self.fc(x)[:, None]
        return F.scaled_dot_product_attention(y, y, y, attn_mask=mask[:, None, None]).square().mean()


class _Whole(nn.Module):
    """Bounds of the global batch, from the end and from both sides, and a value that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        y = x * self.token
        y[:, : lengths.max(), 0] = 2.0
        y[:, -lengths.min() :, 1:3] = self.token
        y[:, 1 : lengths.min()] = 0
        y[:, lengths.min() : -1, lengths.max() - 3 :] = 5
        return y.square().mean()


@pytest.mark.parametrize("model", [_Masked, _Whole])
def test_a_write_up_to_a_place_of_the_data(model: type[nn.Module]) -> None:
    lengths = torch.tensor([2, 5, 3, 5, 1, 4, 2])
    lockstep.check(model(), (torch.randn(7, 5, 4), lengths), splits=((4, 3), (5, 1, 0, 1)))
