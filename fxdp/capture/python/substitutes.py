"""Replacements for functions of torch that read values during capture, or hide the batch dim.

`cov` checks in C++ whether the degrees of freedom are positive, which no graph can. `embedding_bag` of a
matrix flattens all bags into one dim, in which a rank cannot find its own bags, and `segment_reduce` and bags
with offsets begin where values say. `nn.TransformerEncoder` and
`Decoder` check whether a mask is causal; `MultivariateNormal` checks whether a matrix is symmetric before
factoring. Results of two `masked_select` by one mask have equal sizes, which export only knows for indexing.
`roll` requires a known shift. `ctc_loss` becomes an op of fxdp and a plain mean.

Each replacement is active while the user's code is captured, and computes the same values and gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributions import constraints
from torch.nn import functional as F

from fxdp import torch_compat
from fxdp.capture.row_lengths import is_global_start
from fxdp.ir.ops.ctc import CTC_OP
from fxdp.torch_compat import Patch

_eager_embedding_bag = F.embedding_bag
_eager_masked_select = torch.masked_select
_eager_roll = torch.roll
_eager_ctc_loss = F.ctc_loss
_eager_reduce_by_lengths = torch.segment_reduce


def cov(
    input: Tensor,
    *,
    correction: int = 1,
    fweights: Tensor | None = None,
    aweights: Tensor | None = None,
) -> Tensor:
    """Compute the covariances of variables (rows) over observations (columns), in two stages."""
    if input.dim() > 2 or input.dtype == torch.bool:
        raise RuntimeError(f"cov: expected numbers of at most two dims, got {input.dtype} of {input.dim()}")
    rows = input if input.dim() == 2 else input.reshape(1, -1)
    rows = rows if rows.is_floating_point() or rows.is_complex() else rows.to(torch.get_default_dtype())
    weights = fweights if aweights is None else aweights if fweights is None else fweights * aweights
    if weights is None:
        centred = rows - rows.mean(1, keepdim=True)
        weighted: Tensor = centred
        degrees: Any = rows.shape[1] - correction
    else:
        total = weights.sum()
        centred = rows - ((rows * weights).sum(1) / total).unsqueeze(1)
        weighted = centred * weights
        lost = total if aweights is None else (weights * aweights).sum()
        degrees = total - correction * lost / total
        degrees = degrees.clamp(min=0)
    result: Tensor = weighted @ centred.mH / degrees
    return result if input.dim() == 2 and input.shape[0] != 1 else result.reshape(())


def corrcoef(input: Tensor) -> Tensor:
    """Compute the covariances divided by the standard deviations of both variables."""
    covariance = cov(input)
    if covariance.dim() == 0:
        return covariance / covariance
    deviations = covariance.diagonal().sqrt()
    result = covariance / deviations.unsqueeze(1) / deviations.unsqueeze(0)
    if result.is_complex():
        return torch.complex(_within_one(result.real), _within_one(result.imag))
    return _within_one(result)


def _within_one(x: Tensor) -> Tensor:
    """Clamp away rounding errors, with an identity gradient.

    Whether rounding yields 1 or 1 + 2e-16 must not decide the gradient.
    """
    return x + (x.clamp(-1, 1) - x).detach()


def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Compute bags of equal length, one row of `input` each, by `embedding` and a reduction over each bag."""
    plain = input.dim() == 2 and not input.is_nested and offsets is None and weight.dim() == 2
    ragged = input.dim() == 1 and is_global_start(offsets)
    # torch's frequencies are its own, and it has no sparse gradient of a maximum
    other = max_norm is not None or scale_grad_by_freq or (sparse and mode == "max")
    weighted = per_sample_weights is not None
    if not (plain or ragged) or other or mode not in _REDUCE or (weighted and mode != "sum"):
        return _eager_embedding_bag(
            input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse,
            per_sample_weights, include_last_offset, padding_idx,
        )  # fmt: skip
    pad = None if padding_idx is None else padding_idx % weight.shape[0]
    rows = F.embedding(input, weight, pad, sparse=sparse)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if ragged:
        assert offsets is not None
        return _bags(rows, None if pad is None else input != pad, offsets, mode, include_last_offset)
    if pad is None:
        return _REDUCE[mode](rows)
    return _without_padding(rows, (input != pad).unsqueeze(-1), mode)


_REDUCE: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda rows: rows.sum(1),
    "mean": lambda rows: rows.mean(1),
    "max": lambda rows: rows.max(1).values,
}


def _without_padding(rows: Tensor, kept: Tensor, mode: str) -> Tensor:
    """Reduce over the rows that are kept; zero for bags without any."""
    if mode == "max":
        found = rows.masked_fill(~kept, -math.inf).max(1).values
        return torch.where(kept.any(1), found, torch.zeros_like(found))
    total = torch.where(kept, rows, torch.zeros_like(rows)).sum(1)
    return total if mode == "sum" else total / kept.sum(1).clamp(min=1)


