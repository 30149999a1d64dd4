"""Rules for diagonals and triangles of matrices.

Law: shards of dims outside the matrix stay. For a rank that holds rows `first, first + 1, ...` of the matrix,
the diagonal `offset` is `offset + first` of its local rows; for columns it is `offset - first`. So a diagonal
as long as the batch, and any _triangle, is local along either dim. All ops are linear.
"""

from __future__ import annotations

from collections.abc import Iterator

import sympy

from fxdp.ir.ops.library import aten, existing
from fxdp.ir.types.decompositions import Rewrite
from fxdp.ir.types.placements import Dim, Shard
from fxdp.ir.types.sizes import axis_of, batch_factor
from fxdp.rules.dims import rearranged, wrap
from fxdp.rules.labels import linear
from fxdp.rules.registry import Alternative, Op, rule


def _first(size: Dim, outer: Dim) -> sympy.Expr | None:
    """Return the global number of a rank's first row, or None if the rows are not one contiguous range."""
    factor, axis = batch_factor(size), axis_of(size)
    if factor is None or axis is None or not axis.is_contiguous or outer != 1:
        return None
    return factor * axis.offset


def _shifted(name: str, value: Dim, by: sympy.Expr) -> Rewrite:
    return Rewrite(arguments=((name, sympy.sympify(value) + by),))


def _plane(op: Op, ndim: int) -> tuple[int, int]:
    return wrap(op.arg("dim1"), ndim), wrap(op.arg("dim2"), ndim)


def _on_diagonal(op: Op, shape: tuple[Dim, ...], length: Dim) -> Iterator[tuple[Shard, Rewrite]]:
    """Yield the shards of a matrix for which every row (or column) has an element on the diagonal."""
    rows, columns = _plane(op, len(shape))
    for dim, sign in ((rows, 1), (columns, -1)):
        first = _first(shape[dim], 1)
        if first is not None and shape[dim] == length:
            yield Shard(dim), _shifted("offset", op.arg("offset"), sign * first)


@rule("diagonal", aten.diagonal.default, *existing("diagonal_copy"))
def _diagonal(op: Op) -> Iterator[Alternative]:
    """Yield shards for the diagonal of two dims, which becomes the last dim."""
    (x,) = op.operands
    kept = [d for d in range(x.ndim) if d not in _plane(op, x.ndim)]
    yield from rearranged(op, lambda d: kept.index(d) if d in kept else None)
    for shard, rewrite in _on_diagonal(op, x.shape, op.output.shape[-1]):
        if shard in x.shards:
            yield op.alternative({0: shard}, Shard(len(kept)), rewrite)


@rule("diagonal", aten.diagonal_backward.default, aten.diag_embed.default)
def _embedded(op: Op) -> Iterator[Alternative]:
    """Yield shards for zeros with the operand's last dim on a diagonal."""
    (x,) = op.operands
    shape = op.output.shape
    kept = [d for d in range(len(shape)) if d not in _plane(op, len(shape))]
    yield from rearranged(op, lambda d: kept[d] if d < len(kept) else None)
    if Shard(len(kept)) in x.shards and op.target is aten.diagonal_backward.default:
        for shard, rewrite in _on_diagonal(op, shape, x.shape[-1]):
            yield op.alternative({0: Shard(len(kept))}, shard, rewrite)


@rule("diagonal", aten.diagonal_scatter.default)
def _diagonal_scatter(op: Op) -> Iterator[Alternative]:
    """Yield shards for a value with one diagonal replaced."""
    x, piece = op.operands
    kept = [d for d in range(x.ndim) if d not in _plane(op, x.ndim)]
    yield from linear(op, [x, piece])
    for shard in x.shards:
        if shard.dim in kept:
            yield op.alternative({0: shard, 1: Shard(kept.index(shard.dim), shard.outer)}, shard)
    for shard, rewrite in _on_diagonal(op, x.shape, piece.shape[-1]):
        if shard in x.shards:
            yield op.alternative({0: shard, 1: Shard(len(kept))}, shard, rewrite)


@rule("diagonal", aten.tril.default, aten.triu.default)
def _triangle(op: Op) -> Iterator[Alternative]:
    """Yield shards for the part of the last two dims below or above a diagonal, with zeros elsewhere."""
    (x,) = op.operands
    yield from linear(op, [x])
    for shard in x.shards:
        if shard.dim < x.ndim - 2:
            yield op.alternative({0: shard}, shard)
            continue
        first = _first(x.shape[shard.dim], shard.outer)
        if first is not None:
            sign = 1 if shard.dim == x.ndim - 2 else -1
            yield op.alternative({0: shard}, shard, _shifted("diagonal", op.arg("diagonal"), sign * first))
