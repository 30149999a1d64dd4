"""Slices that leave out one row at an end, by which a graph compares each row with its neighbour."""

from __future__ import annotations

from typing import Any

from torch import fx

from fxdp.ir.graph.metadata import meta, tensor_type
from fxdp.ir.ops.library import aten
from fxdp.ir.types.value_types import ScalarType


def later_rows(node: Any) -> tuple[fx.Node | None, int]:
    """Return what a node is all rows but the first of, and the dim; no node if it is not."""
    return _all_but_one(node, 1)


def first_rows(node: Any) -> tuple[fx.Node | None, int]:
    """Return what a node is all rows but the last of, and the dim; no node if it is not."""
    return _all_but_one(node, 0)


def _all_but_one(node: Any, first: int) -> tuple[fx.Node | None, int]:
    if not isinstance(node, fx.Node) or node.target is not aten.slice.Tensor or len(node.args) > 4:
        return None, 0
    given: tuple[Any, ...] = (*node.args, 0, 0)
    source, dim, start = given[:3]
    dim %= len(tensor_type(source).shape)
    if isinstance(start, fx.Node) and isinstance(type_ := meta(start).type, ScalarType):
        start = type_.expr
    is_left_out = tensor_type(source).shape[dim] - tensor_type(node).shape[dim] == 1
    return (source, dim) if is_left_out and (start or 0) == first else (None, 0)
