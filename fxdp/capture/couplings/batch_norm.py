"""BatchNorm by moments in the forward (`fxdp.moments`) and by two sums over the batch in the backward.

The two sums of the backward are exactly the gradients of bias and weight, so that reducing them once
serves both them and the gradient of the input.

With `batch_stats="microbatch"` outputs and gradients need no other part of the batch (`fxdp.standardize`);
only the running statistics follow the moments of all of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fxdp.capture.couplings.coupling_table import BatchSymbols, count, couples, sum_type
from fxdp.ir.ops.moments import MOMENTS_OP
from fxdp.ir.ops.standardize import STANDARDIZE_BACKWARD_OP, STANDARDIZE_OP

aten = torch.ops.aten


@dataclass(frozen=True)
class _Normed:
    """The results of a training-mode BatchNorm."""

    out: torch.Tensor
    mean: torch.Tensor
    invstd: torch.Tensor
    running_mean: torch.Tensor | None
    running_var: torch.Tensor | None


def _normalize(
    batch: BatchSymbols,
    x: Any,
    weight: Any,
    bias: Any,
    means: Any,
    variances: Any,
    momentum: float,
    eps: float,
) -> _Normed:
    """Training-mode BatchNorm of `x` and the new running statistics."""
    dims = [dim for dim in range(x.dim()) if dim != 1]
    wide = x.to(sum_type(x.dtype))
    n = count(x, dims)
    statistics = MOMENTS_OP(wide, dims)
    mean, squares = statistics[1], statistics[2]
    invstd = torch.rsqrt(squares / n + eps)
    if batch.own_statistics:
        out = STANDARDIZE_OP(wide, dims, eps)
    else:
        out = (wide - _channels(mean, x)) * _channels(invstd, x)
    if weight is not None:
        out = out * _channels(weight.to(wide.dtype), x)
    if bias is not None:
        out = out + _channels(bias.to(wide.dtype), x)
    return _Normed(
        out.to(x.dtype),
        mean,
        invstd,
        None if means is None else _moved(means, mean, momentum),
        None if variances is None else _moved(variances, squares / (n - 1), momentum),
    )


def _channels(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """One value per channel, shaped to combine with `x`."""
    return values.view([1, values.shape[0]] + [1] * (x.dim() - 2)) if x.dim() != 2 else values


def _moved(running: torch.Tensor, new: torch.Tensor, momentum: float) -> torch.Tensor:
    """The running average after one more batch."""
    return (new * momentum + running * (1 - momentum)).to(running.dtype)


@couples(aten._native_batch_norm_legit_functional.default)
def _functional(
    batch: BatchSymbols,
    x: Any,
    weight: Any,
    bias: Any,
    means: Any,
    variances: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    if not training or not batch.among(x.shape):
        return NotImplemented
    done = _normalize(batch, x, weight, bias, means, variances, momentum, eps)
    return done.out, done.mean, done.invstd, done.running_mean, done.running_var


@couples(aten._batch_norm_with_update_functional.default)
def _with_update_functional(
    batch: BatchSymbols,
    x: Any,
    weight: Any,
    bias: Any,
    means: Any,
    variances: Any,
    momentum: float,
    eps: float,
) -> Any:
    if not batch.among(x.shape):
        return NotImplemented
    done = _normalize(batch, x, weight, bias, means, variances, momentum, eps)
    reserve = torch.empty([0], dtype=torch.uint8, device=x.device)
    return done.out, done.mean, done.invstd, reserve, done.running_mean, done.running_var


@couples(aten._native_batch_norm_legit.no_stats)
def _no_stats(
    batch: BatchSymbols, x: Any, weight: Any, bias: Any, training: bool, momentum: float, eps: float
) -> Any:
    if not training or not batch.among(x.shape):
        return NotImplemented
    done = _normalize(batch, x, weight, bias, None, None, momentum, eps)
    return done.out, done.mean, done.invstd


@couples(
    aten._native_batch_norm_legit.default, aten.native_batch_norm.default, aten.miopen_batch_norm.default
)  # fmt: skip
def _in_place(
    batch: BatchSymbols,
    x: Any,
    weight: Any,
    bias: Any,
    means: Any,
    variances: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    if not training or not batch.among(x.shape):
        return NotImplemented
    done = _normalize_in_place(batch, x, weight, bias, means, variances, momentum, eps)
    return done.out, done.mean, done.invstd


@couples(aten._batch_norm_with_update.default)
def _with_update(
    batch: BatchSymbols,
    x: Any,
    weight: Any,
    bias: Any,
    means: Any,
    variances: Any,
    momentum: float,
    eps: float,
) -> Any:
    if not batch.among(x.shape):
        return NotImplemented
    done = _normalize_in_place(batch, x, weight, bias, means, variances, momentum, eps)
    return done.out, done.mean, done.invstd, torch.empty([0], dtype=torch.uint8, device=x.device)


@couples(aten.cudnn_batch_norm.default)
def _cudnn(
    batch: BatchSymbols,
    x: Any,
    weight: Any,
    bias: Any,
    means: Any,
    variances: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    if not training or not batch.among(x.shape):
        return NotImplemented
    done = _normalize_in_place(batch, x, weight, bias, means, variances, momentum, eps)
    return done.out, done.mean, done.invstd, torch.empty([0], dtype=torch.uint8, device=x.device)


def _normalize_in_place(
    batch: BatchSymbols,
    x: Any,
    weight: Any,
    bias: Any,
    means: Any,
    variances: Any,
    momentum: float,
    eps: float,
) -> _Normed:
    """As `_normalize`, for the ops that write the running statistics themselves."""
    done = _normalize(batch, x, weight, bias, means, variances, momentum, eps)
    if done.running_mean is not None:
        means.copy_(done.running_mean)
    if done.running_var is not None:
        variances.copy_(done.running_var)
    return done


@couples(aten.native_batch_norm_backward.default)
def _native_backward(
    batch: BatchSymbols,
    grad: Any,
    x: Any,
    weight: Any,
    means: Any,
    variances: Any,
    mean: Any,
    invstd: Any,
    training: bool,
    eps: float,
    mask: list[bool],
) -> Any:
    if not batch.among(x.shape):
        return NotImplemented
    if training and batch.own_statistics:
        return _backward_of_parts(grad, x, weight, eps, mask)
    if not training:
        mean, invstd = means, torch.rsqrt(variances + eps)
    return _backward(grad, x, weight, mean, invstd, training, mask)


@couples(aten.batch_norm_backward.default)
def _unified_backward(
    batch: BatchSymbols,
    grad: Any,
    x: Any,
    weight: Any,
    means: Any,
    variances: Any,
    mean: Any,
    invstd: Any,
    training: bool,
    eps: float,
    mask: list[bool],
    reserve: Any,
) -> Any:
    return _native_backward(batch, grad, x, weight, means, variances, mean, invstd, training, eps, mask)


@couples(aten.cudnn_batch_norm_backward.default)
def _cudnn_backward(
    batch: BatchSymbols,
    x: Any,
    grad: Any,
    weight: Any,
    means: Any,
    variances: Any,
    mean: Any,
    invstd: Any,
    eps: float,
    reserve: Any,
) -> Any:
    everything = [True, True, True]
    return _native_backward(batch, grad, x, weight, means, variances, mean, invstd, True, eps, everything)


@couples(aten.miopen_batch_norm_backward.default)
def _miopen_backward(
    batch: BatchSymbols,
    x: Any,
    grad: Any,
    weight: Any,
    means: Any,
    variances: Any,
    mean: Any,
    invstd: Any,
    eps: float,
) -> Any:
    everything = [True, True, True]
    return _native_backward(batch, grad, x, weight, means, variances, mean, invstd, True, eps, everything)


def _backward(
    grad: Any, x: Any, weight: Any, mean: Any, invstd: Any, training: bool, mask: list[bool]
) -> tuple[Any, Any, Any]:
    """The gradients of input, weight and bias; the latter two are the sums that the first needs."""
    dims = [dim for dim in range(x.dim()) if dim != 1]
    wide = sum_type(x.dtype)
    grad_wide, invstd = grad.to(wide), invstd.to(wide)
    normed = (x.to(wide) - _channels(mean.to(wide), x)) * _channels(invstd, x)
    grad_bias = grad_wide.sum(dims)
    grad_weight = (grad_wide * normed).sum(dims)
    inner = grad_wide
    if training:
        n = count(x, dims)
        inner = grad_wide - _channels(grad_bias / n, x) - normed * _channels(grad_weight / n, x)
    scale = invstd if weight is None else invstd * weight.to(wide)
    grad_input = (inner * _channels(scale, x)).to(x.dtype)
    kind = x.dtype if weight is None else weight.dtype
    return (
        grad_input if mask[0] else None,
        grad_weight.to(kind) if mask[1] else None,
        grad_bias.to(kind) if mask[2] else None,
    )


def _backward_of_parts(grad: Any, x: Any, weight: Any, eps: float, mask: list[bool]) -> tuple[Any, Any, Any]:
    """The gradients of input, weight and bias where each part of the batch has its own statistics."""
    dims = [dim for dim in range(x.dim()) if dim != 1]
    wide = x.to(sum_type(x.dtype))
    grad_wide = grad.to(wide.dtype)
    inner = grad_wide if weight is None else grad_wide * _channels(weight.to(wide.dtype), x)
    kind = x.dtype if weight is None else weight.dtype
    return (
        STANDARDIZE_BACKWARD_OP(inner, wide, dims, eps).to(x.dtype) if mask[0] else None,
        (grad_wide * STANDARDIZE_OP(wide, dims, eps)).sum(dims).to(kind) if mask[1] else None,
        grad_wide.sum(dims).to(kind) if mask[2] else None,
    )
