"""Measure the terms of a sum: a result left over from cancellation is as inexact as the terms."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from fxdp.ir.tensor_difference import largest_size
from fxdp.torch_compat import aten

_MASK = 1e30
"""Larger values stand for "never" (the least finite number in an attention mask) and are not a scale."""


def cancelled(tolerance: float) -> float:
    """Return the ratio of a sum to the terms below which rounding errors exceed the tolerance.

    A thousandth at 1e-9 in float64; at 1e-6 (float32) and above no cancellation is tolerated.
    """
    return min(1.0, 1e6 * tolerance)


def magnitude(value: Tensor) -> float:
    """Return the largest absolute value that is not a mask; 0 for integers."""
    if not value.numel() or not (value.is_floating_point() or value.is_complex()):
        return 0.0
    largest = largest_size(value)
    if largest < _MASK:
        return largest
    sizes = value.abs()
    return float(torch.where(sizes < _MASK, sizes, 0.0).max())


def scaled_floor(node: fx.Node, floors: Sequence[float], operands: Sequence[Tensor]) -> float:
    """Return the floor of a product or quotient from the floors of both operands; 0 for all remaining ops.

    Example: in `x - x.max()` the gradient of the maximum is zero up to rounding, is divided by the number of
    times the maximum occurs, and is multiplied by a mask of the positions.
    """
    if node.target is aten.mul.Tensor and len(operands) == 2:
        return max(floors[0] * _largest(operands[1]), floors[1] * _largest(operands[0]))
    if node.target is aten.div.Tensor and len(operands) == 2:
        sizes = operands[1].abs()
        return floors[0] / float(sizes[sizes > 0].min()) if bool((sizes > 0).any()) else floors[0]
    return 0.0


def _largest(value: Tensor) -> float:
    """Return the largest absolute value, also of masks and counts."""
    return float(value.abs().max()) if value.numel() and value.dtype != torch.bool else 1.0
