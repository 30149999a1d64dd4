"""Notice an optimizer that was built on other tensors than the compiled model's parameters.

A model that was copied, or moved to another dtype after the optimizer was made, would train without ever
changing. A hook looks at the first optimizer step only and then removes itself.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from fxdp.errors import StateError


def watch_optimizers(module: nn.Module) -> None:
    """Check the first optimizer that steps on parameters like the module's.

    Raises
    ------
    StateError (from `optimizer.step()`) : the optimizer holds tensors of the same shapes as the model's
        parameters, but not one of the parameters themselves.
    """
    trainable = [p for p in module.parameters() if p.requires_grad]
    if not trainable:
        return
    own = {id(p) for p in trainable}
    shapes = Counter(tuple(p.shape) for p in trainable)

    def check(optimizer: Optimizer, *_: Any) -> None:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if any(id(p) in own for p in held):
            handle.remove()
        elif Counter(tuple(p.shape) for p in held) == shapes:
            handle.remove()
            raise StateError(
                f"{type(optimizer).__name__} was built on {len(held)} tensors of which none is a parameter of the "
                "compiled model, though they have the same shapes (a copy of the model, or the model before "
                ".to()?). Build it on compiled.parameters()"
            )

    handle: torch.utils.hooks.RemovableHandle = register_optimizer_step_pre_hook(check)  # type: ignore[no-untyped-call]
