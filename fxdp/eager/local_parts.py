"""Between global tensors and programs that take and return local parts, with their gradients.

    global tensor --local_part--> this rank's part --program--> local part --from_part--> global tensor
    gradient <-- of the global batch --                 <-- times the ranks --

A compiled module takes the gradient of a sharded output as that of this rank's own loss, whose mean over the
ranks counts, and divides it by the number of ranks; a gradient of the global loss is multiplied first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxdp.eager.batch_axis import BatchAxis
from fxdp.eager.redistribute import redistributed
from fxdp.eager.spec import dense_stride, sharded_type, spec_of
from fxdp.eager.tensor import GlobalTensor, wrapped
from fxdp.eager.view_origins import current_local
from fxdp.ir.types.placements import R, Shard
from fxdp.torch_compat import without_torch_function


def entered(local: Tensor, axis: BatchAxis, dim: int, *, keeps_graph: bool) -> GlobalTensor:
    """Return this rank's part of a batch as a global tensor; a leaf of autograd unless it keeps its graph."""
    local = local.resolve_conj().resolve_neg()  # the bits are not read below the dispatch
    if not axis.total:
        return wrapped(local.detach(), axis, R)
    if keeps_graph and local.requires_grad:
        return from_part(local, axis, Shard(dim), axis.total, 1)
    return wrapped(local.detach(), axis, Shard(dim)).requires_grad_(local.requires_grad)  # type: ignore[return-value]


def local_part(value: Tensor, axis: BatchAxis, placement: Shard) -> Tensor:
    """Return this rank's part of a global tensor, or of a plain one, which is equal on all ranks."""
    with without_torch_function():
        return _LocalPart.apply(value, axis, placement)  # type: ignore[no-untyped-call,no-any-return]


def from_part(local: Tensor, axis: BatchAxis, placement: Shard, size: int, scale: int) -> GlobalTensor:
    """Return the global tensor with this part; `size` is that of its sharded dim.

    The part's gradient is multiplied by `scale`.
    """
    with without_torch_function():
        return _FromPart.apply(local, axis, placement, size, scale)  # type: ignore[no-untyped-call,no-any-return]


class _LocalPart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, axis: BatchAxis, placement: Shard) -> Tensor:
        ctx.axis, ctx.placement, ctx.size = axis, placement, value.shape[placement.dim]
        return _part(value, axis, placement).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return from_part(grad, ctx.axis, ctx.placement, ctx.size, 1), None, None


class _FromPart(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, local: Tensor, axis: BatchAxis, placement: Shard, size: int, scale: int
    ) -> GlobalTensor:
        ctx.axis, ctx.placement, ctx.scale = axis, placement, scale
        dim = placement.dim
        shape = (*local.shape[:dim], size, *local.shape[dim + 1 :])
        spec = spec_of(local.dtype, shape, dense_stride(shape), local.device, axis.layout(placement))
        return GlobalTensor(local.detach(), spec)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return local_part(grad, ctx.axis, ctx.placement) * ctx.scale, None, None, None, None


def _part(value: Tensor, axis: BatchAxis, placement: Shard) -> Tensor:
    given = value if isinstance(value, GlobalTensor) else wrapped(value, axis.ranks.unit)
    spec, local = given._spec, current_local(given)
    have = spec.placement
    if spec.layout.is_sharded and spec.axis is not axis:
        local, have = redistributed(local, spec.type, have, R, spec.axis, "a local part"), R
    type_ = sharded_type(spec.dtype, spec.shape, axis.layout(placement))
    return redistributed(local, type_, have, placement, axis, "a local part")