def _bags(rows: Tensor, kept: Tensor | None, offsets: Tensor, mode: str, has_end: bool) -> Tensor:
    """Reduce over the rows of each bag that are kept; zero for bags without any."""
    positions = torch.arange(rows.shape[0], dtype=offsets.dtype, device=offsets.device)
    of_row = torch.searchsorted(offsets, positions, right=True) - 1
    bags = offsets.shape[0] - int(has_end)
    if kept is not None:
        rows = torch.where(kept.unsqueeze(-1), rows, -math.inf if mode == "max" else 0.0)
    if mode == "max":
        least = rows.new_full((bags, rows.shape[1]), -math.inf)
        found = least.scatter_reduce(0, of_row.unsqueeze(-1).expand_as(rows), rows, "amax")
        return torch.where(found == -math.inf, 0.0, found)
    total = rows.new_zeros(bags, rows.shape[1]).index_add(0, of_row, rows)
    if mode == "sum":
        return total
    counted = rows.new_ones(rows.shape[0]) if kept is None else kept.to(rows.dtype)
    return total / rows.new_zeros(bags).index_add(0, of_row, counted).clamp(min=1).unsqueeze(-1)


def _reduce_by_lengths(data: Tensor, reduce: str, **options: Any) -> Tensor:
    """Reduce consecutive rows by lengths, also those that are given by `offsets`."""
    offsets = options.get("offsets")
    if offsets is not None and offsets.dim() == 1:
        options |= {"offsets": None, "lengths": offsets.diff()}
    reduced: Tensor = _eager_reduce_by_lengths(data, reduce, **options)
    return reduced


def _masked_select(input: Tensor, mask: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Select by indexing, if neither operand is broadcast; symbolic sizes are never 1."""
    sizes: Iterable[tuple[Any, Any]] = zip(input.shape, mask.shape, strict=False)
    alike = all(type(a) is type(b) and (isinstance(a, torch.SymInt) or a == b) for a, b in sizes)
    if out is None and input.dim() == mask.dim() and alike:
        return input[mask]
    return _eager_masked_select(input, mask, out=out)


def _roll(input: Tensor, shifts: Any, dims: Any = None) -> Tensor:
    """Roll along one dim by a data-dependent number: select the elements that move to each position."""
    if not isinstance(shifts, torch.SymInt) or not isinstance(dims, int):
        return _eager_roll(input, shifts, () if dims is None else dims)
    size = input.shape[dims]
    places: Any = torch.arange(size, device=input.device)
    return input.index_select(dims, (places - shifts) % size)


def _is_told_causal(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    """Return whether the caller declares a mask causal; without a declaration the mask is used as given."""
    return is_causal is True


def is_symmetric(self: constraints.Constraint, value: Tensor) -> Tensor:
    """Return for each matrix whether it is symmetric."""
    if value.shape[-2] != value.shape[-1]:
        return torch.full(value.shape[:-2], False, device=value.device)
    return torch.isclose(value, value.mT, atol=1e-6).all(-2).all(-1)


def is_positive_definite(self: constraints.Constraint, value: Tensor) -> Tensor:
    """Return for each matrix whether it is symmetric and has a Cholesky factor; both are always computed."""
    symmetric = is_symmetric(self, value)
    if value.shape[-2] != value.shape[-1]:
        return symmetric
    factored: Tensor = torch.linalg.cholesky_ex(value).info.eq(0)
    return symmetric & factored


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Compute `F.ctc_loss` by `fxdp::ctc_loss` and a plain mean."""
    lengths = (input_lengths, target_lengths)
    if log_probs.dim() != 3 or not all(isinstance(length, Tensor) for length in lengths):
        eager: Tensor = _eager_ctc_loss(log_probs, targets, *lengths, blank, reduction, zero_infinity)
        return eager
    losses: Tensor = CTC_OP(log_probs, targets, *lengths, blank, zero_infinity)
    if zero_infinity:
        losses = torch.where(losses == float("inf"), 0.0, losses)
    if reduction == "mean":
        losses = losses / target_lengths.to(losses).clamp_min(1)
        return losses.mean()
    return losses.sum() if reduction == "sum" else losses


def _instead(function: Callable[..., Any]) -> Callable[[Any], Any]:
    return lambda _: function


SUBSTITUTES: tuple[Patch, ...] = (
    Patch(F, "ctc_loss", _instead(_ctc_loss)),
    Patch(F, "embedding_bag", _instead(embedding_bag)),
    Patch(torch, "segment_reduce", _instead(_reduce_by_lengths)),
    Patch(torch, "masked_select", _instead(_masked_select)),
    Patch(Tensor, "masked_select", _instead(_masked_select)),
    Patch(torch, "roll", _instead(_roll)),
    Patch(Tensor, "roll", _instead(_roll)),
    Patch(torch, "cov", _instead(cov)),
    Patch(torch, "corrcoef", _instead(corrcoef)),
    Patch(Tensor, "cov", _instead(cov)),
    Patch(Tensor, "corrcoef", _instead(corrcoef)),
    Patch(*torch_compat.CAUSAL_MASK_TEST, _instead(_is_told_causal)),
    Patch(type(constraints.symmetric), "check", _instead(is_symmetric)),
    Patch(type(constraints.positive_definite), "check", _instead(is_positive_definite)),
)
"""Patches for the capture of a model."""
