"""Plain tensors that are written by global ones: their gradients go on as plain ones.

rows = torch.zeros(8, 3) + bias     plain, computed from a parameter
rows[:4] = x.mean(0)                written by a global value: the gradient of `rows` is global
bias.grad                           plain, as `rows` sends a full one
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxdp.torch_compat import in_function_transform, of_function_transform


def keep_plain_gradient(target: Any, full_value: Any) -> None:
    """Let a plain tensor that is about to be written by a global one send plain gradients to its history.

    `target` may be a list of tensors. `full_value` returns the plain value of a global gradient.
    """
    if isinstance(target, (list, tuple)):
        for one in target:
            keep_plain_gradient(one, full_value)
    elif _is_computed(target) and not in_function_transform() and not of_function_transform(target):
        _PlainGradient.apply(target, full_value)  # type: ignore[no-untyped-call]


def _is_computed(target: Any) -> bool:
    return isinstance(target, Tensor) and target.requires_grad and not target.is_leaf


class _PlainGradient(torch.autograd.Function):
    """A plain tensor itself; its gradient is made plain."""

    @staticmethod
    def forward(ctx: Any, target: Tensor, full_value: Any) -> Tensor:
        ctx.full_value = full_value
        ctx.mark_dirty(target)
        return target

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.full_value(grad), None
