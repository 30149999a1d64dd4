"""Build the graph of one part: own nodes, clones of cheap nodes, and inputs for received values."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from fxdp.ir.graph.metadata import copy_meta, meta
from fxdp.ir.graph.signature import OutputSpec, StageValue
from fxdp.torch_compat import graph_module


class PartBuilder:
    """Collector of one part's nodes and clones, which builds the part's graph.

    Attributes
    ----------
    included : nodes that the part computes, or that are inputs of the program.
    crossing : nodes that other parts compute, and their stage values.
    """

    def __init__(self, full: fx.GraphModule) -> None:
        self.full = full
        self.included: set[fx.Node] = set()
        self.crossing: dict[fx.Node, StageValue] = {}

    def include(self, roots: list[fx.Node], stage_value_of: Callable[[fx.Node], StageValue | None]) -> None:
        """Add the roots and all nodes that these depend on, up to the values named by `stage_value_of`."""
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
        """Return the received values in the order of the program."""
        return [node for node in self.full.graph.nodes if node in self.crossing]

    def build(self, results: list[tuple[OutputSpec, fx.Node]], title: str) -> fx.GraphModule:
        """Return the graph that computes the given results."""
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
                # own metadata, because passes change parts independently
                copy_meta(node, copies[node])
        output = graph.output(tuple(copies[n] for _, n in results))
        meta(output).results = tuple(spec for spec, _ in results)
        meta(output).operands = tuple(meta(n).placement for _, n in results)  # type: ignore[misc]
        return graph_module(self.full, graph, title)
