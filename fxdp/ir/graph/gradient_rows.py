"""The parameters of a captured graph whose gradient is sparse: its result is made of `sparse_rows`."""

from __future__ import annotations

from torch import fx

from fxdp.ir.graph.graphs import results_of
from fxdp.ir.graph.redistribution_cause import unconverted
from fxdp.ir.graph.signature import Gradient, Parameter
from fxdp.ir.ops.library import aten
from fxdp.ir.ops.sparse_rows import SPARSE_ROWS


def sparse_gradients(graph: fx.Graph) -> dict[Parameter, fx.Node]:
    """Return the results of a graph that are the rows of a sparse gradient, by parameter."""
    found = {}
    for spec, node in results_of(graph):
        if isinstance(spec, Gradient) and isinstance(spec.of, Parameter) and _is_rows(node):
            found[spec.of] = node
    return found


def _is_rows(node: fx.Node) -> bool:
    node = unconverted(node)
    if node.target is aten.cat.default:
        return all(unconverted(part).target is SPARSE_ROWS for part in node.all_input_nodes)
    return node.target is SPARSE_ROWS
