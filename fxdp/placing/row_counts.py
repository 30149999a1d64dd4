"""Which values say how many rows each sample has, or where these begin or end.

lengths                                   lengths    by contract: on each rank they add up to its rows
lengths.cumsum(0)                         ends
pad(ends, (1, 0)), cat([zeros(1), ends])  bounds     as cu_seqlens
bounds[1:], bounds[:-1]                   ends, starts
ends - starts, ends - lengths             lengths, starts
starts + lengths                          ends
repeat_interleave(lengths)                row numbers of samples
bucketize(arange(rows), ends, right=True)       row numbers of samples
bucketize(arange(rows), bounds, right=True) - 1       of starts and bounds
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from torch import fx

from fxdp.ir.graph.metadata import meta, tensor_type
from fxdp.ir.ops.library import aten
from fxdp.ir.types.placements import Shard
from fxdp.ir.types.sizes import axis, axis_of
from fxdp.ir.types.value_types import ScalarType, TensorType
from fxdp.placing.pointers import may_round
from fxdp.rules.registry import Pointer

_COPIES = frozenset({
    aten.alias.default, aten.clone.default, aten.detach.default, aten._to_copy.default,
    aten.view.default, aten.lift_fresh_copy.default,
})  # fmt: skip
_CONSTANTS = frozenset({aten.zeros.default, aten.new_zeros.default, aten.full.default})


class _Count(NamedTuple):
    """What the values say of the rows of `rows`, of which each row of `samples` has several.

    `of` is the input that says so: the numbers of two inputs do not mix.
    """

    kind: Literal["lengths", "starts", "ends", "bounds"]
    rows: str
    samples: str
    of: fx.Node


_SUMS: dict[Any, Literal["lengths", "starts", "ends"]] = {
    (aten.sub.Tensor, "ends", "starts"): "lengths",
    (aten.sub.Tensor, "ends", "lengths"): "starts",
    (aten.add.Tensor, "starts", "lengths"): "ends",
}


@dataclass(slots=True)
class RowCounts:
    """What is known of numbers of rows."""

    _known: dict[fx.Node, _Count] = field(default_factory=dict)
    _searched: dict[fx.Node, _Count] = field(default_factory=dict)
    """Of each row, how many of these numbers are no larger."""

    def axis_of(self, node: fx.Node) -> str | None:
        """Return the axis whose rows the values count, as lengths; None for other values."""
        found = self._known.get(node)
        return found.rows if found is not None and found.kind == "lengths" else None

    def learn_input(self, node: fx.Node, rows: str) -> None:
        """Note that an input has the number of rows of each sample."""
        along = axis_of(tensor_type(node).shape[0])
        if along is not None and len(tensor_type(node).shape) == 1:
            self._known[node] = _Count("lengths", rows, along.name, node)

    def learn(self, node: fx.Node, iota: Mapping[fx.Node, int]) -> None:
        """Find out what is known of a tensor from what is known of earlier ones."""
        found = None if may_round(node) else self._count(node)
        if found is not None:
            self._known[node] = found
        if (searched := self._search(node, iota)) is not None:
            self._searched[node] = searched

    def pointer_of(self, node: fx.Node) -> Pointer | None:
        """Return that a node has the number of each row's sample."""
        args: Any = node.args
        if node.target is aten.repeat_interleave.Tensor:
            found = self._known.get(args[0])
            is_number = found is not None and found.kind == "lengths"
        elif node.target is aten.sub.Tensor and args[1] == 1 and not node.kwargs:
            found = self._searched.get(args[0])
            is_number = found is not None and found.kind != "ends"
        else:
            found = self._searched.get(node)
            is_number = found is not None and found.kind == "ends"
        if found is None or not is_number or tensor_type(node).shape != (axis(found.rows).total,):
            return None
        return Pointer(found.samples, Shard(0))

    def _count(self, node: fx.Node) -> _Count | None:
        target = node.target
        args: Any = node.args
        first = self._known.get(args[0]) if args and isinstance(args[0], fx.Node) else None
        if target is aten.cat.default:
            return self._joined(args[0])
        if target is aten.slice.Tensor:
            (later, _), (earlier, _) = later_rows(node), first_rows(node)
            known = self._known.get(args[0])
            if known is None or known.kind != "bounds" or (later or earlier) is None:
                return None
            return known._replace(kind="ends" if later is not None else "starts")
        if first is None:
            return None
        if target is aten.cumsum.default and first.kind == "lengths":
            return first._replace(kind="ends")
        if target is aten.constant_pad_nd.default and first.kind == "ends":
            return first._replace(kind="bounds") if (*args[1:], 0)[:2] == ([1, 0], 0) else None
        if target in (aten.add.Tensor, aten.sub.Tensor) and not node.kwargs:
            second = self._known.get(args[1])
            kind = None if second is None else _SUMS.get((target, first.kind, second.kind))
            is_of_one = second is not None and second.of is first.of
            return first._replace(kind=kind) if kind is not None and is_of_one else None
        is_copied = target in _COPIES and tensor_type(node).shape == tensor_type(args[0]).shape
        return first if is_copied else None

    def _joined(self, parts: Any) -> _Count | None:
        """Return bounds, of a zero before ends."""
        found = self._known.get(parts[1]) if len(parts) == 2 else None
        if found is None or found.kind != "ends" or not _is_zero(parts[0]):
            return None
        return found._replace(kind="bounds")

    def _search(self, node: fx.Node, iota: Mapping[fx.Node, int]) -> _Count | None:
        args: Any = node.args
        if node.target is aten.searchsorted.Tensor:
            numbers, values = args[:2]
        elif node.target is aten.bucketize.Tensor:
            values, numbers = args[:2]
        else:
            return None
        found = self._known.get(numbers)
        is_right = bool(node.kwargs.get("right")) or node.kwargs.get("side") == "right"
        if found is None or found.kind == "lengths" or not is_right or node.kwargs.get("sorter") is not None:
            return None
        is_counted = iota.get(values) == 0 and tensor_type(values).shape == (axis(found.rows).total,)
        return found if is_counted else None


def _is_zero(node: fx.Node) -> bool:
    """Return whether a node is one zero."""
    type_ = meta(node).type
    if not isinstance(type_, TensorType) or type_.shape != (1,) or node.target not in _CONSTANTS:
        return False
    return node.target is not aten.full.default or bool(node.args[1] == 0)


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
