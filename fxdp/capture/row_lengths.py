"""Where rows begin, as a rank counts them, as lengths: the one form in which programs get all of these.

             rank 0          rank 1        the program: lengths of all ranks, one after the other
    starts   0 3 3           0 2           3 0 1  2 2
    bounds   0 3 3 4         0 2 4         3 0 1  2 2
                                           the model: starts 0 3 3 4 6, bounds 0 3 3 4 6 8
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from fxdp.capture.ragged_rows import Rows


def to_lengths(values: Tensor, rows: Rows, total: int) -> Tensor:
    """Return the length of each row from where it begins in `total` rows of this rank."""
    if rows.bounds is None and len(values):
        return F.pad(values, (0, 1), value=total).diff()
    return values.diff()


def from_lengths(lengths: Tensor, rows: Rows) -> Tensor:
    """Return what `rows` says, starts or bounds, from the lengths of the global batch."""
    bounds = F.pad(lengths.cumsum(0, dtype=lengths.dtype), (1, 0))
    return bounds if rows.bounds is not None else bounds[:-1]
