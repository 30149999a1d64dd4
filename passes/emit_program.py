"""Lower what fxdp inserted to functions that run: the program of this rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from fxdp.ir import conversions
from fxdp.ir.carriers import group_of
from fxdp.ir.level import Level
from fxdp.ir.mesh import Mesh
from fxdp.ir.notes import is_host_size, note
from fxdp.ir.ops import collectives
from fxdp.ir.ops.moments import MOMENTS_OP, moments
from fxdp.ir.ops.standardize import STANDARDIZE_BACKWARD_OP, STANDARDIZE_OP, standardize, standardize_backward
from fxdp.ir.placements import R
from fxdp.ir.sizes import B
from fxdp.ir.slots import Constant, Size, Slot
from fxdp.ir.types import ScalarType, TensorType

LARGEST = "b_max"
"""The size slot of the largest local batch."""

_SPELLED_OUT: dict[Any, Any] = {
    MOMENTS_OP: moments,
    STANDARDIZE_OP: standardize,
    STANDARDIZE_BACKWARD_OP: standardize_backward,
}
"""Ops of ours that run as plain ops, which Inductor fuses."""

ROWS = Constant("<rows>")
"""The slot of the row numbers at which a padded gather holds real rows; no attribute has such a name."""


@dataclass
class _Lowering:
    """Lowers one graph in place."""

    graph: fx.Graph
    mesh: Mesh
    sizes: dict[str, int] | None
    even: bool
    part: int

    def run(self) -> None:
        self.slots: dict[Slot, fx.Node] = {
            slot: n for n in self.graph.nodes if (slot := note(n).slot) is not None
        }
        for node in list(self.graph.nodes):
            if self.mesh.size == 1 and (
                node.target in conversions.COLLECTIVES or node.target is conversions.wait
            ):
                node.replace_all_uses_with(node.args[0])
                self.graph.erase_node(node)
            elif node.target is conversions.wait:
                self._lower_wait(node)
            elif node.target in conversions.CONVERSIONS:
                self._lower(node)
            elif node.target in _SPELLED_OUT:
                node.target = _SPELLED_OUT[node.target]
        if self.sizes is not None:
            self._bind(self.sizes)

    def _size(self, name: str) -> fx.Node:
        symbol = sympy.Symbol(name, integer=True, nonnegative=True)
        return self._slot(Size(name), ScalarType(symbol))

    def _rows(self) -> fx.Node | None:
        return None if self.even else self._slot(ROWS, TensorType(torch.int64, (B,)))

    def _largest(self) -> fx.Node | None:
        return None if self.even else self._size(LARGEST)

    def _slot(self, slot: Size | Constant, type_: ScalarType | TensorType) -> fx.Node:
        """The placeholder of a slot, made before all others if the program has none yet."""
        if slot not in self.slots:
            with self.graph.inserting_before(next(iter(self.graph.nodes))):
                self.slots[slot] = node = self.graph.placeholder(slot.name.strip("<>"))
            known = note(node)
            known.slot, known.type = slot, type_
            known.placement = R if isinstance(type_, TensorType) else None
        return self.slots[slot]

    def _lower(self, node: fx.Node) -> None:
        value, *rest = node.args
        mesh = self.mesh
        if node.target is conversions.all_reduce and rest[0] == "moments":
            self._replace(node, collectives.start_moments, (value, mesh.size, group_of(node, mesh)))
        elif node.target is conversions.all_reduce:
            self._replace(node, collectives.start_all_reduce, (value, rest[0], group_of(node, mesh)))
        elif node.target is conversions.broadcast:
            self._replace(node, collectives.start_broadcast, (value, group_of(node, mesh)))
        elif node.target is conversions.all_gather:
            gathered = (value, *rest, mesh.size, self._largest(), group_of(node, mesh))
            self._replace(node, collectives.start_all_gather, gathered)
        elif node.target is conversions.reduce_scatter:
            scattered = (value, *rest, mesh.size, self._largest(), self._rows(), group_of(node, mesh))
            self._replace(node, collectives.start_reduce_scatter, scattered)
        elif node.target is conversions.shard:
            bounds = (self._size("B"), self._size("offset"), self._size("b"))
            self._replace(node, collectives.shard, (value, *rest, *bounds))
        else:
            self._replace(node, collectives.partial, (value, self.part))

    def _lower_wait(self, node: fx.Node) -> None:
        pending = node.args[0]
        assert isinstance(pending, fx.Node)
        if pending.target is collectives.start_all_gather:
            self._replace(node, collectives.finish_all_gather, (pending, pending.args[1], self._rows()))
        elif pending.target is collectives.start_moments:
            self._replace(node, collectives.finish_moments, (pending, self.mesh.size))
        elif pending.target is collectives.start_reduce_scatter:
            self._replace(
                node, collectives.finish_reduce_scatter, (pending, pending.args[1], self._size("b"))
            )
        elif pending.target is collectives.start_all_reduce and pending.args[1] in ("max", "min"):
            type_ = note(node).type
            assert isinstance(type_, TensorType)
            self._replace(node, collectives.finish_extremum, (pending, type_.dtype))
        else:
            self._replace(node, collectives.finish, (pending,))

    def _replace(self, node: fx.Node, target: Any, args: tuple[Any, ...]) -> None:
        node.target, node.args = target, args
        node._rename(target.__name__)

    def _bind(self, sizes: dict[str, int]) -> None:
        """Replace size slots by numbers and fold the arithmetic on them."""
        known: dict[fx.Node, Any] = {}
        for node in list(self.graph.nodes):
            slot = note(node).slot
            if isinstance(slot, Size):
                known[node] = sizes[slot.name]
            elif is_host_size(node) and all(a in known for a in node.all_input_nodes):
                args = fx.map_arg(node.args, known.__getitem__)
                known[node] = node.target(*args)
            elif any(a in known for a in node.all_input_nodes):
                node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), lambda n: known.get(n, n))
        for node in reversed(known):
            self.graph.erase_node(node)


@dataclass(frozen=True)
class EmitProgram:
    """After it the graph is executable: aten ops, and the functions of `ir/ops/collectives.py`.

    before: `%all_reduce = all_reduce(%cat, sum)`
    after:  `%start_all_reduce = start_all_reduce(%cat, sum, 3)` with the group's name

    Parameters
    ----------
    sizes : values of all size slots (`B`, `b`, `offset`, `b_max`, ...), which become constants; None keeps
        them as inputs of a size-generic program.
    even : all ranks hold equally many samples, so gathers need no padding.
    part : which part of the global batch the program is for, where micro-batches split it further than the
        ranks do; None: the rank's.
    """

    sizes: tuple[tuple[str, int], ...] | None = None
    even: bool = True
    part: int | None = None

    name = "emit-program"
    requires = Level.LOCAL
    ensures = Level.EMITTED

    def run(self, gm: fx.GraphModule, mesh: Mesh) -> fx.GraphModule:
        """Rewrite the graph in place."""
        sizes = None if self.sizes is None else dict(self.sizes)
        part = mesh.rank if self.part is None else self.part
        _Lowering(gm.graph, mesh, sizes, self.even, part).run()
        return gm
