"""How large the terms of a value were: what is left of larger ones is as inexact as these were."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from fxdp.ir.tensor_difference import largest_size
from fxdp.torch_compat import aten

_MASK = 1e30
"""Larger values stand for "never" (the least finite number in an attention mask): they are no scale."""


def cancelled(tolerance: float) -> float:
    """Which share of its terms a sum may cancel to before its rounding errors exceed the tolerance.

    A thousandth at 1e-9 in float64; float32's 1e-6 and more leave no room.
    """
    return min(1.0, 1e6 * tolerance)


def magnitude(value: Tensor) -> float:
    """The largest |value| that is no mask; 0 for integers."""
    if not value.numel() or not (value.is_floating_point() or value.is_complex()):
        return 0.0
    largest = largest_size(value)
    if largest < _MASK:
        return largest
    sizes = value.abs()
    return float(torch.where(sizes < _MASK, sizes, 0.0).max())


def scaled_floor(node: fx.Node, floors: Sequence[float], operands: Sequence[Tensor]) -> float:
    """The floor of a product or quotient of two values with floors, in its own measure; 0 of other ops.

    x - x.max(): the gradient of the maximum is zero but for rounding, is divided by how often the maximum
    occurs, and multiplied by a mask of where.
    """
    if node.target is aten.mul.Tensor and len(operands) == 2:
        return max(floors[0] * _largest(operands[1]), floors[1] * _largest(operands[0]))
    if node.target is aten.div.Tensor and len(operands) == 2:
        sizes = operands[1].abs()
        return floors[0] / float(sizes[sizes > 0].min()) if bool((sizes > 0).any()) else floors[0]
    return 0.0


def _largest(value: Tensor) -> float:
    """Of masks and counts, too."""
    return float(value.abs().max()) if value.numel() and value.dtype != torch.bool else 1.0
