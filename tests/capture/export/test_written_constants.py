from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.lockstep import check


class _Placed(nn.Module):
    """As peft's waveft does: places in a plain dict are copied and moved in place, and values put there."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.values = nn.Linear(4, 4), nn.Parameter(torch.randn(3))
        self.places = {"a": torch.tensor([[0, 1, 3], [1, 2, 0]])}
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        moved = self.places["a"].clone()
        moved[0] += 1
        moved[1, :] += 2
        inside = (moved[0] < 6) & (moved[1] < 4)
        chosen = moved[:, inside]
        dense = torch.zeros(6, 6, dtype=x.dtype)
        dense[chosen[0], chosen[1]] = self.values[inside]
        return (self.fc(x) @ dense[1:5, 1:5]).square().mean()


def test_copies_of_constants_are_written() -> None:
    check(_Placed(), (torch.randn(7, 4, dtype=torch.float64),), splits=[(4, 0, 3)])
