"""Convolutions over batches of samples.

Law: samples are independent, so the batch dim splits; the gradients of weight and bias sum over samples.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxdp.ir.ops.library import aten
from fxdp.rules.labels import by_labels, leading
from fxdp.rules.registry import Alternative, Op, existing, rule


@rule(
    "convolution",
    aten.convolution.default, aten._convolution.default, aten.mkldnn_convolution.default,
    aten.cudnn_convolution.default, aten.cudnn_convolution_transpose.default,
    *existing("cudnn_convolution_relu"),
)  # fmt: skip
def convolution(op: Op) -> Iterator[Alternative]:
    """Any convolution, also transposed, of `[N, C, ...]`."""
    x, weight = op.operands[:2]
    if x.ndim == weight.ndim:  # else a single sample without a batch dim
        yield from by_labels(op, [(x, leading("n", x.ndim))], [leading("n", len(op.output.shape))])


@rule("convolution", *existing("cudnn_convolution_add_relu"))
def convolution_onto(op: Op) -> Iterator[Alternative]:
    """`relu(convolution(x) + alpha * z)`."""
    x, weight, z = op.operands[:3]
    if x.ndim == weight.ndim:
        samples = leading("n", x.ndim)
        yield from by_labels(op, [(x, samples), (z, samples)], [samples])


@rule("convolution", aten.convolution_backward.default, kind="contracted")
def convolution_backward(op: Op) -> Iterator[Alternative]:
    """Gradients of the input (sharded), weight and bias (partial)."""
    grad, x, weight = op.operands
    if x.ndim == weight.ndim:
        samples = leading("n", x.ndim)
        yield from by_labels(op, [(grad, samples), (x, samples)], [samples, "_" * weight.ndim, "_"])


@rule("convolution", aten.conv_tbc.default)
def convolution_time_batch_channel(op: Op) -> Iterator[Alternative]:
    """A convolution of `[T, B, C]`."""
    yield from by_labels(op, [(op.operands[0], "_n_")], ["_n_"])
