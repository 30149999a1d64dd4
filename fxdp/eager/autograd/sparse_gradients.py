"""Sparse gradients of tables: `nn.Embedding` and `nn.EmbeddingBag` with `sparse=True` on global tensors.

    forward    indices (sharded) --read rows of the table--> result (sharded)
    backward   gradient of the result, and the indices: all-gathered, uneven and empty parts included
               .grad of the table: sparse, equal on all ranks, made by torch from the global batch

As many bytes are sent as the batch has rows, whatever the size of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fxdp.eager.message_report import user_line
from fxdp.eager.tensor import GlobalTensor
from fxdp.errors import InputError
from fxdp.torch_compat import without_torch_function

_LOOKUPS = (F.embedding, F.embedding_bag)
_TENSORS = ("offsets", "per_sample_weights")
"""The arguments of a lookup that may be tensors, beside the indices and the table."""


def is_sparse_lookup(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether this call reads a table that gets a sparse gradient."""
    if func not in _LOOKUPS or not kwargs.get("sparse") or not torch.is_grad_enabled():
        return False
    return isinstance(args[1], Tensor) and args[1].requires_grad


def sparse_lookup(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Read rows of a table, a plain tensor, whose gradient is sparse.

    Raises
    ------
    InputError : the table is a global tensor, names the line.
    """
    indices, table = args
    if isinstance(table, GlobalTensor):
        raise InputError(
            f"{user_line()}: {func.__name__} with sparse=True reads a table that was computed from global "
            "tensors; expected a parameter, whose gradient can be sparse: pass sparse=False"
        )
    read = func(indices, table.detach(), **kwargs)  # also scales rows to `max_norm`, in place
    tensors = tuple(kwargs.get(name) for name in _TENSORS)
    given = {name: value for name, value in kwargs.items() if name not in (*_TENSORS, "max_norm")}
    with without_torch_function():
        return _Read.apply(read, table, func, given, indices, *tensors)  # type: ignore[no-untyped-call]


class _Read(torch.autograd.Function):
    """Rows that were read from a table, as a function of the table."""

    @staticmethod
    def forward(
        ctx: Any,
        read: GlobalTensor,
        table: Tensor,
        func: Any,
        given: dict[str, Any],
        *tensors: Tensor | None,
    ) -> Any:
        ctx.save_for_backward(*tensors)
        ctx.table, ctx.func, ctx.given = table.detach(), func, given
        return read.view_as(read)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        indices, *others = map(_full, ctx.saved_tensors)
        tensors = {name: value for name, value in zip(_TENSORS, others, strict=True) if value is not None}
        with torch.enable_grad():
            table = ctx.table.requires_grad_()  # its values have no part in the gradient
            read = ctx.func(indices, table, **ctx.given, **tensors)
        (gradient,) = torch.autograd.grad(read, table, _full(grad), create_graph=torch.is_grad_enabled())
        return grad, gradient, None, None, None, *(None for _ in others)


def _full(value: Any) -> Any:
    """Return the value of the global batch; a collective call."""
    return value.full() if isinstance(value, GlobalTensor) else value
