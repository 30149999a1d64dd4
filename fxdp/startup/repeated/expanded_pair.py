"""Expand the forward and backward of a reduced program by more repeated layers (`repeated_program.py`).

    reduced program   traced and partitioned              forward F0 F1 F2 F3 F4    backward G4 G3 G2 G1 G0
    full program                                          forward F0 F1 F2 .. Fn    backward Gn .. G2 G1 G0

A value that the forward saves for one layer is saved for every layer. Saved values and results of the
backward are identified by layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, fx

from fxdp.ir.graph.graph_form import NoTextError, value_text
from fxdp.ir.graph.graphs import results_of
from fxdp.ir.graph.metadata import meta
from fxdp.ir.graph.signature import Gradient, Mutation
from fxdp.lowering.eager import backward_inputs, backward_results, forward_inputs, forward_results
from fxdp.lowering.inductor.forward_backward import Pair
from fxdp.lowering.inductor.strides import results
from fxdp.startup.repeated.reduced_program import ReducedProgram
from fxdp.startup.repeated.region_windows import operands
from fxdp.startup.repeated.repeated_program import MoreLayers, RepeatedProgram
from fxdp.torch_compat import graph_module, in_other_memory

_Place = tuple[str, fx.Node]
"""A result of the pair: a value, or the new value or the gradient of an input."""


def expanded(short: ReducedProgram, pair: Pair) -> Pair:
    """Return the forward and backward of the full program.

    Raises
    ------
    OtherLayersError : the layers turn out to differ.
    """
    return _Expansion(short, pair).run()


class _Expansion:
    """Writer of the expanded forward and backward."""

    def __init__(self, short: ReducedProgram, pair: Pair) -> None:
        self.short = short
        self.forward, self.backward, self.saved_order = pair
        visible, gradients = _places(short.gm.graph)
        self.saved = results(self.forward)[len(visible) :]
        self.results: dict[_Place, Any] = dict(zip(visible, results(self.forward), strict=False))
        """The results of forward and backward, by their place in the reduced program."""
        self.inputs = dict(zip(forward_inputs(short.gm.graph), _placeholders(self.forward), strict=True))
        """The inputs of forward and backward, by the inputs of the reduced program."""
        self.taken: dict[fx.Node, int] = {}
        """The backward's saved inputs, each with the position among the saved values."""
        rows = [_calls(self.forward)]
        if self.backward is not None:
            self.results |= zip(gradients, results(self.backward), strict=True)
            given = _placeholders(self.backward)
            self.taken = dict(zip(given, self.saved_order, strict=False))
            self.inputs |= zip(backward_inputs(short.gm.graph), given[len(self.taken) :], strict=True)
            rows.append(_calls(self.backward))
        members = {self.inputs[node]: member for node, member in short.given().items()}
        same = {node: self.saved[i] for node, i in self.taken.items()}
        reduced = RepeatedProgram(rows, members, _known, same)
        self.more = MoreLayers(reduced, short.more, _from_the_middle(short.alike), self._write)
        self.graph = fx.Graph()

    def run(self) -> Pair:
        reduced, (visible, gradients) = self.more.reduced, _places(self.short.full.graph)
        self._begin(self.forward)
        self._inputs(forward_inputs(self.short.full.graph))
        self.more.write_half(0)
        found = [self._result(place) for place in visible]
        numbers: dict[tuple[int, int | None], int] = {}
        for i, node in enumerate(self.saved):
            for real in self._layers(node):
                numbers[i, real] = len(numbers)
                found.append(self.more.copy_of(node, reduced.layer(node), real or 0))
        forward = self._end(self.forward, found)
        if self.backward is None:
            return forward, None, ()
        self._begin(self.backward)
        order = []
        for node, i in self.taken.items():
            for real in self._layers(node):
                self._input(node, real)
                order.append(numbers[i, real])
        self._inputs(backward_inputs(self.short.full.graph))
        self.more.write_half(1)
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
            found, real = self._template(source)
            self._input(self.inputs[found], real)

    def _input(self, node: fx.Node, real: int | None) -> None:
        made = self.graph.placeholder(node.name)
        made.meta.update(node.meta)
        layer = self.more.reduced.layer(node)
        if real is not None and layer is not None and real != self.more.number(layer):
            made.meta["val"] = in_other_memory(node.meta["val"], ())
        self.more.add(node, real, made)

    def _template(self, node: fx.Node) -> tuple[fx.Node, int | None]:
        """Return the reduced program's counterpart of a node of the full program, and the layer or None."""
        if node not in self.short.keys:
            return self.short.copy(node), None
        real = self.short.keys[node][1]
        return self.short.standing_for(node, self.more.template(real)), real

    def _layers(self, node: fx.Node) -> Iterable[int | None]:
        """Return the layers of the full program that save a counterpart of `node`; None: in no layer."""
        layer = self.more.reduced.layer(node)
        return (None,) if layer is None else self.more.numbers(layer)

    def _write(self, node: fx.Node, args: Any, kwargs: Any, moved: int, copied: bool) -> fx.Node:
        made = self.graph.create_node(node.op, node.target, args, kwargs, name=node.name)
        made.meta.update(node.meta)
        read = zip(operands(node), operands(made), strict=True)
        pairs = [(one.meta.get("val"), other.meta.get("val")) for one, other in read]
        if copied or any(one is not other for one, other in pairs):
            made.meta["val"] = in_other_memory(node.meta.get("val"), pairs)
        return made

    def _result(self, place: _Place) -> fx.Node | None:
        what, source = place
        found, real = self._template(source)
        node = self.results[what, found]
        if node is None:
            return None
        return self.more.copy_of(node, None, 0) if real is None else self.more.result(node, real)


def _places(graph: fx.Graph) -> tuple[list[_Place], list[_Place]]:
    """Return the results of forward and backward, in order."""
    inputs = {meta(n).spec: n for n in graph.find_nodes(op="placeholder")}
    specs = results_of(graph)
    forward = [("output", n) for n in forward_results(graph)]
    forward += [("new value", inputs[s.of]) for s, _ in specs if isinstance(s, Mutation)]
    of = forward_inputs(graph) if any(isinstance(s, Gradient) for s, _ in specs) else []
    others = [n for n in backward_results(graph)[len(of) :] if n is not None]
    return forward, [*(("gradient", n) for n in of), *(("output", n) for n in others)]


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


def _from_the_middle(layers: range) -> list[int]:
    """Return the layers beginning in the middle: around the first and last, neighbors differ."""
    return sorted(layers, key=lambda i: abs(2 * i - layers.start - layers.stop + 1))
