"""Gradients that every rank computes in full, from what all samples bring to them: their factors.

%mm = aten.mm(%t, %x)     the product of two factors, gathered
%t_1 = aten.t(%mm)        shows it as the parameter lies
return gradient param(fc.weight)=%t_1
"""

from __future__ import annotations

from torch import fx

from fxdp.ir.metadata import meta

SUFFICIENT_FACTORS = "factors"
"""The reason in the notes of all of these, and of what shows a factor."""


def has_sufficient_factors(graph: fx.Graph) -> bool:
    """Whether some gradients are computed of theirs."""
    return any(meta(node).reason == SUFFICIENT_FACTORS for node in graph.nodes)


def product_of_factors(gradient: fx.Node) -> fx.Node:
    """What computes a gradient of its factors; itself, if it has none."""
    node = gradient
    while meta(node).reason == SUFFICIENT_FACTORS and len(node.all_input_nodes) == 1:
        (source,) = node.all_input_nodes
        if meta(source).reason != SUFFICIENT_FACTORS:
            break
        node = source
    return node
