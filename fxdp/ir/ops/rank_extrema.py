"""Extrema over ranks that respect nan, on any backend.

Backends compare floats by `<`, so whether a nan survives depends on the order of the ranks. Floats are
therefore sent as integers in the same order, in which a nan is more extreme than any number.
"""

from __future__ import annotations

import torch
from torch import Tensor

_INTEGERS = {torch.float64: torch.int64, torch.float32: torch.int32}


def sortable(value: Tensor, op: str) -> Tensor:
    """Return integers in the order of the floats, nan beyond infinity (`max`) or below its negative (`min`).

    The bits of a non-negative float are ordered as an integer's; for negative floats the order is reversed.
    Half precision is widened; integers and bools stay.
    """
    if not value.is_floating_point():
        return value
    wide = value if value.dtype in _INTEGERS else value.to(torch.float32)
    integer = _INTEGERS[wide.dtype]
    extreme = torch.iinfo(integer).max if op == "max" else torch.iinfo(integer).min
    return _flipped(wide.contiguous().view(integer)).masked_fill(wide.isnan(), extreme)


def restored(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the floats of `dtype` from the integers of `sortable`."""
    if not dtype.is_floating_point:
        return value
    wide = dtype if dtype in _INTEGERS else torch.float32
    return _flipped(value).view(wide).to(dtype)


def _flipped(bits: Tensor) -> Tensor:
    """Flip all bits of negative numbers except the sign; inverts itself."""
    digits = torch.iinfo(bits.dtype).bits - 1
    return bits ^ ((bits >> digits) & torch.iinfo(bits.dtype).max)
