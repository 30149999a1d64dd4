"""Means, variances and norms over the batch as sums; the variance in two stages, by `(x - mean)**2`.

The formula `mean(x**2) - mean(x)**2` would need one reduction less, but is inexact by cancellation if the
mean is large compared with the deviation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxdp.capture.cross_sample.table import OpCall, count, decomposes, sum_type
from fxdp.torch_compat import OpOverload, aten

_OF_VARIANCE_AND_MEAN: dict[OpOverload, Callable[[Any, Any], Any]] = {
    aten.var_mean.correction: lambda var, mean: (var, mean),
    aten.var.correction: lambda var, mean: var,
    aten.std.correction: lambda var, mean: var.sqrt(),
    aten.std_mean.correction: lambda var, mean: (var.sqrt(), mean),
}


@decomposes(aten.mean.default, aten.mean.dim)
def _mean(call: OpCall) -> Any:
    x, dims = call["self"], _normal_dims(call["self"], call.get("dim"))
    if not call.batch.among(x.shape[d] for d in dims):
        return NotImplemented
    return _sum_mean(x.to(call["dtype"] or x.dtype), dims, call.get("keepdim", default=False))


@decomposes(*_OF_VARIANCE_AND_MEAN)
def _var_mean(call: OpCall) -> Any:
    x, dims, keepdim = call["self"], _normal_dims(call["self"], call["dim"]), call["keepdim"]
    if x.is_complex() or not call.batch.among(x.shape[d] for d in dims):
        return NotImplemented
    wide = x.to(sum_type(x.dtype))
    mean = _sum_mean(wide, dims, True)
    squares = _sum((wide - mean) * (wide - mean), dims, keepdim)
    correction = call["correction"]
    degrees = count(x, dims) - (1 if correction is None else _full(correction))
    kept = mean.squeeze(dims) if dims and not keepdim else mean
    return _OF_VARIANCE_AND_MEAN[call.op]((squares / degrees).to(x.dtype), kept.to(x.dtype))


@decomposes(aten.linalg_vector_norm.default)
def _vector_norm(call: OpCall) -> Any:
    x, dims = call["self"], _normal_dims(call["self"], call["dim"])
    if call["ord"] != 2 or x.is_complex() or not call.batch.among(x.shape[d] for d in dims):
        return NotImplemented
    wide = x.to(sum_type(call["dtype"] or x.dtype))
    return _sum(wide * wide, dims, call["keepdim"]).sqrt().to(call["dtype"] or x.dtype)


def _sum(x: torch.Tensor, dims: list[int], keepdim: bool) -> torch.Tensor:
    return x.sum(dims, keepdim=keepdim) if dims else x


def _sum_mean(x: torch.Tensor, dims: list[int], keepdim: bool) -> Any:
    """Return `sum / n`; half precision is accumulated in float32, as in eager kernels."""
    total = _sum(x.to(sum_type(x.dtype)), dims, keepdim)
    return (total / count(x, dims)).to(x.dtype)


def _full(value: Any) -> Any:
    """Return the correction as an int if possible, so that the degrees of freedom stay an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _normal_dims(x: torch.Tensor, dims: int | Sequence[int] | None) -> list[int]:
    """Return the dims of a reduction, counted from the front; None and [] mean all dims."""
    if isinstance(dims, int):
        dims = [dims]
    return [dim % x.dim() for dim in dims] if dims and x.dim() else list(range(x.dim()))
