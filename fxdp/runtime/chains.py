"""Compiled modules that feed one another, as a GAN's generator its critic.

The gradient of a sharded output counts as that of a loss of this rank's own, of which the ranks' mean is
meant, and is divided by the number of ranks (DistributedDataParallel's convention). What a compiled module
gives for its inputs is the gradient of the *global* loss. On the way from one to the other it is multiplied
by the ranks.

    images = generator(z);  loss = critic(images);  loss.backward()
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fxdp.runtime.bound import STEP_BACKWARD


def chained(tensors: Sequence[Tensor], batch_dims: Sequence[int | None], world: int) -> Sequence[Tensor]:
    """The inputs of a call; through those that come from a compiled module flow gradients times `world`."""
    if world == 1 or not torch.is_grad_enabled():
        return tensors
    return [
        _Times.apply(t, world) if dim is not None and _from_compiled(t) else t  # type: ignore[no-untyped-call]
        for t, dim in zip(tensors, batch_dims, strict=True)
    ]


def _from_compiled(tensor: Tensor) -> bool:
    """Whether a tensor was computed from an output of a compiled module."""
    waiting: list[Any] = [tensor.grad_fn]
    seen: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        if isinstance(node, STEP_BACKWARD):
            return True
        seen.add(node)
        waiting += [source for source, _ in node.next_functions]
    return False


class _Times(torch.autograd.Function):
    """The same tensor; its gradient times a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: int) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None
