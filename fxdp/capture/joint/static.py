"""Capture of models that fix their batch size: several static traces, and one graph fitted to the traces.

    traced at 3:   view(x, [12, 8]);  sum(..) / 12
    traced at 5:   view(x, [20, 8]);  sum(..) / 20
    ...
    fitted:        size = size("4*B");  view(x, [size, 8]);  sum(..) / size

    torch.tensor([0] * batch)      traced at 3: [0, 0, 0], at 5: [0, 0, 0, 0, 0]
    fitted:        %row = constant [0];  %size = size("B");  expand(%row, [%size])

Any difference that is not a polynomial in the batch size is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from fxdp.capture.captured import Captured, OutputLeaf, SizeLeaf
from fxdp.capture.export.exported import Exported
from fxdp.capture.joint.annotate_joint import AnnotatedJoint, annotate_joint
from fxdp.capture.joint.canonical_sizes import Sizes
from fxdp.capture.joint.fit import fit_number
from fxdp.capture.joint.raw_joint import JointOptions, RawJoint, trace_joint
from fxdp.ir.graph.metadata import (
    Location,
    MemoryLayout,
    Metadata,
    example_layout,
    keep_layout,
    meta,
    set_layouts,
)
from fxdp.ir.graph.signature import Constant
from fxdp.ir.types.value_types import NodeType, ScalarType, TensorType
from fxdp.torch_compat import aten
from fxdp.wings import seam

_STRIDED = frozenset(
    {
        aten.as_strided.default,
        aten.as_strided_copy.default,
        aten.as_strided_scatter.default,
    }
)


class StaticMismatchError(Exception):
    """The static traces differ in a way that is not a polynomial in the batch size."""


def size(expr: str) -> int:
    """A host number of a fitted graph; the value is the expression in the node's metadata."""
    raise RuntimeError(f"size({expr!r}) is symbolic: a pass replaces it before the graph runs")


@seam("python")
def merge_loops(gm: fx.GraphModule, batch: int) -> None:
    """Replace loops over the samples by one op on all samples; without the wing, loops stay."""


def fitted_joint(batches: Sequence[int], exports: Iterable[Exported], options: JointOptions) -> Captured:
    """Fit one graph to forward graphs of these batch sizes; `exports` may export lazily.

    Raises
    ------
    StaticMismatchError : the graphs differ in a number without formula.
    CaptureError : a graph contains nodes that no program can run.
    """
    raws, graphs = [], []
    for exported in exports:
        raws.append(trace_joint(exported, options))
        graphs.append(annotate_joint(raws[-1], Sizes()))
        if len({len(made.gm.graph.nodes) for made in graphs}) > 1:
            break  # larger batches cannot make these graphs fit together
    _Fit(batches[: len(graphs)], graphs).run()
    first = raws[0].exported
    if any(raw.exported.routes != first.routes for raw in raws):
        raise StaticMismatchError("the skip connections depend on the batch size")
    return Captured(
        gm=graphs[0].gm,
        leaves=_fit_leaves(batches, raws),
        out_spec=first.out_spec,
        detached=raws[0].detached,
        batch=first.batch,
        constants=graphs[0].constants,
        checks=first.checks,
        routes=first.routes,
        static=True,
    )


