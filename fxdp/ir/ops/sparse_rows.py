"""Sparse gradients in a graph of dense tensors: rows of a table's gradient, with the rows' numbers beside.

    sparse_rows(rows [N, D], indices [N], ...)   [N, D + n]: each row, and its index in `n` columns
    sparse_gradient(packed, size)                the sparse tensor of the parameter, after the graph

A graph holds dense tensors only, and a joint graph has one gradient per parameter. So both travel in one
tensor: ranks gather the rows of the batch in one message, uneven and empty parts included. An index is
written in digits of as many bits as the dtype's integers are exact, and so is equal after any copy or cast.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fxdp.ir.ops.library import composed


def _base(dtype: torch.dtype) -> int:
    """Return the number up to which all integers are exact."""
    return round(2 / torch.finfo(dtype).eps)


def _columns(dtype: torch.dtype, count: int) -> int:
    """Return how many digits the numbers 0, 1, ..., `count` have."""
    base, digits = _base(dtype), 1
    while base**digits <= count:
        digits += 1
    return digits


def _sparse_rows(rows: Tensor, indices: Tensor, count: int, padding_idx: int) -> Tensor:
    base = _base(rows.dtype)
    indices = torch.where(indices == padding_idx, count, indices.long())  # no row: the table has no such one
    digits = [indices // base**digit % base for digit in range(_columns(rows.dtype, count))]
    return torch.cat([rows, torch.stack(digits, 1).to(rows.dtype)], 1)


SPARSE_ROWS = composed(
    "sparse_rows(Tensor rows, Tensor indices, int count, int padding_idx) -> Tensor", _sparse_rows
)
"""Rows of the gradient of a table of `count` rows, with their indices; `padding_idx` is -1 for none."""


def sparse_gradient(packed: Tensor, size: torch.Size) -> Tensor:
    """Return the gradient of a table of this size, from all rows of the batch; padding is dropped."""
    count, width = size
    rows, digits = packed[:, :width], packed[:, width:].long()
    indices = sum(digits[:, i] * _base(packed.dtype) ** i for i in range(digits.shape[1]))
    kept = indices != count
    if not kept.all():
        rows, indices = rows[kept], indices[kept]
    return torch.sparse_coo_tensor(indices.unsqueeze(0), rows, size, check_invariants=False)
