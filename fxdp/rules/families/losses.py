"""Rules for losses over samples, with reduction `none` or `sum`.

Law: each element's loss depends on one prediction and target, so samples may be sharded; the sum is partial.
The mean divides by a count over the global batch and has no rule: capture decomposes it into sum and count.

Classes may be sharded as well: contrastive losses have one class per sample, so the class dim is sharded if
the similarities are a transposed product. Every rank checks whether a sample's class is among the local ones,
and the losses add up: the only reduction is the sum of losses. A gather would send the full matrix of
log-probabilities.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fxdp.ir.ops.ctc import CTC_BACKWARD_OP, CTC_OP
from fxdp.ir.ops.empty_parts import local_op
from fxdp.ir.ops.library import aten
from fxdp.ir.types.decompositions import Rewrite, Term
from fxdp.ir.types.placements import Dim, P, Placement, R, S, Shard
from fxdp.ir.types.sizes import axis
from fxdp.ir.types.value_types import TensorType
from fxdp.rules.builder import DecompositionBuilder
from fxdp.rules.labels import by_labels, letters, trailing
from fxdp.rules.registry import Alternative, Op, Operand, rule

_NONE, _MEAN, _SUM = 0, 1, 2
_AS_PREDICTION = (
    aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default,
    aten.soft_margin_loss.default,
)  # fmt: skip


@rule(
    "losses",
    aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default,
    aten.soft_margin_loss.default, aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_with_logits.default,
    kind="contracted",
)  # fmt: skip
def _elementwise_loss(op: Op) -> Iterator[Alternative]:
    """Yield shards of any dim of prediction, target and weights, which broadcast.

    Some kernels write into memory of the prediction's shape, so that dims of size 1 of the prediction do not
    broadcast, though the meta kernels would let them.
    """
    if op.arg("reduction") == _MEAN:
        return
    names = letters(max(o.ndim for o in op.operands))
    result = names if op.arg("reduction") == _NONE else ""
    inputs = [(o, trailing(names, o.ndim)) for o in op.operands]
    for alternative in by_labels(op, inputs, [result], broadcast=True):
        if op.target not in _AS_PREDICTION or isinstance(alternative.inputs[0], Shard):
            yield alternative


@rule(
    "losses",
    aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default, aten.huber_loss_backward.default,
    aten.soft_margin_loss_backward.default, aten.binary_cross_entropy_backward.default,
)  # fmt: skip
def _elementwise_loss_backward(op: Op) -> Iterator[Alternative]:
    """Yield shards of any dim; the incoming gradient is one per element, or one number for the sum."""
    if op.arg("reduction") == _MEAN:
        return
    ndim = len(op.output.shape)
    names = letters(ndim)
    inputs = [(o, trailing(names, o.ndim)) for o in op.operands]
    yield from by_labels(op, inputs, [names], broadcast=True)


@rule("losses", aten.nll_loss_forward.default, aten.nll_loss2d_forward.default, kind="contracted")
def _nll_loss(op: Op) -> Iterator[Alternative]:
    """Yield shards for the loss and the targets' total weight, which is zero unless the loss is reduced."""
    prediction, target = op.arg("self"), op.arg("target")
    if op.arg("reduction") == _MEAN or prediction.ndim < 2:
        return
    names = letters(prediction.ndim, full={1})  # `[N, C, ...]`: all but the classes
    chosen = names.replace("_", "")
    # without reduction the total weight is zero, equal on all ranks
    outputs: list[str | Placement] = ["", ""] if op.arg("reduction") == _SUM else [chosen, R]
    yield from by_labels(op, [(prediction, names), (target, chosen)], outputs)
    yield from (_nll_in_parts(op, shard) for shard in _class_shards(op))


