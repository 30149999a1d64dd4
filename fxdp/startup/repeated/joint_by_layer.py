"""Trace the joint graph of a few of many equal layers, and expand it to all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from torch import fx, nn

from fxdp.capture.export.exported import Exported
from fxdp.capture.joint.annotate_joint import (
    AnnotatedJoint,
    SignatureSpecs,
    first_names,
    identifier,
    node_name,
    spec_name,
)
from fxdp.capture.joint.canonical_sizes import Sizes
from fxdp.capture.joint.raw_joint import JointOptions, RawJoint
from fxdp.capture.locations import module_of, module_path
from fxdp.ir.graph.graph_form import tensor_text, value_text
from fxdp.ir.graph.graphs import attribute_of, results_of
from fxdp.ir.graph.metadata import Metadata, copy_meta, meta, sequence_number
from fxdp.ir.graph.regions import number_in, renumbered
from fxdp.ir.graph.signature import Buffer, Gradient, InputSpec, Mutation, OutputSpec, Parameter
from fxdp.startup.repeated.alike_layers import LayeredProgram, OtherLayersError
from fxdp.startup.repeated.by_layer import by_layer
from fxdp.startup.repeated.expanded import Expansion
from fxdp.startup.repeated.reduced import LEAST, Reduced, reduced
from fxdp.torch_compat import graph_module, is_on

Joint: TypeAlias = tuple[RawJoint, Sizes, AnnotatedJoint]


def joint_by_layer(
    own: Callable[[Exported, JointOptions], Joint], exported: Exported, options: JointOptions
) -> Joint:
    """Extend `annotated_joint`: trace a few of many equal layers, and expand the joint graph to all."""
    if not is_on("repeated_joint"):
        return own(exported, options)

    def expand(few: Reduced, made: Joint) -> Joint:
        raw, sizes, short = made
        gm = expanded(few, short.gm, SignatureSpecs(exported.owner, exported.paths))
        return raw, sizes, replace(short, gm=gm)

    found = by_layer(
        partial(reduced_forward, exported), lambda few: own(_exported(exported, few), options), expand
    )
    return found or own(exported, options)


def reduced_forward(exported: Exported, kept: int) -> Reduced:
    """Return an exported forward with few layers.

    Raises
    ------
    OtherLayersError : few layers are alike.
    """
    if not exported.symbolic or exported.routes:
        raise OtherLayersError("the graph is not of any batch size")
    gm, first = exported.gm, first_names(exported.owner)
    names = {}
    for node in gm.graph.find_nodes(op="get_attr"):
        if (name := first.get(module_path(str(node.target)))) is not None:
            names[node] = name

    def known(node: fx.Node) -> object:
        if node.op != "get_attr":
            return value_text(node.meta.get("val"))
        value: Any = attribute_of(gm, node)
        return isinstance(value, nn.Parameter), tensor_text(value)

    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    return reduced(gm.graph, LayeredProgram([calls], known, names, region=module_of).layers(LEAST), kept)


def _exported(exported: Exported, few: Reduced) -> Exported:
    output = exported.gm.graph.output_node()
    made = few.graph.node_copy(output, lambda n: few.copy_of(n, None))
    made.meta = dict(output.meta)
    for node in few.graph.find_nodes(op="get_attr"):
        if not node.users:
            few.graph.erase_node(node)
    return replace(exported, gm=graph_module(exported.gm, few.graph))


def expanded(few: Reduced, short: fx.GraphModule, specs: SignatureSpecs) -> fx.GraphModule:
    """Return the joint graph of all layers.

    Raises
    ------
    OtherLayersError : the layers turn out to differ.
    """
    return _Joint(few, short, specs).run()


class _Joint:
    """Writer of the joint graph of all layers."""

    def __init__(self, few: Reduced, short: fx.GraphModule, specs: SignatureSpecs) -> None:
        calls = [n for n in short.graph.nodes if n.op == "call_function"]
        self.halves = [[n for n in calls if meta(n).backward == backward] for backward in (False, True)]
        given = {n: meta(n).spec for n in short.graph.find_nodes(op="placeholder")}
        names = {n: spec.name for n, spec in given.items() if isinstance(spec, (Parameter, Buffer))}
        program = LayeredProgram(self.halves, _known, names)
        self.more = Expansion(few, program, self._write)
        self.short, self.specs = short, specs
        self.container, self.graph = few.layers.container, fx.Graph()
        self.first: dict[int | None, fx.Node] = {}
        for node in calls:
            self.first.setdefault(sequence_number(node), node)
        self.numbers = 1 + max((number for number in self.first if number is not None), default=0)

    def run(self) -> fx.GraphModule:
        found = [(spec, node, number) for node in self.short.graph.find_nodes(op="placeholder")
                 for spec, number in self._each(meta(node).spec, node)]  # fmt: skip
        for spec, node, number in sorted(found, key=lambda item: self.specs.rank(item[0])):
            made = self.graph.placeholder(identifier(spec_name(spec)))
            made.meta.update(node.meta)
            copy_meta(node, made, spec=spec)
            self.more.add(node, number, made)
        for backward, half in enumerate(self.halves):
            self.more.write(half, backward=bool(backward))
        results = [(spec, self.more.result(node, number)) for kept, node in results_of(self.short.graph)
                   for spec, number in self._each(kept, node)]  # fmt: skip
        results.sort(key=lambda item: self.specs.result_rank(item[0]))
        made = self.graph.output(tuple(node for _, node in results))
        made.meta["fxdp"] = Metadata(results=tuple(spec for spec, _ in results))
        gm = graph_module(self.short, self.graph, "Joint")
        gm.graph.lint()
        return gm

    def _each(self, spec: Any, node: fx.Node) -> Iterator[tuple[Any, int | None]]:
        """Yield an input's or a result's spec in each layer, with the number of the layer."""
        name = _name(spec)
        number = number_in(name, self.container)
        yield spec, number
        for copied in self.more.dropped if number == self.more.template else ():
            yield _renamed(spec, renumbered(name, self.container, copied)), copied

    def _write(self, node: fx.Node, args: Any, kwargs: Any, number: int | None) -> fx.Node:
        made = self.graph.create_node(node.op, node.target, args, kwargs, name=node_name(node))
        self.more.copy_metadata(node, made, number)
        if (sequence := sequence_number(node)) is not None:
            made.meta["seq_nr"] = self._sequence_number(sequence, number)
        return made

    def _sequence_number(self, sequence: int, reader: int | None) -> int:
        """Return torch's number of the same op as seen from a layer; ops of new layers get new numbers."""
        place = self.more.layers.keys.get(self.first[sequence])
        if place is None:
            return sequence
        number, rows = self.more.seen_from(reader, place[1]), self.more.layers.rows
        at: Any = place[0]
        known = sequence_number(rows.get(number, rows[self.more.template])[at]) or 0
        return known + self.numbers * number if number in self.more.dropped else known


def _known(node: fx.Node) -> object:
    known = meta(node)
    return str(known.type), value_text(node.meta.get("val")), node.meta.get("is_gradient_acc"), known.skip


def _name(spec: InputSpec | OutputSpec | None) -> str:
    """Return the name of the parameter or buffer that is given, or that a result belongs to."""
    of = spec.of if isinstance(spec, (Gradient, Mutation)) else spec
    return of.name if isinstance(of, (Parameter, Buffer)) else ""


def _renamed(spec: Any, name: str) -> Any:
    """Return the spec of another parameter or buffer, or of a result that belongs to another one."""
    if isinstance(spec, (Gradient, Mutation)):
        return replace(spec, of=_renamed(spec.of, name))
    return replace(spec, name=name)
