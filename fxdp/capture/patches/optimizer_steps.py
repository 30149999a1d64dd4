"""Refusal of steps of optimizers in captured code: a program computes gradients, and changes none.

    def step(x, y):
        optimizer.zero_grad()       refused: it would act once, at capture
        return F.cross_entropy(net(x), y)
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from fxdp.capture.locations import location_of_call
from fxdp.errors import CaptureError
from fxdp.torch_compat import Patch, around


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise CaptureError(
        f"at {location_of_call()}: an optimizer's step and zero_grad inside the captured code are not "
        "supported, as a program changes no gradient. Return the loss, and call both outside"
    )


_KINDS = tuple(
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and "step" in vars(kind)
)
OPTIMIZER_STEPS: tuple[Patch, ...] = (
    Patch(nn.Module, "zero_grad", around(_refuse)),
    *(Patch(kind, "step", around(_refuse)) for kind in _KINDS),
    Patch(Optimizer, "zero_grad", around(_refuse)),
)
"""Patches for runs of the user's code."""
