"""Derivatives computed by the model itself: a gradient penalty, the forces of a potential.

    x = x.requires_grad_()                                 a node that marks x, in the differentiated graph
    (g,) = torch.autograd.grad(y, x, create_graph=True)    a node that differentiates there, with torch's own

Export would detach the derivative. Deferred (`capture/patches/deferred.py`), the derivative is traced with
the rest of the forward as plain ops, through which the backward then differentiates a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fxdp.capture.locations import location_of_call
from fxdp.capture.patches.deferred import current
from fxdp.errors import CaptureError
from fxdp.ir.graph.metadata import Location
from fxdp.torch_compat import Patch, around


def _grad(
    plain: Callable[..., Any],
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> Any:
    """Replace `torch.autograd.grad` by a node of the exported graph, with a result like each input."""
    kept = current()
    if kept is None or not torch.is_grad_enabled():
        return plain(
            outputs, inputs, grad_outputs, retain_graph, create_graph, only_inputs, allow_unused,
            is_grads_batched, materialize_grads,
        )  # fmt: skip
    location = location_of_call()
    if is_grads_batched:
        raise CaptureError(
            f"at {location}: torch.autograd.grad with is_grads_batched=True is not supported inside the "
            "captured code. Call it for each row of grad_outputs, or use torch.func.jvp"
        )
    of, wrt = _listed(outputs), _listed(inputs)
    weights = [None] * len(of) if grad_outputs is None else _listed(grad_outputs)
    given = [w for w in weights if isinstance(w, Tensor)]
    options = {"create_graph": create_graph, "allow_unused": True, "materialize_grads": materialize_grads}
    job = _Derivative(plain, len(of), len(wrt), tuple(w is not None for w in weights), options, location)
    found = kept.apply(job, [*of, *wrt, *given], [])
    return dict(zip(inputs, found, strict=True)) if isinstance(inputs, dict) else tuple(found)


@dataclass(eq=False)
class _Derivative:
    """One call of `torch.autograd.grad`: numbers of outputs and inputs, and which outputs are weighted."""

    plain: Callable[..., Any]
    outputs: int
    inputs: int
    weighted: tuple[bool, ...]
    options: dict[str, Any]
    location: Location

    def __call__(self, tensors: Sequence[Tensor], _sizes: Sequence[Any]) -> list[Tensor]:
        of, wrt = tensors[: self.outputs], tensors[self.outputs : self.outputs + self.inputs]
        if current() is not None:  # during the export, in which tensors have no autograd history
            return [torch.empty_like(x) for x in wrt]
        rest = iter(tensors[self.outputs + self.inputs :])
        weights = [next(rest) if weighted else None for weighted in self.weighted]
        try:
            # the backward goes through this graph once more
            found = self.plain(of, wrt, weights, retain_graph=True, **self.options)
        except RuntimeError as error:
            raise CaptureError(
                f"at {self.location}: torch.autograd.grad fails: {error}. Call x.requires_grad_() on what it "
                "differentiates by, inside of the model, before that is used"
            ) from error
        if any(g is None for g in found):
            raise CaptureError(
                f"at {self.location}: torch.autograd.grad gives None for an input that the outputs do not "
                "depend on. Pass materialize_grads=True, which gives zeros, or leave that input out"
            )
        return list(found)


def _listed(tensors: Any) -> list[Any]:
    if isinstance(tensors, Tensor):
        return [tensors]
    return pytree.tree_leaves(tuple(tensors.values()) if isinstance(tensors, dict) else tuple(tensors))


def _requires_grad(plain: Callable[..., Tensor], self: Tensor, requires_grad: bool = True) -> Tensor:
    """Add a node for `x.requires_grad_()` to the exported graph, since export would ignore the call."""
    if requires_grad:
        _mark_later(self)
    return plain(self, requires_grad)


def _assigned(plain: Any) -> property:
    """Add a node for the assignment `x.requires_grad = True` to the exported graph."""

    def write(self: Tensor, value: bool) -> None:
        if value:
            _mark_later(self)
        plain.__set__(self, value)

    return property(plain.__get__, write)


def _mark_later(x: Tensor) -> None:
    kept = current()
    if kept is not None and torch.is_grad_enabled():
        kept.visit(_mark, x)


def _mark(x: Tensor) -> None:
    if not x.requires_grad:
        x.requires_grad_()


class MarkedWhenMade(TorchFunctionMode):
    """Add a node for tensors created with `requires_grad=True`, by `torch.ones` or any function of torch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        # checked first: Dynamo traces the branches of torch.cond through this, and does not support context
        # variables
        if kwargs and kwargs.get("requires_grad"):
            _mark_later(made)
        return made


INNER_GRADIENTS: tuple[Patch, ...] = (
    Patch(torch.autograd, "grad", around(_grad)),
    Patch(Tensor, "requires_grad_", around(_requires_grad)),
    Patch(Tensor, "requires_grad", _assigned),
)
"""Patches for the export of the user's code."""
