"""Slices whose bounds are tensors."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

import fxdp
from tests.capturing import capture
from tests.lockstep import check


class Typed(nn.Module):
    """torch_geometric's HeteroLinear: rows sorted by their type, each type with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, 2))

    def forward(self, x: Tensor, kinds: Tensor) -> Tensor:
        kinds, order = kinds.sort(stable=True)
        ends = torch._convert_indices_from_coo_to_csr(kinds, 3)
        x, out = x[order], x.new_zeros(x.size(0), 2)
        for i, (start, end) in enumerate(itertools.pairwise(ends)):
            out[start:end] = x[start:end] @ self.weight[i]
        some = x[: ends[1]].sum() + x[ends[1] - x.size(0) :].sum()
        return (out * torch.arange(1, 3) + some).square().mean()


def test_rows_between_tensors() -> None:
    x, kinds = torch.randn(8, 4, dtype=torch.float64), torch.tensor([2, 0, 0, 2, 2, 0, 1, 0])
    check(Typed().double(), (x, kinds))


class Written(nn.Module):
    def forward(self, x: Tensor, count: Tensor) -> Tensor:
        made = x + 1
        made[: count.max()].zero_()
        return made.mean()


def test_a_slice_that_is_written_in_place_is_refused() -> None:
    with pytest.raises(fxdp.CaptureError, match=r"made\[: count.max\(\)\].zero_\(\).*written in place"):
        capture(Written(), (torch.randn(8, 4), torch.ones(8, dtype=torch.long)), {})
