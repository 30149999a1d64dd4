"""Ops of decompositions on a rank's part: extrema of a possibly empty part, and positions of rows.

All are compositions of plain ops, which a compiler can fuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from fxdp.ir.ops.library import aten, composed


def _lowest(dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return False
    return float("-inf") if dtype.is_floating_point else torch.iinfo(dtype).min


def _highest(dtype: torch.dtype) -> float | int | bool:
    if dtype == torch.bool:
        return True
    return float("inf") if dtype.is_floating_point else torch.iinfo(dtype).max


def _reduced(x: torch.Tensor, dim: Sequence[int], keepdim: bool) -> list[int] | None:
    """Return the shape of a reduction over no elements, or None if there are elements to reduce."""
    gone = {d % x.dim() for d in dim} if dim else set(range(x.dim()))
    if prod(x.shape[d] for d in gone) != 0:
        return None
    return [1 if d in gone else n for d, n in enumerate(x.shape) if keepdim or d not in gone]


def _amax(self: torch.Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> torch.Tensor:
    shape = _reduced(self, dim, keepdim)
    if shape is not None:
        return self.new_full(shape, _lowest(self.dtype))
    return aten.amax.default(self, dim, keepdim)  # type: ignore[no-any-return]


def _amin(self: torch.Tensor, dim: Sequence[int] = (), keepdim: bool = False) -> torch.Tensor:
    shape = _reduced(self, dim, keepdim)
    if shape is not None:
        return self.new_full(shape, _highest(self.dtype))
    return aten.amin.default(self, dim, keepdim)  # type: ignore[no-any-return]


def _positions(
    like: torch.Tensor, ndim: int, dim: int, outer: int, inner: int, local: int, batch: int, offset: int
) -> torch.Tensor:
    """Return the row numbers of a part `S(dim, outer)` in the full value, as a column along `dim`."""

    def count(n: int, *shape: int) -> torch.Tensor:
        return torch.arange(n, device=like.device).view(shape)

    samples = count(outer, -1, 1, 1) * batch + count(local, 1, -1, 1) + offset
    rows = samples * inner + count(inner, 1, 1, -1)
    return rows.view([outer * local * inner if d == dim else 1 for d in range(ndim)])


amax = composed("amax(Tensor self, int[1] dim=[], bool keepdim=False) -> Tensor", _amax)
"""`aten.amax`, with the lowest number as the result over no elements."""
amin = composed("amin(Tensor self, int[1] dim=[], bool keepdim=False) -> Tensor", _amin)
"""`aten.amin`, with the highest number as the result over no elements."""
positions = composed(
    "positions(Tensor like, int ndim, int dim, SymInt outer, SymInt inner, SymInt local, SymInt batch, "
    "SymInt offset) -> Tensor",
    _positions,
)
"""Returns the row numbers of a part in the full value."""
