"""Tensor constants that a model makes for its batch size, the same row for each sample.

    torch.tensor([0] * batch)      traced at 3: [0, 0, 0], at 5: [0, 0, 0, 0, 0]
    fitted:                        %row = constant [0];  %size = size("B");  expand(%row, [%size])
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def repeated_dim(tensors: Sequence[Tensor]) -> int | None:
    """The one dim in which these differ in size, if all have the same row there; None otherwise."""
    first = tensors[0]
    if any((other.dtype, other.dim()) != (first.dtype, first.dim()) for other in tensors):
        return None
    sizes = zip(*(tensor.shape for tensor in tensors), strict=True)
    differing = [dim for dim, found in enumerate(sizes) if len(set(found)) > 1]
    if len(differing) != 1 or not all(map(Tensor.numel, tensors)):
        return None
    (dim,) = differing
    row = first.narrow(dim, 0, 1)
    return dim if all(torch.equal(tensor, row.expand_as(tensor)) for tensor in tensors) else None
