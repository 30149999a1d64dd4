"""CTC loss as one op: torch's own has shapes that depend on data, which export refuses.

`fxdp::ctc_loss` returns the loss of each sample, and an empty tensor for an empty part, where torch raises.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxdp.ir.ops.library import library, opaque
from fxdp.torch_compat import aten


def _losses(log_probs: Tensor, *rest: Any) -> Tensor:
    """Return the loss of each sample, unreduced."""
    if log_probs.shape[1] == 0:
        return log_probs.new_empty([0])
    losses: Tensor = aten._ctc_loss.Tensor(log_probs, *rest)[0]
    return losses


def _gradient(grad: Tensor, log_probs: Tensor, *rest: Any) -> Tensor:
    """Return the gradient of the log probabilities; recomputes the table that the forward dropped."""
    if log_probs.shape[1] == 0:
        return _like(grad, log_probs)
    *lengths, blank, zero_infinity = rest
    made = aten._ctc_loss.Tensor(log_probs, *rest)
    result: Tensor = aten._ctc_loss_backward.Tensor(grad, log_probs, *lengths, *made, blank, zero_infinity)
    return result.contiguous()


def _like(grad: Tensor, log_probs: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


_ARGUMENTS = (
    "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, SymInt blank, "
    "bool zero_infinity"
)

CTC_OP = opaque(
    f"ctc_loss({_ARGUMENTS}) -> Tensor",
    _losses,
    lambda log_probs, *rest: log_probs.new_empty([log_probs.shape[1]]),
)
"""`(log_probs[T, N, C], targets[N, S] or [sum of lengths], input_lengths[N], target_lengths[N]) -> [N]`"""
CTC_BACKWARD_OP = opaque(f"ctc_loss_backward(Tensor grad, {_ARGUMENTS}) -> Tensor", _gradient, _like)
"""Returns the gradient of `log_probs`, from the gradient of the losses and the arguments of the forward."""


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[4:]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return (CTC_BACKWARD_OP(grad, *ctx.saved_tensors, *ctx.options), None, None, None, None, None)


torch.library.register_autograd("fxdp::ctc_loss", _differentiate, setup_context=_keep, lib=library)
