"""Scale gradients between compiled modules that feed one another, as a GAN's generator its critic.

The gradient of a sharded output is taken as the gradient of this rank's local loss, whose mean over ranks is
optimized, and is divided by the number of ranks (the convention of DistributedDataParallel). The input
gradients of a compiled module are gradients of the *global* loss. So a gradient that flows from one compiled
module to another is multiplied by the number of ranks.

    images = generator(z);  loss = critic(images);  loss.backward()
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxdp.runtime.bound import REPLACED, STEP_BACKWARD

GLOBAL_GRADIENT = "fxdp_global_gradient"
"""Attribute of autograd nodes that take gradients of the global loss, and scale these themselves."""


def chained(tensors: Sequence[Tensor], batch_dims: Sequence[int | None], world: int) -> Sequence[Tensor]:
    """Return the inputs of a call; gradients flowing back into a compiled module are scaled by `world`."""
    if world == 1 or not torch.is_grad_enabled():
        return tensors
    made = list(tensors)
    for i, (tensor, dim) in enumerate(zip(tensors, batch_dims, strict=True)):
        if dim is not None and tensor.grad_fn is not None and feeds(tensor):
            made[i] = _Times.apply(tensor, world)  # type: ignore[no-untyped-call]
    return made


def parameters_behind(tensor: Tensor) -> Iterator[nn.Parameter]:
    """Yield the parameters from which eager code computed a tensor, back to results of compiled modules."""
    for node, _ in _behind(tensor):
        if isinstance(found := getattr(node, "variable", None), nn.Parameter):  # accumulates gradients
            yield found


def feeds(tensor: Tensor) -> bool:
    """Return whether a tensor depends on results of compiled modules, and record these results as fed."""
    fed = False
    for node, output in _behind(tensor):
        if isinstance(node, STEP_BACKWARD):
            step: Any = node
            step.fed.add(output)
            fed = True
    return fed


def _behind(tensor: Tensor) -> Iterator[tuple[Any, int]]:
    """Yield the autograd nodes behind a tensor, with output numbers, back to compiled modules."""
    waiting: list[tuple[Any, int]] = [(tensor.grad_fn, tensor.output_nr)]
    seen: set[tuple[Any, int]] = set()
    while waiting:
        node, output = waiting.pop()
        if node is None or (node, output) in seen:
            continue
        seen.add((node, output))
        yield node, output
        if not isinstance(node, STEP_BACKWARD) and not getattr(node, GLOBAL_GRADIENT, False):
            waiting += node.next_functions


def replace_backward(nodes: Sequence[Any]) -> None:
    """Let the compiled calls behind these nodes give no gradients: somebody else gives those of the call.

    Each node is of a result as `module/global_calls.py` returns it, directly behind the call's own node.
    """
    for node in nodes:
        step = node if isinstance(node, STEP_BACKWARD) else node.next_functions[0][0]
        if isinstance(step, STEP_BACKWARD):
            setattr(step, REPLACED, True)


class _Times(torch.autograd.Function):
    """Identity in the forward; multiplies the gradient by a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: int) -> Tensor:
        ctx.factor = factor
        ctx.set_materialize_grads(False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, None]:
        return None if gradient is None else gradient * ctx.factor, None
