"""Portals carry a skip tensor past the partitions between stash and pop, hidden from autograd.

    forward    x ── blue ···(tensor)···▶ [copy] ···▶ orange ── x'
    backward   dx ◀─ blue ◀···(gradient)··· [copy] ◀··· orange ◀─ dx'

The dotted path is not an edge of autograd's graph: the portal stores tensor and gradient. Phonies
(`lanes.py`), which callers join into the main lane, order the backward. If blue and orange run in one
forward, a phony also connects blue directly with orange, so that no gradient is lost if the main lane is cut.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from fxdp.skip.lanes import make_phony

Stream: TypeAlias = torch.cuda.Stream | None
"""A CUDA stream; None on the CPU."""


class Portal:
    """Storage for a tensor that is freed after a fixed number of uses, the life of the portal.

    life 2    blue, orange
    life 3    blue, orange, orange in the recomputation; then 1 for the recomputed blue
    """

    def __init__(self, tensor: Tensor | None, tensor_life: int) -> None:
        self.grad: Tensor | None = None
        self.hides_grad = False
        """True if a gradient is expected to return through the portal."""
        self._untied = False
        self.put_tensor(tensor, tensor_life)

    def put_tensor(self, tensor: Tensor | None, tensor_life: int) -> None:
        """Store a tensor for `tensor_life` uses."""
        self.tensor = tensor if tensor_life > 0 else None
        self.tensor_life = tensor_life
        self._tie: Tensor | None = None
        self._wants_grad = tensor is not None and _may_want_grad(tensor)

    def use_tensor(self) -> Tensor | None:
        """Return the tensor, at the cost of one use."""
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
        """Store a gradient until `use_grad`; several gradients add up."""
        self.grad = grad if self.grad is None else self.grad + grad

    def use_grad(self) -> Tensor:
        """Return the gradient and remove it from the portal.

        Raises
        ------
        RuntimeError : the portal has no gradient.
        """
        if self.grad is None:
            raise RuntimeError("grad in portal has been removed or never set")
        grad, self.grad = self.grad, None
        return grad

    def blue(self) -> Tensor:
        """Hide the tensor from autograd; return a phony to join into the main lane."""
        tensor = self.use_tensor()
        if tensor is None or not (torch.is_grad_enabled() and tensor.requires_grad):
            return make_phony(torch.device("cpu") if tensor is None else tensor.device)
        self.hides_grad = True
        phony: Tensor = _Blue.apply(self, tensor)  # type: ignore[no-untyped-call]
        if self.tensor_life > 0:
            self._tie = phony
        return phony

    def orange(self, phony: Tensor) -> Tensor | None:
        """Return the tensor to autograd, ordered by a phony that was forked from the main lane."""
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
        """Copy the tensor to the device of `next_stream`; return a phony to join into the main lane."""
        if self.tensor is None:
            return phony
        self.tensor = _transfer(self.tensor, prev_stream, next_stream)
        if not (torch.is_grad_enabled() and phony.requires_grad):
            return phony
        done: Tensor = _Copy.apply(self, prev_stream, next_stream, phony)  # type: ignore[no-untyped-call]
        return done

    def _take_grad(self) -> Tensor | None:
        """Return the gradient; None if the popped tensor was not used."""
        if self.grad is None and self._untied:
            raise RuntimeError(
                "the gradient of a skip has no way back: between its stash and its pop the main path was "
                "detached, in partitions that are recomputed. Do not detach it, or do not recompute them"
            )
        return None if self.grad is None else self.use_grad()


def _may_want_grad(tensor: Tensor) -> bool:
    """Return whether a tensor may need a gradient, also in a forward without gradients, to be recomputed."""
    differentiable = tensor.is_floating_point() or tensor.is_complex()
    return differentiable and (tensor.requires_grad or not torch.is_grad_enabled())


class _Blue(torch.autograd.Function):
    """Autograd function that stores the tensor in the portal, and returns the gradient from the portal."""

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
    """Autograd function that returns the tensor and stores its gradient; the phonies only give the order."""

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
    """Autograd function that copies the gradient back to the source device of the tensor."""

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
            ctx.portal.grad = _transfer(grad, *ctx.streams)
        return None, None, None, None


def _transfer(tensor: Tensor, source: Stream, target: Stream) -> Tensor:
    """Return the tensor on the target stream's device, ordered after the source stream."""
    if target is None:
        if source is None:
            return tensor
        with torch.cuda.stream(source):
            return tensor.cpu()  # waits for the copy, because the host has no stream that could wait
    if source is not None:
        target.wait_stream(source)
    with torch.cuda.stream(target):
        moved = tensor.to(target.device, non_blocking=source is not None)
    if source is not None:
        tensor.record_stream(target)  # keep the memory until the target stream has finished
    return moved
