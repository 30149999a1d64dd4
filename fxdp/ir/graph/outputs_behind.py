"""The outputs on which each gradient of a program depends, by the tangents from which it is computed."""

from __future__ import annotations

from torch import fx

from fxdp.ir.graph.graphs import results_of
from fxdp.ir.graph.metadata import meta
from fxdp.ir.graph.signature import Gradient, InputSpec, Tangent


def outputs_behind(graph: fx.Graph) -> dict[InputSpec | None, frozenset[int]]:
    """Map each input with a gradient to the indices of the outputs on which the gradient depends.

    The graph is a joint graph before bucketing, because a bucket depends on all gradients in it. A constant
    gradient, which depends on no tangent, has no outputs.
    """
    # a set of outputs is an int with a bit for each: a graph has many thousands of nodes
    behind: dict[fx.Node, int] = {}
    for node in graph.nodes:
        spec = meta(node).spec
        bits = 1 << spec.index if isinstance(spec, Tangent) else 0
        for source in node.all_input_nodes:
            bits |= behind[source]
        behind[node] = bits
    found = {spec.of: behind[node] for spec, node in results_of(graph) if isinstance(spec, Gradient)}
    sets = {bits: frozenset(i for i in range(bits.bit_length()) if bits >> i & 1) for bits in found.values()}
    return {of: sets[bits] for of, bits in found.items()}
