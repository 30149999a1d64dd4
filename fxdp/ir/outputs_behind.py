"""On which outputs each gradient of a program depends: through the tangents that it is computed from."""

from __future__ import annotations

from torch import fx

from fxdp.ir.graphs import results_of
from fxdp.ir.metadata import meta
from fxdp.ir.signature import Gradient, InputSpec, Tangent


def outputs_behind(graph: fx.Graph) -> dict[InputSpec | None, frozenset[int]]:
    """For each input that has a gradient the outputs by index, read off a joint graph.

    In it each gradient must still travel alone: a bucket depends on all that is in it. A constant gradient,
    which no tangent enters, has no outputs.
    """
    # a set of outputs is a number, a bit for each: a graph has many thousands of nodes
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
