"""Autograd between plain and global tensors: parameters enter ops as replicated values.

    parameter (plain) --Replicated--> global tensor R --op--> ... loss
    .grad (plain, full) <--Full------ gradient, terms of a sum P

So optimizers, clipping, averages of weights and state dicts see the plain parameters, with the gradient of
the global batch. Each function is the other's backward, which is why gradients of gradients work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fxdp.eager.batch_axis import BatchAxis
from fxdp.eager.tensor import GlobalTensor, wrapped
from fxdp.eager.view_origins import gathered
from fxdp.torch_compat import without_torch_function

_NO_OPERANDS = frozenset({
    torch.Tensor.backward, torch.Tensor.register_hook, torch.Tensor.requires_grad_, torch.Tensor.retain_grad,
    torch.Tensor.size, torch.Tensor.dim, torch.Tensor.detach, torch.autograd.backward,
})  # fmt: skip
"""Functions that ask about tensors, or begin a backward: parameters stay themselves."""


def call_above_autograd(
    cls: type, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Call a function of torch on global tensors, and on plain ones as replicated values."""
    if func is torch.autograd.grad:
        args, kwargs = _global_grad_outputs(args, kwargs or {})
    elif torch.is_grad_enabled() and func not in _NO_OPERANDS and (_has_plain(args) or kwargs):
        kwargs = kwargs or {}
        axis = _axis_among(args) or _axis_among(tuple(kwargs.values()))
        if axis is not None:
            args = _entered(args, axis)
            kwargs = {name: _entered(value, axis) for name, value in kwargs.items()} if kwargs else kwargs
    with without_torch_function():
        return func(*args, **kwargs) if kwargs else func(*args)


GlobalTensor.__torch_function__ = classmethod(call_above_autograd)  # type: ignore[assignment,method-assign]


def _has_plain(args: Any) -> bool:
    """Return whether an argument may have to enter: a plain tensor, or a list that may hold one."""
    for value in args:
        kind = type(value)
        if kind is not GlobalTensor and (kind is list or kind is tuple or isinstance(value, Tensor)):
            return True
    return False


def full_value(value: GlobalTensor) -> Tensor:
    """Return the full value as a plain tensor, with its gradient; a collective call."""
    with without_torch_function():
        return _Full.apply(value)  # type: ignore[no-untyped-call,no-any-return]


def replicated(value: Tensor, axis: BatchAxis) -> GlobalTensor:
    """Return a plain tensor, equal on all ranks, as a global one, with its gradient."""
    with without_torch_function():
        return _Replicated.apply(value, axis)  # type: ignore[no-untyped-call,no-any-return]


class _Replicated(torch.autograd.Function):
    """A plain tensor as a global one."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, axis: BatchAxis) -> GlobalTensor:
        return wrapped(value.detach(), axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return full_value(grad) if isinstance(grad, GlobalTensor) else grad, None


class _Full(torch.autograd.Function):
    """The full value of a global tensor as a plain one."""

    @staticmethod
    def forward(ctx: Any, value: GlobalTensor) -> Tensor:
        ctx.axis = value._spec.axis.ranks.unit
        full = gathered(value)
        return full.detach() if full is value._local else full

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad if isinstance(grad, GlobalTensor) else replicated(grad, ctx.axis)


def _entered(value: Any, axis: BatchAxis) -> Any:
    if type(value) is GlobalTensor:
        return value
    if isinstance(value, Tensor):
        return _Replicated.apply(value, axis) if value.requires_grad else value  # type: ignore[no-untyped-call]
    if type(value) in (list, tuple):
        return type(value)([_entered(one, axis) for one in value])
    return value


def _axis_among(values: Any) -> BatchAxis | None:
    for value in values:
        if type(value) is GlobalTensor:
            return value._spec.axis.ranks.unit
        if type(value) in (list, tuple) and (found := _axis_among(value)) is not None:
            return found
    return None


def _global_grad_outputs(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of `torch.autograd.grad` with global `grad_outputs`, as the outputs are."""
    outputs = args[0] if args else kwargs.get("outputs")
    axis = _axis_among(outputs if isinstance(outputs, (list, tuple)) else (outputs,))
    if axis is None:
        return args, kwargs

    def entered(grads: Any) -> Any:
        if isinstance(grads, (list, tuple)):
            return type(grads)(map(entered, grads))
        is_plain = isinstance(grads, Tensor) and not isinstance(grads, GlobalTensor)
        return replicated(grads, axis) if is_plain else grads

    if len(args) > 2:
        args = (*args[:2], entered(args[2]), *args[3:])
    elif kwargs.get("grad_outputs") is not None:
        kwargs = {**kwargs, "grad_outputs": entered(kwargs["grad_outputs"])}
    return args, kwargs
