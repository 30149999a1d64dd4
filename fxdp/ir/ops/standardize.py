"""Normalization by the statistics of the local part of the batch: `Pipeline(batch_stats="microbatch")`.

    standardize(x, dims, eps)                  (x - mean) / sqrt(var + eps), mean and var over `dims`
    standardize_backward(grad, x, dims, eps)   the gradient of x for `grad` of the result

These are the only ops with values that depend, on purpose, on how the batch is split: each part of `x` is
normalized by its own mean and variance, like BatchNorm on each rank of DDP and in each micro-batch of a loop
that accumulates gradients. Hence the rule has no "all replicated", and no further rule may run these ops.

Source of the backward: Ioffe, Szegedy, "Batch Normalization", ICML 2015, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxdp.ir.ops.library import opaque
from fxdp.ir.ops.moments import moments


def standardize(x: Tensor, dims: Sequence[int], eps: float) -> Tensor:
    """Return `x` minus the mean over `dims`, over the deviation; 0 for a single element, empty for none."""
    _, mean, invstd = _statistics(x, dims, eps)
    return (x - mean) * invstd


def standardize_backward(grad: Tensor, x: Tensor, dims: Sequence[int], eps: float) -> Tensor:
    """Return `(g - mean(g) - y * mean(g * y)) / sqrt(var + eps)`, with recomputed `y = standardize(x)`."""
    counts, mean, invstd = _statistics(x, dims, eps)
    normed = (x - mean) * invstd
    along = list(dims)
    shift = grad.sum(along, keepdim=True) / counts
    slope = (grad * normed).sum(along, keepdim=True) / counts
    return (grad - shift - normed * slope) * invstd


def _statistics(x: Tensor, dims: Sequence[int], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return count (at least 1), mean and inverse deviation, shaped to broadcast with `x`."""
    kept = [1 if dim in dims else n for dim, n in enumerate(x.shape)]
    counts, mean, squares = (t.view(kept) for t in moments(x, dims).unbind(0))
    counts = counts.clamp_min(1)
    return counts, mean, torch.rsqrt(squares / counts + eps)


STANDARDIZE_OP = opaque(
    "standardize(Tensor x, int[] dims, float eps) -> Tensor",
    standardize,
    lambda x, dims, eps: torch.empty_like(x),
)
"""`standardize` as an op of the captured graph."""

STANDARDIZE_BACKWARD_OP = opaque(
    "standardize_backward(Tensor grad, Tensor x, int[] dims, float eps) -> Tensor",
    standardize_backward,
    lambda grad, x, dims, eps: torch.empty_like(x),
)
"""`standardize_backward` as an op of the captured graph."""
