"""Alternatives for extrema over a sharded dim, and for norms, which reduce once.

Laws: the extremum of the parts' extrema is the extremum, `P(max)` or `P(min)`; a nan anywhere gives nan, also
between ranks (`ir/ops/rank_extrema.py`). The position of an extremum is the lowest position with its value,
as in torch. With `n` bytes in the result, and 8 per position, the traffic is

| op | reductions | bytes (all-reduce counts twice) |
|---|---|---|
| amax, amin, max, min, any, all | one extremum | 2n |
| max, min along a dim | the extremum, its position | 2n + 2n_positions |
| argmax, argmin along a dim | the extremum, its position | 2n_values + 2n |
| vector norm of order 0, 1, inf, p | one | 2n |
| gradient of max, min, median, ... along a dim | none: each rank fills in its own rows | 0 |
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fxdp.ir.ops.library import aten
from fxdp.ir.ops.local_ops import amax, amin
from fxdp.ir.types.decompositions import Rewrite, Term
from fxdp.ir.types.placements import Dim, Shard
from fxdp.ir.types.sizes import batch_factor, is_range
from fxdp.rules.builder import MAX, MIN, SUM, DecompositionBuilder
from fxdp.rules.dims import keeps_dims, offered, wrap
from fxdp.rules.registry import Alternative, Op

_LARGEST = frozenset(
    {aten.amax.default, aten.max.default, aten.max.dim, aten.argmax.default, aten.any.default,
     aten.any.dim, aten.any.dims}
)  # fmt: skip
"""Ops that return the largest element; all remaining ops of this file return the smallest."""

_NONE = torch.iinfo(torch.int64).max


def extremum_in_parts(op: Op, reduced: frozenset[int]) -> Iterator[Alternative]:
    """Yield partial results over sharded dims for `amax`, `amin`, `max()`, `min()`, `any`, `all`."""
    largest = op.target in _LARGEST
    logical = op.target.overloadpacket in (aten.any, aten.all)
    arguments = (("dim", tuple(sorted(reduced))), ("keepdim", keeps_dims(op)))
    rewrite = None if logical else Rewrite(target=amax if largest else amin, arguments=arguments)
    for shard in offered(op.operands):
        if shard.dim in reduced:
            yield op.alternative({0: shard}, MAX if largest else MIN, rewrite)


def place_of_extremum(op: Op) -> Iterator[Alternative]:
    """Yield decompositions for `max`, `min`, `argmax` and `argmin` along a sharded dim, with positions."""
    (x,) = op.operands
    if op.arg("dim") is None or x.ndim == 0:
        return
    dim = wrap(op.arg("dim"), x.ndim)
    for shard in offered(op.operands):
        if shard.dim == dim and is_range(x.shape[dim]):
            yield _place(op, shard)


def _place(op: Op, shard: Shard) -> Alternative:
    builder, (operand,) = DecompositionBuilder(op), op.operands
    largest = op.target in _LARGEST
    x = builder.operand(operand, shard)
    # The lowest position of the extremum takes two reductions: before the global extremum is known, no rank
    # knows whether its own position counts.
    top = builder.reduce(amax if largest else amin, x, [shard.dim], MAX if largest else MIN)
    hit = builder.pointwise(aten.eq.Tensor, x, top, dtype=torch.bool)
    if x.type.dtype.is_floating_point:
        # torch takes the first nan, and x == nan is false
        nan = builder.pointwise(aten.ne.Tensor, x, x, dtype=torch.bool)
        hit = builder.pointwise(aten.logical_or.default, hit, nan)
    rows = builder.positions(x, operand.ndim, operand.shape[shard.dim], shard)
    where = builder.pointwise(aten.where.ScalarOther, hit, rows, _NONE, dtype=torch.int64)
    first = builder.reduce(amin, where, [shard.dim], MIN)
    results = [top, first][-len(op.outputs) :]
    shapes = [t.shape for t in op.outputs if t is not None]
    return builder.serves(*(_final(builder, r, s) for r, s in zip(results, shapes, strict=True)))


def _final(builder: DecompositionBuilder, term: Term, shape: tuple[Dim, ...]) -> Term:
    return builder.full(term) if term.type.shape == shape else builder.reshaped(term, shape)


def selected_gradient_in_parts(op: Op) -> Iterator[Alternative]:
    """Yield a decomposition for zeros with a gradient at one position along a dim, local on each rank."""
    ndim = len(op.output.shape)
    dim = wrap(op.arg("dim"), ndim)
    if ndim == 0 or batch_factor(op.output.shape[dim]) is None or not is_range(op.output.shape[dim]):
        return
    builder, shard = DecompositionBuilder(op), Shard(dim)
    shape = (*op.output.shape[:dim], 1, *op.output.shape[dim + 1 :])
    grad, index = (builder.reshaped(builder.operand(o), shape) for o in op.operands)
    rows = builder.positions(grad, ndim, op.output.shape[dim], shard)
    hit = builder.pointwise(aten.eq.Tensor, rows, index, dtype=torch.bool)
    yield builder.serves(builder.pointwise(aten.where.ScalarOther, hit, grad, 0, dtype=op.output.dtype))


def norm_in_parts(op: Op, dims: list[int], shard: Shard) -> Alternative:
    """Return a decomposition of `linalg_vector_norm` over a sharded dim."""
    builder, order = DecompositionBuilder(op), op.arg("ord")
    half = op.output.dtype in (torch.float16, torch.bfloat16)
    x = builder.cast(builder.operand(op.operands[0], shard), torch.float32 if half else op.output.dtype)
    size = builder.pointwise(aten.abs.default, x)
    if order in (float("inf"), float("-inf")):
        largest = order > 0
        result = builder.reduce(amax if largest else amin, size, dims, MAX if largest else MIN)
    elif order == 0:
        nonzero = builder.cast(builder.pointwise(aten.ne.Scalar, size, 0, dtype=torch.bool), x.type.dtype)
        result = builder.reduce(aten.sum.dim_IntList, nonzero, dims, SUM)
    else:
        powers = size if order == 1 else builder.pointwise(aten.pow.Tensor_Scalar, size, order)
        result = builder.reduce(aten.sum.dim_IntList, powers, dims, SUM)
        if order != 1:
            result = builder.pointwise(aten.pow.Tensor_Scalar, result, 1.0 / order)
    result = _final(builder, result, op.output.shape)
    return builder.serves(builder.cast(result, op.output.dtype))
