"""Cut a backward graph in two: what other stages wait for first, the gradients of weights later.

backward   %saved, %tangent -> %grad_x, %grad_w
inputs     %saved, %tangent -> %grad_x, then what the other half needs
weights    those            -> %grad_w
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx


def split_backward(gm: fx.GraphModule, first: Sequence[int]) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The two halves of a backward; `first` are the positions of the results that come first."""
    results = list(gm.graph.output_node().args[0])  # type: ignore[arg-type]
    early = [results[i] for i in first]
    late = [r for i, r in enumerate(results) if i not in set(first)]
    ahead = _ancestors(gm.graph, early)
    needed = _ancestors(gm.graph, late)
    handed = [
        n
        for n in gm.graph.nodes
        if n in needed
        and (n in ahead or n.op == "placeholder")
        and (n in late or any(u in needed and u not in ahead and u.op != "output" for u in n.users))
    ]
    return _inputs(gm, early, handed, ahead), _weights(gm, late, handed, needed - ahead)


def _ancestors(graph: fx.Graph, roots: Sequence[fx.Node | None]) -> set[fx.Node]:
    found = {r for r in roots if isinstance(r, fx.Node)}
    for node in reversed(graph.nodes):
        if node in found and node.op != "output":
            found.update(node.all_input_nodes)
    return found


def _inputs(
    gm: fx.GraphModule, early: Sequence[fx.Node | None], handed: Sequence[fx.Node], nodes: set[fx.Node]
) -> fx.GraphModule:
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in gm.graph.nodes:
        if node.op == "placeholder" or (node in nodes and node.op != "output"):
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(None if n is None else copies[n] for n in (*early, *handed)))
    return fx.GraphModule(gm, graph, "InputGradient")


def _weights(
    gm: fx.GraphModule, late: Sequence[fx.Node | None], handed: Sequence[fx.Node], nodes: set[fx.Node]
) -> fx.GraphModule:
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in handed:
        copies[node] = made = graph.placeholder(node.name)
        made.meta = dict(node.meta)
    for node in gm.graph.nodes:
        if node in nodes and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(None if n is None else copies[n] for n in late))
    return fx.GraphModule(gm, graph, "WeightGradient")
