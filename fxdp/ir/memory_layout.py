"""How the dims of an input follow each other in memory: in that order eager draws random numbers for it.

A dropout's numbers are laid down as the memory of its operand lies. So with `rng="single-device"` a program
belongs to one arrangement of its inputs, of the whole batch and of each rank's part.

    x [B, C, H, W] in channels_last         (0, 2, 3, 1)
    [T, B] transposed to [B, T]             (1, 0)
    a row [T], expanded to [B, T]           (1,)
    x [B, T] as it is made, or x[:, :5]     (0, 1)

Sizes and the gaps that a slice leaves do not count: torch makes dense memory in the same order with and
without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import torch
from torch import Tensor

Arrangement: TypeAlias = "tuple[int, ...]"
"""The dims from the outermost to the innermost; those missing were expanded."""

UNCLEAR: Final[Arrangement] = (-1,)
"""Of a tensor that overlaps itself, or lies in other orders on other ranks."""


def arrangement(tensor: Tensor) -> Arrangement:
    """The arrangement of a tensor."""
    sizes, strides = tensor.shape, tensor.stride()
    dims = [d for d, stride in enumerate(strides) if stride != 0]
    order = tuple(sorted(dims, key=lambda d: (-strides[d], sizes[d] == 1)))
    reach = 0
    for dim in reversed(order):
        if sizes[dim] > 1:
            if strides[dim] <= reach:
                return UNCLEAR
            reach += (sizes[dim] - 1) * strides[dim]
    return order


def in_order(ndim: int) -> Arrangement:
    """The arrangement of a tensor whose dims follow each other in memory."""
    return tuple(range(ndim))


def arranged(
    sizes: Sequence[int], order: Arrangement, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Unwritten memory of this arrangement, without gaps."""
    if order == UNCLEAR:
        order = in_order(len(sizes))
    strides, step = [0] * len(sizes), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(sizes[dim], 1)
    return torch.empty_strided(list(sizes), strides, dtype=dtype, device=device)


def copied(tensor: Tensor, order: Arrangement) -> Tensor:
    """A detached copy of this arrangement."""
    made = arranged(tensor.shape, order, tensor.dtype, tensor.device)
    once = tuple(slice(None) if stride else slice(1) for stride in made.stride())
    made[once].copy_(tensor.detach()[once])
    return made
