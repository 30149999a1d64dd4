"""`Request`: what is to be captured, and how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fxdp.capture.inputs import Inputs
from fxdp.capture.joint.raw_joint import JointOptions
from fxdp.capture.locations import Origin
from fxdp.capture.mixed_precision import MixedPrecision
from fxdp.errors import CaptureError, InputError


@dataclass(frozen=True)
class Request:
    """A module, the inputs of a call, and how they are captured; under `torch.no_grad()` the forward alone.

    Raises
    ------
    InputError, CaptureError : a request that cannot be meant.
    """

    module: nn.Module
    inputs: Inputs
    loss_fn: Callable[..., Any] | None = None
    """The program becomes `loss_fn(module(*args, **kwargs), target)`; `target` is a keyword."""
    joint: JointOptions = field(default_factory=JointOptions)
    dynamic: bool = False
    """Make all sizes of the inputs symbolic, not only the batch."""
    hint: int | None = None
    """The batch size to trace with: for code that branches on the batch size, whose `Captured.conditions` do
    not hold at the size that is wanted; 1, with `full_batch_draws`: the capture is for a single sample, for
    which random numbers may come in another order."""
    full_batch_draws: bool = False
    """Random numbers are one device's for the global batch (`joint/batch_size_one_rng.py`)."""
    precision: MixedPrecision | None = None
    """In which dtypes the model computes, if not in its own."""
    branches: tuple[bool, ...] | None = ()
    """Which way the code goes at each flag of the batch that it branches on, as far as it is known, elsewhere
    the likely one; None: such branches are refused (`patches/flags.py`)."""
    origin: Origin | None = None
    """The user's lines behind the model; None: where it is captured."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        _check_hint(self.hint, 1 if self.full_batch_draws else 2)
        _check_loss_fn(self.loss_fn, self.module, self.inputs)


def _check_hint(hint: int | None, least: int) -> None:
    if hint is not None and hint < least:
        raise InputError(f"hint must be a batch size of at least {least}, got {hint}")


def _check_loss_fn(loss_fn: Callable[..., Any] | None, module: nn.Module, inputs: Inputs) -> None:
    if loss_fn is None:
        return
    _, kwargs = inputs.rebuild(inputs.tensors)
    if "target" not in kwargs:
        raise InputError(
            "with loss_fn= a call in training needs the keyword target=, the loss's second argument; "
            "in evaluation, after eval(), a call without it returns the model's own output"
        )
    if isinstance(loss_fn, nn.Module):
        own = {id(parameter) for parameter in module.parameters()}
        loose = [name for name, p in loss_fn.named_parameters() if p.requires_grad and id(p) not in own]
        if loose:
            raise CaptureError(
                f"loss_fn has trainable parameters of its own ({', '.join(loose)}), which the module's state "
                "does not hold. Make the loss a part of the module and let the module return it"
            )
