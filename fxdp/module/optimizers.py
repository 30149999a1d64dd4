"""Notice an optimizer that was built on other tensors than the compiled model's parameters.

A model that was copied, or moved to another dtype after the optimizer was made, would train without ever
changing. A hook looks at optimizer steps until it has seen the model's own optimizer.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from fxdp.errors import StateError
from fxdp.ir.model_tensors import held


class OptimizerWatch:
    """Checks the first optimizer that steps on parameters like the module's.

    Raises
    ------
    StateError (from `optimizer.step()`) : the optimizer holds tensors of the same shapes as the model's
        parameters, but not one of them, and has no gradient to step on while the model has.
    """

    def __init__(self, module: nn.Module) -> None:
        trainable = [p for p in module.parameters() if p.requires_grad]
        # of a DTensor an optimizer may step on the local shard alone, for speed
        self._own = {id(t): weakref.ref(t) for p in trainable for t in (p, held(p))}
        self._shapes = Counter(tuple(p.shape) for p in trainable)
        self._handle = register_optimizer_step_pre_hook(self._check)
        self._done = not trainable

    def remove_when_done(self) -> bool:
        """Remove the hook once it has seen the optimizer; a hook cannot remove itself while it runs."""
        if self._done:
            self.remove()
        return self._done

    def remove(self) -> None:
        """Look at no further optimizer; torch holds a hook, and what it is bound to, forever."""
        self._handle.remove()

    def _check(self, optimizer: Optimizer, *_: Any) -> None:
        if self._done:
            return
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        self._done = any(id(p) in self._own for p in stepped)
        if not self._done and self._is_misdirected(stepped):
            raise StateError(
                f"{type(optimizer).__name__} was built on {len(stepped)} tensors of which none is a "
                "parameter of the compiled model, though they have the same shapes (a copy of the model, "
                "or the model before .to()?). Build it on compiled.parameters()"
            )

    def _is_misdirected(self, stepped: list[torch.Tensor]) -> bool:
        shapes = Counter(tuple(p.shape) for p in stepped)
        if shapes != self._shapes or any(p.grad is not None for p in stepped):
            return False
        return any(
            (own := reference()) is not None and own.grad is not None for reference in self._own.values()
        )
