"""Normalization by the statistics of the part of the batch that is there: `batch_stats="microbatch"`.

    standardize(x, dims, eps)                  (x - mean) / sqrt(var + eps), mean and var over `dims`
    standardize_backward(grad, x, dims, eps)   the gradient of x for `grad` of the result

The only ops whose value depends on how the batch is split, on purpose: a part of `x` gives the result for
that part by its own mean and variance, as BatchNorm does on each rank of DDP and in each micro-batch of a
loop that accumulates gradients. Hence their rule has no "all replicated", and nothing else may run them.

Source of the backward: Ioffe, Szegedy, "Batch Normalization", ICML 2015, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxdp.ir.ops.library import opaque
from fxdp.ir.ops.moments import moments


def standardize(x: Tensor, dims: Sequence[int], eps: float) -> Tensor:
    """`x` less its mean over `dims`, over its deviation; of a single element 0, of no elements nothing."""
    _, mean, invstd = _statistics(x, dims, eps)
    return (x - mean) * invstd


def standardize_backward(grad: Tensor, x: Tensor, dims: Sequence[int], eps: float) -> Tensor:
    """`(g - mean(g) - y * mean(g * y)) / sqrt(var + eps)` with `y = standardize(x)`; computes it anew."""
    counts, mean, invstd = _statistics(x, dims, eps)
    normed = (x - mean) * invstd
    along = list(dims)
    shift = grad.sum(along, keepdim=True) / counts
    slope = (grad * normed).sum(along, keepdim=True) / counts
    return (grad - shift - normed * slope) * invstd


def _statistics(x: Tensor, dims: Sequence[int], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Count (at least 1), mean and inverse deviation, shaped to combine with `x`."""
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