@rule("losses", aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def _nll_loss_backward(op: Op) -> Iterator[Alternative]:
    """Yield shards for each sample's gradient; the total weight is read for the mean only."""
    prediction, target, grad = op.arg("self"), op.arg("target"), op.arg("grad_output")
    if op.arg("reduction") == _MEAN or prediction.ndim < 2:
        return
    names = letters(prediction.ndim, full={1})  # `[N, C, ...]`: all but the classes
    chosen = names.replace("_", "")
    inputs = [(prediction, names), (target, chosen), (grad, chosen if grad.ndim else "")]
    yield from by_labels(op, inputs, [names], unread=[op.arg("total_weight")])
    yield from (_nll_backward_in_parts(op, shard) for shard in _class_shards(op))


@rule(
    "losses", aten.multi_margin_loss.default, aten.multilabel_margin_loss_forward.default, kind="contracted"
)
def _margin_loss(op: Op) -> Iterator[Alternative]:
    """Yield shards of the samples of `[N, C]` against one or several classes per sample."""
    prediction, target = op.arg("self"), op.arg("target")
    if op.arg("reduction") == _MEAN or prediction.ndim != 2:
        return
    summed = op.arg("reduction") == _SUM
    inputs = [(prediction, "n_"), (target, "n...")]
    outputs = ["" if summed else "n", "n_"][: len(op.outputs)]
    rewrite = Rewrite(target=local_op(op.target)) if summed else None
    yield from by_labels(op, inputs, outputs, rewrite=rewrite)


@rule("losses", aten.multi_margin_loss_backward.default, aten.multilabel_margin_loss_backward.default)
def _margin_loss_backward(op: Op) -> Iterator[Alternative]:
    """Yield shards of the samples for the gradient of `[N, C]`."""
    prediction, grad = op.arg("self"), op.arg("grad_output")
    if op.arg("reduction") == _MEAN or prediction.ndim != 2:
        return
    per_sample = [prediction, op.arg("target")]
    if op.target is aten.multilabel_margin_loss_backward.default:
        per_sample.append(op.arg("is_target"))
    inputs = [(grad, "n" if grad.ndim else ""), *((o, "n...") for o in per_sample)]
    yield from by_labels(op, inputs, ["n_"])


@rule("losses", CTC_OP)
def _ctc_loss(op: Op) -> Iterator[Alternative]:
    """Yield shards of the samples of `[T, N, C]`.

    Concatenated targets in one dim are sharded if the lengths count the rows of an axis.
    """
    if op.arg("targets").ndim == 2:
        yield from by_labels(op, _sequences(op), ["n"])
    elif (shards := _of_own_targets(op)) is not None:
        yield op.alternative(shards, S(0))


@rule("losses", CTC_BACKWARD_OP)
def _ctc_loss_backward(op: Op) -> Iterator[Alternative]:
    """Yield shards of the samples for the gradient of `[T, N, C]`."""
    if op.arg("targets").ndim == 2:
        yield from by_labels(op, [(op.arg("grad"), "n"), *_sequences(op)], ["_n_"])
    elif (shards := _of_own_targets(op)) is not None:
        yield op.alternative({op.arg("grad").index: S(0), **shards}, S(1))


def _sequences(op: Op) -> list[tuple[Operand, str]]:
    """Return the labels of log-probabilities and targets of sequences, and of their lengths."""
    labels = {"log_probs": "_n_", "targets": "n_", "input_lengths": "n", "target_lengths": "n"}
    return [(op.arg(name), names) for name, names in labels.items()]


def _of_own_targets(op: Op) -> dict[int, Placement | None] | None:
    """Return the shards by which each rank has the concatenated targets of its own samples."""
    targets, counted = op.arg("targets"), op.arg("target_lengths").counts
    if counted is None or targets.shape != (axis(counted).total,):
        return None
    dims = {"log_probs": 1, "targets": 0, "input_lengths": 0, "target_lengths": 0}
    return {op.arg(name).index: S(dim) for name, dim in dims.items()}


def _class_shards(op: Op) -> Iterator[Shard]:
    """Yield the shards of the class dim, unless classes have weights or the loss is a mean."""
    x = op.arg("self")
    if op.arg("weight") is None and op.arg("reduction") != _MEAN and x.ndim >= 2:
        yield from (shard for shard in x.shards if shard.dim == 1)


def _nll_in_parts(op: Op, shard: Shard) -> Alternative:
    """Return a decomposition of `nll_loss(x, target)` for `x` sharded on the class dim."""
    builder, operand = DecompositionBuilder(op), op.arg("self")
    x, target = builder.operand(operand, shard), builder.operand(op.arg("target"))
    hit, valid = _hits(builder, operand, target, shard)
    picked = builder.pointwise(aten.where.ScalarOther, hit, x, 0, dtype=operand.type.dtype)
    loss = builder.pointwise(aten.neg.default, picked)
    scalar = TensorType(op.output.dtype, ())
    if op.arg("reduction") == _NONE:
        losses = builder.reshaped(builder.reduce(aten.sum.dim_IntList, loss, [1], P), op.output.shape)
        weight = builder.call(aten.full.default, (), 0, type=scalar, at=R, dtype=scalar.dtype)
        return builder.serves(losses, weight)
    total = builder.call(aten.sum.default, loss, type=scalar, at=P)
    weight = builder.call(aten.sum.default, builder.cast(valid, scalar.dtype), type=scalar, at=R)
    return builder.serves(total, weight)


def _nll_backward_in_parts(op: Op, shard: Shard) -> Alternative:
    """Return a decomposition of `nll_loss`'s gradient: the negated incoming one at each sample's class."""
    builder, operand = DecompositionBuilder(op), op.arg("self")
    builder.unread(operand)
    builder.unread(op.arg("total_weight"))
    target, grad = builder.operand(op.arg("target")), builder.operand(op.arg("grad_output"))
    hit, _ = _hits(builder, operand, target, shard)
    if grad.type.shape:
        grad = builder.reshaped(grad, _column(grad))
    minus = builder.pointwise(aten.neg.default, grad)
    return builder.serves(builder.pointwise(aten.where.ScalarOther, hit, minus, 0, dtype=op.output.dtype))


def _hits(builder: DecompositionBuilder, x: Operand, target: Term, shard: Shard) -> tuple[Term, Term]:
    """Return the masks of (local classes that are a sample's target and not ignored, samples not ignored)."""
    classes = builder.reshaped(target, _column(target))
    ignored = builder.op.arg("ignore_index")
    valid = builder.pointwise(aten.ne.Scalar, classes, ignored, dtype=torch.bool)
    rows = builder.positions(classes, x.ndim, x.shape[1], shard)
    own = builder.pointwise(aten.eq.Tensor, rows, classes, dtype=torch.bool)
    return builder.pointwise(aten.logical_and.default, own, valid), valid


def _column(term: Term) -> tuple[Dim, ...]:
    return (term.type.shape[0], 1, *term.type.shape[1:])
