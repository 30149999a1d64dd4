"""Autograd between plain and global tensors: parameters enter ops as replicated values.

    parameter (plain) --Replicated--> global tensor R --op--> ... loss
    .grad (plain, full) <--Full------ gradient, terms of a sum P

So optimizers, clipping, averages of weights and state dicts see the plain parameters, with the gradient of
the global batch. Each function is the other's backward, which is why gradients of gradients work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fxdp.eager.autograd.gradient_buckets import keep_term, reduce_pending
from fxdp.eager.autograd.plain_gradients import keep_plain_gradient
from fxdp.eager.autograd.sparse_gradients import is_sparse_lookup, sparse_lookup
from fxdp.eager.batch_axis import BatchAxis
from fxdp.eager.plans.sparse_layouts import stays_plain
from fxdp.eager.sharded_operands import has_sharded, with_full_values, writes_first
from fxdp.eager.sums import reduce_small
from fxdp.eager.tensor import GlobalTensor, wrapped
from fxdp.eager.view_origins import gathered
from fxdp.torch_compat import (
    call_without_torch_function,
    in_function_transform,
    of_function_transform,
    without_torch_function,
)

_BIASES = "torch.nn.attention.bias"
"""The module of masks of attention that are tensors without values."""
_SEQUENCES = frozenset({list, tuple})
_SCALARS = frozenset({int, float, bool, slice, type(None), type(...), torch.dtype})
_INDEXED = frozenset({torch.Tensor.__getitem__, torch.Tensor.__setitem__})
_NO_OPERANDS = frozenset({
    torch.Tensor.backward, torch.Tensor.requires_grad_, torch.Tensor.retain_grad,
    torch.Tensor.size, torch.Tensor.dim, torch.Tensor.detach, torch.autograd.backward,
})  # fmt: skip
"""Functions that ask about tensors, or begin a backward: parameters stay themselves."""


def _call_above_autograd(
    cls: type, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """Call a function of torch on global tensors, and on plain ones as replicated values."""
    if len(types) > 1 and any(kind.__module__ == _BIASES for kind in types):
        return NotImplemented  # they do themselves what they stand for
    if func in _INDEXED and type(args[1]) is tuple:
        if len(args) == 2 and _SCALARS.issuperset(map(type, args[1])):
            return call_without_torch_function(func, types, args, {})
        if not _SEQUENCES.isdisjoint(map(type, args[1])):
            args = (args[0], tuple(map(_index, args[1])), *args[2:])
    if func in _CHANGED:
        return _CHANGED[func](args, kwargs or {})
    if kwargs and is_sparse_lookup(func, args, kwargs):
        return sparse_lookup(func, args, kwargs)
    if (_has_plain(args) or (kwargs and _has_plain(kwargs.values()))) and func not in _NO_OPERANDS:
        with without_torch_function():
            kwargs = kwargs or {}
            if has_sharded(args) or has_sharded(tuple(kwargs.values())):
                args = with_full_values(func, args)
                kwargs = dict(zip(kwargs, with_full_values(func, [*kwargs.values()]), strict=True))
            if not torch.is_grad_enabled():
                return func(*args, **kwargs)
            axis = _axis_among(args) or _axis_among(tuple(kwargs.values()))
            if axis is not None:
                written = args[:1] if writes_first(func) else ()
                keep_plain_gradient(written, _plain_gradient)
                args = (*written, *_entered(args[len(written) :], axis))
                kwargs = {name: _entered(value, axis) for name, value in kwargs.items()}
            return func(*args, **kwargs)
    return call_without_torch_function(func, types, args, kwargs or {})


GlobalTensor.__torch_function__ = classmethod(_call_above_autograd)  # type: ignore[assignment,method-assign]


def _index(value: Any) -> Any:
    """Return an index: a list of global numbers (`x[rows, columns]`) as a tensor; torch reads memory."""
    if type(value) in (list, tuple) and any(type(number) is GlobalTensor for number in value):
        return torch.stack([torch.as_tensor(number) for number in value])
    return value


def _has_plain(args: Any) -> bool:
    """Return whether an argument, or one in a list, is a plain tensor, which may have to enter."""
    for value in args:
        kind = type(value)
        if kind is GlobalTensor or kind in _SCALARS:
            continue
        if (kind is list or kind is tuple) and _has_plain(value):
            return True
        if isinstance(value, Tensor):
            return True
    return False


def full_value(value: GlobalTensor) -> Tensor:
    """Return the full value as a plain tensor, with its gradient; a collective call."""
    with without_torch_function():
        return _Full.apply(value)  # type: ignore[no-untyped-call,no-any-return]


def _plain_gradient(grad: Tensor) -> Tensor:
    return full_value(grad) if isinstance(grad, GlobalTensor) else grad


def replicated(value: Tensor, axis: BatchAxis) -> GlobalTensor:
    """Return a plain tensor, equal on all ranks, as a global one, with its gradient."""
    with without_torch_function():
        function = _ReplicatedInTransform if in_function_transform() else _Replicated
        return function.apply(value, axis)  # type: ignore[no-untyped-call,no-any-return]


class _Replicated(torch.autograd.Function):
    """A plain tensor as a global one."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, axis: BatchAxis) -> GlobalTensor:
        _note_entry(ctx, value, axis)
        return wrapped(value.detach(), axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        if ctx.leaf is not None and keep_term(ctx, grad):
            return None, None
        if type(grad) is not GlobalTensor or torch.is_grad_enabled():
            return _plain_gradient(grad), None
        full = gathered(grad, "a gradient")
        return full.clone() if full is grad._local else full, None  # it becomes `.grad`, which is written


class _ReplicatedInTransform(torch.autograd.Function):
    """The same inside of a transform of torch.func, which asks for this form; it costs 20 us more."""

    generate_vmap_rule = True

    @staticmethod
    def forward(value: Tensor, axis: BatchAxis) -> GlobalTensor:
        return wrapped(value.detach(), axis)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, BatchAxis], output: Any) -> None:
        _note_entry(ctx, *inputs)

    backward = _Replicated.backward


