"""Moments of parts combine to the moments of the full value, as exactly as two passes over the full value."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fxdp.ir.ops.moments import MOMENTS_OP, combine, moments
from fxdp.ir.ops.parts import combine as join
from fxdp.ir.types.placements import MOMENTS

SPLITS = [(7,), (3, 4), (5, 2, 0, 1), (1, 1, 1, 1, 1), (0, 0, 6)]


def _direct(x: Tensor) -> Tensor:
    """Count, mean and M2 of `[N, C, L]` per channel, in float64."""
    wide = x.double()
    mean = wide.mean((0, 2))
    squares = (wide - mean.view(1, -1, 1)).square().sum((0, 2))
    return torch.stack([torch.full_like(mean, x.shape[0] * x.shape[2]), mean, squares])


@pytest.mark.parametrize("split", SPLITS, ids=str)
def test_parts_combine_to_the_whole(split: tuple[int, ...]) -> None:
    x = torch.randn(sum(split), 3, 5, dtype=torch.float64)
    parts = [moments(part, (0, 2)) for part in x.split(list(split))]
    torch.testing.assert_close(combine(torch.stack(parts)), _direct(x), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(join(parts, MOMENTS, split), _direct(x), rtol=1e-13, atol=1e-13)


def test_combination_is_associative() -> None:
    """So ranks and micro-batches can combine in steps."""
    x = torch.randn(9, 3, 5, dtype=torch.float64)
    a, b, c = (moments(part, (0, 2)) for part in x.split([4, 2, 3]))
    stepwise = combine(torch.stack([combine(torch.stack([a, b])), c]))
    torch.testing.assert_close(stepwise, combine(torch.stack([a, b, c])), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("offset", [0.0, 1e3, 1e5])
def test_no_digits_are_lost_far_from_zero(offset: float) -> None:
    """`E[x**2] - E[x]**2` has none left at a mean of 1e5 in float32."""
    x = (torch.randn(600, 3, 5) + offset).float()
    parts = [moments(part, (0, 2)) for part in x.split([200, 399, 1])]
    _, mean, squares = combine(torch.stack(parts))
    _, true_mean, true_squares = _direct(x)
    torch.testing.assert_close(mean.double(), true_mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(squares.double(), true_squares, rtol=1e-4, atol=0)


def test_the_op_is_the_function() -> None:
    x = torch.randn(4, 3, 5)
    assert torch.equal(MOMENTS_OP(x, [0, 2]), moments(x, (0, 2)))
    torch.library.opcheck(MOMENTS_OP, (x, [0, 2]), test_utils=("test_schema", "test_faketensor"))
