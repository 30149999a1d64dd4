"""Choose how an optimizer steps on sharded parameters.

elementwise ones of torch.optim    on this rank's shards                    `LocalStep`
matrix ones                        on full matrices, each on one rank      `OwnerUpdate`
any other class                    on `DTensor`s, as in torch
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
from fxdp.ir.graph.model_tensors import is_sharded
from fxdp.ranks.process_mesh import ProcessMesh
from fxdp.sharding.local_step import LocalShards, LocalStep
from fxdp.sharding.owner_update import OwnerUpdate
from fxdp.sharding.superseded import adopt_successors
from fxdp.torch_compat import surround_step

# by exact type: a subclass may override `step`
_ELEMENTWISE = frozenset(
    {
        optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax, optim.AdamW, optim.ASGD, optim.NAdam,
        optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD,
    }
)  # fmt: skip
_BY_MATRIX = frozenset({optim.Adafactor, optim.Muon})
_REFUSED = (optim.LBFGS, optim.SparseAdam)


class ShardedOptimizers:
    """Make each optimizer with parameters of a sharded module step as on one device.

    Parameters
    ----------
    note_step : called before each step.
    bitwise : whether the bits of a step must not depend on the number of ranks.

    Raises
    ------
    InputError (from `optimizer.step()`) : an LBFGS or SparseAdam; with `bitwise`, a fused optimizer.
    RankFailedError (from `optimizer.step()`) : another rank failed or died.
    """

    def __init__(
        self,
        module: nn.Module,
        process_mesh: ProcessMesh,
        note_step: Callable[[], None],
        *,
        bitwise: bool = False,
    ) -> None:
        self._own = frozenset(id(p) for p in module.parameters() if is_sharded(p))
        self._process_mesh = process_mesh
        self._note_step, self._bitwise = note_step, bitwise
        self._rows: weakref.WeakKeyDictionary[Optimizer, LocalShards] = weakref.WeakKeyDictionary()
        self._begin_hook = self._begin  # bound once, so that the hook can be identified
        handle = register_optimizer_step_pre_hook(self._meet)
        weakref.finalize(module, handle.remove)

    def _meet(self, optimizer: Optimizer, *_: Any) -> None:
        """Install hooks that run last before the optimizer's step and first after the step.

        Therefore hooks of the user that clip gradients or average parameters see the parameters that are
        stepped.
        """
        adopt_successors(optimizer)
        if any(id(p) in self._own for group in optimizer.param_groups for p in group["params"]):
            self._note_step()
            surround_step(optimizer, self._begin_hook, _finish)

    def _begin(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the step's arguments with a counterpart for the optimizer, or None to change nothing."""
        if args[0] is not optimizer:  # a second compiled module has put a counterpart there
            return None
        kind = type(optimizer)
        if isinstance(optimizer, _REFUSED):
            raise InputError(
                f"{kind.__name__} cannot step on sharded parameters, as it needs all gradients as one; "
                'expected another optimizer, or strategy="replicate"'
            )
        if self._bitwise and any(group.get("fused") for group in optimizer.param_groups):
            raise InputError(
                f"{kind.__name__}(fused=True) on sharded parameters with fxdp.Bitwise(...): its kernel "
                "rounds the last elements of a shard in another way, so bits would depend on the number of "
                'ranks; expected foreach=True instead, or strategy="replicate"'
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
    """Copy the results of the counterpart to the optimizer."""
    step = vars(args[0]).pop("fxdp_step", None)
    if step is not None:
        step.finish()


def _with_loss(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Call the closure, as a counterpart needs gradients first; return arguments with the finished loss."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        return args, kwargs
    with torch.enable_grad():
        loss = closure()
    return args[:1], {"closure": lambda: loss}