class _Fit:
    """Converter of the first of several graphs into a graph that fits all."""

    def __init__(self, batches: Sequence[int], graphs: Sequence[AnnotatedJoint]) -> None:
        self.batches = batches
        self.graphs = graphs
        self.graph = graphs[0].gm.graph
        self.sizes: dict[sympy.Expr, fx.Node] = {}

    def run(self) -> None:
        """Compare the graphs node by node, and replace differing numbers."""
        rows = [list(graph.gm.graph.nodes) for graph in self.graphs]
        # not strict: the line where the traces diverge is more informative than the lengths
        for nodes in zip(*rows, strict=False):
            if len({(node.op, node.name, node.target) for node in nodes}) > 1:
                if any(node.op == "placeholder" for node in nodes):
                    raise StaticMismatchError(
                        "how many tensor constants there are depends on the batch size: a loop over samples"
                    )
                ops = sorted({str(node.target) for node in nodes})
                raise StaticMismatchError(
                    f"{meta(nodes[0]).location} runs other operations ({' / '.join(ops)})"
                )
            self._fit_node(nodes)
        if len({len(row) for row in rows}) > 1:
            counts = " / ".join(str(len(row)) for row in rows)
            raise StaticMismatchError(f"the number of operations depends on the batch size ({counts})")
        self._fit_constants()
        self.graphs[0].gm.recompile()

    def _fit_node(self, nodes: Sequence[fx.Node]) -> None:
        first = nodes[0]
        where = str(_read_at(first))
        merged = self._merge([(node.args, node.kwargs) for node in nodes], first, where)
        first.args, first.kwargs = merged
        meta(first).type = self._fit_type([meta(node).type for node in nodes], where)
        if len({(meta(node).spec, meta(node).results) for node in nodes}) > 1:
            raise StaticMismatchError(f"{where}: inputs or results depend on the batch size")
        layout = self._fit_layout(nodes) if any(user.target in _STRIDED for user in first.users) else None
        keep_layout(first)
        set_layouts(first, (layout, None))

    def _fit_layout(self, nodes: Sequence[fx.Node]) -> MemoryLayout | None:
        """Fit the strides of a value, if an op counts in them; None if they have no formula."""
        found = [example_layout(node) for node in nodes]
        rows = [(*each.sizes, *each.strides, each.offset) for each in found if each is not None]
        if len(rows) < len(found) or len({len(row) for row in rows}) > 1 or any(None in row for row in rows):
            return None
        try:
            fitted = [self._fit_number(column, "a stride") for column in zip(*rows, strict=True)]
        except StaticMismatchError:
            return None
        dims = len(fitted) // 2
        return MemoryLayout(tuple(fitted[:dims]), tuple(fitted[dims:-1]), fitted[-1])

    def _fit_number(self, values: Sequence[Any], where: str) -> Any:
        return values[0] if len(set(values)) == 1 else _fit_number(self.batches, values, where)

    def _merge(self, values: Sequence[Any], user: fx.Node, where: str) -> Any:
        """Merge corresponding arguments, with a `size` node for each number that differs."""
        first = values[0]
        if isinstance(first, fx.Node):
            if len({value.name if isinstance(value, fx.Node) else None for value in values}) > 1:
                raise StaticMismatchError(f"{where}: operands depend on the batch size")
            return first
        if isinstance(first, (tuple, list)):
            if len({len(value) if isinstance(value, (tuple, list)) else -1 for value in values}) > 1:
                raise StaticMismatchError(f"{where}: the length of an argument depends on the batch size")
            return type(first)(self._merge(parts, user, where) for parts in zip(*values, strict=True))
        if isinstance(first, dict) and all(isinstance(v, dict) and v.keys() == first.keys() for v in values):
            return {key: self._merge([value[key] for value in values], user, where) for key in first}
        # compare types, too: for Python, 1, 1.0 and True are equal
        if all(type(value) is type(first) and value == first for value in values):
            return first
        return self._size_node(_fit_number(self.batches, values, where), user)

    def _size_node(self, expr: sympy.Expr, user: fx.Node) -> fx.Node:
        """Return the node of a number, inserted before the number's first user."""
        found = self.sizes.get(expr)
        if found is None:
            with self.graph.inserting_before(user):
                found = self.graph.call_function(size, (str(expr),))
            found.meta["fxdp"] = Metadata(type=ScalarType(expr), location=meta(user).location)
            self.sizes[expr] = found
        return found

    def _fit_type(self, types: Sequence[NodeType], where: str) -> NodeType:
        """Return the common type, with sizes in `B`."""
        first = types[0]
        if all(other == first for other in types):
            return first
        if isinstance(first, tuple):
            if len({len(other) if isinstance(other, tuple) else -1 for other in types}) > 1:
                raise StaticMismatchError(f"{where}: the number of results depends on the batch size")
            columns = zip(*(other for other in types if isinstance(other, tuple)), strict=True)
            return tuple(self._fit_member(column, where) for column in columns)
        return self._fit_member([other for other in types if not isinstance(other, tuple)], where)

    def _fit_member(self, types: Sequence[Any], where: str) -> TensorType | ScalarType | None:
        first = types[0]
        if all(other == first for other in types):
            return first  # type: ignore[no-any-return]
        if all(isinstance(other, TensorType) for other in types):
            kinds = {(other.dtype, len(other.shape)) for other in types}
            if len(kinds) == 1:
                columns = zip(*(other.shape for other in types), strict=True)
                return TensorType(first.dtype, tuple(self._fit_number(column, where) for column in columns))
        raise StaticMismatchError(f"{where}: the kind of result depends on the batch size")

    def _fit_constants(self) -> None:
        """Check that constants do not depend on the batch size, unless all samples have the same row."""
        for name, tensor in self.graphs[0].constants.items():
            found = [graph.constants.get(name) for graph in self.graphs]
            if all(_equal(tensor, other) for other in found):
                continue
            known = [other for other in found if other is not None]
            dim = _repeated_dim(known) if len(known) == len(found) else None
            if dim is None:
                raise StaticMismatchError(
                    f"a tensor constant of shape {list(tensor.shape)} depends on the batch size, used at "
                    f"{self._user_of(name)}"
                )
            self._repeat(name, dim)

    def _repeat(self, name: str, dim: int) -> None:
        """Keep one row of a constant, and expand the row to the batch size."""
        constants = self.graphs[0].constants
        constants[name] = constants[name].narrow(dim, 0, 1).clone()
        node = next(n for n in self.graph.nodes if meta(n).spec == Constant(name))
        full = meta(node).type
        assert isinstance(full, TensorType)
        with self.graph.inserting_before(next(n for n in self.graph.nodes if n.op != "placeholder")):
            length = self.graph.call_function(size, (str(full.shape[dim]),))
            length.meta["fxdp"] = Metadata(type=ScalarType(full.shape[dim]), location=meta(node).location)
            sizes = [length if at == dim else each for at, each in enumerate(full.shape)]
            spread = self.graph.call_function(aten.expand.default, (node, sizes))
            spread.meta["fxdp"] = Metadata(type=full, location=self._user_of(name))
        node.replace_all_uses_with(spread, lambda user: user is not spread)
        meta(node).type = TensorType(full.dtype, tuple(constants[name].shape))

    def _user_of(self, constant: str) -> Location:
        """Return the location at which the model first reads a constant."""
        read = next(n for n in self.graph.nodes if meta(n).spec == Constant(constant))
        return meta(next(iter(read.users))).location


