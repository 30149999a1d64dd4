"""Compiled modules that feed one another, as a GAN's generator its critic.

The gradient of a sharded output counts as that of a loss of this rank's own, of which the ranks' mean is
meant, and is divided by the number of ranks (DistributedDataParallel's convention). What a compiled module
gives for its inputs is the gradient of the *global* loss. On the way from one to the other it is multiplied
by the ranks.

    images = generator(z);  loss = critic(images);  loss.backward()
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxdp.runtime.bound import STEP_BACKWARD


def chained(tensors: Sequence[Tensor], batch_dims: Sequence[int | None], world: int) -> Sequence[Tensor]:
    """The inputs of a call; through those that come from a compiled module flow gradients times `world`."""
    if world == 1 or not torch.is_grad_enabled():
        return tensors
    return [
        _Times.apply(t, world) if dim is not None and _feeds(t) else t  # type: ignore[no-untyped-call]
        for t, dim in zip(tensors, batch_dims, strict=True)
    ]


def parameters_behind(tensor: Tensor) -> Iterator[nn.Parameter]:
    """The parameters from which ordinary code computed a tensor, since compiled modules gave results."""
    for node, _ in _behind(tensor):
        if isinstance(found := getattr(node, "variable", None), nn.Parameter):  # where gradients accumulate
            yield found


def _feeds(tensor: Tensor) -> bool:
    """Whether a tensor was computed from results of compiled modules, which are noted as such."""
    fed = False
    for node, output in _behind(tensor):
        if isinstance(node, STEP_BACKWARD):
            step: Any = node
            step.fed.add(output)
            fed = True
    return fed


def _behind(tensor: Tensor) -> Iterator[tuple[Any, int]]:
    """The autograd nodes from which a tensor was computed, with their outputs, back to compiled modules."""
    waiting: list[tuple[Any, int]] = [(tensor.grad_fn, tensor.output_nr)]
    seen: set[tuple[Any, int]] = set()
    while waiting:
        node, output = waiting.pop()
        if node is None or (node, output) in seen:
            continue
        seen.add((node, output))
        yield node, output
        if not isinstance(node, STEP_BACKWARD):
            waiting += node.next_functions


class _Times(torch.autograd.Function):
    """The same tensor; its gradient times a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: int) -> Tensor:
        ctx.factor = factor
        ctx.set_materialize_grads(False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:
        return None if gradient is None else gradient * ctx.factor, None
