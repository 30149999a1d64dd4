"""Nodes that may be delayed to the end of a graph, because only gradients depend on these."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from fxdp.ir import redistributions
from fxdp.ir.graph.graphs import reachable, results_of
from fxdp.ir.graph.signature import Gradient


def deferrable(graph: fx.Graph, *, cut: bool = False) -> set[fx.Node]:
    """Return the nodes on which only gradients depend, without a redistribution in between.

    `cut` allows redistributions that slice.
    """
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
    """Return the calls that depend on these roots, in order, without the roots."""
    reached = reachable(roots) - set(roots)
    return [n for n in graph.nodes if n in reached and n.op == "call_function"]
