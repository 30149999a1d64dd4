"""Means, variances and norms over the batch as sums; the variance in two stages, `(x - mean)**2`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fxdp.capture.couplings.coupling_table import BatchSymbols, count, couples, normal_dims, sum_type

aten = torch.ops.aten


@couples(aten.mean.default)
def _mean(batch: BatchSymbols, x: torch.Tensor, *, dtype: torch.dtype | None = None) -> Any:
    return _mean_dims(batch, x, None, False, dtype=dtype)


@couples(aten.mean.dim)
def _mean_dims(
    batch: BatchSymbols,
    x: torch.Tensor,
    dim: Sequence[int] | None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    dims = normal_dims(x, dim)
    if not batch.among(x.shape[d] for d in dims):
        return NotImplemented
    return _sum_mean(x.to(dtype or x.dtype), dims, keepdim)


@couples(aten.var.correction)
def _var(
    batch: BatchSymbols, x: torch.Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> Any:
    both = _var_mean(batch, x, dim, correction=correction, keepdim=keepdim)
    return both if both is NotImplemented else both[0]


@couples(aten.std.correction)
def _std(
    batch: BatchSymbols, x: torch.Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> Any:
    both = _var_mean(batch, x, dim, correction=correction, keepdim=keepdim)
    return both if both is NotImplemented else both[0].sqrt()


@couples(aten.std_mean.correction)
def _std_mean(
    batch: BatchSymbols, x: torch.Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> Any:
    both = _var_mean(batch, x, dim, correction=correction, keepdim=keepdim)
    return both if both is NotImplemented else (both[0].sqrt(), both[1])


@couples(aten.var_mean.correction)
def _var_mean(
    batch: BatchSymbols, x: torch.Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
) -> Any:
    dims = normal_dims(x, dim)
    if x.is_complex() or not batch.among(x.shape[d] for d in dims):
        return NotImplemented
    wide = x.to(sum_type(x.dtype))
    mean = _sum_mean(wide, dims, True)
    squares = _sum((wide - mean) * (wide - mean), dims, keepdim)
    degrees = count(x, dims) - (1 if correction is None else _whole(correction))
    kept = mean if keepdim else _squeeze(mean, dims)
    return (squares / degrees).to(x.dtype), kept.to(x.dtype)


@couples(aten.linalg_vector_norm.default)
def _vector_norm(
    batch: BatchSymbols,
    x: torch.Tensor,
    ord: float = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    dims = normal_dims(x, dim)
    if ord != 2 or x.is_complex() or not batch.among(x.shape[d] for d in dims):
        return NotImplemented
    wide = x.to(sum_type(dtype or x.dtype))
    return _sum(wide * wide, dims, keepdim).sqrt().to(dtype or x.dtype)


def _sum(x: torch.Tensor, dims: list[int], keepdim: bool) -> torch.Tensor:
    return x.sum(dims, keepdim=keepdim) if dims else x


def _sum_mean(x: torch.Tensor, dims: list[int], keepdim: bool) -> Any:
    """`sum / n`; half precision is added up in float32, as eager's kernel does."""
    total = _sum(x.to(sum_type(x.dtype)), dims, keepdim)
    return (total / count(x, dims)).to(x.dtype)


def _squeeze(x: torch.Tensor, dims: list[int]) -> torch.Tensor:
    return x.squeeze(dims) if dims else x


def _whole(value: Any) -> Any:
    """A correction as an int where it is one, so that the degrees of freedom stay an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value
