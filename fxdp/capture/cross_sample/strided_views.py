"""`as_strided` of a contiguous tensor, as the equivalent view.

Strides count elements of the full tensor, so a rank could not apply strides to a local shard. Calls of
`as_strided` made by torch itself (a mean over pixels, a replayed view) are only views; all other calls stay
and run replicated.

    as_strided(x [B, 16, 1, 1], [B, 16], [16, 1])          ->  x.view(B, 16)
    as_strided_scatter(x [16 * B], y [B, 16], ..., [16, 1])  ->  y.view(16 * B)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from fxdp.capture.cross_sample.table import OpCall, count, decomposes
from fxdp.torch_compat import aten


@decomposes(aten.as_strided.default)
def _as_strided(call: OpCall) -> Any:
    return call["self"].view(call["size"]) if _is_view(call) else NotImplemented


@decomposes(aten.as_strided_scatter.default)
def _as_strided_scatter(call: OpCall) -> Any:
    return call["src"].reshape(call["self"].shape) if _is_view(call) else NotImplemented


def _is_view(call: OpCall) -> bool:
    """Return whether the call selects all elements of a contiguous tensor, in order."""
    x, size, stride = call["self"], call["size"], call["stride"]
    if not call.holds_batch("self") or not _is_contiguous(x) or call["storage_offset"] not in (None, 0):
        return False
    return _same(count(x, range(x.dim())), math.prod(size)) and _in_order(size, stride)


def _is_contiguous(x: torch.Tensor) -> bool:
    start = x.storage_offset()
    return isinstance(start, int) and start == 0 and _in_order(x.shape, x.stride())


def _in_order(size: Sequence[Any], stride: Sequence[Any]) -> bool:
    """Return whether the strides are contiguous; dims of size 1 may have any stride."""
    expected: Any = 1
    for n, step in zip(reversed(size), reversed(stride), strict=True):
        if _same(n, 1):
            continue
        if not _same(step, expected):
            return False
        expected = expected * n
    return True


def _same(a: Any, b: Any) -> bool:
    """Return whether two sizes are the same expression, without a guard on symbolic values."""
    first, second = (n.node.expr if isinstance(n, torch.SymInt) else n for n in (a, b))
    return bool(first == second)
