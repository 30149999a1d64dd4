"""Refuse second derivatives: gradients of compiled programs can be differentiated only once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from fxdp.errors import StateError


def once_differentiable(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return a backward's gradients; with create_graph=True, marked so that another backward raises.

    Without the mark, a second backward would treat the gradients as constants.
    """
    if not torch.is_grad_enabled():
        return list(gradients)
    return [None if g is None else _OnlyOnce.apply(g.detach().requires_grad_()) for g in gradients]  # type: ignore[no-untyped-call]


class _OnlyOnce(torch.autograd.Function):
    """A gradient that raises if differentiated again."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.view_as(gradient) if gradient.layout is torch.strided else gradient.clone()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> NoReturn:
        raise StateError(
            "a gradient of a compiled module was differentiated again (create_graph=True, as in a gradient "
            "penalty); a compiled module has first derivatives only. Write the term with tensor operations "
            "inside of the model, or train this model without fxdp.compile"
        )
