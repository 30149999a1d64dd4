"""Constants from which a forward computes values that are written in place: they must be inputs of the trace.

    places = self.places["a"].clone()       a tensor that is neither parameter nor buffer: a constant
    places[0] += 1                          written in place

Tracing functionalizes in-place ops on values computed from inputs and factories. Values computed only from an
attribute of the graph are not functionalized, and tracing fails on the remaining write.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

from fxdp.ir.graph.graphs import attribute_of


def hold_written_constants(gm: fx.GraphModule) -> None:
    """Register written constants as buffers of the graph's module, which makes them inputs; in place."""
    roots: dict[fx.Node, frozenset[fx.Node]] = {}
    written: dict[fx.Node, None] = {}
    for node in gm.graph.nodes:
        if node.op == "get_attr" and _is_constant(gm, node):
            roots[node] = frozenset({node})
        elif node.op == "call_function" and node.all_input_nodes:
            sources = node.all_input_nodes
            if _writes(node) and sources[0] is node.args[0]:
                written |= dict.fromkeys(roots.get(sources[0], ()))
            if all(source in roots for source in sources):
                roots[node] = frozenset[fx.Node]().union(*(roots[source] for source in sources))
    for node in written:
        _register(gm, str(node.target))


def _is_constant(gm: fx.GraphModule, node: fx.Node) -> bool:
    value: Any = attribute_of(gm, node)
    owner, _, name = str(node.target).rpartition(".")
    held = gm.get_submodule(owner)
    return isinstance(value, Tensor) and name not in held._parameters and name not in held._buffers


def _writes(node: fx.Node) -> bool:
    """Return whether an op writes into its first argument."""
    arguments = getattr(getattr(node.target, "_schema", None), "arguments", ())
    return bool(arguments and arguments[0].is_write)


def _register(gm: fx.GraphModule, target: str) -> None:
    owner, _, name = target.rpartition(".")
    held = gm.get_submodule(owner)
    value = getattr(held, name)
    if name not in held._buffers:
        delattr(held, name)
        held.register_buffer(name, value, persistent=False)
