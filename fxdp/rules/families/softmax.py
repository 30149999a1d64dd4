"""Softmax and its kin along a sharded dim, by an extremum and a sum over the ranks.

Law: `softmax(x) = exp(x - m) / sum(exp(x - m))` for any `m` along the dim, the largest element for safety.
With `n` bytes in a slice of the result (one number along the dim) the recipes send

| op | reductions | bytes (all-reduce counts twice) |
|---|---|---|
| softmax, log_softmax, safe softmax, logsumexp | max, sum | 2n + 2n |
| their backwards | sum | 2n |

where gathering would send the whole operand. Half precision is reduced in float32, as torch's kernels add.
"""

from __future__ import annotations

import torch

from fxdp.ir.ops.library import aten
from fxdp.ir.ops.local_ops import amax
from fxdp.ir.placements import Shard
from fxdp.ir.recipes import Term
from fxdp.rules.cook import MAX, SUM, Cook
from fxdp.rules.registry import Alternative, Op

_INFINITY = float("inf")


def _wide(cook: Cook, term: Term) -> Term:
    half = term.type.dtype in (torch.float16, torch.bfloat16)
    return cook.cast(term, torch.float32) if half else term


def softmax_in_parts(op: Op, dims: list[int], shard: Shard) -> Alternative:
    """`_softmax`, `_log_softmax` and `_safe_softmax` of a value sharded along their dim."""
    cook = Cook(op)
    given = cook.operand(op.operands[0], shard)
    x = _wide(cook, cook.cast(given, op.output.dtype))
    # the same `m` on all ranks: each with its own would scale its terms otherwise, and their sum mean nothing
    top = cook.reduce(amax, x, dims, MAX)
    small = cook.pointwise(aten.sub.Tensor, x, top)
    powers = cook.pointwise(aten.exp.default, small)
    total = cook.reduce(aten.sum.dim_IntList, powers, dims, SUM)
    if op.target is aten._log_softmax.default:
        result = cook.pointwise(aten.sub.Tensor, small, cook.pointwise(aten.log.default, total))
    else:
        result = cook.pointwise(aten.div.Tensor, powers, total)
    if op.target is aten._safe_softmax.default:  # a row of -inf alone gives zeros instead of nan
        nothing = cook.pointwise(aten.eq.Scalar, top, -_INFINITY, dtype=torch.bool)
        result = cook.pointwise(aten.masked_fill.Scalar, result, nothing, 0)
    return cook.serves(cook.cast(result, op.output.dtype))


def softmax_backward_in_parts(op: Op, dims: list[int], shard: Shard) -> Alternative:
    """`out * (grad - sum(grad * out))`, or for the logarithm `grad - exp(out) * sum(grad)`."""
    cook = Cook(op)
    grad, out = (_wide(cook, cook.operand(o, shard)) for o in op.operands)
    if op.target is aten._log_softmax_backward_data.default:
        total = cook.reduce(aten.sum.dim_IntList, grad, dims, SUM)
        share = cook.pointwise(aten.mul.Tensor, cook.pointwise(aten.exp.default, out), total)
        result = cook.pointwise(aten.sub.Tensor, grad, share)
    else:
        total = cook.reduce(aten.sum.dim_IntList, cook.pointwise(aten.mul.Tensor, grad, out), dims, SUM)
        result = cook.pointwise(aten.mul.Tensor, out, cook.pointwise(aten.sub.Tensor, grad, total))
    return cook.serves(cook.cast(result, op.output.dtype))


def logsumexp_in_parts(op: Op, dims: list[int], shard: Shard) -> Alternative:
    """`log(sum(exp(x - m))) + m`, where an infinite `m` is not subtracted."""
    cook = Cook(op)
    x = _wide(cook, cook.operand(op.operands[0], shard))
    top = cook.reduce(amax, x, dims, MAX)
    size = cook.pointwise(aten.abs.default, top)
    infinite = cook.pointwise(aten.eq.Scalar, size, _INFINITY, dtype=torch.bool)
    finite = cook.pointwise(aten.masked_fill.Scalar, top, infinite, 0)
    powers = cook.pointwise(aten.exp.default, cook.pointwise(aten.sub.Tensor, x, finite))
    total = cook.reduce(aten.sum.dim_IntList, powers, dims, SUM)
    result = cook.pointwise(aten.add.Tensor, cook.pointwise(aten.log.default, total), finite)
    return cook.serves(cook.cast(cook.reshaped(result, op.output.shape), op.output.dtype))
