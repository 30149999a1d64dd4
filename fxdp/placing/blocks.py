"""Which masks are one value wherever row and column belong to different ranks, as between documents.

    ids[:, None] == ids            False between ranks, if equal ids are on one rank alone
    (...) & causal                 False
    where(..., 0.0, -inf)          -inf
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from fxdp.ir.graph.metadata import meta, tensor_type
from fxdp.ir.ops.library import aten
from fxdp.ir.types.placements import Shard
from fxdp.ir.types.sizes import axis_of
from fxdp.ir.types.value_types import TensorType
from fxdp.placing.pointers import moved_operands, moved_shard
from fxdp.rules.registry import Blocks

_AND = frozenset({aten.bitwise_and.Tensor, aten.logical_and.default})
_OR = frozenset({aten.bitwise_or.Tensor, aten.logical_or.default})
_NOT = frozenset({aten.bitwise_not.default, aten.logical_not.default})
_COMPARISONS: dict[Any, float] = {aten.eq.Tensor: 0.0, aten.ne.Tensor: 1.0}
_NUMBERS = frozenset({aten.scalar_tensor.default, aten.full.default, aten.full_like.default})


def blocks_of(
    node: fx.Node,
    known: Mapping[fx.Node, Blocks],
    dims_apart: Callable[[Any, Any], tuple[int, int] | None],
) -> Blocks | None:
    """Return what is known of a mask between ranks, from what is known of earlier masks.

    `dims_apart` returns the dims along which two values have equal elements on one rank alone.
    """
    target = node.target
    args: Any = node.args
    if target in _COMPARISONS:
        apart = dims_apart(*args[:2])
        if apart is None:
            return None
        rows, columns = (_in_result(node, args[i], apart[i]) for i in range(2))
        shape = tensor_type(node).shape
        along = axis_of(shape[rows])
        if rows == columns or along is None or not shape[rows] == shape[columns] == along.total:
            return None
        return Blocks(along.name, (rows, columns), _COMPARISONS[target])
    if target in _AND or target in _OR:
        fill = float(target in _OR)
        return next((b for value in args if (b := _broadcast(node, value, known)) and b.fill == fill), None)
    if target in _NOT and _is_mask(node):
        found = known.get(args[0])
        return None if found is None else found._replace(fill=1.0 - found.fill)
    if target is aten.where.self:
        found = _broadcast(node, args[0], known)
        number = None if found is None else _number(args[1 if found.fill else 2])
        return None if found is None or number is None else found._replace(fill=number)
    if target is aten.masked_fill.Scalar:
        found = _broadcast(node, args[1], known)
        return None if found is None or not found.fill else found._replace(fill=float(args[2]))
    return _moved(node, known)


def _moved(node: fx.Node, known: Mapping[fx.Node, Blocks]) -> Blocks | None:
    moved = moved_operands(node)
    if len(moved) != 1 or (found := known.get(moved[0])) is None or not _same_kind(node, moved[0]):
        return None
    shards = (moved_shard(node, {moved[0]: Shard(dim)}, {}) for dim in found.dims)
    rows, columns = (None if shard is None or shard.outer != 1 else shard.dim for shard in shards)
    return None if rows is None or columns is None else found._replace(dims=(rows, columns))


def _broadcast(node: fx.Node, value: Any, known: Mapping[fx.Node, Blocks]) -> Blocks | None:
    """Return what is known of an operand, with the dims of the result."""
    found = known.get(value) if isinstance(value, fx.Node) and _is_mask(value) else None
    if found is None:
        return None
    rows, columns = (_in_result(node, value, dim) for dim in found.dims)
    return found._replace(dims=(rows, columns))


def _in_result(node: fx.Node, operand: Any, dim: int) -> int:
    return dim + len(tensor_type(node).shape) - len(tensor_type(operand).shape)


def _number(value: Any) -> float | None:
    """Return the number with which a node is filled."""
    if not isinstance(value, fx.Node) or value.target not in _NUMBERS:
        return None
    number = value.args[value.target is not aten.scalar_tensor.default]
    return float(number) if isinstance(number, (int, float)) else None


def _is_mask(node: fx.Node) -> bool:
    type_ = meta(node).type
    return isinstance(type_, TensorType) and type_.dtype == torch.bool


def _same_kind(node: fx.Node, operand: fx.Node) -> bool:
    """Return whether a cast, if the node is one, keeps truth values and infinities."""
    return _is_mask(node) or not _is_mask(operand)