def _read_at(node: fx.Node) -> Location:
    """Return the line of a node; for a constant, which has none, the line of the first read."""
    location = meta(node).location
    return location if location.file or not node.users else meta(next(iter(node.users))).location


def _fit_number(batches: Sequence[int], values: Sequence[Any], where: str) -> sympy.Expr:
    """Return the expression of a number that differs between the traces."""
    found = fit_number(batches, values)
    if found is None:
        listed = ", ".join(f"{value} at {batch}" for batch, value in zip(batches, values, strict=True))
        raise StaticMismatchError(
            f"{where} depends on the batch size in a way that has no formula ({listed})"
        )
    return found


def _fit_leaves(batches: Sequence[int], raws: Sequence[RawJoint]) -> tuple[Any, ...]:
    """Return the leaves of the output, with expressions for numbers that differ."""
    if len({len(raw.exported.leaves) for raw in raws}) > 1:
        raise StaticMismatchError("the structure of the model's output depends on the batch size")
    fitted: list[Any] = []
    for column in zip(*(raw.exported.leaves for raw in raws), strict=True):
        same = isinstance(column[0], OutputLeaf) or all(value == column[0] for value in column)
        fitted.append(column[0] if same else SizeLeaf(_fit_number(batches, column, "the model's output")))
    return tuple(fitted)


def _repeated_dim(tensors: Sequence[torch.Tensor]) -> int | None:
    """Return the single dim in which the sizes differ, if all rows along the dim are equal; else None."""
    first = tensors[0]
    if any((other.dtype, other.dim()) != (first.dtype, first.dim()) for other in tensors):
        return None
    sizes = zip(*(tensor.shape for tensor in tensors), strict=True)
    differing = [dim for dim, found in enumerate(sizes) if len(set(found)) > 1]
    if len(differing) != 1 or not all(map(torch.Tensor.numel, tensors)):
        return None
    (dim,) = differing
    row = first.narrow(dim, 0, 1)
    return dim if all(torch.equal(tensor, row.expand_as(tensor)) for tensor in tensors) else None


def _equal(a: torch.Tensor, b: torch.Tensor | None) -> bool:
    if b is None or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return a is b or torch.equal(a, b)
