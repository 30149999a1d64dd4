"""CTC loss as one op: torch's own has a shape that depends on the data, so export refuses it.

`fxdp::ctc_loss` gives the loss of each sample, and of an empty part nothing, where torch refuses one.
"""

from __future__ import annotations

from typing import Any

import torch


@torch.library.custom_op("fxdp::ctc_loss", mutates_args=())
def ctc_losses(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int,
    zero_infinity: bool,
) -> torch.Tensor:
    """The loss of each sample, unreduced."""
    if log_probs.shape[1] == 0:
        return log_probs.new_empty([0])
    losses, _ = _forward(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)
    return losses


@torch.library.custom_op("fxdp::ctc_loss_backward", mutates_args=())
def ctc_losses_backward(
    grad: torch.Tensor,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int,
    zero_infinity: bool,
) -> torch.Tensor:
    """The gradient of the log probabilities; recomputes the table that the forward dropped."""
    if log_probs.shape[1] == 0:
        return torch.empty_like(log_probs, memory_format=torch.contiguous_format)
    losses, table = _forward(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)
    result: torch.Tensor = torch.ops.aten._ctc_loss_backward.Tensor(
        grad, log_probs, targets, input_lengths, target_lengths, losses, table, blank, zero_infinity
    )
    return result.contiguous()


def _forward(log_probs: Any, targets: Any, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    losses, table = torch.ops.aten._ctc_loss.Tensor(log_probs, targets, *rest)
    return losses, table


@ctc_losses.register_fake
def _(
    log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, blank: int, zero_infinity: bool
) -> Any:
    return log_probs.new_empty([log_probs.shape[1]])


@ctc_losses_backward.register_fake
def _(grad: Any, log_probs: Any, *rest: Any) -> Any:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[4:]


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    return (ctc_losses_backward(grad, *ctx.saved_tensors, *ctx.options), None, None, None, None, None)


ctc_losses.register_autograd(_backward, setup_context=_setup_context)

CTC_OP = torch.ops.fxdp.ctc_loss.default
"""`(log_probs[T, N, C], targets[N, S] or [sum of lengths], input_lengths[N], target_lengths[N]) -> [N]`"""
CTC_BACKWARD_OP = torch.ops.fxdp.ctc_loss_backward.default
"""The gradient of `log_probs`, from that of the losses and the same arguments."""
