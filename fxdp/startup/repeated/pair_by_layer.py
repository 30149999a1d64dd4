"""Trace and cut a program of a few of its repeated layers, and expand both halves to all of them.

    reduced program   traced and partitioned              forward F0 F1 F2 F3 F4    backward G4 G3 G2 G1 G0
    full program                                          forward F0 F1 F2 .. Fn    backward Gn .. G2 G1 G0

A value that the forward saves for one layer is saved for every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from fxdp.ir.graph.draws import node_draws
from fxdp.ir.graph.graph_form import NoTextError, tensor_text, value_text
from fxdp.ir.graph.graphs import results_of
from fxdp.ir.graph.metadata import copy_meta, meta
from fxdp.ir.graph.signature import Buffer, Gradient, InputSpec, Mutation, Parameter
from fxdp.ir.ops import collectives
from fxdp.ir.ops.full_batch_draws import is_twin
from fxdp.ir.ops.parameter_shards import STARTS
from fxdp.lowering.eager import backward_inputs, backward_results, forward_inputs, forward_results
from fxdp.lowering.inductor.forward_backward import Cut, Pair
from fxdp.lowering.inductor.strides import results
from fxdp.lowering.shapes import Shapes
from fxdp.startup.repeated.alike_layers import LayeredProgram, OtherLayersError, operands
from fxdp.startup.repeated.by_layer import by_layer
from fxdp.startup.repeated.expanded import Expansion
from fxdp.startup.repeated.expanded_check import check_expanded
from fxdp.startup.repeated.reduced import LEAST, Reduced, reduced
from fxdp.torch_compat import OpOverload, graph_module, in_other_memory, is_on

_Place = tuple[str, fx.Node]
"""A result of the pair: a value, or the new value or the gradient of an input."""


def pair_by_layer(
    own: Callable[..., Cut], gm: fx.GraphModule, values: Mapping[InputSpec, Any], shapes: Shapes,
    device: torch.device, budget: float,
) -> Cut:  # fmt: skip
    """Extend `partition`: cut a few of many equal layers, and expand both halves to all."""
    if not is_on("repeated_layers"):
        return own(gm, values, shapes, device, budget)

    def expand(few: Reduced, made: Cut) -> Cut:
        forward, backward, saved_order = pair = expanded(gm, few, made)
        check_expanded(gm, pair)
        return replace(made, forward=forward, backward=backward, saved_order=saved_order)

    found = by_layer(
        partial(_reduced_program, gm, values),
        lambda few: own(graph_module(gm, few.graph), values, shapes, device, budget), expand,
    )  # fmt: skip
    return found or own(gm, values, shapes, device, budget)


def _reduced_program(gm: fx.GraphModule, values: Mapping[InputSpec, Any], kept: int) -> Reduced:
    """Return an emitted program with few layers.

    Raises
    ------
    OtherLayersError : few layers are equal, or layers communicate or draw random numbers.
    """
    calls = [n for n in gm.graph.nodes if n.op == "call_function"]
    halves = [[n for n in calls if meta(n).backward == backward] for backward in (False, True)]

    def known(node: fx.Node) -> object:
        """Return all metadata of a node that a trace reads, besides arguments."""
        found, value = meta(node), values.get(meta(node).spec)  # type: ignore[arg-type]
        own = str(found.type), str(found.placement), found.recompute, found.draws_for
        return (*own, type(found.spec), tensor_text(value) if isinstance(value, Tensor) else "")

    layers = LayeredProgram(halves, known, _names(gm.graph)).layers(LEAST)
    few = reduced(gm.graph, layers, kept)
    if not all(map(_is_plain, layers.rows[few.template])):
        raise OtherLayersError("layers communicate, or draw random numbers")
    inputs = {meta(n).spec: n for n in gm.graph.find_nodes(op="placeholder")}
    found = []
    for spec, node in results_of(gm.graph):
        owner = inputs.get(spec.of) if isinstance(spec, (Gradient, Mutation)) else None
        if few.layers.number(node if owner is None else owner) not in few.dropped:
            found.append((spec, few.copy_of(node, None if owner is None else few.layers.number(owner))))
    output = few.graph.output(tuple(node for _, node in found))
    copy_meta(gm.graph.output_node(), output, results=tuple(spec for spec, _ in found))
    return few


def expanded(full: fx.GraphModule, few: Reduced, pair: Cut) -> Pair:
    """Return the forward and backward of the full program.

    Raises
    ------
    OtherLayersError : the layers turn out to differ.
    """
    return _Pair(full, few, pair).run()


class _Pair:
    """Writer of the forward and backward of all layers."""

    def __init__(self, full: fx.GraphModule, few: Reduced, pair: Cut) -> None:
        self.full, self.few = full.graph, few
        self.forward, self.backward = pair.forward, pair.backward
        visible, gradients = _places(few.graph)
        self.saved = results(self.forward)[len(visible) :]
        self.results: dict[_Place, Any] = dict(zip(visible, results(self.forward), strict=False))
        """The results of forward and backward, by their place in the reduced program."""
        self.inputs = dict(zip(forward_inputs(few.graph), _placeholders(self.forward), strict=True))
        """The inputs of forward and backward, by the inputs of the reduced program."""
        self.taken: dict[fx.Node, int] = {}
        """The backward's saved inputs, each with the position among the saved values."""
        self.halves = [_calls(self.forward)]
        if self.backward is not None:
            self.results |= zip(gradients, results(self.backward), strict=True)
            given = _placeholders(self.backward)
            self.taken = dict(zip(given, pair.saved_order, strict=False))
            self.inputs |= zip(backward_inputs(few.graph), given[len(self.taken) :], strict=True)
            self.halves.append(_calls(self.backward))
        names = {self.inputs[node]: name for node, name in _names(few.graph).items()}
        same = {node: self.saved[i] for node, i in self.taken.items()}
        self.more = Expansion(few, LayeredProgram(self.halves, _known, names, same), self._write)
        self.graph = fx.Graph()

    def run(self) -> Pair:
        visible, gradients = _places(self.full)
        self._begin(self.forward)
        self._inputs(forward_inputs(self.full))
        self.more.write(self.halves[0], backward=False)
        found = [self._result(place) for place in visible]
        numbers: dict[tuple[int, int | None], int] = {}
        for i, node in enumerate(self.saved):
            for number in self.more.numbers(node):
                numbers[i, number] = len(numbers)
                found.append(self.more.copy_of(node, number))
        forward = self._end(self.forward, found)
        if self.backward is None:
            return forward, None, ()
        self._begin(self.backward)
        order = []
        for node, i in self.taken.items():
            for number in self.more.numbers(node):
                self._input(node, number)
                order.append(numbers[i, number])
        self._inputs(backward_inputs(self.full))
        self.more.write(self.halves[1], backward=True)
        return forward, self._end(self.backward, [*map(self._result, gradients)]), tuple(order)

    def _begin(self, half: fx.GraphModule) -> None:
        self.graph = fx.Graph()
        self.more.forget()
        for node in half.graph.find_nodes(op="get_attr"):
            self.more.add(node, None, self.graph.node_copy(node))

    def _end(self, half: fx.GraphModule, found: Sequence[Any]) -> fx.GraphModule:
        self.graph.output(tuple(found)).meta = dict(half.graph.output_node().meta)
        return graph_module(half, self.graph)

    def _inputs(self, sources: Iterable[fx.Node]) -> None:
        """Write inputs of the full program."""
        for source in sources:
            found, number = self._template(source)
            self._input(self.inputs[found], number)

    def _input(self, node: fx.Node, number: int | None) -> None:
        made = self.graph.placeholder(node.name)
        made.target = made.name  # the argument's name: each copy has its own
        made.meta.update(node.meta)
        if number in self.few.dropped:
            made.meta["val"] = in_other_memory(node.meta["val"], ())
        self.more.add(node, number, made)

    def _template(self, node: fx.Node) -> tuple[fx.Node, int | None]:
        """Return the reduced program's counterpart of a node of the full program, and the layer or None."""
        number = self.few.layers.number(node)
        if number in self.few.dropped:
            node = self.few.counterpart(node, self.few.template)
        return self.few.copy_of(node, None), number

    def _write(self, node: fx.Node, args: Any, kwargs: Any, number: int | None) -> fx.Node:
        made = self.graph.create_node(node.op, node.target, args, kwargs, name=node.name)
        self.more.copy_metadata(node, made, number)
        read = zip(operands(node), operands(made), strict=True)
        pairs = [(one.meta.get("val"), other.meta.get("val")) for one, other in read]
        if number in self.few.dropped or any(one is not other for one, other in pairs):
            made.meta["val"] = in_other_memory(node.meta.get("val"), pairs)
        return made

    def _result(self, place: _Place) -> fx.Node | None:
        what, source = place
        found, number = self._template(source)
        node = self.results[what, found]
        return None if node is None else self.more.result(node, number)


