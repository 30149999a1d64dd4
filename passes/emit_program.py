"""Lower the nodes that fxdp inserted to functions that run: the program of this rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from fxdp.errors import PlacementError
from fxdp.ir import redistributions
from fxdp.ir.graph.level import Level
from fxdp.ir.graph.metadata import is_host_size, meta, tensor_type
from fxdp.ir.graph.signature import Constant, InputSpec, Size, rows_of
from fxdp.ir.network.transports import group_of
from fxdp.ir.network.zero_copy_gathers import is_zero_copy
from fxdp.ir.ops import collectives, exchanged_sizes
from fxdp.ir.ops.moments import MOMENTS_OP, moments
from fxdp.ir.ops.standardize import STANDARDIZE_BACKWARD_OP, STANDARDIZE_OP, standardize, standardize_backward
from fxdp.ir.redistribution_entry import Call, Redistribution
from fxdp.ir.types.mesh import Mesh
from fxdp.ir.types.placements import R
from fxdp.ir.types.sizes import Axis, axis_of, batch_factor, exact_quotient
from fxdp.ir.types.value_types import ScalarType, TensorType

_SPELLED_OUT: dict[Any, Any] = {
    MOMENTS_OP: moments,
    STANDARDIZE_OP: standardize,
    STANDARDIZE_BACKWARD_OP: standardize_backward,
}
"""Ops of fxdp that are lowered to plain ops, which Inductor can fuse."""


@dataclass
class _Place:
    """Context for lowering one redistribution, as `redistribution_entry.Emission`."""

    program: _Lowering
    node: fx.Node
    redistribution: Redistribution
    exchanged: dict[str, fx.Node]
    """Sizes of an axis born inside the program, and positions of its rows; empty for other axes."""

    @property
    def group(self) -> str:
        """The name of the process group along the redistribution's axis."""
        return group_of(self.node, self.program.mesh)

    @property
    def world(self) -> int:
        """The number of ranks along the redistribution's axis."""
        return self.program.mesh.size_along(self.redistribution.axis)

    @property
    def index(self) -> int:
        """This rank's index along the redistribution's axis."""
        return self.program.mesh.place_along(self.redistribution.axis)

    @property
    def number(self) -> int:
        """The index of this part of the batch among those of all ranks and micro-batches."""
        axis = self.redistribution.axis
        return self.program.part if axis is None else self.program.mesh.place_along(axis)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the redistributed value."""
        return tensor_type(self.node).dtype

    @property
    def device(self) -> str:
        """The type of the device on which the program runs."""
        return self.program.mesh.device_type

    @property
    def shown(self) -> bool:
        """True if the gather is zero-copy: all ranks read the local shard over shared memory."""
        return is_zero_copy(self.node, self.program.mesh)

    @property
    def axis(self) -> Axis:
        """The batch axis of the dim that is gathered or sharded."""
        dim = self.node.args[1]
        assert isinstance(dim, int)
        found = axis_of(tensor_type(self.node).shape[dim])
        assert found is not None
        return found

    def size(self, name: str) -> fx.Node:
        """Return the size input `B`, `b` or `offset` of the axis."""
        if self.exchanged:
            return self.exchanged[name]
        return self._size(dict(zip(("B", "b", "offset"), self.axis.inputs, strict=False))[name])

    def largest(self) -> fx.Node | None:
        """Return the size of the largest part along the axis, or None if local batches are equal."""
        if self.exchanged:
            return self.exchanged["largest"]
        return None if self.program.even else self._size(self.axis.largest)

    def rows(self) -> fx.Node | None:
        """Return the positions of real rows among padded ones, or None if local batches are equal."""
        if self.exchanged:
            return self.exchanged["rows"]
        if self.program.even:
            return None
        self._refuse_part_of_the_ranks()
        return self.program.spec(rows_of(self.axis.name), TensorType(torch.int64, (self.axis.total,)))

    def part(self, value: fx.Node, dim: int, outer: int) -> Call:
        """Return the call that takes this rank's part of a replicated value."""
        if not self.exchanged:
            batch = self.size("B"), self.size("offset"), self.size("b")
            return collectives.shard, (value, dim, outer, *batch)
        # the global size, a number read from data, divides no number in a trace
        factor = batch_factor(tensor_type(self.node).shape[dim])
        inner = None if factor is None else exact_quotient(factor, outer)
        if "own_rows" in self.exchanged:
            return collectives.shard_rows, (value, dim, outer, inner, self.exchanged["own_rows"])
        return collectives.shard_range, (value, dim, outer, inner, self.size("offset"), self.size("b"))

    def _size(self, name: str) -> fx.Node:
        self._refuse_part_of_the_ranks()
        return self.program.size(name)

    def _refuse_part_of_the_ranks(self) -> None:
        """Raise if the redistribution is along a subset of the data axes.

        A program's sizes count samples along all data axes, and say nothing about a single axis.
        """
        mesh = self.program.mesh
        if self.world < mesh.size:
            raise PlacementError(
                f"%{self.node.name} is along {self.redistribution.axis} of {mesh} and asks for sizes of "
                "parts "
                "there, which a program does not have; this is a bug in a pass"
            )


