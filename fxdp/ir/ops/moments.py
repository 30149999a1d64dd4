"""Count, mean and squared deviations of a tensor: moments that combine to an exact global variance.

    moments(x, dims)   [3, *kept]: count, mean, M2 = sum((x - mean)**2), over `dims`
    combine(parts)     the moments of the union, from the moments of its parts

`fxdp::moments` is the op of the captured graph. Its value over a sharded dim is `P(moments)`: every rank
holds the moments of its own elements, and their reduction is `combine`. So a normalization that needs mean
and variance communicates once, `3 * kept` values, and no two large numbers are ever subtracted.

Source: Chan, Golub, LeVeque, "Algorithms for Computing the Sample Variance: Analysis and Recommendations",
The American Statistician 37 (1983), 242-247: the corrected two-pass algorithm within a part, and the pairwise
formula between parts, here for any number of parts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxdp.ir.ops.library import opaque


def moments(x: Tensor, dims: Sequence[int]) -> Tensor:
    """Return count, mean and M2 over `dims` as `[3, *kept]` of `x`'s dtype.

    `dims` are counted from the front, at least one. The function makes two passes over `x`; the second also
    corrects the rounding error of the mean, which would cost digits if the mean is large. Over no elements
    all three are 0.
    """
    dims = list(dims)
    count = 1
    for dim in dims:
        count = count * x.shape[dim]
    total = x.sum(dims, keepdim=True)
    # as a tensor: a compiler may assume that a size is not 0
    counts = torch.full(total.shape, count, dtype=x.dtype, device=x.device)
    rough = torch.where(counts > 0, total / counts, total)
    apart = x - rough
    rest = apart.sum(dims, keepdim=True)
    shift = torch.where(counts > 0, rest / counts, rest)
    squares = (apart * apart).sum(dims)
    kept = squares.shape
    return torch.stack([counts.view(kept), (rough + shift).view(kept), squares - (rest * shift).view(kept)])


def combine(parts: Tensor) -> Tensor:
    """Return the joint moments `[3, *kept]` of all parts `[n, 3, *kept]`; parts may be empty.

        mean = sum(n_i * mean_i) / n        M2 = sum(M2_i) + sum(n_i * (mean_i - mean)**2)

    The parts are added in order, so equal `parts` give equal results on every rank.
    """
    counts, means, squares = parts.unbind(1)
    count = counts.sum(0)
    mean = (counts * means).sum(0) / count.clamp_min(1)
    apart = means - mean
    return torch.stack([count, mean, (squares + counts * (apart * apart)).sum(0)])


def _shape(x: Tensor, dims: Sequence[int]) -> Tensor:
    return x.new_empty([3, *(n for dim, n in enumerate(x.shape) if dim not in dims)])


MOMENTS_OP = opaque("moments(Tensor x, int[] dims) -> Tensor", moments, _shape)
"""`moments` as an op of the captured graph."""
