"""The joint graph of all layers from that of a few: what the middle ones have is made again for each other.

    short     embed  F0 F1 F2 F3 F4 F5  head  head'  G5 G4 G3 G2 G1 G0  embed'
    long      embed  F0 F1 F2 C3 .. Cn F3 F4 F5  head  head'  G5 G4 G3 Dn .. D3 G2 G1 G0  embed'

F and G are what forward and backward of a layer are made of, found as runs of the same ops; their borders
need not be those of the layers that were left out. C and D are copies of F2 and G2, each with the parameters
of its own layer. They are right because F2 reads of F1, of the parameters and of what all share just what F1
reads of F0, and G2 likewise, of the forward as well: what comes next reads the same again.

Where that does not hold, `OtherLayersError` says so, and all layers are traced.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import fx

from fxdp.capture.joint.alike_layers import KEPT, Layers
from fxdp.capture.joint.convert import Slots, identifier, node_name, slot_name
from fxdp.capture.joint.moved_notes import Numbers, Sites
from fxdp.capture.joint.short_joint import OtherLayersError, ShortJoint
from fxdp.ir.graphs import results_of
from fxdp.ir.notes import Note, copy_note, note, sequence_number
from fxdp.ir.slots import Buffer, Gradient, Mutation, Parameter, ResultSlot, Slot
from fxdp.torch_compat import graph_module


def lengthened(short: fx.GraphModule, layers: Layers, slots: Slots) -> fx.GraphModule:
    """The joint graph of all layers.

    Raises
    ------
    OtherLayersError : that cannot be told from the short one.
    """
    return _Lengthened(short, layers, slots).run()


class _Lengthened:
    """Writes the long graph."""

    def __init__(self, gm: fx.GraphModule, layers: Layers, slots: Slots) -> None:
        self.gm = gm
        self.layers = layers
        self.slots = slots
        self.short = ShortJoint(gm, layers)
        self.copied = self.short.copied()
        self.more = layers.count - KEPT
        self.graph = fx.Graph()
        self.plain: dict[fx.Node, fx.Node] = {}
        """Copies of what belongs to no layer."""
        self.made: dict[object, fx.Node] = {}
        """Of what does, by its place in the long graph."""
        self.sites = Sites(layers)
        self.numbers = Numbers(self.short, self.copied, self.more)

    def run(self) -> fx.GraphModule:
        self._placeholders()
        for half, nodes in enumerate((self.short.forward, self.short.backward)):
            self._half(half, nodes)
        self._output()
        return graph_module(self.gm, self.graph, "Joint")

    def _real(self, number: int) -> int:
        """The number that a window or parameter of the short graph has in the long one."""
        return number if number <= self.copied else number + self.more

    def _templates(self) -> Iterator[tuple[int, int]]:
        """For each layer of the long graph that of the short one which it is like."""
        for real in range(self.layers.count):
            yield real, min(real, max(self.copied, real - self.more))

    def _placeholders(self) -> None:
        found: list[tuple[Slot, fx.Node, object]] = []
        kept = {self.short.parameter(n): n for n in self.gm.graph.find_nodes(op="placeholder")}
        for node in self.gm.graph.find_nodes(op="placeholder"):
            slot = note(node).slot
            assert slot is not None
            if self.short.parameter(node) is None:
                found.append((slot, node, None))
        for family, names in enumerate(self.layers.families):
            for real, i in self._templates():
                if (node := kept.get((family, i))) is not None:
                    slot = _renamed(note(node).slot, names[real])
                    found.append((slot, node, ("parameter", real, family)))
        for slot, node, place in sorted(found, key=lambda item: self.slots.rank(item[0])):
            made = self.graph.placeholder(identifier(slot_name(slot)))
            made.meta = dict(node.meta)
            copy_note(node, made, slot=slot)
            if place is None:
                self.plain[node] = made
            else:
                self.made[place] = made

    def _half(self, half: int, nodes: list[fx.Node]) -> None:
        if not nodes:
            return
        rows = self.short.rows[half]
        row = rows[self.copied]
        copies = range(self.copied + 1, self.copied + self.more + 1)
        upper = half == 1  # a backward begins with the last layer
        for node in nodes:
            if half == 1 and node is row[0]:
                for real in reversed(copies):
                    self._row(row, real)
            place = self.short.places.get(node)
            if place is not None:
                self._emit(node, place[1], self._real(place[1]))
                upper = half == 0
            else:
                self._emit(node, None, self.more if upper else 0)
            if half == 0 and node is row[-1]:
                for real in copies:
                    self._row(row, real)

    def _row(self, row: tuple[fx.Node, ...], real: int) -> None:
        for node in row:
            self._emit(node, self.copied, real)

    def _emit(self, node: fx.Node, number: int | None, real: int) -> None:
        """Write a node of window `number` for layer `real`; in none, `real` says how far it moves."""
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: self._copy_of(n, number, real))
        made = self.graph.create_node(node.op, node.target, args, kwargs, name=node_name(node))
        made.meta = dict(node.meta)
        moved = real if number is None else real - number
        copied = number == self.copied and moved > 0
        copy_note(node, made, site=self.sites.moved(note(node).site, moved, strict=copied))
        if (numbered := sequence_number(node)) is not None:
            made.meta["seq_nr"] = self.numbers.moved(numbered, moved, copied)
        if number is None:
            self.plain[node] = made
        else:
            half, _, k = self.short.places[node]
            self.made[half, real, k] = made

    def _copy_of(self, node: fx.Node, number: int | None, real: int) -> fx.Node:
        """What stands for a node that one of window `number` reads, for layer `real`."""
        layer = self.short.layer(node)
        if layer is None:
            return self.plain[node]
        wanted = self._real(layer) if number is None else real - (number - layer)
        if node in self.short.places:
            half, _, k = self.short.places[node]
            key: object = (half, wanted, k)
        else:
            place = self.short.parameter(node)
            assert place is not None
            key = ("parameter", wanted, place[0])
        if key not in self.made:
            raise OtherLayersError(f"%{node.name} is not there for layer {wanted}")
        return self.made[key]

    def _output(self) -> None:
        results: list[tuple[ResultSlot, fx.Node]] = []
        families: dict[tuple[int, int], list[tuple[ResultSlot, fx.Node]]] = {}
        for slot, node in results_of(self.gm.graph):
            assert slot is not None
            place = self.short.families.get(_name(slot))
            if place is None:
                results.append((slot, self._copy_of(node, None, 0)))
            else:
                families.setdefault(place, []).append((slot, node))
        for family, names in enumerate(self.layers.families):
            for real, i in self._templates():
                for slot, node in families.get((family, i), ()):
                    results.append((_of(slot, names[real]), self._result(node, i, real)))
        results.sort(key=lambda item: self.slots.result_rank(item[0]))
        made = self.graph.output(tuple(node for _, node in results))
        made.meta["fxdp"] = Note(results=tuple(slot for slot, _ in results))

    def _result(self, node: fx.Node, number: int, real: int) -> fx.Node:
        if self.short.layer(node) is None and real != self._real(number):
            raise OtherLayersError(f"the gradient %{node.name} of a layer is computed outside of the layers")
        return self._copy_of(node, number, real)


def _renamed(slot: Slot | None, name: str) -> Parameter | Buffer:
    assert isinstance(slot, (Parameter, Buffer))
    return replace(slot, name=name)


def _name(slot: ResultSlot) -> str:
    """The parameter or buffer that a result is of."""
    of = slot.of if isinstance(slot, (Gradient, Mutation)) else None
    return of.name if isinstance(of, (Parameter, Buffer)) else ""


def _of(slot: ResultSlot, name: str) -> ResultSlot:
    """The same result of another parameter or buffer."""
    assert isinstance(slot, (Gradient, Mutation))
    renamed = _renamed(slot.of, name)
    if isinstance(slot, Mutation):
        assert isinstance(renamed, Buffer)
        return Mutation(renamed)
    assert isinstance(renamed, Parameter)
    return Gradient(renamed)
