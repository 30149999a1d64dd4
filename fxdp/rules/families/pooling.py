"""Pooling over batches of samples.

Law: every window lies in one sample, so the batch dim splits; indices count within a plane of a sample.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxdp.ir.ops.library import aten
from fxdp.rules.labels import by_labels, leading
from fxdp.rules.registry import Alternative, Op, rule

_SPATIAL = {"1d": 1, "2d": 2, "3d": 3}


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
def pooling(op: Op) -> Iterator[Alternative]:
    """All tensors, also indices and the random samples of fractional pooling, lead with the batch."""
    name = op.target._schema.name
    spatial = next(n for suffix, n in _SPATIAL.items() if suffix in name)
    if op.operands[0].ndim != spatial + 2:  # a single sample without a batch dim
        return
    inputs = [(o, leading("n", o.ndim)) for o in op.operands]
    yield from by_labels(op, inputs, [leading("n", len(t.shape)) if t else "" for t in op.outputs])
