"""A program without most of its layers, as the input of a trace.

    full       embed  F0 F1 F2 .. Fn  head  head'  Gn .. G2 G1 G0  embed'
    reduced    embed  F0 F1 F2 Fm Fn  head  head'  Gn Gm G2 G1 G0  embed'

Every layer that is left out reads the same as those before and after, so the reduced program is the same
program with fewer layers. The last layer before the gap is the template of all that are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, partial

from torch import fx

from fxdp.startup.repeated.alike_layers import Key, Layers, OtherLayersError

LEAST = 8
"""The smallest number of equal layers: finding and restoring fewer takes more time than is saved."""


@dataclass(frozen=True)
class Reduced:
    """A graph without its dropped layers; without an output node at first."""

    layers: Layers
    """The layers of the full graph."""
    kept: int
    """The number of equal layers that stay before the gap, and after it."""
    graph: fx.Graph = field(default_factory=fx.Graph)
    copies: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """The nodes that stay, with their copies."""

    @cached_property
    def dropped(self) -> list[int]:
        """The numbers of the layers that are left out."""
        return list(self.layers.alike[self.kept : -self.kept])

    @property
    def template(self) -> int:
        """The number of the layer that those left out are like."""
        return self.layers.alike[self.kept - 1]

    def copy_of(self, node: fx.Node, reader: int | None) -> fx.Node:
        """Return the copy of a node, or of its counterpart in a layer that stays, as read by layer `reader`.

        Raises
        ------
        OtherLayersError : there is none.
        """
        if reader is not None and (number := self.layers.number(node)) in self.dropped:
            kept = [n for n in self.layers.rows if n not in self.dropped]
            by = 0 if reader == number else self.layers.distance(reader, number)
            node = self.counterpart(node, self.template if by == 0 else kept[kept.index(reader) - by])
        if node not in self.copies:
            raise OtherLayersError(f"%{node.name} is in no layer that stays")
        return self.copies[node]

    def counterpart(self, node: fx.Node, number: int) -> fx.Node:
        """Return the node of another layer that is like a node of a layer; itself if there is none."""
        return self._nodes.get((self.layers.keys[node][0], number), node)

    @cached_property
    def _nodes(self) -> dict[Key, fx.Node]:
        return {key: node for node, key in self.layers.keys.items()}


def reduced(graph: fx.Graph, layers: Layers, kept: int) -> Reduced:
    """Copy a graph without most of its layers, and without its output.

    Raises
    ------
    OtherLayersError : a node of no layer reads a layer that is left out.
    """
    found = Reduced(layers, kept)
    found.graph.set_codegen(graph._codegen)
    dropped = set(found.dropped)
    for node in graph.nodes:
        number = found.layers.number(node)
        if number not in dropped and node.op != "output":
            found.copies[node] = found.graph.node_copy(node, partial(found.copy_of, reader=number))
    return found
