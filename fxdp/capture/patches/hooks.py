"""Hooks on gradients: those on tensors become part of the backward, those on modules are refused."""

from __future__ import annotations

import contextlib
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fxdp.capture.patches.deferred import current
from fxdp.errors import CaptureError
from fxdp.ir.notes import Site


@contextlib.contextmanager
def deferred_hooks() -> Iterator[None]:
    """While the user's code is exported, `tensor.register_hook` is a node (see `deferred`)."""
    plain = Tensor.register_hook

    def register_hook(self: Tensor, hook: Callable[[Tensor], Any]) -> RemovableHandle:
        kept = current()
        if kept is None or not torch.is_grad_enabled():
            return plain(self, hook)  # type: ignore[no-any-return, no-untyped-call]
        frame = traceback.extract_stack(limit=2)[0]
        checked = _checked(hook, Site(frame.filename, frame.lineno or 0, frame.line or ""))
        kept.visit(lambda x: plain(x, checked) if x.requires_grad else None, self)  # type: ignore[no-untyped-call]
        return RemovableHandle(OrderedDict())

    Tensor.register_hook = register_hook  # type: ignore[method-assign]
    try:
        yield
    finally:
        Tensor.register_hook = plain  # type: ignore[method-assign]


def _checked(hook: Callable[[Tensor], Any], site: Site) -> Callable[[Tensor], Tensor]:
    """A hook that must return the gradient which takes the place of the given one."""

    def checked(gradient: Tensor) -> Tensor:
        replaced = hook(gradient)
        if isinstance(replaced, Tensor):
            return replaced
        raise CaptureError(
            f"at {site}: a hook on a gradient returns nothing. What else it does would happen once, while "
            "the model is captured, and not at each step. Let it return a new gradient, or return the tensor "
            "from the model and take its gradient outside"
        )

    return checked


def check_module_hooks(module: nn.Module) -> None:
    """Refuse hooks on the backward of modules, which no graph of tensors can hold.

    Raises
    ------
    CaptureError : modules with such hooks, all of them.
    """
    if not torch.is_grad_enabled():
        return
    found = [
        f"{name or 'the model'} ({type(child).__name__})"
        for name, child in module.named_modules()
        if child._backward_hooks or child._backward_pre_hooks
    ]
    if found:
        raise CaptureError(
            f"hooks on the backward of modules are not supported; registered on {', '.join(found)}. Remove "
            "them, or hook the tensor itself in the forward (tensor.register_hook with a hook that returns "
            "the gradient)"
        )
