"""Decompositions of softmax and related ops along a sharded dim, by an extremum and a sum over ranks.

Law: `softmax(x) = exp(x - m) / sum(exp(x - m))` for any `m` along the dim, the largest element for safety.
With `n` bytes in a slice of the result (one number along the dim) the decompositions send

| op | reductions | bytes (all-reduce counts twice) |
|---|---|---|
| softmax, log_softmax, safe softmax, logsumexp | max, sum | 2n + 2n |
| their backwards | sum | 2n |

where gathering would send the full operand. Half precision is reduced in float32, as in torch's kernels.
"""

from __future__ import annotations

import torch

from fxdp.ir.ops.library import aten
from fxdp.ir.ops.local_ops import amax
from fxdp.ir.types.decompositions import Term
from fxdp.ir.types.placements import Shard
from fxdp.rules.builder import MAX, SUM, DecompositionBuilder
from fxdp.rules.registry import Alternative, Op

_INFINITY = float("inf")


def _wide(builder: DecompositionBuilder, term: Term) -> Term:
    half = term.type.dtype in (torch.float16, torch.bfloat16)
    return builder.cast(term, torch.float32) if half else term


def softmax_in_parts(op: Op, dims: list[int], shard: Shard) -> Alternative:
    """Return a decomposition of `_softmax`, `_log_softmax` or `_safe_softmax` along a sharded dim."""
    builder = DecompositionBuilder(op)
    given = builder.operand(op.operands[0], shard)
    x = _wide(builder, builder.cast(given, op.output.dtype))
    # one `m` for all ranks: with a local `m` each rank would scale its terms differently
    top = builder.reduce(amax, x, dims, MAX)
    small = builder.pointwise(aten.sub.Tensor, x, top)
    powers = builder.pointwise(aten.exp.default, small)
    total = builder.reduce(aten.sum.dim_IntList, powers, dims, SUM)
    if op.target is aten._log_softmax.default:
        result = builder.pointwise(aten.sub.Tensor, small, builder.pointwise(aten.log.default, total))
    else:
        result = builder.pointwise(aten.div.Tensor, powers, total)
    if op.target is aten._safe_softmax.default:  # a row of only -inf gives zeros instead of nan
        nothing = builder.pointwise(aten.eq.Scalar, top, -_INFINITY, dtype=torch.bool)
        result = builder.pointwise(aten.masked_fill.Scalar, result, nothing, 0)
    return builder.serves(builder.cast(result, op.output.dtype))


def softmax_backward_in_parts(op: Op, dims: list[int], shard: Shard) -> Alternative:
    """Return a decomposition of the backward along a sharded dim.

    This computes `out * (grad - sum(grad * out))`, or for the logarithm `grad - exp(out) * sum(grad)`.
    """
    builder = DecompositionBuilder(op)
    grad, out = (_wide(builder, builder.operand(o, shard)) for o in op.operands)
    if op.target is aten._log_softmax_backward_data.default:
        total = builder.reduce(aten.sum.dim_IntList, grad, dims, SUM)
        share = builder.pointwise(aten.mul.Tensor, builder.pointwise(aten.exp.default, out), total)
        result = builder.pointwise(aten.sub.Tensor, grad, share)
    else:
        total = builder.reduce(aten.sum.dim_IntList, builder.pointwise(aten.mul.Tensor, grad, out), dims, SUM)
        result = builder.pointwise(aten.mul.Tensor, out, builder.pointwise(aten.sub.Tensor, grad, total))
    return builder.serves(builder.cast(result, op.output.dtype))


def logsumexp_in_parts(op: Op, dims: list[int], shard: Shard) -> Alternative:
    """Return a decomposition of `log(sum(exp(x - m))) + m`, in which an infinite `m` is not subtracted."""
    builder = DecompositionBuilder(op)
    x = _wide(builder, builder.operand(op.operands[0], shard))
    top = builder.reduce(amax, x, dims, MAX)
    size = builder.pointwise(aten.abs.default, top)
    infinite = builder.pointwise(aten.eq.Scalar, size, _INFINITY, dtype=torch.bool)
    finite = builder.pointwise(aten.masked_fill.Scalar, top, infinite, 0)
    powers = builder.pointwise(aten.exp.default, builder.pointwise(aten.sub.Tensor, x, finite))
    total = builder.reduce(aten.sum.dim_IntList, powers, dims, SUM)
    result = builder.pointwise(aten.add.Tensor, builder.pointwise(aten.log.default, total), finite)
    return builder.serves(builder.cast(builder.reshaped(result, op.output.shape), op.output.dtype))
