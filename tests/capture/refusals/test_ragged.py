from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxdp
from fxdp.errors import InputError

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


OFFSETS = torch.arange(6, dtype=torch.int32)[:, None]


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 1), (1, 2)])
def test_offsets_of_each_part_are_refused(ranks: int, microbatches: int) -> None:
    words = r"offsets has the offsets.*test_ragged.py.*ragged.*starts='values'.*_idx.*cumsum"
    with pytest.raises(InputError, match=words):
        fxdp.plan(Bags(), (X, OFFSETS), mesh={"dp": ranks}, pipeline={"microbatches": microbatches})


def test_offsets_of_the_whole_batch_are_not() -> None:
    lengths = torch.ones(6, dtype=torch.long)
    assert fxdp.verify(Lengths(), (X[:, None], lengths), mesh={"dp": 2}).ok
    assert fxdp.verify(Bags(), (X, OFFSETS), mesh={"dp": 2}, batch_dims=((None, 0), {})).ok


def test_a_single_rank_has_all_offsets() -> None:
    torch.manual_seed(0)
    model = Bags()
    compiled = fxdp.compile(model, backend="eager")
    offsets = torch.tensor([0, 0, 2, 5, 5, 6])[:, None]
    torch.testing.assert_close(compiled(X, offsets), model(X, offsets))
