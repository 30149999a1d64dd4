"""The joint graph of all layers from that of a few: `ir/few_layers.py`, with parameters by their names.

    short     embed  F0 F1 F2 F3 F4 F5  head  head'  G5 G4 G3 G2 G1 G0  embed'
    long      embed  F0 F1 F2 C3 .. Cn F3 F4 F5  head  head'  G5 G4 G3 Dn .. D3 G2 G1 G0  embed'
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from fxdp.capture.joint.alike_layers import Layers
from fxdp.capture.joint.convert import Slots, identifier, node_name, slot_name
from fxdp.capture.joint.moved_notes import Numbers, Sites
from fxdp.ir.few_layers import FewLayers, Member, MoreLayers
from fxdp.ir.graph_form import value_text
from fxdp.ir.graphs import results_of
from fxdp.ir.notes import Note, copy_note, note, sequence_number
from fxdp.ir.slots import Buffer, Gradient, Mutation, Parameter, ResultSlot, Slot
from fxdp.torch_compat import graph_module

_COPIED = (2, 3, 1, 4)
"""The layers that are tried as the one to copy."""


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
        self.families: dict[str, Member] = {
            names[real]: (family, i)
            for family, names in enumerate(layers.families)
            for i, real in enumerate(layers.kept)
        }
        few = _few_layers(gm, self.families)
        self.more = MoreLayers(few, layers.count - layers.few, _COPIED, self._write)
        self.graph = fx.Graph()
        self.sites = Sites(layers)
        self.numbers = Numbers(few, self.more.copied, self.more.more)

    def run(self) -> fx.GraphModule:
        self._placeholders()
        for half in range(len(self.more.few.halves)):
            self.more.write_half(half)
        self._output()
        return graph_module(self.gm, self.graph, "Joint")

    def _placeholders(self) -> None:
        found: list[tuple[Slot, fx.Node, int | None]] = []
        kept = {}
        for node in self.gm.graph.find_nodes(op="placeholder"):
            slot = note(node).slot
            assert slot is not None
            if (member := self.more.few.given.get(node)) is None:
                found.append((slot, node, None))
            else:
                kept[member] = node
        for family, names in enumerate(self.layers.families):
            for real, i in self.more.templates(self.layers.count):
                if (node := kept.get((family, i))) is not None:
                    found.append((_renamed(note(node).slot, names[real]), node, real))
        for slot, node, place in sorted(found, key=lambda item: self.slots.rank(item[0])):
            made = self.graph.placeholder(identifier(slot_name(slot)))
            made.meta.update(node.meta)
            copy_note(node, made, slot=slot)
            self.more.add(node, place, made)

    def _write(self, node: fx.Node, args: Any, kwargs: Any, moved: int, copied: bool) -> fx.Node:
        made = self.graph.create_node(node.op, node.target, args, kwargs, name=node_name(node))
        made.meta.update(node.meta)
        copy_note(node, made, site=self.sites.moved(note(node).site, moved, strict=copied))
        if (numbered := sequence_number(node)) is not None:
            made.meta["seq_nr"] = self.numbers.moved(numbered, moved, copied)
        return made

    def _output(self) -> None:
        results: list[tuple[ResultSlot, fx.Node]] = []
        families: dict[Member, list[tuple[ResultSlot, fx.Node]]] = {}
        for slot, node in results_of(self.gm.graph):
            assert slot is not None
            place = self.families.get(_name(slot))
            if place is None:
                results.append((slot, self.more.copy_of(node, None, 0)))
            else:
                families.setdefault(place, []).append((slot, node))
        for family, names in enumerate(self.layers.families):
            for real, i in self.more.templates(self.layers.count):
                for slot, node in families.get((family, i), ()):
                    results.append((_of(slot, names[real]), self.more.result(node, real)))
        results.sort(key=lambda item: self.slots.result_rank(item[0]))
        made = self.graph.output(tuple(node for _, node in results))
        made.meta["fxdp"] = Note(results=tuple(slot for slot, _ in results))


def _few_layers(gm: fx.GraphModule, families: dict[str, Member]) -> FewLayers:
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    halves = [n for n in calls if not note(n).backward], [n for n in calls if note(n).backward]
    given = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        slot = note(node).slot
        if isinstance(slot, (Parameter, Buffer)) and slot.name in families:
            given[node] = families[slot.name]
    return FewLayers([half for half in halves if half], given, _known)


def _known(node: fx.Node) -> object:
    known = note(node)
    return str(known.type), value_text(node.meta.get("val")), node.meta.get("is_gradient_acc"), known.skip


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
        return Mutation(renamed)
    assert isinstance(renamed, Parameter)
    return Gradient(renamed)
