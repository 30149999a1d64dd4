"""What a tensor subclass around another tensor needs of torch, also while a backward runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

__all__ = [
    "backward_id", "call_after_backward", "call_without_torch_function", "kernel", "of_function_transform",
    "refuse_pointer", "same_versions", "will_accumulate", "without_torch_dispatch", "without_torch_function",
]  # fmt: skip

without_torch_function = torch._C.DisableTorchFunctionSubclass
"""`with without_torch_function():` calls torch's own functions on tensors of a subclass."""

refuse_pointer = torch._C._set_throw_on_mutable_data_ptr
"""Make an extension in C++ that asks for memory end with an error, instead of reading address 0."""

call_without_torch_function: Any = torch.nn.Parameter.__torch_function__
"""The same for one call, `(function, types, args, kwargs)`, in C."""

without_torch_dispatch = torch._C._DisableTorchDispatch
"""`with without_torch_dispatch():` an op acts on the wrappers of a subclass, not on what they wrap."""


def same_versions(tensors: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
    """Return a block whose writes do not count for autograd, as native BatchNorm's do not."""
    return torch.autograd._unsafe_preserve_version_counter(tuple(tensors))  # type: ignore[attr-defined]


def of_function_transform(value: torch.Tensor) -> bool:
    """Return whether a tensor belongs to a transform of `torch.func` that runs, as `grad` or `vmap`."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(value))


def backward_id() -> int:
    """Return a number of the backward that runs, -1 if none does; a backward in a backward has its own."""
    return torch._C._current_graph_task_id()


def call_after_backward(function: Callable[[], None]) -> None:
    """Call a function when the backward that runs has computed all gradients, before it returns."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def will_accumulate(node: Any) -> bool:
    """Return whether the backward that runs adds a gradient to the leaf of this node.

    False if the gradient is returned, as by `torch.autograd.grad`.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch's answer for a leaf whose gradient is returned
        return False


def kernel(op: Callable[..., Any]) -> Callable[..., Any]:
    """Return the builtin that an op calls, which saves a call of Python."""
    return getattr(op, "_op", op)
