"""Rules for batches of images: convolutions, pooling, resizing, padding, sliding windows and grids.

Law: samples never interact, so the batch dim may be sharded; the gradients of a convolution's weight and bias
sum over samples. A pooling window stays within one sample, and indices count within a plane of the sample.
Constant padding and pixel shuffling do not touch any further dims.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxdp.ir.ops.empty_parts import local_op
from fxdp.ir.ops.library import aten, existing
from fxdp.ir.types.decompositions import Rewrite
from fxdp.ir.types.sizes import mentions_batch
from fxdp.rules.labels import by_labels, letters, linear
from fxdp.rules.registry import Alternative, Op, rule

_SPATIAL = {"1d": 1, "2d": 2, "3d": 3}


def _has_batch_dim(op: Op) -> bool:
    """Return whether the first operand is `[N, C, ...]`; a single sample `[C, ...]` has no batch dim."""
    spatial = next(n for suffix, n in _SPATIAL.items() if suffix in op.target._schema.name)
    return op.operands[0].ndim == spatial + 2


@rule(
    "convolution",
    aten.convolution.default, aten._convolution.default, aten.mkldnn_convolution.default,
    aten.cudnn_convolution.default, aten.cudnn_convolution_transpose.default,
    *existing("cudnn_convolution_relu"),
)  # fmt: skip
def _convolution(op: Op) -> Iterator[Alternative]:
    """Yield shards of the batch, for convolutions of `[N, C, ...]`, including transposed ones."""
    x, weight = op.operands[:2]
    if x.ndim == weight.ndim:  # otherwise a single sample without a batch dim
        yield from by_labels(op, [(x, "n...")], "n...")


@rule("convolution", *existing("cudnn_convolution_add_relu"))
def _convolution_onto(op: Op) -> Iterator[Alternative]:
    """Yield shards of the batch, for `relu(convolution(x) + alpha * z)`."""
    x, weight, z = op.operands[:3]
    if x.ndim == weight.ndim:
        yield from by_labels(op, [(x, "n..."), (z, "n...")], "n...")


@rule("convolution", aten.convolution_backward.default, kind="contracted")
def _convolution_backward(op: Op) -> Iterator[Alternative]:
    """Yield shards of the batch: the gradient of the input is sharded, of weight and bias partial."""
    grad, x, weight = op.operands
    if x.ndim == weight.ndim:
        yield from by_labels(op, [(grad, "n..."), (x, "n...")], ["n...", "...", "_"])


@rule("convolution", aten.conv_tbc.default)
def _convolution_time_batch_channel(op: Op) -> Iterator[Alternative]:
    """Yield shards of the batch, for a convolution of `[T, B, C]`."""
    yield from by_labels(op, [(op.operands[0], "_n_")], "_n_")


@rule(
    "pooling",
    aten.avg_pool1d.default, aten.adaptive_avg_pool1d.default,
    aten.avg_pool2d.default, aten.avg_pool2d_backward.default,
    aten.avg_pool3d.default, aten.avg_pool3d_backward.default,
    aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default,
    aten.max_pool3d_with_indices.default, aten.max_pool3d_with_indices_backward.default,
    aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool2d_backward.default,
    aten._adaptive_avg_pool3d.default, aten._adaptive_avg_pool3d_backward.default,
    aten.adaptive_max_pool2d.default, aten.adaptive_max_pool2d_backward.default,
    aten.adaptive_max_pool3d.default, aten.adaptive_max_pool3d_backward.default,
    aten.fractional_max_pool2d.default, aten.fractional_max_pool2d_backward.default,
    aten.fractional_max_pool3d.default, aten.fractional_max_pool3d_backward.default,
    aten.max_unpool2d.default, aten.max_unpool3d.default,
)  # fmt: skip
def _pooling(op: Op) -> Iterator[Alternative]:
    """Yield shards of the batch, the first dim of all tensors, even indices and random samples."""
    if _has_batch_dim(op):
        yield from by_labels(op, [(o, "n...") for o in op.operands], "n...")


@rule(
    "resampling",
    aten.upsample_nearest1d.default, aten.upsample_nearest1d_backward.default,
    aten.upsample_nearest2d.default, aten.upsample_nearest2d_backward.default,
    aten.upsample_nearest3d.default, aten.upsample_nearest3d_backward.default,
    aten._upsample_nearest_exact1d.default, aten._upsample_nearest_exact1d_backward.default,
    aten._upsample_nearest_exact2d.default, aten._upsample_nearest_exact2d_backward.default,
    aten._upsample_nearest_exact3d.default, aten._upsample_nearest_exact3d_backward.default,
    aten.upsample_linear1d.default, aten.upsample_linear1d_backward.default,
    aten.upsample_bilinear2d.default, aten.upsample_bilinear2d_backward.default,
    aten.upsample_bicubic2d.default, aten.upsample_bicubic2d_backward.default,
    aten.upsample_trilinear3d.default, aten.upsample_trilinear3d_backward.default,
    aten._upsample_bilinear2d_aa.default, aten._upsample_bilinear2d_aa_backward.default,
    aten._upsample_bicubic2d_aa.default, aten._upsample_bicubic2d_aa_backward.default,
    aten.upsample_nearest1d.vec, aten.upsample_nearest2d.vec, aten.upsample_nearest3d.vec,
    aten.upsample_linear1d.vec, aten.upsample_bilinear2d.vec, aten.upsample_bicubic2d.vec,
    aten.upsample_trilinear3d.vec,
    aten.reflection_pad1d.default, aten.reflection_pad1d_backward.default,
    aten.reflection_pad2d.default, aten.reflection_pad2d_backward.default,
    aten.reflection_pad3d.default, aten.reflection_pad3d_backward.default,
    aten.replication_pad1d.default, aten.replication_pad1d_backward.default,
    aten.replication_pad2d.default, aten.replication_pad2d_backward.default,
    aten.replication_pad3d.default, aten.replication_pad3d_backward.default,
    *existing(
        "_upsample_nearest_exact1d.vec", "_upsample_nearest_exact2d.vec", "_upsample_nearest_exact3d.vec",
        "_upsample_lanczos2d_aa", "_upsample_lanczos2d_aa_backward",
    ),
)  # fmt: skip
def _resampling(op: Op) -> Iterator[Alternative]:
    """Yield shards of the batch, and partial values, for interpolation and non-constant padding."""
    if _has_batch_dim(op):
        yield from by_labels(op, [(o, "n...") for o in op.operands], "n...")
        yield from linear(op, op.operands[:1])


@rule("resampling", aten.constant_pad_nd.default)
def _constant_padding(op: Op) -> Iterator[Alternative]:
    """Yield shards of the dims without padding; padding with zeros is linear."""
    (x,) = op.operands
    pad = op.arg("pad")
    amounts = list(zip(pad[::2], pad[1::2], strict=True))  # from the last dim to the first
    padded = {x.ndim - 1 - i for i, amount in enumerate(amounts) if amount != (0, 0)}
    names = letters(x.ndim, full=padded)
    yield from by_labels(op, [(x, names)], names)
    if op.arg("value") == 0:
        yield from linear(op, [x])


@rule("resampling", aten.pixel_shuffle.default, aten.pixel_unshuffle.default)
def _pixel_shuffle(op: Op) -> Iterator[Alternative]:
    """Yield shards of the dims before `[C, H, W]`, for rearranging channels and pixels."""
    (x,) = op.operands
    names = letters(x.ndim - 3) + "..."
    unshuffle = op.target is aten.pixel_unshuffle.default  # eager's shape of an empty result is wrong
    rewrite = Rewrite(target=local_op(op.target)) if unshuffle else None
    yield from by_labels(op, [(x, names)], names, rewrite=rewrite)
    yield from linear(op, [x])


@rule("resampling", aten.channel_shuffle.default, aten.native_channel_shuffle.default)
def _channel_shuffle(op: Op) -> Iterator[Alternative]:
    """Yield shards of the batch, for permuting channels of `[N, C, ...]`."""
    (x,) = op.operands
    yield from by_labels(op, [(x, "n...")], "n...")
    yield from linear(op, [x])


@rule("resampling", aten.im2col.default, aten.col2im.default)
def _sliding_windows(op: Op) -> Iterator[Alternative]:
    """Yield shards of the batch, and partial values, for `unfold` and `fold`."""
    (x,) = op.operands
    batched = 4 if op.target is aten.im2col.default else 3
    if x.ndim == batched:
        yield from by_labels(op, [(x, "n...")], "n...")
        yield from linear(op, [x])


@rule(
    "resampling",
    aten.grid_sampler_2d.default, aten.grid_sampler_2d_backward.default,
    aten.grid_sampler_3d.default, aten.grid_sampler_3d_backward.default,
    aten.cudnn_grid_sampler.default, aten.cudnn_grid_sampler_backward.default,
)  # fmt: skip
def _grid_sampler(op: Op) -> Iterator[Alternative]:
    """Yield shards of the batch, for reading each sample at a separate grid."""
    yield from by_labels(op, [(o, "n...") for o in op.operands], "n...")


@rule("resampling", *existing("cudnn_affine_grid_generator", "cudnn_affine_grid_generator_backward"))
def _cudnn_affine_grid(op: Op) -> Iterator[Alternative]:
    """Yield shards of the batch, for one grid per matrix or the gradient; the argument `N` is local."""
    (x,) = op.operands
    yield from by_labels(op, [(x, "n...")], "n...", rewrite=Rewrite(local=("N",)))


@rule("resampling", aten.affine_grid_generator.default)
def _affine_grid(op: Op) -> Iterator[Alternative]:
    """Yield shards of the batch, for one grid per matrix; the batch in the size list is local."""
    (theta,) = op.operands
    if not any(mentions_batch(n) for n in op.arg("size")[1:]):
        yield from by_labels(op, [(theta, "n__")], "n...", rewrite=Rewrite(local=("size",)))
