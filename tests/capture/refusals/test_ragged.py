from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fxdp.errors import InputError
from tests.capturing import capture

X = torch.tensor([7, 3, 9, 4, 8, 1])


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(10, 3)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        return self.bag(x, offsets[:, 0].long()).square().mean()


class Lengths(Bags):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.bag(x.flatten(), lengths.cumsum(0) - lengths).square().mean()


def test_offsets_of_each_rank_are_refused() -> None:
    offsets = torch.arange(6, dtype=torch.int32)[:, None]
    with pytest.raises(
        InputError, match=r"offsets has the offsets.*test_ragged.py.*ragged.*_idx.*cumsum"
    ):
        capture(Bags(), (X, offsets), {})


def test_offsets_of_the_whole_batch_are_not() -> None:
    capture(Lengths(), (X[:, None], torch.ones(6, dtype=torch.long)), {})
    capture(Bags(), (X, torch.arange(6)[:, None]), {}, batch_dims=((None, 0), {}))
