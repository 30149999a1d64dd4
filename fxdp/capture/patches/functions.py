"""`torch.autograd.Function`s of the user's, whose own backward must be the one that is run (`deferred`).

Without it a straight-through estimator would get no gradient, and a gradient reversal the plain one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxdp import torch_compat
from fxdp.capture.patches.deferred import Deferred, current
from fxdp.errors import CaptureError


@contextlib.contextmanager
def whole_functions() -> Iterator[None]:
    """While the user's code is exported, a function that is applied is one node."""
    plain = vars(torch.autograd.Function)["apply"]

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        original = plain.__get__(None, cls)
        kept = current()
        if kept is None or _needs_no_backward(cls):
            return original(*args, **kwargs)
        return _deferred(kept, cls, original, (args, kwargs))

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = plain  # type: ignore[method-assign]


def _needs_no_backward(cls: type) -> bool:
    """Without gradients the forward is all there is; torch's own functions are inside of ops."""
    torchs = cls.__module__.partition(".")[0] == "torch"
    return torchs or not torch.is_grad_enabled() or torch_compat.in_function_transform()


def _deferred(kept: Deferred, cls: type, apply: Callable[..., Any], arguments: Any) -> Any:
    leaves, spec = pytree.tree_flatten(arguments)
    for leaf in leaves:
        _check_argument(cls, leaf)
    template, tensors, sizes = _split(leaves)
    application = _Application(apply, template, spec)
    return application.rebuild(kept.apply(application, tensors, sizes))


def _check_argument(cls: type, leaf: Any) -> None:
    """Refuse what may hold parameters, to which the backward would add behind our back."""
    if isinstance(leaf, nn.Module) or (callable(leaf) and not isinstance(leaf, (Tensor, type))):
        raise CaptureError(
            f"the autograd.Function {cls.__qualname__} takes a {type(leaf).__name__} as an argument. Tensors "
            "that it uses by itself would get no gradient. Pass all of them as arguments, or write it as a "
            "plain function (for recomputation there is torch.utils.checkpoint.checkpoint)"
        )


@dataclass(eq=False)
class _Application:
    """A function with its arguments; those that are no tensors and no sizes are the same at each run."""

    apply: Callable[..., Any]
    template: Sequence[Any]
    spec: pytree.TreeSpec
    results: Sequence[Any] = ()
    result_spec: pytree.TreeSpec | None = None

    def __call__(self, tensors: Sequence[Tensor], sizes: Sequence[Any]) -> list[Tensor]:
        """The tensors that the function returns."""
        args, kwargs = pytree.tree_unflatten(_filled(self.template, tensors, sizes), self.spec)
        leaves, self.result_spec = pytree.tree_flatten(self.apply(*args, **kwargs))
        self.results, found, _ = _split(leaves)
        return found

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        """What the function returned, with these tensors."""
        assert self.result_spec is not None
        return pytree.tree_unflatten(_filled(self.results, tensors, ()), self.result_spec)


@dataclass(frozen=True, slots=True)
class _Place:
    """Stands for a tensor or a size among other values."""

    of_tensor: bool
    index: int


def _split(leaves: Sequence[Any]) -> tuple[list[Any], list[Tensor], list[Any]]:
    """The leaves with places for tensors and symbolic sizes; the tensors; the sizes."""
    template: list[Any] = []
    tensors: list[Tensor] = []
    sizes: list[Any] = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            template.append(_Place(True, len(tensors)))
            tensors.append(leaf)
        elif isinstance(leaf, torch.SymInt):
            template.append(_Place(False, len(sizes)))
            sizes.append(leaf)
        else:
            template.append(leaf)
    return template, tensors, sizes


def _filled(template: Sequence[Any], tensors: Sequence[Tensor], sizes: Sequence[Any]) -> list[Any]:
    """The leaves, with these tensors and sizes in their places."""
    return [
        (tensors if leaf.of_tensor else sizes)[leaf.index] if isinstance(leaf, _Place) else leaf
        for leaf in template
    ]
