"""Refuse calls inside of a tracer, a transform of torch.func or a `DistributedDataParallel`."""

from __future__ import annotations

import torch
from torch import nn

from fxdp.errors import InputError, StateError
from fxdp.torch_compat import running_ddp, running_transform

_TRAINERS = (
    "fxdp.integrations.transformers.compile_trainer(trainer)",
    "fxdp.integrations.accelerate.compile_accelerator(accelerator)",
    "Trainer(strategy=fxdp.integrations.lightning.FxdpStrategy())",
)


def refuse_surroundings(model: nn.Module) -> None:
    """Refuse a call inside of a transform of code, or of a `DistributedDataParallel`.

    Raises
    ------
    InputError : a `DistributedDataParallel` would reduce the model's gradients, too.
    StateError : a transform of torch.func or a tracer runs.
    """
    refuse_transforms("called")
    ddp = running_ddp()
    if ddp is None or not torch.is_grad_enabled():
        return
    reduced = {id(p) for p in ddp.parameters() if p.requires_grad}
    if any(id(p) in reduced for p in model.parameters()):
        raise refused_wrapper(f"DistributedDataParallel({type(ddp.module).__name__}), of which it is a part")


def refuse_transforms(done: str) -> None:
    """Refuse an action (`done`, as in "called") inside of a transform of code.

    Raises
    ------
    StateError : a transform of torch.func, or a tracer, runs.
    """
    if transform := running_transform():
        raise StateError(
            f"a compiled module was {done} inside of {transform}, which cannot look into its programs; "
            "expected calls on plain tensors: transform or export the model itself, compiled.module"
        )


def refused_wrapper(what: str) -> InputError:
    """Return the error about a wrapper around a compiled module."""
    return InputError(
        f"{what}: a compiled module sums its gradients over the ranks already; expected nothing around it: "
        "call the compiled module itself. For a trainer that puts it there, there is a line to add: "
        + "; ".join(_TRAINERS)
    )
