"""Builds the graph of one part: its nodes, copies of what it may compute for itself, and what it is given."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from fxdp.ir.notes import copy_note, note
from fxdp.ir.slots import Crossing, ResultSlot
from fxdp.torch_compat import graph_module


class PartBuilder:
    """Collects the nodes of one part with all that it clones, and builds its graph.

    Attributes
    ----------
    included : what the part computes, or takes as the whole program does.
    crossing : what it is given by other parts.
    """

    def __init__(self, whole: fx.GraphModule) -> None:
        self.whole = whole
        self.included: set[fx.Node] = set()
        self.crossing: dict[fx.Node, Crossing] = {}

    def include(self, roots: list[fx.Node], crossing_of: Callable[[fx.Node], Crossing | None]) -> None:
        """Take the roots and, from there, everything that is a member or can be cloned."""
        pending = list(roots)
        while pending:
            node = pending.pop()
            if node in self.included or node in self.crossing:
                continue
            found = None if node.op == "placeholder" else crossing_of(node)
            if found is not None:
                self.crossing[node] = found
                continue
            self.included.add(node)
            pending.extend(node.all_input_nodes)

    def reads(self) -> list[fx.Node]:
        """What comes from other parts, in the order of the whole program."""
        return [node for node in self.whole.graph.nodes if node in self.crossing]

    def build(self, results: list[tuple[ResultSlot, fx.Node]], title: str) -> fx.GraphModule:
        """The graph that gives these results."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in self.whole.graph.find_nodes(op="placeholder"):
            if node in self.included:
                copies[node] = graph.node_copy(node)
                copy_note(node, copies[node])
        for node in self.reads():
            copies[node] = made = graph.placeholder(node.name)
            slot = self.crossing[node]
            copy_note(node, made, slot=slot, operands=(), cause=None, rewrite=None, backward=slot.backward)
        for node in self.whole.graph.nodes:
            if node in self.included and node.op != "placeholder":
                copies[node] = graph.node_copy(node, copies.__getitem__)
                # a note of its own: passes change the parts one by one
                copy_note(node, copies[node])
        output = graph.output(tuple(copies[n] for _, n in results))
        note(output).results = tuple(slot for slot, _ in results)
        note(output).operands = tuple(note(n).placement for _, n in results)  # type: ignore[misc]
        return graph_module(self.whole, graph, title)
