"""Rules for normalization within a sample, and for BatchNorm by given statistics.

Laws: LayerNorm and RMSNorm treat every index of the dims before the normalized ones separately, GroupNorm
every sample; BatchNorm with running statistics treats every element of a channel separately. Statistics that
an op returns have the samples' placement; the gradients of weight and bias sum over samples. BatchNorm that
computes statistics mixes samples and has no rule: capture decomposes it, its statistics become `moments`,
whose terms on the ranks combine.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxdp.ir.ops.empty_parts import local_op
from fxdp.ir.ops.library import aten
from fxdp.ir.ops.moments import MOMENTS_OP
from fxdp.ir.ops.standardize import STANDARDIZE_BACKWARD_OP, STANDARDIZE_OP
from fxdp.ir.types.decompositions import Rewrite
from fxdp.ir.types.placements import MOMENTS, R, Shard
from fxdp.rules.dims import argument_or_none, wrap_all
from fxdp.rules.labels import by_labels, letters, linear
from fxdp.rules.registry import Alternative, Op, rule


@rule("normalization", aten.native_layer_norm.default, aten._fused_rms_norm.default)
def _layer_norm(op: Op) -> Iterator[Alternative]:
    """Yield shards of the dims before the normalized ones, equal for output, mean and rstd."""
    x = op.arg("input")
    labels = letters(x.ndim - len(op.arg("normalized_shape"))) + "..."
    yield from by_labels(op, [(x, labels)], labels)


@rule(
    "normalization", aten.native_layer_norm_backward.default, aten._fused_rms_norm_backward.default,
    kind="contracted",
)  # fmt: skip
def _layer_norm_backward(op: Op) -> Iterator[Alternative]:
    """Yield shards: the gradient of the input is sharded, of weight and bias partial."""
    x = op.arg("input")
    labels = letters(x.ndim - len(op.arg("normalized_shape"))) + "..."
    read = [op.arg("grad_out"), x, op.arg("rstd")]
    if op.target is aten.native_layer_norm_backward.default:
        read.append(op.arg("mean"))
    yield from by_labels(op, [(o, labels) for o in read], [labels, *("..." for _ in op.outputs[1:])])


@rule("normalization", aten.native_group_norm.default)
def _group_norm(op: Op) -> Iterator[Alternative]:
    """Yield shards of the samples; the argument `N` is local."""
    # the kernel uses N, C and HxW, not the operand's shape
    yield from by_labels(op, [(op.arg("input"), "n...")], "n...", rewrite=Rewrite(local=("N",)))


@rule("normalization", aten.native_group_norm_backward.default, kind="contracted")
def _group_norm_backward(op: Op) -> Iterator[Alternative]:
    """Yield shards: the gradient of the input is sharded, of weight and bias partial."""
    inputs = [(op.arg(name), "n...") for name in ("grad_out", "input", "mean", "rstd")]
    yield from by_labels(op, inputs, ["n...", "_", "_"], rewrite=Rewrite(local=("N",)))


@rule(
    "normalization",
    aten._native_batch_norm_legit_no_training.default, aten._batch_norm_no_update.default,
    aten.native_batch_norm.default, aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit_functional.default, aten.cudnn_batch_norm.default,
)  # fmt: skip
def _batch_norm_by_running_statistics(op: Op) -> Iterator[Alternative]:
    """Yield shards of all dims except the channels, in evaluation.

    All results but the first are empty or statistics.
    """
    x = op.operands[0]
    # the trap: in training this op mixes all samples, and a rank's local statistics look plausible
    if argument_or_none(op, "training") or x.ndim < 2:
        return
    names = letters(x.ndim, full={1})  # the channels
    yield from by_labels(op, [(x, names)], [names, *(R for _ in op.outputs[1:])])


@rule("normalization", aten.native_batch_norm_backward.default, kind="contracted")
def _batch_norm_backward_by_running_statistics(op: Op) -> Iterator[Alternative]:
    """Yield shards of all dims except the channels, in evaluation: an affine map with constant statistics.

    Torch's kernel divides by the number of elements, which may be zero on a rank, so a different op runs.
    """
    grad, x = op.operands[:2]
    if op.arg("train") or x.ndim < 2:
        return
    names = letters(x.ndim, full={1})  # the channels
    unread = [op.arg("save_mean"), op.arg("save_invstd")]
    rewrite = Rewrite(target=local_op(op.target))
    yield from by_labels(op, [(grad, names), (x, names)], [names, "_", "_"], unread=unread, rewrite=rewrite)


@rule("normalization", MOMENTS_OP, kind="contracted")
def _moments(op: Op) -> Iterator[Alternative]:
    """Yield shards of kept dims, which move back by one, and partial moments over sharded reduced dims.

    To combine the moments of their elements, ranks exchange `3 * kept` values once.
    """
    x, dims = op.operands[0], wrap_all(op.arg("dims"), op.operands[0].ndim)
    for shard in x.shards:
        if shard.dim in dims:
            # no plain sum: means combine by counts, and deviations by the distance of means
            yield op.alternative({0: shard}, MOMENTS)
        else:
            place = 1 + shard.dim - sum(dim < shard.dim for dim in dims)
            yield op.alternative({0: shard}, Shard(place, shard.outer))


@rule("normalization", STANDARDIZE_OP, STANDARDIZE_BACKWARD_OP, full=False)
def _standardize(op: Op) -> Iterator[Alternative]:
    """Yield any shard, with local statistics, but no full values: their statistics would differ."""
    x = op.operands[-1]
    shards = [s for o in op.operands for s in o.shards] or [Shard(dim) for dim in x.batch_dims]
    for shard in dict.fromkeys(shards):
        yield op.alternative(dict.fromkeys((o.index for o in op.operands), shard), shard)


@rule(
    "normalization", aten._weight_norm_interface.default, aten._weight_norm_interface_backward.default,
    kind="gathered",
)  # fmt: skip
def _weight_norm(op: Op) -> Iterator[Alternative]:
    """Yield partial gradients only: `g * v / |v|` of weights, which are full; the backward is linear."""
    if op.target is aten._weight_norm_interface_backward.default:
        yield from linear(op, op.operands[:1])
