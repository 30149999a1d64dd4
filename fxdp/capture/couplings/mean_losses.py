"""Losses with mean reduction: the same op with sum reduction, divided by the global weight or count.

Element-wise losses take torch's own decompositions, which end in pointwise ops and `mean` or `sum`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fxdp.capture.couplings.coupling_table import BatchSymbols, couples
from fxdp.torch_compat import OpOverload, torch_decompositions

aten = torch.ops.aten

MEAN, SUM = 1, 2
"""torch's numbers of the reductions."""

_ELEMENTWISE = (
    aten.mse_loss.default,
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss.default,
    aten.smooth_l1_loss_backward.default,
    aten.huber_loss.default,
    aten.huber_loss_backward.default,
    aten.binary_cross_entropy.default,
    aten.binary_cross_entropy_backward.default,
    aten.binary_cross_entropy_with_logits.default,
    aten.soft_margin_loss.default,
    aten.soft_margin_loss_backward.default,
)


def _use_torch(op: OpOverload, function: Callable[..., Any]) -> None:
    """Register torch's decomposition of an element-wise loss, where the loss holds the batch."""

    def decompose(batch: BatchSymbols, *args: Any, **kwargs: Any) -> Any:
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        if not any(batch.among(tensor.shape) for tensor in tensors):
            return NotImplemented
        return function(*args, **kwargs)

    couples(op)(decompose)


for _op in _ELEMENTWISE:
    if _op in torch_decompositions:
        _use_torch(_op, torch_decompositions[_op])


@couples(aten.nll_loss_forward.default)
def _nll_loss(
    batch: BatchSymbols, x: Any, target: Any, weight: Any, reduction: int, ignore_index: int
) -> Any:
    return _nll_forward(aten.nll_loss_forward.default, batch, x, target, weight, reduction, ignore_index)


@couples(aten.nll_loss2d_forward.default)
def _nll_loss2d(
    batch: BatchSymbols, x: Any, target: Any, weight: Any, reduction: int, ignore_index: int
) -> Any:
    return _nll_forward(aten.nll_loss2d_forward.default, batch, x, target, weight, reduction, ignore_index)


def _nll_forward(
    op: Any, batch: BatchSymbols, x: Any, target: Any, weight: Any, reduction: int, ignore_index: int
) -> Any:
    """The weighted sum over the valid targets divided by their total weight."""
    if reduction != MEAN or not batch.among(x.shape):
        return NotImplemented
    total, total_weight = op(x, target, weight, SUM, ignore_index)
    return total / total_weight, total_weight


@couples(aten.nll_loss_backward.default)
def _nll_loss_backward(batch: BatchSymbols, grad: Any, x: Any, *args: Any) -> Any:
    return _nll_backward(aten.nll_loss_backward.default, batch, grad, x, *args)


@couples(aten.nll_loss2d_backward.default)
def _nll_loss2d_backward(batch: BatchSymbols, grad: Any, x: Any, *args: Any) -> Any:
    return _nll_backward(aten.nll_loss2d_backward.default, batch, grad, x, *args)


def _nll_backward(
    op: Any,
    batch: BatchSymbols,
    grad: Any,
    x: Any,
    target: Any,
    weight: Any,
    reduction: int,
    ignore_index: int,
    total_weight: Any,
) -> Any:
    if reduction != MEAN or not batch.among(x.shape):
        return NotImplemented
    return op(grad / total_weight, x, target, weight, SUM, ignore_index, total_weight)


@couples(aten.multi_margin_loss.default)
def _multi_margin(
    batch: BatchSymbols,
    x: Any,
    target: Any,
    p: Any = 1,
    margin: Any = 1,
    weight: Any = None,
    reduction: int = MEAN,
) -> Any:
    if reduction != MEAN or not batch.among(x.shape):
        return NotImplemented
    return aten.multi_margin_loss.default(x, target, p, margin, weight, SUM) / _samples(x)


@couples(aten.multi_margin_loss_backward.default)
def _multi_margin_backward(
    batch: BatchSymbols,
    grad: Any,
    x: Any,
    target: Any,
    p: Any,
    margin: Any,
    weight: Any = None,
    reduction: int = MEAN,
) -> Any:
    if reduction != MEAN or not batch.among(x.shape):
        return NotImplemented
    grad = grad / _samples(x)
    return aten.multi_margin_loss_backward.default(grad, x, target, p, margin, weight, SUM)


@couples(aten.multilabel_margin_loss_forward.default)
def _multilabel_margin(batch: BatchSymbols, x: Any, target: Any, reduction: int) -> Any:
    if reduction != MEAN or not batch.among(x.shape):
        return NotImplemented
    total, is_target = aten.multilabel_margin_loss_forward.default(x, target, SUM)
    return total / _samples(x), is_target


@couples(aten.multilabel_margin_loss_backward.default)
def _multilabel_margin_backward(
    batch: BatchSymbols, grad: Any, x: Any, target: Any, reduction: int, is_target: Any
) -> Any:
    if reduction != MEAN or not batch.among(x.shape):
        return NotImplemented
    grad = grad / _samples(x)
    return aten.multilabel_margin_loss_backward.default(grad, x, target, SUM, is_target)


def _samples(x: torch.Tensor) -> Any:
    """The number of samples of a `[N, C]` or `[C]` input."""
    return x.shape[0] if x.dim() > 1 else 1