def _places(graph: fx.Graph) -> tuple[list[_Place], list[_Place]]:
    """Return the results of forward and backward, in order."""
    inputs = {meta(n).spec: n for n in graph.find_nodes(op="placeholder")}
    specs = results_of(graph)
    forward = [("output", n) for n in forward_results(graph)]
    forward += [("new value", inputs[s.of]) for s, _ in specs if isinstance(s, Mutation)]
    of = forward_inputs(graph) if any(isinstance(s, Gradient) for s, _ in specs) else []
    others = [n for n in backward_results(graph)[len(of) :] if n is not None]
    return forward, [*(("gradient", n) for n in of), *(("output", n) for n in others)]


def _names(graph: fx.Graph) -> dict[fx.Node, str]:
    """Return the parameters and buffers of a program, with their names."""
    specs = {n: meta(n).spec for n in graph.find_nodes(op="placeholder")}
    return {n: spec.name for n, spec in specs.items() if isinstance(spec, (Parameter, Buffer))}


def _placeholders(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if n.op == "placeholder"]


def _calls(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if n.op == "call_function"]


def _known(node: fx.Node) -> str:
    values = node.meta.get("val")
    for value in values if isinstance(values, (list, tuple)) else [values]:
        if isinstance(value, Tensor) and value.is_complex():
            raise NoTextError("complex values may be views in other ways than by strides")
    return value_text(values)


def _is_plain(node: fx.Node) -> bool:
    """Return whether a call is a pure function: no communication, mutation or random numbers."""
    target = node.target
    communicates = target in STARTS or getattr(target, "__module__", "") == collectives.__name__
    writes = isinstance(target, OpOverload) and target._schema.is_mutable
    return not (communicates or writes or node_draws(node) or is_twin(target))
