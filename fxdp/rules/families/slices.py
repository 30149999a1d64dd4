"""Rules for slices and their backwards: slice, select, unfold, and pieces put into zeros or a tensor.

Law: shards of untouched dims stay. On the sharded dim, entire blocks may be sliced or put back:
half of `S(0, 2)` is `S(0)`. All ops are linear.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sympy

from fxdp.ir.ops.library import aten, existing
from fxdp.ir.types.decompositions import Rewrite
from fxdp.ir.types.placements import Dim, Shard
from fxdp.ir.types.sizes import axis_of, exact_quotient
from fxdp.rules.dims import has_argument, rearranged, without, wrap
from fxdp.rules.labels import linear
from fxdp.rules.registry import Alternative, Op, rule

_UNBOUNDED = 2**62  # torch writes `x[a:]` with an end beyond any size, 2**63 - 1
_BOUNDS = Rewrite(local=("start", "end"))


@rule("slice", aten.slice.Tensor, *existing("slice_copy.Tensor"))
def _cut(op: Op) -> Iterator[Alternative]:
    """Yield shards for `x[start:end:step]` on one dim."""
    (x,) = op.operands
    dim = wrap(op.arg("dim"), x.ndim)
    yield from linear(op, [x])
    for shard in x.shards:
        if shard.dim != dim:
            yield op.alternative({0: shard}, shard)
        else:
            kept = _kept_blocks(op, x.shape[dim], shard.outer)
            if kept is not None:
                yield op.alternative({0: shard}, Shard(dim, kept), _BOUNDS)


@rule("slice", aten.slice_backward.default)
def _cut_backward(op: Op) -> Iterator[Alternative]:
    """Yield shards for the gradient of a slice.

    The result has the sliced value's shape, with the gradient in the slice and zeros elsewhere.
    """
    (grad,) = op.operands
    dim = wrap(op.arg("dim"), grad.ndim)
    yield from linear(op, [grad])
    for shard in grad.shards:
        if shard.dim != dim:
            yield op.alternative({0: shard}, shard)
            continue
        outer = _blocks_around(op, grad.shape[dim], op.output.shape[dim], shard.outer)
        if outer is not None:
            yield op.alternative({0: shard}, Shard(dim, outer), _BOUNDS)


@rule("slice", aten.slice_scatter.default)
def _put_back(op: Op) -> Iterator[Alternative]:
    """Yield shards for a value with one slice replaced."""
    x, piece = op.operands
    dim = wrap(op.arg("dim"), x.ndim)
    yield from linear(op, [x, piece])
    for shard in {**dict.fromkeys(x.shards), **dict.fromkeys(s for s in piece.shards if s.dim != dim)}:
        if shard.dim != dim:
            yield op.alternative({0: shard, 1: shard}, shard)
            continue
        kept = _kept_blocks(op, x.shape[dim], shard.outer)
        if kept is not None:
            yield op.alternative({0: shard, 1: Shard(dim, kept)}, shard, _BOUNDS)


def _kept_blocks(op: Op, size: Dim, outer: Dim) -> Dim | None:
    """Return how many of a dim's `outer` blocks a slice keeps, or None if the slice cuts a block."""
    start, end, step = op.arg("start"), op.arg("end"), op.arg("step")
    full = end is None or end == size or (isinstance(end, int) and end >= _UNBOUNDED)
    if step != 1:
        return outer if full and _strides_evenly(start, step, size, outer) else None
    if full and (start is None or start == 0):
        return outer
    # Each rank has rows of every block: [a a | b b] is [a b] on both of two ranks. A slice of full blocks
    # keeps blocks of each rank; a cut through a block would leave some ranks all of it and further ones none.
    block = exact_quotient(size, outer)
    if block is None or not isinstance(outer, int):
        return None
    first = _block_number(start or 0, block, outer)
    last = outer if full else _block_number(end, block, outer)
    return last - first if first is not None and last is not None and first < last else None


def _block_number(bound: Any, block: Dim, outer: int) -> int | None:
    number = exact_quotient(bound, block)
    if not isinstance(number, int):
        return None
    # like Python indices: negative from the end, and clamped to both ends
    return min(max(number + outer if number < 0 else number, 0), outer)


def _strides_evenly(start: Any, step: Any, size: Dim, outer: Dim) -> bool:
    """Return whether every rank's part of every block starts and ends on a multiple of the step."""
    axis = axis_of(size)
    inner = None if axis is None else exact_quotient(size, sympy.sympify(outer) * axis.total)
    first = 0 if start is None else start
    if not (isinstance(step, int) and isinstance(inner, int) and isinstance(first, int)):
        return False
    # the length of a rank's part of a block is a multiple of `inner`, for any number of samples
    return inner % step == 0 and 0 <= first < step


def _blocks_around(op: Op, piece: Dim, size: Dim, outer: Dim) -> Dim | None:
    """Return the number of blocks of the full dim if the piece consists of `outer` such blocks, else None."""
    if op.arg("step") != 1:
        return outer if _kept_blocks(op, size, outer) == outer else None
    block = exact_quotient(piece, outer)
    blocks = None if block is None else exact_quotient(size, block)
    if blocks is None or _kept_blocks(op, size, blocks) != outer:
        return None
    return blocks


@rule("slice", aten.select.int, *existing("select_copy.int"))
def _select(op: Op) -> Iterator[Alternative]:
    """Yield shards for `x[index]` on one dim, which is removed."""
    (x,) = op.operands
    dim = wrap(op.arg("dim"), x.ndim)
    yield from rearranged(op, without(dim))


@rule("slice", aten.select_backward.default)
def _select_backward(op: Op) -> Iterator[Alternative]:
    """Yield shards for the gradient of a selection: zeros, and the gradient at the index."""
    (grad,) = op.operands
    dim = wrap(op.arg("dim"), grad.ndim + 1)
    yield from rearranged(op, lambda d: d + (d >= dim))


@rule("slice", aten.select_scatter.default)
def _select_scatter(op: Op) -> Iterator[Alternative]:
    """Yield shards for a value with one selection replaced."""
    x, piece = op.operands
    dim = wrap(op.arg("dim"), x.ndim)
    yield from linear(op, [x, piece])
    moved = (Shard(s.dim + (s.dim >= dim), s.outer) for s in piece.shards)
    for shard in dict.fromkeys((*x.shards, *moved)):
        if shard.dim != dim:
            below = Shard(shard.dim - (shard.dim > dim), shard.outer)
            yield op.alternative({0: shard, 1: below}, shard)


@rule("slice", aten.unfold.default, *existing("unfold_copy", "narrow_copy"))
def _unfold(op: Op) -> Iterator[Alternative]:
    """Yield shards for windows along one dim, which become the last dim; a single one stays in place."""
    (x,) = op.operands
    dim = wrap(op.arg("dimension" if has_argument(op, "dimension") else "dim"), x.ndim)
    yield from rearranged(op, lambda d: None if d == dim else d)


@rule("slice", aten.unfold_backward.default)
def _unfold_backward(op: Op) -> Iterator[Alternative]:
    """Yield shards for windows summed back into the original dim."""
    (grad,) = op.operands
    dim = wrap(op.arg("dim"), grad.ndim - 1)
    yield from rearranged(op, lambda d: None if d in (dim, grad.ndim - 1) else d)
