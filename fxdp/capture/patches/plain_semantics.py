"""Refusals of the core: what `torch.export` would capture silently wrong, without the wing `python`.

    class Sign(autograd.Function): ...      export would differentiate its forward, not run its backward
    x.register_hook(scale)                  export would drop the hook
    torch.autograd.grad(y, x)               export would detach the derivative
    dist.all_reduce(x)                      export would communicate while it traces

Each is refused with its line. The wing (`fxdp/capture/python/python_wing.py`) captures them instead.
"""

from __future__ import annotations

from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fxdp.capture.locations import is_user_file, location_of_call, location_of_frame
from fxdp.errors import CaptureError
from fxdp.ir.graph.metadata import Location
from fxdp.torch_compat import DEFAULT_GROUP, Patch, around, calling_frame

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


def _communicate(plain: Any, *args: Any, **kwargs: Any) -> Any:
    """Refuse a collective or a question about ranks by the user's code."""
    frame: FrameType | None = calling_frame()
    name = ""
    while frame is not None and str(where := frame.f_globals.get("__name__")).startswith(_OF_GROUPS):
        name = frame.f_code.co_name if where == DEFAULT_GROUP[0].__name__ else name
        if frame.f_code.co_name == _LOGGED:
            return plain(*args, **kwargs)
        frame = frame.f_back
    if frame is None or not is_user_file(frame.f_code.co_filename):
        return plain(*args, **kwargs)
    raise _communication_error(name, location_of_frame(frame))


def _communication_error(name: str, location: Location) -> CaptureError:
    return CaptureError(
        f"at {location}: torch.distributed.{name} in a model is not captured with "
        "FXDP_WINGS=off. Leave FXDP_WINGS out, or communicate outside of the model"
    )


class RefusedCollectives(TorchFunctionMode):
    """Mode that refuses the collectives which `torch.export` would put into its graph."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        functional = str(func).startswith("_c10d_functional.")
        if functional or str(getattr(func, "__module__", "")).startswith("torch.distributed."):
            name = str(func).removeprefix("_c10d_functional.") if functional else func.__name__
            raise _communication_error(name, location_of_call())
        return func(*args, **(kwargs or {}))


_LOGGED = "_get_msg_dict"
"""The function of torch that describes a collective which has raised, also one that was refused."""
_OF_GROUPS = ("torch.distributed.", "fxdp.torch_compat.")


REFUSED: tuple[Patch, ...] = (
    Patch(torch.autograd.Function, "apply", _function),
    Patch(Tensor, "register_hook", around(partial(_refuse, "a hook on a gradient"))),
    Patch(torch.autograd, "grad", around(partial(_refuse, "torch.autograd.grad"))),
    Patch(torch.autograd, "backward", around(partial(_refuse, "a backward inside of the model"))),
    Patch(*DEFAULT_GROUP, around(_communicate)),
    *(Patch(torch.func, name, around(partial(_refuse, f"torch.func.{name}"))) for name in _DERIVATIVES),
)
"""Patches for the export of the user's code."""
