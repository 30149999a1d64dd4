"""`F.ctc_loss` as the capture sees it."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from fxdp.ir.ops.ctc import ctc_losses

_eager_ctc_loss = F.ctc_loss


def capturable_ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> torch.Tensor:
    """`F.ctc_loss` in terms of `fxdp::ctc_loss` and a plain mean."""
    lengths = (input_lengths, target_lengths)
    if log_probs.dim() != 3 or not all(isinstance(length, torch.Tensor) for length in lengths):
        eager: torch.Tensor = _eager_ctc_loss(log_probs, targets, *lengths, blank, reduction, zero_infinity)
        return eager
    losses: torch.Tensor = ctc_losses(log_probs, targets, *lengths, blank, zero_infinity)
    if zero_infinity:
        losses = torch.where(losses == float("inf"), 0.0, losses)
    if reduction == "mean":
        losses = losses / target_lengths.to(losses).clamp_min(1)
        return losses.mean()
    return losses.sum() if reduction == "sum" else losses
