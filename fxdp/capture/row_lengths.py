"""Where rows begin, as a rank counts them, as lengths: the one form in which programs get all of these.

         rank 0          rank 1        the program: lengths of all ranks, one after the other
starts   0 3 3           0 2           3 0 1  2 2
bounds   0 3 3 4         0 2 4         3 0 1  2 2
                                       the model: starts 0 3 3 4 6, bounds 0 3 3 4 6 8
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

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


_starts: ContextVar[tuple[Tensor, ...]] = ContextVar("global_starts", default=())


@contextlib.contextmanager
def global_starts(tensors: tuple[Tensor, ...]) -> Iterator[None]:
    """Tell which tensors say where rows of the global batch begin; all other offsets count on each rank."""
    token = _starts.set(tensors)
    try:
        yield
    finally:
        _starts.reset(token)


def is_global_start(tensor: Tensor | None) -> bool:
    """Return whether a tensor says where rows of the global batch begin, by the innermost `global_starts`."""
    return any(tensor is told for told in _starts.get())
