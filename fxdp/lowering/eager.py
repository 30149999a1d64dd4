"""Cut an emitted joint graph in two and run both as they are: `compute="eager"`.

The forward keeps what the backward reads, as eager autograd does; nothing is recomputed. Generated code
drops each value after its last use.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fxdp.annotations import Gradient, Input, Mutation, Output, Parameter, Tangent, TensorType, note
from fxdp.lowering.halves import Halves
from fxdp.lowering.tangents import usual_zeros
from fxdp.torch_compat import boxed_code

aten = torch.ops.aten


def lower_eager(gm: fx.GraphModule) -> Halves:
    """The two halves of an emitted program, as generated Python code over aten ops."""
    forward_nodes = _forward_nodes(gm.graph)
    saved = _saved(gm.graph, forward_nodes)
    forward, outputs = _forward_graph(gm, forward_nodes, saved)
    backward = _backward_graph(gm, forward_nodes, saved)
    tangents = [tensor_type(n) for n in gm.graph.nodes if isinstance(note(n).slot, Tangent)]
    halves = Halves(
        boxed_code(forward),
        outputs,
        forward,
        backward,
        tuple(range(len(saved))),
        len(tangents),
        boxed_code,
    )
    if halves.trains:
        halves.backward(usual_zeros(tangents))
    return halves


def tensor_type(node: fx.Node) -> TensorType:
    """The type of a node that is a tensor."""
    type_ = note(node).type
    assert isinstance(type_, TensorType)
    return type_


def results(graph: fx.Graph) -> list[tuple[Any, fx.Node]]:
    """Pairs of result slot and node."""
    output = graph.output_node()
    return list(zip(note(output).results, output.args[0], strict=True))  # type: ignore[arg-type]


def gradient_of(graph: fx.Graph) -> dict[Parameter | Input, fx.Node]:
    """The gradient of each input that has one."""
    return {slot.of: node for slot, node in results(graph) if isinstance(slot, Gradient)}


def _forward_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Nodes of the forward: all but tangents, what they reach, and what the capture called backward."""
    later: set[fx.Node] = set()
    needed = {n for s, n in results(graph) if isinstance(s, (Output, Mutation))}
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    for node in graph.nodes:
        reads_later = any(a in later for a in node.all_input_nodes)
        called_backward = note(node).backward and node.op == "call_function" and node not in needed
        if isinstance(note(node).slot, Tangent) or reads_later or called_backward:
            later.add(node)
    return {n for n in graph.nodes if n not in later and n.op != "output"}


def _saved(graph: fx.Graph, forward: set[fx.Node]) -> list[fx.Node]:
    """Forward values that the backward reads, in graph order."""
    gradients = set(gradient_of(graph).values())
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
    outputs = [copies[n] for s, n in results(gm.graph) if isinstance(s, Output)]
    kept = [copies[n] for n in saved]
    mutations = [(s.of, copies[n]) for s, n in results(gm.graph) if isinstance(s, Mutation)]
    kept = _write_back(graph, mutations, kept)
    graph.output((*outputs, *kept))
    graph.eliminate_dead_code(is_impure_node=_keeps)
    return fx.GraphModule(gm, graph, "Forward"), len(outputs)


def _keeps(node: fx.Node) -> bool:
    return node.op in ("placeholder", "output") or node.target is aten.copy_.default or node.is_impure()


def _write_back(graph: fx.Graph, mutations: list[tuple[Any, fx.Node]], kept: list[fx.Node]) -> list[fx.Node]:
    """Copy new values into buffers and inputs, after saving the old values that the backward reads."""
    targets = {note(n).slot: n for n in graph.nodes if n.op == "placeholder"}
    written = {targets[slot] for slot, _ in mutations}
    kept = [graph.call_function(aten.clone.default, (n,)) if n in written else n for n in kept]
    for slot, value in mutations:
        graph.call_function(aten.copy_.default, (targets[slot], value))
    return kept


def _backward_graph(gm: fx.GraphModule, forward: set[fx.Node], saved: list[fx.Node]) -> fx.GraphModule | None:
    gradients = gradient_of(gm.graph)
    if not gradients:
        return None
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in saved:
        copies[node] = copy = graph.placeholder(node.name)
        copy.meta = dict(node.meta)
    for node in gm.graph.nodes:
        if node.op != "output" and node not in forward:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    order = forward_inputs(gm.graph)
    graph.output(tuple(copies.get(gradients.get(note(n).slot)) for n in order))  # type: ignore[arg-type]
    graph.eliminate_dead_code(is_impure_node=_keeps)
    return fx.GraphModule(gm, graph, "Backward")


def forward_inputs(graph: fx.Graph) -> list[fx.Node]:
    """The placeholders that the forward takes, in order: all but the tangents."""
    return [n for n in graph.nodes if n.op == "placeholder" and not isinstance(note(n).slot, Tangent)]
