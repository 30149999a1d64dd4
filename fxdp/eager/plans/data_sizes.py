"""Ops whose sizes depend on data, along the batch: each rank keeps its own, after one exchange of counts.

x: [8, 3] in S(0) of (5, 3)     x[x[:, 0] > 0]: [6, 3] in S(0) of (4, 2)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxdp.eager.batch_axis import BatchAxis
from fxdp.eager.redistribute import redistributed
from fxdp.eager.spec import sharded_type
from fxdp.eager.tensor import GlobalTensor, wrapped
from fxdp.eager.view_origins import current_local
from fxdp.ir.types.placements import R, Shard
from fxdp.torch_compat import aten

_FIRST = Shard(0)


def _by_sample(value: Any) -> bool:
    return isinstance(value, GlobalTensor) and value._spec.placement == _FIRST


def _local_samples(value: Tensor, axis: BatchAxis, cause: str) -> Tensor:
    """Return this rank's samples of a value that leads with the batch, in any placement."""
    if not isinstance(value, GlobalTensor):
        value = wrapped(value, axis.ranks.unit)
    local, placement = current_local(value), value._spec.placement
    if placement == _FIRST and value._spec.axis is axis:
        return local
    if value._spec.layout.is_sharded:
        local, placement = redistributed(local, value._spec.type, placement, R, value._spec.axis, cause), R
    type_ = sharded_type(value.dtype, tuple(value.shape), axis.layout(_FIRST))
    return redistributed(local, type_, placement, _FIRST, axis, cause)


def _selected(local: Tensor, axis: BatchAxis) -> GlobalTensor:
    """Return the samples that the ranks have selected; full if there are none at all."""
    found = axis.ranks.counted(local.shape[0])
    return wrapped(local, found, _FIRST if found.total else R)


def _mask_axis(mask: Any, value: Any) -> BatchAxis | None:
    """Return the batch axis along which a mask selects from a value; None if it is another kind of index."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.dim() == 0 or value.dim() == 0:
        return None
    leading = next((one for one in (mask, value) if _by_sample(one)), None)
    if leading is None or mask.shape[0] != value.shape[0]:
        return None
    assert isinstance(leading, GlobalTensor)
    axis = leading._spec.axis
    return axis if axis.total == mask.shape[0] else None


def _index(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    value, indices = args
    axis = _mask_axis(indices[0], value) if len(indices) == 1 else None
    if axis is None:
        return NotImplemented
    mask = indices[0]
    return _selected(op(_local_samples(value, axis, str(op)), [_local_samples(mask, axis, str(op))]), axis)


def _masked_select(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    value, mask = args
    return _index(aten.index.Tensor, (value, [mask]), {}) if value.shape == mask.shape else NotImplemented


def _nonzero(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    value = args[0]
    if not _by_sample(value) or value._spec.axis.total != value.shape[0]:
        return NotImplemented
    axis = value._spec.axis
    found = op(current_local(value))
    found[:, 0] += axis.offset
    return _selected(found, axis)


def _index_put(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Write selected samples back, where each rank has as many values as its mask selects."""
    value, indices, given = args[:3]
    axis = _mask_axis(indices[0], value) if len(indices) == 1 else None
    if axis is None or given.dim() == 0 or not _by_sample(given):
        return NotImplemented
    mask, samples = (_local_samples(one, axis, str(op)) for one in (indices[0], value))
    local = current_local(given)
    fits = int(int(mask.sum()) == local.shape[0])
    with axis.ranks.message("index_put"):
        if not all(row == (1,) for row in axis.ranks.exchange((fits,))):
            return NotImplemented
    return wrapped(op(samples, [mask], local, *args[3:]), axis, _FIRST)


DATA_SIZES: Mapping[Any, Callable[..., Any]] = {
    aten.index.Tensor: _index,
    aten.masked_select.default: _masked_select,
    aten.nonzero.default: _nonzero,
    aten.index_put.default: _index_put,
}
"""Ops with a way of their own for masks along the batch; they return NotImplemented for all else."""
