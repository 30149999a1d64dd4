"""Order in autograd's graph without data: fork a lane into a phony, and join a phony into a lane.

    x ──── fork ──── x'          y ──── join ──── y'
             └─ phony          phony ───┘

The backward of the op that made the phony waits for the backward of `y'`; the backward of any op that uses
the forked phony runs before the backward of `x`. A phony has no elements.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def make_phony(device: torch.device) -> Tensor:
    """Return a tensor without elements, which only carries order."""
    return torch.empty(0, device=device)


def fork(lane: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lane and a phony; the backward of the phony's users runs before the backward of the lane."""
    if not (torch.is_grad_enabled() and lane.requires_grad):
        return lane, make_phony(lane.device)
    out, phony = _Fork.apply(lane)  # type: ignore[no-untyped-call]
    return out, phony


def join(lane: Tensor, phony: Tensor) -> Tensor:
    """Return the lane, whose backward runs before the backward of the op that made the phony."""
    if not (torch.is_grad_enabled() and (lane.requires_grad or phony.requires_grad)):
        return lane
    out: Tensor = _Join.apply(lane, phony)  # type: ignore[no-untyped-call]
    return out


class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lane: Tensor) -> tuple[Tensor, Tensor]:
        return lane.detach(), make_phony(lane.device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lane: Tensor, phony: Tensor) -> Tensor:
        return lane.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
