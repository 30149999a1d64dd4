"""Derivatives in the user's code: functions with a custom backward, and hooks on gradients.

    class Sign(autograd.Function): ...      the custom backward must run (it is deferred): otherwise a
                                            straight-through estimator would get no gradient, and a
                                            gradient reversal the plain one
    x.register_hook(scale)                  becomes part of the backward; hooks on modules are refused
    loss.backward()                         refused; torch.autograd.grad is in `inner_gradients.py`

Torch's export keeps no backward but the one that torch derives from the exported ops, and would detach a
derivative.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from fxdp import torch_compat
from fxdp.capture.locations import location_of_call
from fxdp.capture.patches.deferred import Deferred, current
from fxdp.errors import CaptureError, a_kind
from fxdp.ir.graph.metadata import Location
from fxdp.torch_compat import Patch, around

_APPLY: Any = vars(torch.autograd.Function)["apply"]  # a C method since torch 2.14


def _full(plain: Any) -> Any:
    """Wrap `Function.apply` so that an applied function becomes one node of the exported graph."""

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        original = _APPLY.__get__(None, cls)  # `plain` is bound to Function, which has no forward
        kept = current()
        if kept is None or _needs_no_backward(cls):
            return original(*args, **kwargs)
        return _deferred(kept, cls, original, (args, kwargs))

    return classmethod(apply)


def _register_hook(
    plain: Callable[..., RemovableHandle], self: Tensor, hook: Callable[[Tensor], Any]
) -> RemovableHandle:
    """Replace `tensor.register_hook` by a node of the exported graph."""
    kept = current()
    if kept is None or not torch.is_grad_enabled():
        return plain(self, hook)
    checked = _checked(hook, location_of_call())
    kept.visit(lambda x: plain(x, checked) if x.requires_grad else None, self)
    return RemovableHandle(OrderedDict())


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise CaptureError(
        f"at {location_of_call()}: backward and torch.func.grad and its kin inside the captured code are not "
        "supported. Return the loss, and call its backward() outside; take a derivative that the loss needs "
        "(a gradient penalty, a force) with torch.autograd.grad(y, x, create_graph=True) or torch.func.jvp, "
        "which are captured"
    )


_REVERSE = ("grad", "grad_and_value", "vjp", "jacrev", "hessian")
"""Functions of torch.func that compute derivatives in reverse mode."""

AUTOGRAD: tuple[Patch, ...] = (
    Patch(torch.autograd.Function, "apply", _full),
    Patch(Tensor, "register_hook", around(_register_hook)),
    Patch(torch.autograd, "backward", around(_refuse)),
    Patch(Tensor, "backward", around(_refuse)),
    *(Patch(torch.func, name, around(_refuse)) for name in _REVERSE),
)
"""Patches for the export of the user's code; the code's backward runs later, under unpatched torch."""


def _needs_no_backward(cls: type) -> bool:
    """Return whether a function needs no deferred backward: gradients are off, or the function is torch's."""
    # also true inside of a torch.func transform, for which the deferred node has no rule
    torchs = cls.__module__.partition(".")[0] == "torch"
    return torchs or not torch.is_grad_enabled() or torch_compat.in_function_transform()


def _deferred(kept: Deferred, cls: type, apply: Callable[..., Any], arguments: Any) -> Any:
    leaves, spec = pytree.tree_flatten(arguments)
    for leaf in leaves:
        _check_argument(cls, leaf)
    application = _Application(apply, leaves, spec)
    tensors, sizes = [leaves[i] for i in _places(leaves, Tensor)], [leaves[i] for i in _places(leaves, _SIZE)]
    return application.rebuild(kept.apply(application, tensors, sizes))


def _check_argument(cls: type, leaf: Any) -> None:
    """Raise on arguments that may hold parameters, into which the backward would accumulate unseen."""
    if isinstance(leaf, nn.Module) or (callable(leaf) and not isinstance(leaf, (Tensor, type))):
        raise CaptureError(
            f"the autograd.Function {cls.__qualname__} takes {a_kind(leaf)} as an argument. Tensors "
            "that it uses by itself would get no gradient. Pass all of them as arguments, or write it as a "
            "plain function (for recomputation there is torch.utils.checkpoint.checkpoint)"
        )


_SIZE = torch.SymInt


@dataclass(eq=False)
class _Application:
    """A function with its arguments; only tensors and sizes may differ between runs."""

    apply: Callable[..., Any]
    leaves: Sequence[Any]
    spec: pytree.TreeSpec
    results: Sequence[Any] = ()
    result_spec: pytree.TreeSpec | None = None

    def __call__(self, tensors: Sequence[Tensor], sizes: Sequence[Any]) -> list[Tensor]:
        """Return the tensors that the function returns for these tensors and sizes."""
        filled = _filled(_filled(self.leaves, Tensor, tensors), _SIZE, sizes)
        args, kwargs = pytree.tree_unflatten(filled, self.spec)
        self.results, self.result_spec = pytree.tree_flatten(self.apply(*args, **kwargs))
        return [self.results[i] for i in _places(self.results, Tensor)]

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        """Return the function's result with these tensors in place of the original ones."""
        assert self.result_spec is not None
        return pytree.tree_unflatten(_filled(self.results, Tensor, tensors), self.result_spec)


def _places(leaves: Sequence[Any], kind: type) -> list[int]:
    return [i for i, leaf in enumerate(leaves) if isinstance(leaf, kind)]


def _filled(leaves: Sequence[Any], kind: type, values: Sequence[Any]) -> list[Any]:
    """Return the leaves, with `values` in the positions of the leaves of class `kind`."""
    found = dict(zip(_places(leaves, kind), values, strict=True))
    return [found.get(i, leaf) for i, leaf in enumerate(leaves)]


def _checked(hook: Callable[[Tensor], Any], location: Location) -> Callable[[Tensor], Tensor]:
    """Wrap a hook so that it must return the gradient that replaces the given one."""

    def checked(gradient: Tensor) -> Tensor:
        replaced = hook(gradient)
        if isinstance(replaced, Tensor):
            return replaced
        raise CaptureError(
            f"at {location}: a hook on a gradient returns nothing. What else it does would happen once, "
            "while the model is captured, and not at each step. Let it return a new gradient, or return the "
            "tensor from the model and take its gradient outside"
        )

    return checked
