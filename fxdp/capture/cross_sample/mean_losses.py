"""Losses with mean reduction, decomposed into sum reduction and division by the global weight or count.

Element-wise losses use torch's own decompositions, which end in pointwise ops and `mean` or `sum`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fxdp.capture.cross_sample.table import CrossSampleRule, OpCall, decomposes
from fxdp.torch_compat import OpOverload, aten, torch_decompositions

_MEAN, _SUM = 1, 2
"""Torch's codes of the reductions."""

_ELEMENTWISE = (
    aten.mse_loss.default, aten.mse_loss_backward.default, aten.smooth_l1_loss.default,
    aten.smooth_l1_loss_backward.default, aten.huber_loss.default, aten.huber_loss_backward.default,
    aten.binary_cross_entropy.default, aten.binary_cross_entropy_backward.default,
    aten.binary_cross_entropy_with_logits.default, aten.soft_margin_loss.default,
    aten.soft_margin_loss_backward.default,
)  # fmt: skip


@decomposes(*(op for op in _ELEMENTWISE if op in torch_decompositions))
def _elementwise(call: OpCall) -> Any:
    tensors = [name for name, value in call.arguments.items() if isinstance(value, torch.Tensor)]
    if not any(map(call.holds_batch, tensors)):
        return NotImplemented
    return call.again(torch_decompositions[call.op])


def _averages(*ops: OpOverload) -> Callable[[CrossSampleRule], CrossSampleRule]:
    """Register like `decomposes`, for losses: the function is called only for a mean over the batch."""

    def register(function: CrossSampleRule) -> CrossSampleRule:
        def of_mean(call: OpCall) -> Any:
            if call["reduction"] != _MEAN or not call.holds_batch("self"):
                return NotImplemented
            return function(call)

        return decomposes(*ops)(of_mean)

    return register


@_averages(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def _nll_loss(call: OpCall) -> Any:
    """Return the weighted sum over the valid targets divided by the total weight of these targets."""
    total, total_weight = call.again(reduction=_SUM)
    return total / total_weight, total_weight


@_averages(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def _nll_loss_backward(call: OpCall) -> Any:
    return call.again(grad_output=call["grad_output"] / call["total_weight"], reduction=_SUM)


@_averages(aten.multi_margin_loss.default)
def _multi_margin(call: OpCall) -> Any:
    return call.again(reduction=_SUM) / _samples(call["self"])


@_averages(aten.multilabel_margin_loss_forward.default)
def _multilabel_margin(call: OpCall) -> Any:
    total, is_target = call.again(reduction=_SUM)
    return total / _samples(call["self"]), is_target


@_averages(aten.multi_margin_loss_backward.default, aten.multilabel_margin_loss_backward.default)
def _margin_backward(call: OpCall) -> Any:
    return call.again(grad_output=call["grad_output"] / _samples(call["self"]), reduction=_SUM)


def _samples(x: torch.Tensor) -> Any:
    """Return the number of samples of a `[N, C]` or `[C]` input."""
    return x.shape[0] if x.dim() > 1 else 1
