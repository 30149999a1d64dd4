"""Splitting of a global tensor into local tensors, and the inverse, for any placement."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fxdp.ir.ops import moments
from fxdp.ir.types.placements import ParamShard, Partial, Placement, Replicate, Shard


def take_part(value: Tensor, dim: int, outer: int, batch: int, start: int, size: int) -> Tensor:
    """Return the rows `start : start + size` of the batch factor of `dim` (`outer x batch x inner`).

    The result is a view if that is contiguous, else a copy, because some kernels (layer_norm's backward for
    its statistics) depend on strides. `batch` is the global batch.
    """
    inner = value.shape[dim] // (outer * max(batch, 1))  # an axis other than the batch may have no rows
    if outer == 1:
        part = value.narrow(dim, start * inner, size * inner)
        return part if dim == 0 else part.contiguous()
    blocks = unflatten(value, dim, outer, batch, inner)
    return blocks.narrow(dim + 1, start, size).flatten(dim, dim + 2).contiguous()


def join_parts(parts: Sequence[Tensor], dim: int, outer: int, sizes: Sequence[int]) -> Tensor:
    """Join the ranks' parts, of the given batch sizes, into the global tensor."""
    if outer == 1:
        return torch.cat(tuple(parts), dim)
    factors = [_inner(p.shape[dim], outer, n) for p, n in zip(parts, sizes, strict=True)]
    inner = next((f for f in factors if f is not None), 1)
    blocks = [unflatten(p, dim, outer, n, inner) for p, n in zip(parts, sizes, strict=True)]
    return torch.cat(blocks, dim + 1).flatten(dim, dim + 2)


def unflatten(value: Tensor, dim: int, outer: int, batch: int, inner: int) -> Tensor:
    """Reshape `dim` to the three dims `outer x batch x inner`, of which any may be 0."""
    return value.reshape(*value.shape[:dim], outer, batch, inner, *value.shape[dim + 1 :])


def _inner(length: int, outer: int, size: int) -> int | None:
    return length // (outer * size) if size else None


_COMBINED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}


def combine(values: Sequence[Tensor], placement: Placement, sizes: Sequence[int]) -> Tensor:
    """Return the global value that the ranks' local `values` represent under a placement."""
    match placement:
        case Replicate():
            return values[0]
        case Partial("moments"):
            return moments.combine(torch.stack(list(values)))
        case Partial(op):
            total = values[0].clone()
            for value in values[1:]:
                total = _COMBINED[op](total, value)
            return total
        case Shard(dim, outer):
            return join_parts(values, dim, int(outer), sizes)
        case ParamShard():
            return torch.cat(tuple(values))
