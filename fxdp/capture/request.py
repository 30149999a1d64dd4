"""`Request`: a module to be captured, with the inputs and options of the capture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fxdp.capture.captured import Captured
from fxdp.capture.inputs import Inputs
from fxdp.capture.joint.raw_joint import JointOptions
from fxdp.capture.locations import Origin
from fxdp.capture.mixed_precision import MixedPrecision
from fxdp.errors import CaptureError, InputError


class Guarded(nn.Module):
    """A module whose captures hold under conditions of its own, as a graph that was traced before."""

    def with_guards(self, captured: Captured, inputs: Inputs) -> Captured:
        """Return the capture with the module's conditions added."""
        raise NotImplementedError


@dataclass(frozen=True)
class Request:
    """A module, the inputs of a call, and options of capture.

    Under `torch.no_grad()` only the forward is captured.

    Raises
    ------
    InputError, CaptureError : the request is inconsistent.
    """

    module: nn.Module
    inputs: Inputs
    loss_fn: Callable[..., Any] | None = None
    """If given, the program computes `loss_fn(module(*args, **kwargs), target)`; `target` is a keyword."""
    joint: JointOptions = field(default_factory=JointOptions)
    dynamic: bool = False
    """True makes all sizes of the inputs symbolic, not only the batch."""
    hint: int | None = None
    """The batch size to trace with.

    Set for code that branches on the batch size, if `Captured.conditions` do not hold at the wanted size.
    With `full_batch_draws`, a hint of 1 captures for a single sample, for which random numbers may come in
    another order.
    """
    full_batch_draws: bool = False
    """True if random numbers are those of one device on the global batch (`joint/batch_size_one_rng.py`)."""
    precision: MixedPrecision | None = None
    """The dtypes in which the model computes; None for the model's own dtypes."""
    branches: tuple[bool, ...] | None = ()
    """Known decisions of the code at each flag of the batch that the code branches on.

    At further flags the likely branch is taken. None refuses branches on the batch (`python/flags.py`).
    """
    origin: Origin | None = None
    """The user's lines behind the model; None for the line that starts the capture."""

    strict: bool = False
    """An error says of each strategy of capture why it was left or not tried, not only of those tried."""

    def __post_init__(self) -> None:
        """Raise if the options contradict the inputs."""
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
