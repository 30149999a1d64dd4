"""Refusals of the core: what `torch.export` would capture silently wrong, without the wing `python`.

    class Sign(autograd.Function): ...      export would differentiate its forward, not run its backward
    x.register_hook(scale)                  export would drop the hook
    torch.autograd.grad(y, x)               export would detach the derivative

Each is refused with its line. The wing (`fxdp/capture/python/python_wing.py`) captures them instead.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fxdp.capture.locations import location_of_call
from fxdp.errors import CaptureError
from fxdp.torch_compat import Patch, around

_APPLY: Any = vars(torch.autograd.Function)["apply"]
_DERIVATIVES = ("grad", "grad_and_value", "vjp", "jacrev", "hessian")


def _refuse(what: str, plain: Any, *args: Any, **kwargs: Any) -> Any:
    """Raise, but where no gradient is taken: then each of these does what it does in eager."""
    if not torch.is_grad_enabled():
        return plain(*args, **kwargs)
    raise CaptureError(
        f"at {location_of_call()}: {what} is not captured with FXDP_WINGS=off. Leave FXDP_WINGS out, or take "
        "the derivative outside of the model"
    )


def _function(_: Any) -> Any:
    """Refuse a user's `autograd.Function`, but where no gradient is taken, or torch's own."""

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        plain = _APPLY.__get__(None, cls)
        if cls.__module__.partition(".")[0] == "torch":
            return plain(*args, **kwargs)
        return _refuse(f"the autograd.Function {cls.__qualname__}", plain, *args, **kwargs)

    return classmethod(apply)


REFUSED: tuple[Patch, ...] = (
    Patch(torch.autograd.Function, "apply", _function),
    Patch(Tensor, "register_hook", around(partial(_refuse, "a hook on a gradient"))),
    Patch(torch.autograd, "grad", around(partial(_refuse, "torch.autograd.grad"))),
    Patch(torch.autograd, "backward", around(partial(_refuse, "a backward inside of the model"))),
    *(Patch(torch.func, name, around(partial(_refuse, f"torch.func.{name}"))) for name in _DERIVATIVES),
)
"""Patches for the export of the user's code."""
