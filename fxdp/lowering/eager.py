"""Partition an emitted joint graph into forward and backward, and run both op by op: `backend="eager"`.

The forward saves all values that the backward reads, as in eager autograd; nothing is recomputed. Generated
code drops each value after the last use.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from fxdp.ir.graph.graphs import ancestors, results_of, subgraph
from fxdp.ir.graph.metadata import meta, tensor_type
from fxdp.ir.graph.signature import Gradient, Mutation, Output, StageValue, Tangent
from fxdp.lowering.backward import usual_zeros
from fxdp.lowering.forward_backward_pair import Boxed, ForwardBackward
from fxdp.lowering.op_by_op import op_by_op
from fxdp.torch_compat import aten, graph_module


def lower_eager(
    gm: fx.GraphModule, zero: frozenset[int] | None = None, summed: tuple[int, ...] = ()
) -> ForwardBackward:
    """Return the forward/backward pair of an emitted program, as generated Python code over aten ops.

    `zero` are the tangents for whose absence a backward is built at once; by default the tangents that a
    training loop leaves zero. `summed` numbers the backward's results that are added to buffers.
    """
    first = forward_nodes(gm.graph)
    saved = _saved(gm.graph, first)
    forward, outputs = _forward_graph(gm, first, saved)
    backward = _backward_graph(gm, first, saved)
    tangents = [tensor_type(n) for n in backward_inputs(gm.graph)]
    order = tuple(range(len(saved)))
    pair = ForwardBackward(_code(forward), outputs, forward, backward, order, len(tangents), _code, summed)
    if pair.trains:
        pair.backward(usual_zeros(tangents) if zero is None else zero)
    return pair


def _code(gm: fx.GraphModule, half: bool = False) -> Boxed:
    return op_by_op(gm)


def forward_results(graph: fx.Graph) -> list[fx.Node]:
    """Return the results of the forward, except new values of buffers."""
    return [n for s, n in results_of(graph) if isinstance(s, Output) or _crosses(s, backward=False)]


def backward_results(graph: fx.Graph) -> list[fx.Node | None]:
    """Return the results of the backward: a gradient or None per forward input, then values for stages."""
    found = results_of(graph)
    gradients = {s.of: n for s, n in found if isinstance(s, Gradient)}
    crossing: list[fx.Node | None] = [n for s, n in found if _crosses(s, backward=True)]
    if not gradients:
        return crossing
    return [*(gradients.get(meta(n).spec) for n in forward_inputs(graph)), *crossing]  # type: ignore[arg-type]


def forward_inputs(graph: fx.Graph) -> list[fx.Node]:
    """Return the placeholders of the forward, in order."""
    return [n for n in graph.nodes if n.op == "placeholder" and not _comes_later(n)]


def backward_inputs(graph: fx.Graph) -> list[fx.Node]:
    """Return the placeholders of the backward alone: tangents, and values from other stages' backwards."""
    return [n for n in graph.nodes if n.op == "placeholder" and _comes_later(n)]


def _comes_later(node: fx.Node) -> bool:
    spec = meta(node).spec
    return isinstance(spec, Tangent) or _crosses(spec, backward=True)


def _crosses(spec: object, *, backward: bool) -> bool:
    return isinstance(spec, StageValue) and spec.backward is backward


def forward_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes of the forward: all but tangents, nodes that depend on tangents, and backward ops.

    The capture marks backward ops; a marked op that a forward result needs is part of the forward.
    """
    later: set[fx.Node] = set()
    mutations = [n for s, n in results_of(graph) if isinstance(s, Mutation)]
    needed = ancestors([*forward_results(graph), *mutations])
    for node in graph.nodes:
        # a result of the forward needs this node, even if the capture marked the node as backward
        reads_later = any(a in later for a in node.all_input_nodes)
        called_backward = meta(node).backward and node.op == "call_function" and node not in needed
        if _comes_later(node) or reads_later or called_backward:
            later.add(node)
    return {n for n in graph.nodes if n not in later and n.op != "output"}


def _saved(graph: fx.Graph, forward: set[fx.Node]) -> list[fx.Node]:
    """Return the forward values that the backward reads, in graph order."""
    gradients = set(backward_results(graph))
    return [
        n
        for n in graph.nodes
        if n in forward and (n in gradients or any(u not in forward and u.op != "output" for u in n.users))
    ]


def _forward_graph(
    gm: fx.GraphModule, nodes: set[fx.Node], saved: list[fx.Node]
) -> tuple[fx.GraphModule, int]:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in gm.graph.nodes:
        if node in nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    outputs = [copies[n] for n in forward_results(gm.graph)]
    kept = [copies[n] for n in saved]
    mutations = [(s.of, copies[n]) for s, n in results_of(gm.graph) if isinstance(s, Mutation)]
    kept = _write_back(graph, mutations, kept)
    graph.output((*outputs, *kept))
    graph.eliminate_dead_code(is_impure_node=_keeps)
    return graph_module(gm, graph, "Forward"), len(outputs)


def _keeps(node: fx.Node) -> bool:
    return node.op in ("placeholder", "output") or node.target is aten.copy_.default or node.is_impure()


def _write_back(graph: fx.Graph, mutations: list[tuple[Any, fx.Node]], kept: list[fx.Node]) -> list[fx.Node]:
    """Copy new values into buffers and inputs; old values that the backward reads are cloned before."""
    targets = {meta(n).spec: n for n in graph.nodes if n.op == "placeholder"}
    written = {targets[spec] for spec, _ in mutations}
    kept = [graph.call_function(aten.clone.default, (n,)) if n in written else n for n in kept]
    for spec, value in mutations:
        graph.call_function(aten.copy_.default, (targets[spec], value))
    return kept


def _backward_graph(gm: fx.GraphModule, forward: set[fx.Node], saved: list[fx.Node]) -> fx.GraphModule | None:
    gradients = backward_results(gm.graph)
    if not gradients:
        return None
    later = [n for n in gm.graph.nodes if n.op != "output" and n not in forward]
    backward = subgraph(gm, set(later), gradients, "Backward", saved)
    backward.graph.eliminate_dead_code(is_impure_node=_keeps)
    return backward
