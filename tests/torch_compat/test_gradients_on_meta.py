"""A model on the meta device has the joint graph that it has on any other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fxdp


class _Composed(nn.Module):
    """Ops that are made of others and have a kernel for meta: `nll_loss`, `dropout`, `var`, `relu6`, ..."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(F.relu6(self.words(x)), 0.1)
        h = h / h.std(-1, keepdim=True)
        return F.cross_entropy(self.out(h).flatten(0, 1), x.flatten())


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_plan_on_meta_is_the_plan_on_a_cpu(ranks: int) -> None:
    model, x = _Composed(), torch.zeros(4, 6, dtype=torch.long)
    here, there = (
        fxdp.plan(model.to(device), (x.to(device),), mesh={"dp": ranks}) for device in ("cpu", "meta")
    )
    assert there.gradient_bytes == here.gradient_bytes
    assert there.text.replace("device=meta", "device=cpu") == here.text
