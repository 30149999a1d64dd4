"""Restore the layers that a reduced program lacks, after a trace of it.

    few     embed  F0 F1 F2              F3 F4    head  head'  G4 G3              G2 G1 G0  embed'
    more    embed  F0 F1 F2 C3 .. Cn ..  F3 F4    head  head'  G4 G3 .. Dn .. D3  G2 G1 G0  embed'

C and D are copies of F2 and G2, the template, each with the parameters of its own layer. The copies are
correct because F2 reads, of F1, of the parameters and of shared values, exactly what F1 reads of F0, and F3
of F2; and G2 likewise, values of the forward included: the next layer goes on so.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from fxdp.ir.graph.metadata import copy_meta
from fxdp.ir.graph.regions import renumbered
from fxdp.startup.repeated.alike_layers import LayeredProgram, Layers, OtherLayersError
from fxdp.startup.repeated.reduced import Reduced

_Write = Callable[[fx.Node, Any, Any, "int | None"], fx.Node]
"""Creates a node like the given one with these arguments, in the layer with this number, or in none."""


class Expansion:
    """Writer of a program with all layers.

    Raises
    ------
    OtherLayersError : the template is not like the layers beside it.
    """

    def __init__(self, reduced: Reduced, program: LayeredProgram, write: _Write) -> None:
        self.layers: Layers = program.layers_in(reduced.layers.container)
        self.dropped, self.template = reduced.dropped, reduced.template
        self._named = program.named
        self._write = write
        self._order = sorted((*self.layers.rows, *self.dropped))
        if self.template not in self.layers.alike[:-1]:
            raise OtherLayersError(f"layers {self.layers.alike} alone are alike after the trace")
        self._plain: dict[fx.Node, fx.Node] = {}
        self._made: dict[tuple[Hashable, int], fx.Node] = {}

    def numbers(self, node: fx.Node) -> Sequence[int | None]:
        """Return the layers that have a node like this one: several for a node of the template."""
        number = self.layers.number(node)
        return [number] if number != self.template else [number, *self.dropped]

    def forget(self) -> None:
        """Go on in another graph, with inputs of its own."""
        self._plain.clear()
        self._made.clear()

    def add(self, node: fx.Node, number: int | None, made: fx.Node) -> None:
        """Register the copy of a node for a layer."""
        key = self.layers.keys.get(node)
        if key is None:
            self._plain[self._named(node)] = made
        else:
            self._made[key[0], key[1] if number is None else number] = made

    def copy_metadata(self, node: fx.Node, made: fx.Node, number: int | None) -> None:
        """Give a copy the metadata of its node, with the module of the layer that it is for."""
        made.meta.update(node.meta)
        own = copy_meta(node, made)
        if number in self.dropped and (path := own.location.module):
            own.location = replace(own.location, module=renumbered(path, self.layers.container, number))

    def write(self, nodes: Sequence[fx.Node], *, backward: bool) -> None:
        """Write the calls of a forward, or of a backward, which begins with the last layer."""
        template = [node for node in nodes if self.layers.number(node) == self.template]
        at = template[:1] if backward else template[-1:]
        for node in nodes:
            if backward and node in at:
                self._copies(template, self.dropped[::-1])
            self._emit(node, self.layers.number(node))
            if not backward and node in at:
                self._copies(template, self.dropped)

    def _copies(self, nodes: Sequence[fx.Node], numbers: Sequence[int]) -> None:
        for number in numbers:
            for node in nodes:
                self._emit(node, number)

    def _emit(self, node: fx.Node, number: int | None) -> None:
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: self.copy_of(n, number))
        self.add(node, number, self._write(node, args, kwargs, number))

    def copy_of(self, node: fx.Node, reader: int | None) -> fx.Node:
        """Return the copy of a value that layer `reader` of the full program reads; None: no layer."""
        key = self.layers.keys.get(node)
        if key is None:
            return self._plain[self._named(node)]
        place, wanted = key[0], self.seen_from(reader, key[1])
        if (place, wanted) not in self._made:
            raise OtherLayersError(f"%{node.name} is not there for layer {wanted}")
        return self._made[place, wanted]

    def seen_from(self, reader: int | None, number: int) -> int:
        """Return the layer that layer `reader` reads as its template reads layer `number`."""
        short = self.template if reader in self.dropped else reader
        if short is None or reader is None or short not in self.layers.rows:
            return number
        return self._order[self._order.index(reader) - self.layers.distance(short, number)]

    def result(self, node: fx.Node, number: int | None) -> fx.Node:
        """Return the copy of a result that belongs to a layer of the full program; None: to none."""
        if number in self.dropped and node not in self.layers.keys:
            raise OtherLayersError(f"%{node.name} of a layer is computed outside of the layers")
        return self.copy_of(node, number)
