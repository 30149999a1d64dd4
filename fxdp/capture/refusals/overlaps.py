"""Refuse writes into views with repeated elements: the result depends on the order of the writes.

    h.as_strided((n, 3, 2), (4, 1, 1)).mul_(2)      eager doubles elements once or twice, a trace once

Torch refuses writes into views made by `expand` or `unfold`, but not into views made by strides.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxdp.errors import CaptureError
from fxdp.ir.graph.metadata import Location
from fxdp.torch_compat import aten


def check_overlap(node: fx.Node, location: Location) -> None:
    """Raise if a node writes into a view by strides that overlaps itself.

    Raises
    ------
    CaptureError : with the line that makes the view or writes.
    """
    if node.target is not aten.as_strided_scatter.default:
        return
    sizes: Any = node.args[2]
    strides: Any = node.args[3]
    if overlaps([*map(_hint, sizes)], [*map(_hint, strides)]):
        raise CaptureError(
            f"at {location}: the model writes into a view of strides {[*map(_hint, strides)]} and sizes "
            f"{[*map(_hint, sizes)]}, which has some elements several times: what is left depends on the "
            "order of the writes. Clone the view before it is written, and add up where several meet "
            "(F.fold, index_add)"
        )


def overlaps(sizes: list[int], strides: list[int]) -> bool:
    """Return whether two indices may lead to one element.

    A dim does not overlap if the stride exceeds the span of all dims with smaller strides.
    """
    reached = 0
    for stride, size in sorted(zip(strides, sizes, strict=True)):
        if size > 1 and stride <= reached:
            return True
        reached += (size - 1) * stride
    return False


def _hint(size: Any) -> int:
    """Return the example's value of a size."""
    value = size.meta["val"] if isinstance(size, fx.Node) else size
    return int(value.node.hint) if isinstance(value, torch.SymInt) else int(value)