@dataclass
class _Lowering:
    """Lowering of one graph, in place."""

    graph: fx.Graph
    mesh: Mesh
    sizes: dict[str, int] | None
    even: bool
    part: int

    def run(self) -> None:
        self.specs: dict[InputSpec, fx.Node] = {
            spec: n for n in self.graph.nodes if (spec := meta(n).spec) is not None
        }
        self.waits: dict[Any, Callable[[], Call]] = {}
        for node in list(self.graph.nodes):
            found = redistributions.redistribution_of(node)
            if found is not None and found.communicates and self.mesh.size_along(found.axis) == 1:
                self._skip(node)
            elif found is not None:
                sizes: Any = node.kwargs.get("sizes", {})
                self._start(_Place(self, node, found, dict(sizes)))
            elif node.target is redistributions.wait and node.args[0] in self.waits:
                self._replace(node, self.waits[node.args[0]]())
            elif node.target is redistributions.wait:
                self._skip(node)
            elif node.target in _SPELLED_OUT:
                node.target = _SPELLED_OUT[node.target]
        if self.sizes is not None:
            self._bind(self.sizes)

    def size(self, name: str) -> fx.Node:
        symbol = sympy.Symbol(name, integer=True, nonnegative=True)
        return self.spec(Size(name), ScalarType(symbol))

    def spec(self, spec: Size | Constant, type_: ScalarType | TensorType) -> fx.Node:
        """Return the placeholder of an input spec.

        Insert one before all placeholders if the program has none yet.
        """
        if spec not in self.specs:
            with self.graph.inserting_before(next(iter(self.graph.nodes))):
                self.specs[spec] = node = self.graph.placeholder(spec.name.strip("<>").replace(" ", "_"))
            known = meta(node)
            known.spec, known.type = spec, type_
            known.placement = R if isinstance(type_, TensorType) else None
        return self.specs[spec]

    def _skip(self, node: fx.Node) -> None:
        """Replace a redistribution by the operand: a single rank has the result already."""
        if node.target is redistributions.exchange_sizes:
            self._replace(node, (exchanged_sizes.of_one, (node.args[0], self.mesh.device_type)))
            return
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        self.graph.erase_node(node)

    def _start(self, place: _Place) -> None:
        """Lower the start of a redistribution, and keep the function that lowers the wait.

        The wait's call is built when the wait is reached, so that size inputs are created in the order of
        use.
        """
        node, found = place.node, place.redistribution
        value, *arguments = node.args
        self._replace(node, found.start(place, value, *arguments))
        if (finish := found.finish) is not None:
            self.waits[node] = lambda: finish(place, node, *arguments)

    def _replace(self, node: fx.Node, call: Call) -> None:
        target, node.args = call
        node.target, node.kwargs = target, {}
        node._rename(target.__name__)

    def _bind(self, sizes: dict[str, int]) -> None:
        """Replace size inputs by numbers and fold the arithmetic on sizes."""
        known: dict[fx.Node, Any] = {}
        for node in list(self.graph.nodes):
            spec = meta(node).spec
            if isinstance(spec, Size):
                known[node] = sizes[spec.name]
            elif is_host_size(node) and all(a in known for a in node.all_input_nodes):
                args = fx.map_arg(node.args, known.__getitem__)
                known[node] = node.target(*args)
            elif any(a in known for a in node.all_input_nodes):
                node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), lambda n: known.get(n, n))
        for node in reversed(known):
            self.graph.erase_node(node)


@dataclass(frozen=True)
class EmitProgram:
    """Make the graph executable: only aten ops and functions of `ir/ops/collectives.py` are left.

    before: `%all_reduce = all_reduce(%cat, sum)`
    after:  `%start_all_reduce = start_all_reduce(%cat, sum, 3)` with the group's name

    Parameters
    ----------
    sizes : values of all size inputs (`B`, `b`, `offset`, `b_max`, ...), which become constants. None keeps
        the inputs, for a size-generic program.
    even : all ranks hold equally many samples, so gathers need no padding.
    part : index of the part of the global batch for which the program is emitted, where micro-batches split
        the batch further than the ranks do; None: this rank's part.
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
