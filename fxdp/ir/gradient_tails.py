"""What of a graph may wait until the end: what serves gradients alone."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from fxdp.ir import redistributions
from fxdp.ir.graphs import reachable, results_of
from fxdp.ir.signature import Gradient


def deferrable(graph: fx.Graph, *, cut: bool = False) -> set[fx.Node]:
    """Nodes whose results flow into gradients alone, without a redistribution (`cut`: but to parts)."""
    ends = redistributions.REDISTRIBUTIONS - (redistributions.LOCAL if cut else frozenset())
    result = graph.output_node()
    bad = {value for spec, value in results_of(graph) if not isinstance(spec, Gradient)}
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op != "call_function" or node in bad or not node.users:
            continue
        if all(user is result or (user in found and user.target not in ends) for user in node.users):
            found.add(node)
    return found


def computed_after(graph: fx.Graph, roots: Collection[fx.Node]) -> list[fx.Node]:
    """All that is computed from these, in order, the roots aside."""
    reached = reachable(roots) - set(roots)
    return [n for n in graph.nodes if n in reached and n.op == "call_function"]
