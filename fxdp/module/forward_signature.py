"""`SignedForward`: the forward of a compiled module, with the signature of its model's own.

Frameworks read it: transformers' Trainer drops every column of a batch that the forward does not name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

_SELF = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)


class SignedForward:
    """A method of a class whose instances have a function of their own for it, as `_forward`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __get__(self, module: Any, owner: type | None = None) -> Callable[..., Any]:
        # a bound method is made at each read, as Python does: one kept by the module would hold the module
        return self.function if module is None else MethodType(module._forward, module)


def signed(forward: SignedForward, model: nn.Module, with_target: bool) -> Callable[..., Any]:
    """The function with the signature of the model's forward, and the keyword `target` where a loss takes it.

    A forward without a readable signature leaves the function's own.
    """

    @functools.wraps(forward.function)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward.function(self, *args, **kwargs)

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
