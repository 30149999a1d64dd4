"""Builds the graph of one part: its nodes, copies of what it may compute for itself, and what it is given."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from fxdp.ir.metadata import copy_meta, meta
from fxdp.ir.signature import OutputSpec, StageValue
from fxdp.torch_compat import graph_module


class PartBuilder:
    """Collects the nodes of one part with all that it clones, and builds its graph.

    Attributes
    ----------
    included : what the part computes, or takes as the entire program does.
    crossing : what it is given by other parts.
    """

    def __init__(self, full: fx.GraphModule) -> None:
        self.full = full
        self.included: set[fx.Node] = set()
        self.crossing: dict[fx.Node, StageValue] = {}

    def include(self, roots: list[fx.Node], stage_value_of: Callable[[fx.Node], StageValue | None]) -> None:
        """Take the roots and, from there, everything that is a member or can be cloned."""
        pending = list(roots)
        while pending:
            node = pending.pop()
            if node in self.included or node in self.crossing:
                continue
            found = None if node.op == "placeholder" else stage_value_of(node)
            if found is not None:
                self.crossing[node] = found
                continue
            self.included.add(node)
            pending.extend(node.all_input_nodes)

    def reads(self) -> list[fx.Node]:
        """What comes from other parts, in the order of the entire program."""
        return [node for node in self.full.graph.nodes if node in self.crossing]

    def build(self, results: list[tuple[OutputSpec, fx.Node]], title: str) -> fx.GraphModule:
        """The graph that gives these results."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in self.full.graph.find_nodes(op="placeholder"):
            if node in self.included:
                copies[node] = graph.node_copy(node)
                copy_meta(node, copies[node])
        for node in self.reads():
            copies[node] = made = graph.placeholder(node.name)
            spec = self.crossing[node]
            copy_meta(node, made, spec=spec, operands=(), cause=None, rewrite=None, backward=spec.backward)
        for node in self.full.graph.nodes:
            if node in self.included and node.op != "placeholder":
                copies[node] = graph.node_copy(node, copies.__getitem__)
                # a note of its own: passes change the parts one by one
                copy_meta(node, copies[node])
        output = graph.output(tuple(copies[n] for _, n in results))
        meta(output).results = tuple(spec for spec, _ in results)
        meta(output).operands = tuple(meta(n).placement for _, n in results)  # type: ignore[misc]
        return graph_module(self.full, graph, title)
