"""How far two tensors are apart."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import torch
from torch import Tensor, fx

from fxdp.ir.op_kinds import mixes

aten = torch.ops.aten

_MASK = 1e30
"""Larger values stand for "never" (the least finite number in an attention mask): they are no scale."""


def difference(a: Tensor, b: Tensor, floor: float = 0.0) -> float:
    """The largest |a - b| over the largest |b|, or over `floor` where that is larger.

    0 where both are 0; nan and inf must agree in place. A floor says how large the terms were from which a
    value that cancels to nothing was made.
    """
    if a.shape != b.shape:
        return float("inf")
    if a.numel() == 0:
        return 0.0
    if not (a.is_floating_point() or a.is_complex()):
        return 0.0 if a.equal(b) else float("inf")
    if a.dtype == b.dtype and a.equal(b):  # most are, and no nan: one look, and no copy
        return 0.0
    error = _largest_size(a - b)
    if isfinite(error):  # so is every value of both
        return error / (max(_largest_size(b), floor) or 1.0)
    finite = a.isfinite() & b.isfinite()
    if not a[~finite].allclose(b[~finite], equal_nan=True):
        return float("inf")
    a, b = a[finite], b[finite]
    if a.numel() == 0:
        return 0.0
    return _largest_size(a - b) / (max(_largest_size(b), floor) or 1.0)


def cancelled(tolerance: float) -> float:
    """Which share of its terms a sum may cancel to before its rounding errors exceed the tolerance.

    A thousandth at 1e-9 in float64; float32's 1e-6 and more leave no room.
    """
    return min(1.0, 1e6 * tolerance)


def magnitude(value: Tensor) -> float:
    """The largest |value| that is no mask; 0 for integers."""
    if not value.numel() or not (value.is_floating_point() or value.is_complex()):
        return 0.0
    largest = _largest_size(value)
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


def _largest_size(value: Tensor) -> float:
    """The largest |value|, nan if one is; real values in one pass, without a copy."""
    if value.is_complex():
        return float(value.abs().max())
    least, most = value.aminmax()
    return max(abs(float(least)), abs(float(most)))


def _largest(value: Tensor) -> float:
    """Of masks and counts, too."""
    return float(value.abs().max()) if value.numel() and value.dtype != torch.bool else 1.0


def adds_or_moves(node: fx.Node) -> bool:
    """Whether a node puts values together that may be what is left of larger terms."""
    return mixes(node.target)
