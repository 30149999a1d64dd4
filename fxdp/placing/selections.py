"""Rows that values select, each rank of its own part: which nodes select these, and the axes born so.

%index: f32[u0, 4] {dp=S(0)} = aten.index(%x, [%mask])       %mask selects the rows of the axis `u0`
%nonzero: i64[u1, 1] {dp=S(0)} = aten.nonzero(%mask)         and of `u1`; the values point into the batch
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from fxdp.ir.graph.metadata import meta, tensor_operands, tensor_type
from fxdp.ir.ops.library import aten
from fxdp.ir.types.born_axes import concatenation, renamed, unborn
from fxdp.ir.types.placements import S, Shard
from fxdp.ir.types.sizes import Axis, axis_of, batch_factor
from fxdp.ir.types.value_types import NodeType, TensorType
from fxdp.placing.equal_values import EqualValues
from fxdp.rules.families.indexing import MASKS, SELECTIONS, runs_of
from fxdp.rules.registry import Pointer


class BornAxes:
    """The axes born in one graph; the types of its nodes say which."""

    def __init__(self, graph: fx.Graph) -> None:
        self._captured: list[tuple[fx.Node, NodeType]] = [(n, meta(n).type) for n in graph.nodes]

    def forget(self) -> None:
        """Restore the types of capture, before a further propagation."""
        for node, type_ in self._captured:
            meta(node).type = type_

    def add(self, of: Axis, equal: Axis | None = None) -> None:
        """Rename the sizes of all nodes to those of an axis, or of one with as many rows on each rank."""
        for node, _ in self._captured:
            meta(node).type = renamed(meta(node).type, of, equal)


class SelectedRows:
    """Which nodes select rows, and of which axes; `pointers` of all nodes are added to.

    `born` is None where no axis may be born.
    """

    def __init__(self, pointers: dict[fx.Node, Pointer], born: BornAxes | None) -> None:
        self._pointers, self._born = pointers, born
        self._axes: dict[fx.Node, tuple[str, ...]] = {}
        self._equal = EqualValues()
        self._selected: dict[tuple[fx.Node, bool, int], Axis] = {}
        """The axis that equal masks select, or to which lengths repeat rows, by the number of runs."""
        self._columns: dict[fx.Node, tuple[int, Pointer]] = {}

    def axes_of(self, node: fx.Node) -> tuple[str, ...] | None:
        """Return the axes of the rows that a node selects; None where no axis may be born."""
        if self._born is None:
            return None
        is_mask = bool(self._axes) and tensor_type(node).dtype in MASKS
        return self._axes.get(self._equal.first(node) if is_mask else node, ())

    def shard_of(self, node: fx.Node) -> Shard | None:
        """Return the shard of a node that selects rows."""
        placement = meta(node).placement
        return placement if node in self._axes and isinstance(placement, Shard) else None

    @property
    def any(self) -> bool:
        """Whether a node selects rows."""
        return bool(self._axes)

    def learn(self, node: fx.Node) -> bool:
        """Learn of a call that has its placement; return whether its values are numbers of selected rows."""
        placement, type_ = meta(node).placement, meta(node).type
        if self._born is None or not isinstance(placement, Shard) or not isinstance(type_, TensorType):
            return False
        if (into := self._column(node)) is not None:
            self._pointers[node] = into
            return True
        size, sources = type_.shape[placement.dim], tensor_operands(node)
        if node.target is aten.cat.default:
            joined = concatenation([tensor_type(source).shape[placement.dim] for source in sources])
            if joined is not None and size != joined.total:
                self._born.add(joined)
        if node.target not in SELECTIONS or (
            node.target is aten.index.Tensor and tensor_type(sources[-1]).dtype not in MASKS
        ):
            return False
        mask, rows, read = sources[-1], tensor_type(sources[-1]).shape, meta(node).operands[-1]
        assert isinstance(read, Shard)
        if (of := unborn(size, runs_of(rows, read))) is not None:
            repeats, equal = node.target is aten.repeat_interleave.Tensor, self._equal.first(mask)
            known = self._selected.setdefault((equal, repeats, len(of.parts)), of)
            self._born.add(of, known)
            for one in {mask, equal}:
                self._axes[one] = (*self._axes.get(one, ()), known.name)
        if node.target not in _NUMBERS:
            return False
        along, per = axis_of(rows[read.dim]), batch_factor(rows[read.dim])
        assert along is not None
        assert per is not None
        into = Pointer(along.name, placement, per)
        if len(rows) == 1:
            self._pointers[node] = into
        else:
            self._columns[node] = read.dim, into
        return True

    def _column(self, node: fx.Node) -> Pointer | None:
        """Return where the values point, if a node is the column of numbers along the mask's sharded dim."""
        args: Any = node.args
        if node.target is aten.select.int:
            source, dim, place = args
        elif node.target is operator.getitem and args[0].target is aten.unbind.int:
            (source, dim), place = (*args[0].args, 0)[:2], args[1]
        else:
            return None
        column, into = self._columns.get(source, (None, None))
        is_column = into is not None and dim in (1, -1) and place == column
        return into if is_column and meta(node).placement == S(0) else None


_NUMBERS = frozenset({aten.nonzero.default, aten.repeat_interleave.Tensor})
"""Ops whose results are the numbers of the selected rows."""
