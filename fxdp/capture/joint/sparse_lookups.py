"""Tables that are read with `sparse=True`: differentiated as dense, with the gradient's rows as the result.

    forward    embedding(%table, %ids, -1, False, True)      embedding(%table, %ids, -1, False, False)
    backward   embedding_dense_backward(%grad, %ids, 9, ..)  sparse_rows(%grad, %ids, 9, ..)

Torch cannot hold a sparse tensor in a joint graph. A table that is also read in another way has a dense
gradient, as in eager, where a sparse gradient and a dense one make a dense one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import fx

from fxdp.ir.graph.graphs import argument
from fxdp.ir.graph.metadata import Metadata, meta
from fxdp.ir.ops.sparse_rows import SPARSE_ROWS
from fxdp.ir.types.value_types import NodeType
from fxdp.torch_compat import aten

_SPARSE = "fxdp_sparse"


def read_densely(gm: fx.GraphModule) -> None:
    """Let lookups with `sparse=True` of a parameter have dense gradients; in place, marked.

    Others stay, and are refused where their gradient is made: lookups of a computed table, and counts of
    indices (`scale_grad_by_freq`), for which torch itself has no sparse gradient.
    """
    for node in gm.graph.find_nodes(op="call_function", target=aten.embedding.default):
        table = argument(node, "weight")
        if argument(node, "sparse") and not argument(node, "scale_grad_by_freq") and _is_parameter(table):
            node.args = (table, argument(node, "indices"), argument(node, "padding_idx"))
            node.kwargs = {}
            node.meta[_SPARSE] = True
    gm.recompile()


def sparse_tables(gm: fx.GraphModule) -> set[str]:
    """Return the targets of the parameters of which all lookups were marked by `read_densely`."""
    lookups = gm.graph.find_nodes(op="call_function", target=aten.embedding.default)
    marked = {n.args[0].target for n in lookups if n.meta.get(_SPARSE)}
    return marked - {n.args[0].target for n in lookups if not n.meta.get(_SPARSE)}


def _is_parameter(table: Any) -> bool:
    return isinstance(table, fx.Node) and table.op == "get_attr"


def rows_of_gradient(graph: fx.Graph, gradient: fx.Node, type_of: Callable[[Any], NodeType]) -> fx.Node:
    """Return the rows of a table's gradient, new nodes at the end of the graph; a dense gradient as it is."""
    terms = list(_terms(gradient))
    if any(term.target is not aten.embedding_dense_backward.default for term in terms):
        return gradient

    def add(term: fx.Node, target: Any, *args: Any) -> fx.Node:
        values = fx.map_arg(args, lambda node: node.meta["val"])
        made = graph.call_function(target, args)
        made.meta["val"] = target(*values)
        made.meta["fxdp"] = Metadata(
            type=type_of(made.meta["val"]), location=meta(term).location, backward=True
        )
        if "seq_nr" in term.meta:
            made.meta["seq_nr"] = term.meta["seq_nr"]
        return made

    parts = []
    for term in terms:
        grad, indices, count, padding_idx, _ = term.args
        width = grad.meta["val"].shape[-1]  # type: ignore[union-attr]
        rows = add(term, aten.reshape.default, grad, [-1, width])
        flat = add(term, aten.reshape.default, indices, [-1])
        parts.append(add(term, SPARSE_ROWS, rows, flat, count, padding_idx))
    return add(gradient, aten.cat.default, parts) if len(parts) > 1 else parts[0]


def _terms(gradient: fx.Node) -> Iterator[fx.Node]:
    """Yield the values of which a gradient is the sum."""
    if gradient.target is aten.add.Tensor and not gradient.kwargs:
        for term in gradient.args:
            assert isinstance(term, fx.Node)
            yield from _terms(term)
    else:
        yield gradient
