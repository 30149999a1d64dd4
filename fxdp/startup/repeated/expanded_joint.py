"""The joint graph of all layers, expanded from a joint graph with few; parameters are matched by name.

    short     embed  F0 F1 F2 F3 F4 F5  head  head'  G5 G4 G3 G2 G1 G0  embed'
    long      embed  F0 F1 F2 C3 .. Cn F3 F4 F5  head  head'  G5 G4 G3 Dn .. D3 G2 G1 G0  embed'

The copying itself is in `repeated_program.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from fxdp.capture.joint.annotate_joint import SignatureSpecs, identifier, node_name, spec_name
from fxdp.ir.graph.graph_form import value_text
from fxdp.ir.graph.graphs import results_of
from fxdp.ir.graph.metadata import Metadata, copy_meta, meta, sequence_number
from fxdp.ir.graph.signature import Buffer, Gradient, InputSpec, Mutation, OutputSpec, Parameter
from fxdp.startup.repeated.copied_metadata import Locations, Numbers
from fxdp.startup.repeated.repeated_forward import Layers
from fxdp.startup.repeated.repeated_program import Member, MoreLayers, RepeatedProgram
from fxdp.torch_compat import graph_module

_COPIED = (2, 3, 1, 4)
"""Layers that are tried, in this order, as the layer to copy."""


def expanded(short: fx.GraphModule, layers: Layers, specs: SignatureSpecs) -> fx.GraphModule:
    """Return the joint graph of all layers.

    Raises
    ------
    OtherLayersError : the joint graph of all layers does not follow from the short one.
    """
    return _Expansion(short, layers, specs).run()


class _Expansion:
    """Writer of the expanded graph."""

    def __init__(self, gm: fx.GraphModule, layers: Layers, specs: SignatureSpecs) -> None:
        self.gm = gm
        self.layers = layers
        self.specs = specs
        self.parameter_groups: dict[str, Member] = {
            names[real]: (family, i)
            for family, names in enumerate(layers.parameter_groups)
            for i, real in enumerate(layers.kept)
        }
        reduced = _repeated_program(gm, self.parameter_groups)
        self.more = MoreLayers(reduced, layers.count - layers.reduced, _COPIED, self._write)
        self.graph = fx.Graph()
        self.locations = Locations(layers)
        self.numbers = Numbers(reduced, self.more.copied, self.more.more)

    def run(self) -> fx.GraphModule:
        self._placeholders()
        for half in range(len(self.more.reduced.pair)):
            self.more.write_half(half)
        self._output()
        return graph_module(self.gm, self.graph, "Joint")

    def _placeholders(self) -> None:
        found: list[tuple[InputSpec, fx.Node, int | None]] = []
        kept = {}
        for node in self.gm.graph.find_nodes(op="placeholder"):
            spec = meta(node).spec
            assert spec is not None
            if (member := self.more.reduced.given.get(node)) is None:
                found.append((spec, node, None))
            else:
                kept[member] = node
        for family, names in enumerate(self.layers.parameter_groups):
            for real, i in self.more.templates(self.layers.count):
                if (node := kept.get((family, i))) is not None:
                    found.append((_renamed(meta(node).spec, names[real]), node, real))
        for spec, node, place in sorted(found, key=lambda item: self.specs.rank(item[0])):
            made = self.graph.placeholder(identifier(spec_name(spec)))
            made.meta.update(node.meta)
            copy_meta(node, made, spec=spec)
            self.more.add(node, place, made)

    def _write(self, node: fx.Node, args: Any, kwargs: Any, moved: int, copied: bool) -> fx.Node:
        made = self.graph.create_node(node.op, node.target, args, kwargs, name=node_name(node))
        made.meta.update(node.meta)
        copy_meta(node, made, location=self.locations.moved(meta(node).location, moved, strict=copied))
        if (numbered := sequence_number(node)) is not None:
            made.meta["seq_nr"] = self.numbers.moved(numbered, moved, copied)
        return made

    def _output(self) -> None:
        results: list[tuple[OutputSpec, fx.Node]] = []
        parameter_groups: dict[Member, list[tuple[OutputSpec, fx.Node]]] = {}
        for spec, node in results_of(self.gm.graph):
            assert spec is not None
            place = self.parameter_groups.get(_name(spec))
            if place is None:
                results.append((spec, self.more.copy_of(node, None, 0)))
            else:
                parameter_groups.setdefault(place, []).append((spec, node))
        for family, names in enumerate(self.layers.parameter_groups):
            for real, i in self.more.templates(self.layers.count):
                for spec, node in parameter_groups.get((family, i), ()):
                    results.append((_of(spec, names[real]), self.more.result(node, real)))
        results.sort(key=lambda item: self.specs.result_rank(item[0]))
        made = self.graph.output(tuple(node for _, node in results))
        made.meta["fxdp"] = Metadata(results=tuple(spec for spec, _ in results))


def _repeated_program(gm: fx.GraphModule, parameter_groups: dict[str, Member]) -> RepeatedProgram:
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    pair = [n for n in calls if not meta(n).backward], [n for n in calls if meta(n).backward]
    given = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        spec = meta(node).spec
        if isinstance(spec, (Parameter, Buffer)) and spec.name in parameter_groups:
            given[node] = parameter_groups[spec.name]
    return RepeatedProgram([half for half in pair if half], given, _known)


def _known(node: fx.Node) -> object:
    known = meta(node)
    return str(known.type), value_text(node.meta.get("val")), node.meta.get("is_gradient_acc"), known.skip


def _renamed(spec: InputSpec | None, name: str) -> Parameter | Buffer:
    assert isinstance(spec, (Parameter, Buffer))
    return replace(spec, name=name)


def _name(spec: OutputSpec) -> str:
    """Return the name of the parameter or buffer to which a result belongs."""
    of = spec.of if isinstance(spec, (Gradient, Mutation)) else None
    return of.name if isinstance(of, (Parameter, Buffer)) else ""


def _of(spec: OutputSpec, name: str) -> OutputSpec:
    """Return the spec for another parameter or buffer."""
    assert isinstance(spec, (Gradient, Mutation))
    renamed = _renamed(spec.of, name)
    if isinstance(spec, Mutation):
        return Mutation(renamed)
    assert isinstance(renamed, Parameter)
    return Gradient(renamed)
