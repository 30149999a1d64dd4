"""Functions on dims and arguments that several op families share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from fxdp.ir.types.placements import Dim, P, Shard
from fxdp.rules.labels import linear
from fxdp.rules.registry import Alternative, Op, Operand


def wrap(dim: int, ndim: int) -> int:
    """Return a possibly negative dim as an index; 0 for a 0-dim tensor."""
    return dim % ndim if ndim else 0


def wrap_all(dims: int | Iterable[int], ndim: int) -> frozenset[int]:
    """Return one or several dims as indices."""
    return frozenset(wrap(d, ndim) for d in ((dims,) if isinstance(dims, int) else dims))


def widens(source: torch.dtype, target: torch.dtype) -> bool:
    """Return whether a cast preserves sums: no rounding and no change of kind (int, real, complex)."""
    same_kind = _kind(source) == _kind(target)
    return same_kind and torch.bool != source and torch.promote_types(source, target) == target


def _kind(dtype: torch.dtype) -> tuple[bool, bool]:
    return dtype.is_floating_point, dtype.is_complex


def has_argument(op: Op, name: str) -> bool:
    """Return whether the op's schema has an argument of this name."""
    return any(argument.name == name for argument in op.target._schema.arguments)


def argument_or_none(op: Op, name: str) -> Any:
    """Return the argument of this name, or None if the op's schema has none."""
    return op.arg(name) if has_argument(op, name) else None


def keeps_dims(op: Op) -> bool:
    """Return whether reduced dims stay with size 1."""
    return bool(argument_or_none(op, "keepdim"))


def operand_or_none(value: Any) -> Operand | None:
    """Return the argument if it is a tensor, else None."""
    return value if isinstance(value, Operand) else None


def candidates(operand: Operand) -> tuple[Shard, ...]:
    """Return the shards in which an operand is worth reading: the existing ones.

    A value that exists only as terms of a sum can also be reduced into shards, at half the cost of a full
    reduction.
    """
    if operand.placements == (P,):
        return tuple(Shard(d) for d in operand.batch_dims)
    return operand.shards


def offered(operands: Iterable[Operand]) -> dict[Shard, None]:
    """Return the candidates of several operands of equal rank, in order, without duplicates."""
    return {shard: None for operand in operands for shard in candidates(operand)}


def moved(op: Op, target: Callable[[int], int | None]) -> Iterator[Alternative]:
    """Move each shard of the only operand to the dim that `target` returns; skip dims with None."""
    (x,) = op.operands
    for shard in candidates(x):
        dim = target(shard.dim)
        if dim is not None:
            yield op.alternative({x.index: shard}, Shard(dim, shard.outer))


def rearranged(op: Op, target: Callable[[int], int | None]) -> Iterator[Alternative]:
    """Move shards like `moved`, for an op that computes nothing and so passes partial values on."""
    yield from linear(op, op.operands)
    yield from moved(op, target)


def without(dim: int) -> Callable[[int], int | None]:
    """Return a map of dims for an op that removes `dim`, which maps to None."""
    return lambda d: None if d == dim else d - (d > dim)


def together(op: Op, full: frozenset[int]) -> Iterator[Alternative]:
    """Shard all operands and results, of equal rank, on one common dim that is not in `full`."""
    for shard in offered(op.operands):
        if shard.dim not in full and _fits(op, shard.dim):
            yield op.alternative({o.index: shard for o in op.operands}, shard)


def _fits(op: Op, dim: int) -> bool:
    sizes: set[Dim] = {o.shape[dim] for o in op.operands}
    sizes |= {t.shape[dim] for t in op.outputs if t is not None}
    return len(sizes) == 1
