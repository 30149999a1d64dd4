"""Portals carry a skip tensor past the partitions between its stash and its pop, hidden from autograd.

    forward    x ── blue ···(tensor)···▶ [copy] ···▶ orange ── x'
    backward   dx ◀─ blue ◀···(gradient)··· [copy] ◀··· orange ◀─ dx'

The dotted way is no edge of autograd's graph: tensor and gradient lie in the portal. What orders the backward
are phonies (`lanes.py`), joined into the main lane by whoever uses the portal; and a phony goes straight from
blue to orange too, where both run in one forward, so that no gradient is lost if the main lane is cut.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from fxdp.skip.lanes import make_phony

Stream: TypeAlias = torch.cuda.Stream | None
"""A CUDA stream; None on the CPU."""


class Portal:
    """Holds a tensor for a fixed number of uses, its life, and then lets go of it.

    life 2    blue, orange
    life 3    blue, orange, orange in the recomputation; then 1 for the recomputed blue
    """

    def __init__(self, tensor: Tensor | None, tensor_life: int) -> None:
        self.grad: Tensor | None = None
        self.hides_grad = False
        """Whether a gradient was ever to come back through it."""
        self._untied = False
        self.put_tensor(tensor, tensor_life)

    def put_tensor(self, tensor: Tensor | None, tensor_life: int) -> None:
        """Hold a tensor for `tensor_life` uses."""
        self.tensor = tensor if tensor_life > 0 else None
        self.tensor_life = tensor_life
        self._tie: Tensor | None = None
        self._wants_grad = tensor is not None and _may_want_grad(tensor)

    def use_tensor(self) -> Tensor | None:
        """The tensor, at the cost of one use."""
        self.check_tensor_life()
        tensor = self.tensor
        self.tensor_life -= 1
        if self.tensor_life <= 0:
            self.tensor = self._tie = None
        return tensor

    def check_tensor_life(self) -> None:
        """Raise RuntimeError if the tensor is used up."""
        if self.tensor_life <= 0:
            raise RuntimeError("tensor in portal has been removed")

    def put_grad(self, grad: Tensor) -> None:
        """Hold a gradient until `use_grad`; several add up."""
        self.grad = grad if self.grad is None else self.grad + grad

    def use_grad(self) -> Tensor:
        """The gradient, once.

        Raises
        ------
        RuntimeError : there is none.
        """
        if self.grad is None:
            raise RuntimeError("grad in portal has been removed or never set")
        grad, self.grad = self.grad, None
        return grad

    def blue(self) -> Tensor:
        """Hide the tensor from autograd; a phony to join into the main lane."""
        tensor = self.use_tensor()
        if tensor is None or not (torch.is_grad_enabled() and tensor.requires_grad):
            return make_phony(torch.device("cpu") if tensor is None else tensor.device)
        self.hides_grad = True
        phony: Tensor = _Blue.apply(self, tensor)  # type: ignore[no-untyped-call]
        if self.tensor_life > 0:
            self._tie = phony
        return phony

    def orange(self, phony: Tensor) -> Tensor | None:
        """Show the tensor to autograd again, behind a phony that was forked from the main lane."""
        tie = self._tie
        tensor = self.use_tensor()
        if tensor is None or not (self._wants_grad and torch.is_grad_enabled()):
            return None if tensor is None else tensor.detach()
        if tie is None and not phony.requires_grad:
            self._untied = True
            return tensor.detach()
        shown: Tensor = _Orange.apply(self, tensor.detach(), phony, tie)  # type: ignore[no-untyped-call]
        return shown

    def copy(self, prev_stream: Stream, next_stream: Stream, phony: Tensor) -> Tensor:
        """Take the tensor to the device of another stream; a phony to join into the main lane."""
        if self.tensor is None:
            return phony
        self.tensor = transfer(self.tensor, prev_stream, next_stream)
        if not (torch.is_grad_enabled() and phony.requires_grad):
            return phony
        done: Tensor = _Copy.apply(self, prev_stream, next_stream, phony)  # type: ignore[no-untyped-call]
        return done

    def _take_grad(self) -> Tensor | None:
        """The gradient; None where nobody used the popped tensor."""
        if self.grad is None and self._untied:
            raise RuntimeError(
                "the gradient of a skip has no way back: between its stash and its pop the main path was "
                "detached, in partitions that are recomputed. Do not detach it, or do not recompute them"
            )
        return None if self.grad is None else self.use_grad()


def _may_want_grad(tensor: Tensor) -> bool:
    """A forward that is to be recomputed runs without gradients, whatever the tensor will want."""
    differentiable = tensor.is_floating_point() or tensor.is_complex()
    return differentiable and (tensor.requires_grad or not torch.is_grad_enabled())


class _Blue(torch.autograd.Function):
    """Takes the tensor in, gives its gradient out."""

    @staticmethod
    def forward(ctx: Any, portal: Portal, tensor: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.portal, ctx.device = portal, tensor.device
        return make_phony(tensor.device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, Tensor | None]:
        grad = ctx.portal._take_grad()
        return None, None if grad is None else grad.to(ctx.device)


class _Orange(torch.autograd.Function):
    """Gives the tensor out, takes its gradient in; its phonies get none, only their turn."""

    @staticmethod
    def forward(ctx: Any, portal: Portal, tensor: Tensor, phony: Tensor, tie: Tensor | None) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.portal = portal
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None, None]:
        if grads[0] is not None:
            ctx.portal.put_grad(grads[0])
        return None, None, None, None


class _Copy(torch.autograd.Function):
    """Takes the gradient back to where the tensor came from."""

    @staticmethod
    def forward(ctx: Any, portal: Portal, prev_stream: Stream, next_stream: Stream, phony: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.portal, ctx.streams = portal, (next_stream, prev_stream)
        device = torch.device("cpu") if next_stream is None else next_stream.device
        return make_phony(device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None, None]:
        grad = ctx.portal.grad
        if grad is not None:
            ctx.portal.grad = transfer(grad, *ctx.streams)
        return None, None, None, None


def transfer(tensor: Tensor, source: Stream, target: Stream) -> Tensor:
    """The tensor for work on another stream, on that stream's device; nothing to do on the CPU."""
    if target is None:
        if source is None:
            return tensor
        with torch.cuda.stream(source):
            return tensor.cpu()  # waits for the copy, as the host has no stream that could
    if source is not None:
        target.wait_stream(source)
    with torch.cuda.stream(target):
        moved = tensor.to(target.device, non_blocking=source is not None)
    if source is not None:
        tensor.record_stream(target)  # its memory stays until the other stream is done with it
    return moved
