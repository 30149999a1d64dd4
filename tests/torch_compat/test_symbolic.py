"""Sizes that stand for any number."""

from __future__ import annotations

import torch

from fxdp.torch_compat import symbolic_sizes


def test_a_size_that_depends_on_data_may_be_a_multiple_of_another() -> None:
    mode, sizes = symbolic_sizes({"b": 5})
    with mode:
        rows, mask = torch.empty(sizes["b"] * 24), torch.empty(sizes["b"] * 24, dtype=torch.bool)
        assert rows[mask].view(sizes["b"], 16).shape[1] == 16
