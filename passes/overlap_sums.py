"""Compute weight gradients while the backward waits for all-reduces."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from fxdp.ir import redistributions
from fxdp.ir.graph.convolutions import gradients_apart
from fxdp.ir.graph.graphs import reachable
from fxdp.ir.graph.level import Level
from fxdp.ir.graph.metadata import meta
from fxdp.ir.types.mesh import Mesh
from fxdp.pipeline.cut.cost import node_flops

_BACKWARD = torch.ops.aten.convolution_backward.default


def _tails(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes between the last node with FLOPs and a result: gradient reductions, casts, views."""
    result, found = graph.output_node(), set[fx.Node]()
    for node in reversed(graph.nodes):
        follows = bool(node.users) and all(user is result or user in found for user in node.users)
        if node.op == "call_function" and follows and not node_flops(node):
            found.add(node)
    return found


def _waits(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Map the start of each all-reduce on which the rest of the backward depends to the matching wait."""
    tails = _tails(graph)
    starts = graph.find_nodes(op="call_function", target=redistributions.all_reduce)
    found = {start: next(iter(start.users)) for start in starts if meta(start).backward}
    return {start: wait for start, wait in found.items() if wait not in tails}


def _hide(graph: fx.Graph, waits: dict[fx.Node, fx.Node]) -> None:
    """Move work for gradients alone, computed since the previous all-reduce, behind the next one's start."""
    tails, position = _tails(graph), {node: i for i, node in enumerate(graph.nodes)}
    work: list[fx.Node] = []
    in_flight: fx.Node | None = None
    for node in list(graph.nodes):
        if node in waits:
            in_flight = waits[node]
            # together with dependent nodes, such as the start of the gradient's own reduction
            moved = [n for n in reachable(work) if position[n] < position[in_flight]]
            for one in sorted(moved, key=position.__getitem__):
                in_flight.prepend(one)
            work = []
        elif node is in_flight:
            in_flight = None
        elif in_flight is None and meta(node).backward and node_flops(node) and tails.issuperset(node.users):
            work.append(node)


@dataclass(frozen=True)
class OverlapSums:
    """Compute a layer's weight gradients while an all-reduce that the backward needs next is in flight.

    before: `%convolution_backward` of input and weight, `%all_reduce = all_reduce(%cat)` of the BatchNorm
            before it, `wait`
    after:  `%convolution_backward` of the input, `%all_reduce`, `%convolution_backward_1` of the weight,
            `wait`

    Without this pass nothing overlaps the all-reduce's transfer and the wait for slower ranks. Weight
    gradients can be delayed because only buckets read the results. Zero-bubble pipelines use the same fact
    (Qi et al., 2023).
    """

    name = "overlap-sums"
    requires = Level.LOCAL
    ensures = Level.LOCAL

    def run(self, gm: fx.GraphModule, mesh: Mesh) -> fx.GraphModule:
        """Rewrite the graph in place."""
        if mesh.size > 1 and (waits := _waits(gm.graph)):
            for node in gm.graph.find_nodes(op="call_function", target=_BACKWARD):
                gradients_apart(node)
            _hide(gm.graph, waits)
        return gm
