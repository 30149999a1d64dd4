"""A bias of fused attention has rows at aligned addresses and the values it had."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fxdp.ir.ops.aligned_bias import _aligned


@pytest.mark.parametrize(
    "bias",
    [torch.randn(2, 3, 6, 6), torch.randn(3, 2, 6, 32).transpose(0, 1)[..., :6], torch.randn(2, 1, 16, 5).mT],
)
def test_rows_begin_at_aligned_addresses(bias: Tensor) -> None:
    found = _aligned(bias)
    assert found is not None
    assert torch.equal(found, bias)
    assert found.stride(-1) == 1
    assert not any(n % 16 for n in found.stride()[:-1])


def test_what_lies_well_is_itself() -> None:
    padded = torch.randn(2, 1, 6, 16)[..., :6].expand(2, 4, 6, 6)  # as torch makes it: one for all heads
    empty = torch.randn(0, 2, 6, 6)
    assert _aligned(padded) is padded
    assert _aligned(empty) is empty
    assert _aligned(None) is None
