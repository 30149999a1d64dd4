"""Refuse changes to parameters in a forward that a graph would not repeat at each step.

    for p in self.critic.parameters():
        p.requires_grad_(False)             no op of any graph: the critic would get this part's gradient, too
    score = self.critic(made)
    self.weight.register_hook(scale)        one more hook at each call
    if self.places is None:
        self.places = nn.Parameter(...)     no parameter of the program, which would make it anew at each step

The refusal is at the line of the change, and only if the statement changes anything.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fxdp.capture.locations import location_of_call
from fxdp.errors import CaptureError, a_kind
from fxdp.torch_compat import Patch, around


def unchanged_parameters(module: nn.Module) -> tuple[Patch, ...]:
    """Return patches that refuse to freeze, thaw, hook or create parameters while the model's code runs.

    The patched functions raise a `CaptureError` with the line.
    """
    return (
        Patch(Tensor, "requires_grad_", around(partial(_requires_grad, module))),
        Patch(Tensor, "requires_grad", partial(_assigned, module)),
        *(Patch(Tensor, name, around(partial(_hooked, module, name))) for name in _HOOKS),
        *(Patch(nn.Module, name, around(partial(_set, module))) for name in _SETTERS),
    )


_HOOKS = ("register_hook", "register_post_accumulate_grad_hook")
_SETTERS = ("__setattr__", "register_parameter", "add_module")
"""Methods called by assignment to an attribute, and methods that code calls directly."""


def _name_of(module: nn.Module, x: Tensor) -> str | None:
    """Return the name of a parameter; None if the tensor is not a parameter of the module."""
    return next((name for name, own in module.named_parameters() if own is x), None)


def _requires_grad(
    module: nn.Module, plain: Callable[..., Tensor], self: Tensor, requires_grad: bool = True
) -> Tensor:
    _check_kept(module, self, requires_grad)
    return plain(self, requires_grad)


def _assigned(module: nn.Module, plain: Any) -> property:
    """Check the assignment `x.requires_grad = False` as well."""

    def write(self: Tensor, value: bool) -> None:
        _check_kept(module, self, value)
        plain.__set__(self, value)

    return property(plain.__get__, write)


def _check_kept(module: nn.Module, x: Tensor, value: bool) -> None:
    if x.requires_grad == value or (name := _name_of(module, x)) is None:
        return
    raise CaptureError(
        f"{location_of_call().where}: the forward {'thaws' if value else 'freezes'} the parameter {name} "
        "(requires_grad), which no graph can hold: a program trains what trains when it is compiled. Do it "
        "outside of the forward, before the call; to keep one part of a loss from training a module, call "
        "that with detached parameters there: torch.func.functional_call(module, {name: p.detach() for name, "
        "p in module.named_parameters()}, x)"
    )


def _hooked(module: nn.Module, how: str, plain: Callable[..., Any], self: Tensor, hook: Any) -> Any:
    if (name := _name_of(module, self)) is None:
        return plain(self, hook)
    raise CaptureError(
        f"{location_of_call().where}: the forward hooks the parameter {name} by {how}, once more at each "
        "call, "
        "and a graph would do it once. Hook it outside of the forward, before or after the model is compiled"
    )


def _set(module: nn.Module, plain: Callable[..., None], self: nn.Module, name: str, value: Any) -> None:
    if isinstance(value, (nn.Parameter, nn.Module)) and torch.is_grad_enabled():
        given = [value] if isinstance(value, nn.Parameter) else list(value.parameters())
        known = {id(p) for p in module.parameters()}
        if any(p.requires_grad and id(p) not in known for p in given) and _is_part(self, module):
            raise CaptureError(
                f"{location_of_call().where}: the forward makes parameters ({name} of {a_kind(self)}), "
                "which a program cannot train: it has those that the model had when it was compiled. Make "
                "them in __init__, compute with plain tensors, or call the model once before it is compiled, "
                "if it is the first call that makes them"
            )
    plain(self, name, value)


def _is_part(one: nn.Module, module: nn.Module) -> bool:
    return any(part is one for part in module.modules())
