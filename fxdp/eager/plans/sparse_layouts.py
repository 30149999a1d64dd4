"""Sparse, nested and quantized tensors stay plain: ops that read or return such run on full values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fxdp.eager.batch_axis import BatchAxis
from fxdp.eager.tensor import GlobalTensor, wrapped
from fxdp.eager.view_origins import gathered
from fxdp.torch_compat import OpOverload


def stays_plain(value: Tensor) -> bool:
    """Return whether a tensor is sparse, nested or quantized, as no global tensor is."""
    return value.layout is not torch.strided or value.is_nested or value.is_quantized


def run_on_full_values(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an op on the full values of its operands, of which some stay plain."""
    units: list[BatchAxis] = []

    def full(value: Any) -> Any:
        if isinstance(value, GlobalTensor):
            units.append(value._spec.axis.ranks.unit)
            return gathered(value, str(op))
        return [full(one) for one in value] if isinstance(value, (list, tuple)) else value

    result = op(*map(full, args), **{name: full(value) for name, value in kwargs.items()})
    return wrapped_results(result, units[0])


def wrapped_results(results: Any, unit: BatchAxis) -> Any:
    """Wrap full values, whose shapes are known only now; those of other layouts stay plain."""
    if isinstance(results, Tensor):
        return results if stays_plain(results) else wrapped(results, unit)
    if isinstance(results, (list, tuple)):
        return type(results)([wrapped_results(one, unit) for one in results])
    return results
