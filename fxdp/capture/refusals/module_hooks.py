"""Refuse hooks on the backward of modules, before the model is captured."""

from __future__ import annotations

import torch
from torch import nn

from fxdp.errors import CaptureError


def check_module_hooks(module: nn.Module) -> None:
    """Raise on backward hooks of modules, which no graph of tensors can hold.

    Raises
    ------
    CaptureError : modules with backward hooks, all of them.
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
