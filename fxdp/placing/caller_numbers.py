"""Row numbers as the caller of a rank counts them: from the first row of the rank's own part.

edge_index                       0 1 2 on each rank
%add = edge_index + offset       global row numbers, as the program means them
gather(x, edge_index)            by a rule that reads own rows, which would subtract the offset again
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import sympy
from torch import fx

from fxdp.ir.graph.graphs import inputs_of
from fxdp.ir.graph.metadata import copy_meta, meta
from fxdp.ir.graph.signature import Input
from fxdp.ir.ops.library import aten
from fxdp.ir.types.sizes import axis as axis_named


def enter(
    graph: fx.Graph, sizes: Mapping[sympy.Basic, fx.Node], points: Sequence[str | None]
) -> dict[fx.Node, fx.Node]:
    """Add the offset to inputs whose values point into an axis: a caller counts from the rank's first row.

    Return the input behind each sum.
    """
    found: dict[fx.Node, fx.Node] = {}
    last = graph.find_nodes(op="placeholder")[-1]
    for spec, node in inputs_of(graph, Input):
        into = points[spec.index] if spec.index < len(points) else None
        if into is not None and node.users:
            with graph.inserting_after(last):
                made = graph.call_function(aten.add.Tensor, (node, sizes[axis_named(into).offset]))
            node.replace_all_uses_with(made)
            made.replace_input_with(made, node)
            copy_meta(node, made, spec=None, operands=(meta(node).placement,))
            found[made] = node
    return found


def own_numbers(source: fx.Node, entered: dict[fx.Node, fx.Node]) -> fx.Node | None:
    """Return the caller's own numbers for moved ones of an input that entered; None for other values."""
    if source in entered:
        return entered[source]
    operands = source.all_input_nodes
    if source.target not in _VIEWS or not (inner := own_numbers(operands[0], entered)):
        return None
    with source.graph.inserting_after(source):
        made = source.graph.call_function(
            source.target,  # type: ignore[arg-type]
            fx.map_arg(source.args, lambda n: inner if n is operands[0] else n),
            source.kwargs,
        )
    copy_meta(source, made)
    entered[source] = made
    return made


_VIEWS = frozenset({
    aten.select.int, aten.slice.Tensor, aten.view.default, aten.reshape.default, aten.unsqueeze.default,
    aten.squeeze.dim, aten.expand.default, aten.permute.default, aten.t.default, aten.alias.default,
    aten.unbind.int, operator.getitem,
})  # fmt: skip
"""Ops that move a caller's numbers, through which an offset need not be added and subtracted again."""
