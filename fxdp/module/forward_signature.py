"""`SignedForward`: the forward of a compiled module with the signature of the model's own forward.

Frameworks read this signature: transformers' Trainer drops every batch column that the forward does not name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

from torch import nn

_SELF = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)


class SignedForward:
    """Descriptor for a method that each instance replaces by its own function, `_forward`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __get__(self, module: Any, owner: type | None = None) -> Callable[..., Any]:
        # a bound method is made at each read, as in Python: a stored bound method would keep the module alive
        return self.function if module is None else MethodType(module._forward, module)


def signed(forward: SignedForward, model: nn.Module, with_target: bool) -> Callable[..., Any]:
    """Return the function with the model's forward signature, plus the keyword `target` if a loss needs it.

    If the forward has no readable signature, the function keeps its own.
    """

    run = _copy(forward.function)
    try:
        own = inspect.signature(model.forward)
    except (TypeError, ValueError):
        return run
    parameters = [p for p in own.parameters.values() if p.name != "self"]
    if with_target and "target" not in own.parameters:
        rest = [p for p in parameters if p.kind is p.VAR_KEYWORD]
        target = inspect.Parameter("target", inspect.Parameter.KEYWORD_ONLY, default=None)
        parameters = [*(p for p in parameters if p not in rest), target, *rest]
    run.__signature__ = own.replace(parameters=[_SELF, *parameters])  # type: ignore[attr-defined]
    return run


def _copy(function: Any) -> FunctionType:
    """Copy a function: a wrapper around it would cost a further Python call at each step."""
    code, scope, default = function.__code__, function.__globals__, function.__defaults__
    made = FunctionType(code, scope, function.__name__, default, function.__closure__)
    functools.update_wrapper(made, function)
    del made.__wrapped__  # type: ignore[attr-defined]
    return made
