"""The negative log-likelihood of classes that are spread over the ranks.

Contrastive losses have one class per sample, so the class dim is sharded where the similarities are a
transposed product. Every rank sees whether a sample's class is among its own, and the losses add up: one sum,
which is the loss itself. Gathering would send the whole matrix of log-probabilities.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fxdp.ir.ops.library import aten
from fxdp.ir.placements import Dim, P, R, Shard
from fxdp.ir.types import TensorType
from fxdp.rules.recipe import SUM, Cook
from fxdp.rules.registry import Alternative, Op, Operand, Term

_NONE, _MEAN = 0, 1


def nll_in_parts(op: Op) -> Iterator[Alternative]:
    """`nll_loss(x, target)` of `x` sharded on its class dim, unless classes have weights or it is a mean."""
    for shard in _class_shards(op):
        yield _forward(op, shard)


def _class_shards(op: Op) -> Iterator[Shard]:
    x = op.arg("self")
    if op.arg("weight") is None and op.arg("reduction") != _MEAN and x.ndim >= 2:
        yield from (shard for shard in x.shards if shard.dim == 1)


def _forward(op: Op, shard: Shard) -> Alternative:
    cook, operand = Cook(op), op.arg("self")
    x, target = cook.operand(operand, shard), cook.operand(op.arg("target"))
    hit, valid = _hits(cook, operand, target, shard)
    picked = cook.pointwise(aten.where.ScalarOther, hit, x, 0, dtype=operand.type.dtype)
    loss = cook.pointwise(aten.neg.default, picked)
    scalar = TensorType(op.output.dtype, ())
    if op.arg("reduction") == _NONE:
        losses = cook.reshaped(cook.reduce(aten.sum.dim_IntList, loss, [1], SUM), op.output.shape)
        weight = cook.call(aten.full.default, (), 0, type=scalar, at=R, dtype=scalar.dtype)
        return cook.serves(losses, weight)
    total = cook.call(aten.sum.default, loss, type=scalar, at=P)
    weight = cook.call(aten.sum.default, cook.cast(valid, scalar.dtype), type=scalar, at=R)
    return cook.serves(total, weight)


def nll_backward_in_parts(op: Op) -> Iterator[Alternative]:
    """The gradient: minus the loss's own at each sample's class, zero elsewhere."""
    for shard in _class_shards(op):
        yield _backward(op, shard)


def _backward(op: Op, shard: Shard) -> Alternative:
    cook, operand = Cook(op), op.arg("self")
    cook.unread(operand)
    cook.unread(op.arg("total_weight"))
    target, grad = cook.operand(op.arg("target")), cook.operand(op.arg("grad_output"))
    hit, _ = _hits(cook, operand, target, shard)
    if grad.type.shape:
        grad = cook.reshaped(grad, _column(grad))
    minus = cook.pointwise(aten.neg.default, grad)
    return cook.serves(cook.pointwise(aten.where.ScalarOther, hit, minus, 0, dtype=op.output.dtype))


def _hits(cook: Cook, x: Operand, target: Term, shard: Shard) -> tuple[Term, Term]:
    """Where a part's class is the sample's own and not ignored; which samples are not ignored."""
    classes = cook.reshaped(target, _column(target))
    ignored = cook.op.arg("ignore_index")
    valid = cook.pointwise(aten.ne.Scalar, classes, ignored, dtype=torch.bool)
    rows = cook.positions(classes, x.ndim, x.shape[1], shard)
    own = cook.pointwise(aten.eq.Tensor, rows, classes, dtype=torch.bool)
    return cook.pointwise(aten.logical_and.default, own, valid), valid


def _column(term: Term) -> tuple[Dim, ...]:
    return (term.type.shape[0], 1, *term.type.shape[1:])