def _note_entry(ctx: Any, value: Tensor, axis: BatchAxis) -> None:
    ctx.axis, ctx.leaf = axis, value if value.is_leaf else None
    ctx.order = next(axis.ranks.entries)


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
    if isinstance(value, Tensor):  # a transform of torch.func derives by its own tensors
        enters = value.requires_grad and not stays_plain(value) and not of_function_transform(value)
        return _entered_tensor(value, axis) if enters else value
    if type(value) in (list, tuple):
        return type(value)([_entered(one, axis) for one in value])
    return value


def _entered_tensor(value: Tensor, axis: BatchAxis) -> Any:
    """Return the global value of a plain tensor; of a parameter one for all its uses in a step."""
    entered = axis.ranks.entered
    found = entered.get(id(value))
    if found is not None and found[0] is value:
        made = found[1]
        if made._version == 0 and made._local.data_ptr() == value.data_ptr():  # as `p.data = ...` changes it
            return made
    if axis.ranks.compares:
        axis.ranks.plain.note("an op", (value,))
    made = replicated(value, axis)
    if value.is_leaf and type(made) is GlobalTensor:  # not a tensor of a transform of torch.func
        entered[id(value)] = value, made
    return made


def _axis_among(values: Any) -> BatchAxis | None:
    for value in values:
        if type(value) is GlobalTensor:
            return value._spec.axis.ranks.unit
        if type(value) in (list, tuple) and (found := _axis_among(value)) is not None:
            return found
    return None


def _grad(args: Any, kwargs: dict[str, Any]) -> Any:
    """Call `torch.autograd.grad` with global `grad_outputs`, as the outputs are."""
    outputs = args[0] if args else kwargs.get("outputs")
    axis = _axis_among(outputs if isinstance(outputs, (list, tuple)) else (outputs,))

    def entered(grads: Any) -> Any:
        if isinstance(grads, (list, tuple)):
            return type(grads)(map(entered, grads))
        is_plain = isinstance(grads, Tensor) and not isinstance(grads, GlobalTensor)
        return replicated(grads, axis) if axis is not None and is_plain else grads

    with without_torch_function():
        if len(args) > 2:
            args = (*args[:2], entered(args[2]), *args[3:])
        elif kwargs.get("grad_outputs") is not None:
            kwargs = {**kwargs, "grad_outputs": entered(kwargs["grad_outputs"])}
        result = torch.autograd.grad(*args, **kwargs)
    reduce_small(result, "autograd.grad")
    return result


def _backward(args: Any, kwargs: dict[str, Any]) -> None:
    """Run a backward inside of which hooks, and functions that compute again, get what a forward gets.

    Given a tensor, torch would turn `__torch_function__` off until the backward ends.
    """
    given = dict(zip(("gradient", "retain_graph", "create_graph", "inputs"), args[1:], strict=False)) | kwargs
    with without_torch_function():
        value: Tensor = args[0]
        gradient = given.pop("gradient", None)
        if gradient is None and value.numel() == 1:
            gradient = torch.ones_like(value)
        if not value.requires_grad or gradient is None:
            value.backward(gradient, **given)  # type: ignore[no-untyped-call]  # torch refuses it
        edge = torch.autograd.graph.get_gradient_edge(value)
    torch.autograd.backward(edge, gradient, **given)


def _register_hook(args: Any, kwargs: dict[str, Any]) -> Any:
    """Register a hook of a global tensor, which sees each parameter's `.grad` up to date."""
    hook = args[1] if len(args) > 1 else kwargs["hook"]

    def reduce_and_call(grad: Tensor) -> Any:
        reduce_pending()
        return hook(grad)

    with without_torch_function():
        return args[0].register_hook(reduce_and_call)


def _number(name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return a global tensor's number; `torch.tensor([x, y])` asks for it where no op reaches fxdp."""
    value = args[0]
    is_number = isinstance(value, GlobalTensor) and set(value._spec.shape) <= {1}
    with without_torch_function():
        return getattr(gathered(value, name) if is_number else value, name)()


_CHANGED: Mapping[Callable[..., Any], Callable[[Any, dict[str, Any]], Any]] = {
    torch.autograd.grad: _grad,
    torch.Tensor.backward: _backward,
    torch.Tensor.register_hook: _register_hook,
    torch.Tensor.data_ptr: lambda args, kwargs: args[0].data_ptr(),  # of the class, as some libraries call it
    torch.Tensor.untyped_storage: lambda args, kwargs: args[0].untyped_storage(),
    **{getattr(torch.Tensor, name): partial(_number, name) for name in ("__index__", "__int__", "__float__")},
}
"""Functions that are called in another way."""
