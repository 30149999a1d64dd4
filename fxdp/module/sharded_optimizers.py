"""Optimizers on sharded parameters, and which of them step how.

elementwise ones of torch.optim    on this rank's rows                      `LocalStep`
matrix ones                        on full matrices, each on one rank      `OwnerUpdate`
those of others                    on `DTensor`s, as torch does
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn, optim
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fxdp.errors import InputError
from fxdp.ir.model_tensors import is_sharded
from fxdp.module.local_step import LocalShards, LocalStep
from fxdp.module.owner_update import OwnerUpdate
from fxdp.module.superseded import adopt_successors
from fxdp.ranks.process_mesh import ProcessMesh
from fxdp.torch_compat import surround_step

# by exact type: a subclass may do anything in its step
_ELEMENTWISE = frozenset(
    {
        optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax, optim.AdamW, optim.ASGD, optim.NAdam,
        optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD,
    }
)  # fmt: skip
_BY_MATRIX = frozenset({optim.Adafactor, optim.Muon})
_REFUSED = (optim.LBFGS, optim.SparseAdam)


class ShardedOptimizers:
    """Lets each optimizer that has parameters of a sharded module step as it would on one device.

    Parameters
    ----------
    note_step : called before each step.

    Raises
    ------
    InputError (from `optimizer.step()`) : an LBFGS or SparseAdam.
    RankFailedError (from `optimizer.step()`) : another rank failed or died.
    """

    def __init__(self, module: nn.Module, process_mesh: ProcessMesh, note_step: Callable[[], None]) -> None:
        self._own = frozenset(id(p) for p in module.parameters() if is_sharded(p))
        self._process_mesh = process_mesh
        self._note_step = note_step
        self._rows: weakref.WeakKeyDictionary[Optimizer, LocalShards] = weakref.WeakKeyDictionary()
        self._begin_hook = self._begin  # bound once, so that it is found again
        handle = register_optimizer_step_pre_hook(self._meet)
        weakref.finalize(module, handle.remove)

    def _meet(self, optimizer: Optimizer, *_: Any) -> None:
        """Come last before the optimizer's step and first after it.

        So hooks of the user that clip gradients or average parameters see those that are stepped on.
        """
        adopt_successors(optimizer)
        if any(id(p) in self._own for group in optimizer.param_groups for p in group["params"]):
            self._note_step()
            surround_step(optimizer, self._begin_hook, _finish)

    def _begin(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The step's arguments, with a twin in the place of the optimizer."""
        if args[0] is not optimizer:  # another module's, in whose place a twin steps already
            return None
        kind = type(optimizer)
        if isinstance(optimizer, _REFUSED):
            raise InputError(
                f"{kind.__name__} cannot step on sharded parameters, as it needs all gradients as one; "
                'expected another optimizer, or strategy="replicate"'
            )
        by_rows = kind in _ELEMENTWISE and not optimizer.defaults.get("differentiable")
        if not by_rows and kind not in _BY_MATRIX:
            return None
        args, kwargs = _with_loss(args, kwargs)
        step = self._local_step(optimizer) if by_rows else OwnerUpdate(optimizer, self._process_mesh)
        vars(step.twin)["fxdp_step"] = step
        return (step.twin, *args[1:]), kwargs

    def _local_step(self, optimizer: Optimizer) -> LocalStep:
        step = LocalStep(optimizer, self._rows.get(optimizer))
        self._rows[optimizer] = step.rows
        return step


def _finish(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Let the optimizer have what its twin has got."""
    step = vars(args[0]).pop("fxdp_step", None)
    if step is not None:
        step.finish()


def _with_loss(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with a closure that was called: it makes the gradients that a twin needs to begin."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    return args[:1], {"closure": lambda: loss}
