"""Which index operands are `arange(B)`: then each rank's samples meet themselves, and nothing is sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fxdp.eager.batch_axis import BatchAxis
from fxdp.eager.tensor import GlobalTensor
from fxdp.torch_compat import OpOverload, aten

INDEXING = frozenset({
    aten.index.Tensor, aten.index_put.default, aten._unsafe_index.Tensor, aten._unsafe_index_put.default,
    aten.gather.default, aten.index_select.default, aten.scatter.src, aten.scatter.value,
    aten.scatter_add.default,
})  # fmt: skip
"""Ops whose plan depends on the values of full index operands."""


def iotas(op: OpOverload, tensors: Sequence[Tensor], axis: BatchAxis | None) -> tuple[int | None, ...]:
    """Return for each operand the dim along which it is `arange(B)`, or None; reads local values only."""
    if op not in INDEXING or axis is None:
        return (None,) * len(tensors)
    return tuple(_iota_dim(tensor, axis.total) for tensor in tensors)


def _iota_dim(tensor: Tensor, batch: int) -> int | None:
    local = tensor
    if isinstance(tensor, GlobalTensor):
        if not tensor._spec.layout.is_full:
            return None
        local = tensor._local
    if local.dtype != torch.int64 or local.numel() != batch or batch not in local.shape:
        return None
    if not torch.equal(local.reshape(-1), torch.arange(batch, device=local.device)):
        return None
    return list(local.shape).index(batch)
