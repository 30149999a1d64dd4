"""Diagonals and triangles of matrices.

Law: dims outside the matrix pass. A rank that holds rows `first, first + 1, ...` of the matrix finds the
diagonal `offset` at `offset + first` of its own rows; with columns at `offset - first`. So a diagonal as
long as the batch, and any triangle, is local on either side. All are linear.
"""

from __future__ import annotations

from collections.abc import Iterator

import sympy

from fxdp.ir.decompositions import Rewrite
from fxdp.ir.ops.library import aten, existing
from fxdp.ir.placements import Dim, Shard
from fxdp.ir.sizes import OFFSET, batch_factor
from fxdp.rules.dims import rearranged, wrap
from fxdp.rules.labels import linear
from fxdp.rules.registry import Alternative, Op, rule


def _first(size: Dim, outer: Dim) -> sympy.Expr | None:
    """The global number of a rank's first row, where its rows are one contiguous range."""
    factor = batch_factor(size)
    return None if factor is None or outer != 1 else factor * OFFSET


def _shifted(name: str, value: Dim, by: sympy.Expr) -> Rewrite:
    return Rewrite(arguments=((name, sympy.sympify(value) + by),))


def _plane(op: Op, ndim: int) -> tuple[int, int]:
    return wrap(op.arg("dim1"), ndim), wrap(op.arg("dim2"), ndim)


def _on_diagonal(op: Op, shape: tuple[Dim, ...], length: Dim) -> Iterator[tuple[Shard, Rewrite]]:
    """The shards of a matrix whose every row (or column) has an element on the diagonal."""
    rows, columns = _plane(op, len(shape))
    for dim, sign in ((rows, 1), (columns, -1)):
        first = _first(shape[dim], 1)
        if first is not None and shape[dim] == length:
            yield Shard(dim), _shifted("offset", op.arg("offset"), sign * first)


@rule("diagonal", aten.diagonal.default, *existing("diagonal_copy"))
def diagonal(op: Op) -> Iterator[Alternative]:
    """The diagonal of two dims, put last."""
    (x,) = op.operands
    kept = [d for d in range(x.ndim) if d not in _plane(op, x.ndim)]
    yield from rearranged(op, lambda d: kept.index(d) if d in kept else None)
    for shard, rewrite in _on_diagonal(op, x.shape, op.output.shape[-1]):
        if shard in x.shards:
            yield op.alternative({0: shard}, Shard(len(kept)), rewrite)


@rule("diagonal", aten.diagonal_backward.default, aten.diag_embed.default)
def embedded(op: Op) -> Iterator[Alternative]:
    """Zeros with the last dim of the operand on a diagonal."""
    (x,) = op.operands
    shape = op.output.shape
    kept = [d for d in range(len(shape)) if d not in _plane(op, len(shape))]
    yield from rearranged(op, lambda d: kept[d] if d < len(kept) else None)
    if Shard(len(kept)) in x.shards and op.target is aten.diagonal_backward.default:
        for shard, rewrite in _on_diagonal(op, shape, x.shape[-1]):
            yield op.alternative({0: Shard(len(kept))}, shard, rewrite)


@rule("diagonal", aten.diagonal_scatter.default)
def diagonal_scatter(op: Op) -> Iterator[Alternative]:
    """A value with one of its diagonals replaced."""
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
def triangle(op: Op) -> Iterator[Alternative]:
    """The last two dims below or above a diagonal, zeros elsewhere."""
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
