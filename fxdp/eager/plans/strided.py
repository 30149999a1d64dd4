"""`as_strided`, which counts in memory: a part's memory is ordered as one device's before it is counted in.

x: [6, 8] as [8, 6].t()     x.as_strided(...) counts along [8, 6]     so does x.permute(1, 0).contiguous()
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fxdp.eager.message_report import user_line
from fxdp.eager.spec import dense_stride
from fxdp.eager.tensor import GlobalTensor
from fxdp.eager.view_origins import current_local, note_view
from fxdp.errors import InputError
from fxdp.torch_compat import aten


def _as_strided(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Count in a copy whose memory is ordered as one device's; NotImplemented where the parts' memory is."""
    value = args[0]
    if not isinstance(value, GlobalTensor):
        return NotImplemented
    shape, stride = tuple(value.shape), tuple(value.stride())
    if stride == dense_stride(shape) and current_local(value).is_contiguous():
        return NotImplemented
    order = sorted(range(len(shape)), key=lambda dim: (-stride[dim], dim))
    ordered = value.permute(order)
    if any(n != 1 and s != d for n, s, d in _strides(ordered)):
        raise InputError(
            f"{user_line()}: as_strided counts in memory with gaps or overlaps, of which no rank has all; "
            "expected a contiguous tensor: call .contiguous() before"
        )
    result = op(ordered.clone(memory_format=torch.contiguous_format), *args[1:], **kwargs)
    note_view(result, value, op, args[1:], dict(kwargs), False)
    return result


def _strides(value: Any) -> list[tuple[int, int, int]]:
    """Return each dim's size, stride, and stride if the value were contiguous."""
    shape = tuple(value.shape)
    return list(zip(shape, value.stride(), dense_stride(shape), strict=True))


STRIDED: Mapping[Any, Callable[..., Any]] = {aten.as_strided.default: _as_strided}
"""Ops that count in memory."""
