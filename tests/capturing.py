"""Capture a module in one call, as most tests want it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from fxdp.capture.captured import Captured
from fxdp.capture.driver import capture_request
from fxdp.capture.inputs import read_inputs
from fxdp.capture.joint.raw_joint import JointOptions
from fxdp.capture.request import Request


def capture(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    batch_dims: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    dynamic: bool = False,
    differentiable: str = "loss",
    couple: bool = True,
    own_statistics: bool = False,
    hint: int | None = None,
    full_batch_draws: bool = False,
) -> Captured:
    """`module(*args, **kwargs)` and its backward; the options are those of `Request` and `JointOptions`."""
    inputs = read_inputs(module, args, kwargs, batch_dims)
    how = JointOptions(differentiable, couple, own_statistics)
    return capture_request(Request(module, inputs, loss_fn, how, dynamic, hint, full_batch_draws))
