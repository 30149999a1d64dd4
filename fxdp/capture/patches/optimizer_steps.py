"""Refusal of steps of optimizers in captured code: a program computes gradients, and changes none.

def step(x, y):
    optimizer.zero_grad()       refused: it would act once, at capture
    return F.cross_entropy(net(x), y)
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fxdp.capture.locations import location_of_call
from fxdp.errors import CaptureError
from fxdp.torch_compat import Patch, around, patched


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise CaptureError(
        f"at {location_of_call()}: an optimizer's step and zero_grad inside the captured code are not "
        "supported, as a program changes no gradient. Return the loss, and call both outside"
    )


@contextlib.contextmanager
def refused_steps() -> Iterator[None]:
    """Refuse steps of optimizers of any class by this thread inside the block.

    Raises
    ------
    CaptureError : an optimizer steps, or gradients are set to zero.
    """
    thread = threading.get_ident()

    def refuse(*_: Any) -> None:
        if threading.get_ident() == thread:
            _refuse()

    handle = register_optimizer_step_pre_hook(refuse)  # of all optimizers of the process
    try:
        with patched(Patch(owner, "zero_grad", around(_refuse)) for owner in (nn.Module, Optimizer)):
            yield
    finally:
        handle.remove()
