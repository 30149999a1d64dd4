"""Relative difference between two tensors."""

from __future__ import annotations

from math import isfinite

import torch
from torch import Tensor


def difference(a: Tensor, b: Tensor, floor: float = 0.0) -> float:
    """Return the largest |a - b| over the largest |b|, or over `floor` if that is larger.

    The result is 0 if both are 0; nan and inf must agree in place. A floor gives the magnitude of the terms
    from which a value that cancels to nothing was computed.
    """
    if a.shape != b.shape:
        return float("inf")
    if a.numel() == 0:
        return 0.0
    if a.dtype == b.dtype == torch.complex32:  # which torch itself cannot compare
        a, b = a.to(torch.complex64), b.to(torch.complex64)
    if not (a.is_floating_point() or a.is_complex()):
        return 0.0 if a.equal(b) else float("inf")
    if a.dtype == b.dtype and a.equal(b):  # the usual case, and no nan: one pass, no copy
        return 0.0
    error = largest_size(a - b)
    if isfinite(error):  # then all values of both are finite, too
        return error / (max(largest_size(b), floor) or 1.0)
    finite = a.isfinite() & b.isfinite()
    if not a[~finite].allclose(b[~finite], equal_nan=True):
        return float("inf")
    a, b = a[finite], b[finite]
    if a.numel() == 0:
        return 0.0
    return largest_size(a - b) / (max(largest_size(b), floor) or 1.0)


def largest_size(value: Tensor) -> float:
    """Return the largest |value|, or nan if there is one; for real values in one pass, without a copy."""
    if value.is_complex():
        return float(value.abs().max())
    least, most = value.aminmax()
    return max(abs(float(least)), abs(float(most)))
