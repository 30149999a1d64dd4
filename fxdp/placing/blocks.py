"""Which masks are one value wherever row and column belong to different ranks, as between documents.

    ids[:, None] == ids            False between ranks, if equal ids are on one rank alone
    (...) & causal                 False
    where(..., 0.0, -inf)          -inf

Of masks that say nothing but which rows are of one sample, and which are earlier, that is kept, too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx

from fxdp.ir.graph.metadata import meta, tensor_type
from fxdp.ir.ops.library import aten
from fxdp.ir.types.placements import Shard
from fxdp.ir.types.sizes import axis_of, is_axis
from fxdp.ir.types.value_types import TensorType
from fxdp.placing.packed_samples import PackedSamples
from fxdp.placing.pointers import moved_operands, moved_shard
from fxdp.rules.registry import Blocks, SampleMask

_AND = frozenset({aten.bitwise_and.Tensor, aten.logical_and.default})
_OR = frozenset({aten.bitwise_or.Tensor, aten.logical_or.default})
_NOT = frozenset({aten.bitwise_not.default, aten.logical_not.default})
_EQUAL = {aten.eq.Tensor: 0.0, aten.ne.Tensor: 1.0}
_NUMBERS = {
    aten.scalar_tensor.default: 0, aten.full.default: 1, aten.full_like.default: 1, aten.new_full.default: 2
}  # fmt: skip
"""Ops that fill a tensor with the number that they have at this argument."""
_ONES = frozenset({aten.ones.default, aten.new_ones.default, aten.ones_like.default})


class _Order(NamedTuple):
    """Fact about a mask: True exactly where the column is no later than the row.

    `of` are the positions that were compared, which count anew in each sample; None: row numbers.
    """

    rows: int
    columns: int
    of: fx.Node | None


@dataclass(slots=True)
class Masks:
    """What is known of masks between the rows of an axis."""

    samples: PackedSamples
    blocks: dict[fx.Node, Blocks] = field(default_factory=dict)
    _orders: dict[fx.Node, _Order] = field(default_factory=dict)

    def learn(self, node: fx.Node) -> None:
        """Find out what is known of a tensor from what is known of earlier ones."""
        if (blocks := self._blocks(node)) is not None:
            self.blocks[node] = blocks
        elif (order := self._order(node)) is not None:
            self._orders[node] = order

    def _blocks(self, node: fx.Node) -> Blocks | None:
        target = node.target
        args: Any = node.args
        if target in _EQUAL:
            return self._compared(node, _EQUAL[target])
        if target in _AND:
            return self._both(node, *args) or self._both(node, args[1], args[0])
        if target in _OR:
            found = (self._operand(node, value) for value in args)
            return next((one._replace(samples=None) for one in found if one is not None and one.fill), None)
        if target in _NOT and _is_mask(node):
            known = self.blocks.get(args[0])
            return None if known is None else known._replace(fill=1.0 - known.fill, samples=None)
        if target is aten.where.self:
            known = self._operand(node, args[0])
            if known is None or (hidden := _number(args[1 if known.fill else 2])) is None:
                return None
            is_told = not known.fill and _number(args[1]) == 0
            return known._replace(fill=hidden, samples=known.samples if is_told else None)
        if target is aten.masked_fill.Scalar:
            known = self._operand(node, args[1])
            if known is None or not known.fill:
                return None
            return known._replace(fill=float(args[2]), samples=None)
        return self._moved(node)

    def _compared(self, node: fx.Node, fill: float) -> Blocks | None:
        """Return what is known of numbers of samples, or row numbers, compared with one another."""
        args: Any = node.args
        apart = self.samples.dims_apart(*args[:2])
        if apart is None:
            return None
        rows, columns = (_in_result(node, args[i], apart[i]) for i in range(2))
        shape = tensor_type(node).shape
        along = axis_of(shape[rows])
        if rows == columns or along is None or shape[rows] != shape[columns]:
            return None
        first, second = (self.samples.apart[value].numbers for value in args[:2])
        is_of_samples = first is not None and first is second and not fill
        samples = SampleMask(first.name) if first is not None and is_of_samples else None
        return Blocks(along.name, (rows, columns), fill, samples)

    def _both(self, node: fx.Node, mask: Any, other: Any) -> Blocks | None:
        """Return what is known of a mask and another condition."""
        found = self._operand(node, mask)
        if found is None or found.fill:
            return None
        if isinstance(other, fx.Node) and (other.target in _ONES or _number(other) == 1):
            return found
        order, samples = self._orders.get(other), found.samples
        if order is None or samples is None:
            return found._replace(samples=None)
        dims = _in_result(node, other, order.rows), _in_result(node, other, order.columns)
        origin = next((of for n, of in self.samples.origins.items() if n.name == samples.numbers), None)
        is_within = order.of is None or order.of is origin
        if set(dims) != set(found.dims) or not is_within or (samples.causal and dims != found.dims):
            return found._replace(samples=None)
        return found._replace(dims=dims, samples=samples._replace(causal=True))

    def _order(self, node: fx.Node) -> _Order | None:
        if node.target in (aten.le.Tensor, aten.ge.Tensor):
            earlier, later = node.args[:2] if node.target is aten.le.Tensor else node.args[1::-1]
            if (found := self._counted(earlier, later)) is None:
                return None
            columns, rows = _in_result(node, earlier, found[0]), _in_result(node, later, found[1])
            return _Order(rows, columns, found[2]) if rows != columns else None
        moved = moved_operands(node)
        known = self._orders.get(moved[0]) if len(moved) == 1 and _is_mask(node) else None
        dims = None if known is None else _moved_dims(node, (known.rows, known.columns))
        return None if known is None or dims is None else _Order(*dims, known.of)

    def _counted(self, first: Any, second: Any) -> tuple[int, int, fx.Node | None] | None:
        """Return the dims along which two values count rows alike, and the positions with which they do."""
        iota, positions = self.samples.iota, self.samples.positions
        if first in iota and second in iota:
            return iota[first], iota[second], None
        a, b = positions.get(first), positions.get(second)
        if a is None or b is None or a.of is not b.of:
            return None
        sizes = (tensor_type(value).shape[fact.shard.dim] for value, fact in ((first, a), (second, b)))
        return (a.shard.dim, b.shard.dim, a.of) if all(map(is_axis, sizes)) else None

    def _moved(self, node: fx.Node) -> Blocks | None:
        moved = moved_operands(node)
        known = self.blocks.get(moved[0]) if len(moved) == 1 else None
        if known is None or (_is_mask(moved[0]) and not _is_mask(node)):
            return None
        dims = _moved_dims(node, known.dims)
        return None if dims is None else known._replace(dims=dims)

    def _operand(self, node: fx.Node, value: Any) -> Blocks | None:
        """Return what is known of a mask that is an operand, with the dims of the result."""
        found = self.blocks.get(value) if isinstance(value, fx.Node) and _is_mask(value) else None
        if found is None:
            return None
        rows, columns = (_in_result(node, value, dim) for dim in found.dims)
        return found._replace(dims=(rows, columns))


def _moved_dims(node: fx.Node, dims: tuple[int, int]) -> tuple[int, int] | None:
    """Return where two dims of the only operand are in the result."""
    source = moved_operands(node)[0]
    rows, columns = (moved_shard(node, {source: Shard(dim)}, {}) for dim in dims)
    if rows is None or columns is None or (rows.outer, columns.outer) != (1, 1):
        return None
    shape, size = tensor_type(node).shape, tensor_type(source).shape[dims[0]]
    return (rows.dim, columns.dim) if shape[rows.dim] == shape[columns.dim] == size else None


def _in_result(node: fx.Node, operand: Any, dim: int) -> int:
    return dim + len(tensor_type(node).shape) - len(tensor_type(operand).shape)


def _number(value: Any) -> float | None:
    """Return the number with which a node is filled."""
    if not isinstance(value, fx.Node) or value.target not in _NUMBERS:
        return None
    number = value.args[_NUMBERS[value.target]]
    return float(number) if isinstance(number, (int, float)) else None


def _is_mask(node: fx.Node) -> bool:
    type_ = meta(node).type
    return isinstance(type_, TensorType) and type_.dtype == torch.bool
