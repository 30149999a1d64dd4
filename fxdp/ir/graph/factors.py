"""Gradients that every rank computes in full from sufficient factors gathered from all samples.

%mm = aten.mm(%t, %x)     the product of two factors, gathered
%t_1 = aten.t(%mm)        the gradient in the parameter's shape
return gradient param(fc.weight)=%t_1
"""

from __future__ import annotations

from torch import fx

from fxdp.ir.graph.metadata import meta

SUFFICIENT_FACTORS = "factors"
"""The `reason` in the metadata of nodes that multiply factors, and of views of factors and products."""


def has_sufficient_factors(graph: fx.Graph) -> bool:
    """Return whether some gradients are computed from sufficient factors."""
    return any(meta(node).reason == SUFFICIENT_FACTORS for node in graph.nodes)


def product_of_factors(gradient: fx.Node) -> fx.Node:
    """Return the node that multiplies a gradient's sufficient factors, or the gradient itself."""
    node = gradient
    while meta(node).reason == SUFFICIENT_FACTORS and len(node.all_input_nodes) == 1:
        (source,) = node.all_input_nodes
        if meta(source).reason != SUFFICIENT_FACTORS:
            break
        node = source
    return node
