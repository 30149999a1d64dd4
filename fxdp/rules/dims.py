"""Small answers about dims that several op families ask."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from fxdp.ir.placements import Dim, P, Shard
from fxdp.rules.labels import linear
from fxdp.rules.registry import Alternative, Op, Operand


def wrap(dim: int, ndim: int) -> int:
    """A possibly negative dim as an index; 0 for a 0-dim tensor."""
    return dim % ndim if ndim else 0


def wrap_all(dims: int | Iterable[int], ndim: int) -> frozenset[int]:
    """One or several dims as indices."""
    return frozenset(wrap(d, ndim) for d in ((dims,) if isinstance(dims, int) else dims))


def widens(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether a cast keeps sums: no rounding and no change of kind (int, real, complex)."""
    same_kind = _kind(source) == _kind(target)
    return same_kind and torch.bool != source and torch.promote_types(source, target) == target


def _kind(dtype: torch.dtype) -> tuple[bool, bool]:
    return dtype.is_floating_point, dtype.is_complex


def has_argument(op: Op, name: str) -> bool:
    """Whether the op's schema has an argument of this name."""
    return any(argument.name == name for argument in op.target._schema.arguments)


def argument_or_none(op: Op, name: str) -> Any:
    """The argument of this name; None where the op's schema has none."""
    return op.arg(name) if has_argument(op, name) else None


def keeps_dims(op: Op) -> bool:
    """Whether reduced dims stay with size 1."""
    return bool(argument_or_none(op, "keepdim"))


def operand_or_none(value: Any) -> Operand | None:
    """The argument if it is a tensor."""
    return value if isinstance(value, Operand) else None


def candidates(operand: Operand) -> tuple[Shard, ...]:
    """The shards worth asking of an operand: those it has.

    A value that exists as a sum of terms only could also be reduced into shards, at half the cost of
    reducing it full.
    """
    if operand.placements == (P,):
        return tuple(Shard(d) for d in operand.batch_dims)
    return operand.shards


def offered(operands: Iterable[Operand]) -> dict[Shard, None]:
    """The candidates of several operands of one rank, without repeats, in order."""
    return {shard: None for operand in operands for shard in candidates(operand)}


def moved(op: Op, target: Callable[[int], int | None]) -> Iterator[Alternative]:
    """The only operand's shards pass to the dim that `target` names; None where they cannot."""
    (x,) = op.operands
    for shard in candidates(x):
        dim = target(shard.dim)
        if dim is not None:
            yield op.alternative({x.index: shard}, Shard(dim, shard.outer))


def rearranged(op: Op, target: Callable[[int], int | None]) -> Iterator[Alternative]:
    """`moved`, of an op that computes nothing, so that a sum of terms stays one."""
    yield from linear(op, op.operands)
    yield from moved(op, target)


def without(dim: int) -> Callable[[int], int | None]:
    """Where the other dims are once `dim` is gone; None for itself."""
    return lambda d: None if d == dim else d - (d > dim)


def together(op: Op, full: frozenset[int]) -> Iterator[Alternative]:
    """All operands and results, of one rank, are sharded on one dim that is not in `full`."""
    for shard in offered(op.operands):
        if shard.dim not in full and _fits(op, shard.dim):
            yield op.alternative({o.index: shard for o in op.operands}, shard)


def _fits(op: Op, dim: int) -> bool:
    sizes: set[Dim] = {o.shape[dim] for o in op.operands}
    sizes |= {t.shape[dim] for t in op.outputs if t is not None}
    return len(sizes) == 1
