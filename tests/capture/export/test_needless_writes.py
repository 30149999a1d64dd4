"""Writes into a part of a value: put back into it only where somebody reads more than the part."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fxdp
from fxdp import Rows
from tests.lockstep import check
from tests.oracle.test_ragged_axes import run_ragged


class Relative(nn.Module):
    """Funnel: scores of relative positions, shifted by reshaping parts, and masked in place."""

    def __init__(self, reads_more: bool) -> None:
        super().__init__()
        self.reads_more = reads_more
        self.relative = nn.Parameter(torch.randn(6, 2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        full = torch.einsum("bih,th->bit", x, self.relative)
        part = full.reshape(-1, 6, 3)[:, 1:].reshape(-1, 3, 5)[..., :3]
        part *= torch.ones(3, 3, dtype=x.dtype).tril()
        return part.square().sum() + (full.sum() if self.reads_more else 0)


@pytest.mark.parametrize("reads_more", [False, True])
def test_what_is_written_into_a_part(reads_more: bool) -> None:
    local = check(Relative(reads_more), (torch.randn(8, 3, 2, dtype=torch.float64),))
    assert any("slice_scatter" in str(node.target) for node in local.gm.graph.nodes) == reads_more


class CountsInMemory(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        part = (x * 2)[:, 1:].mul_(3)
        return part.as_strided((2, 2), (6, 1)).sum() + part.sum()


def test_where_memory_is_counted_in_it_stays() -> None:
    model, x = CountsInMemory(), torch.arange(36.0).view(6, 6).requires_grad_()
    assert fxdp.compile(model, backend="eager")(x) == model(x)


class Counted(nn.Module):
    """As torch_geometric's HGT numbers edges from items behind those from users."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        moved = items * self.scale
        moved += users.shape[0]
        return moved.square().sum() + users.sum()


def test_a_size_is_written() -> None:
    parts = [(torch.randn(n, 2).double(), torch.randn(m, 2).double()) for n, m in ((2, 3), (0, 1), (3, 0))]
    run_ragged(Counted(), parts, (Rows("users"), Rows("items")))
