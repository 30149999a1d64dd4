"""Prove by value numbering that a graph in regions computes the same as the original graph.

    graph       %a = sin(%x)   %b = sin(%a)            x: 0   a: sin(0) = 1   b: sin(1) = 2
    regions     [sin]  [sin]   one code, called twice        call 1 gives 1   call 2 gives 2

Two values have equal numbers if the same op computed both from values with equal numbers (global value
numbering; Alpern, Wegman and Zadeck, 1988). A call of a region runs the graph that was compiled for the
region's kind, on the values at the places that the call takes. This finds, without running anything, a call
that reads a value before the value exists or after it was freed, a kind shared by two different regions, and
a shifted result. Collectives, random ops and writes must be in the same order, too.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxdp.ir.graph.graphs import written_operands
from fxdp.ir.ops.parameter_shards import STARTS
from fxdp.lowering.inductor.collective_order import starts_collective
from fxdp.startup.regions.region_code import RegionPlan
from fxdp.torch_compat import OpOverload


class WrongRegionsError(Exception):
    """Raised if the regions of a graph do not compute the same as the graph."""


def check_regions(gm: fx.GraphModule, plan: RegionPlan) -> None:
    """Compare the values of a graph with the values of its regions.

    Raises
    ------
    WrongRegionsError : the values differ; names the wrong call or result.
    """
    numbers = _Numbers()
    sources = [n for op in ("placeholder", "get_attr") for n in gm.graph.nodes if n.op == op]
    given = {node: numbers.of(("given", i)) for i, node in enumerate(sources)}
    values: list[int | None] = [given[node] for node in sources]
    attributes = len(gm.graph.find_nodes(op="get_attr"))
    half, ours = _Run(numbers), _Run(numbers)
    values += map(half.literal, plan.constants[attributes:])
    wanted = half.graph(gm.graph, given)
    for i, call in enumerate(plan.calls):
        taken = _taken(values, call.takes, i)
        graph = plan.kinds[call.code].graph
        inputs = graph.find_nodes(op="placeholder")
        if len(inputs) != len(taken):
            raise WrongRegionsError(f"call {i} takes {len(taken)} values; its code has {len(inputs)} inputs")
        read = dict(zip(inputs, taken, strict=True))
        made = ours.graph(graph, read)
        # a later reader of the same place sees a region's writes
        for place, node in zip(call.takes, inputs, strict=True):
            values[place] = read[node]
        for place in call.frees:
            values[place] = None
        values += made
    found = _taken(values, plan.results, len(plan.calls))
    if wrong := [i for i, (a, b) in enumerate(zip(wanted, found, strict=True)) if a != b]:
        raise WrongRegionsError(f"results {wrong} are values of other ops")
    for what, order in half.effects.items():
        if ours.effects.get(what, []) != order:
            raise WrongRegionsError(f"{what} come in another order")


def _taken(values: Sequence[int | None], places: Sequence[int], call: int) -> list[int]:
    found = [values[p] if p < len(values) else None for p in places]
    if missing := [p for p, value in zip(places, found, strict=True) if value is None]:
        raise WrongRegionsError(f"call {call} takes values {missing}, which are not made yet, or freed")
    return [value for value in found if value is not None]


class _Numbers:
    """Numbers for values, by the op and operands that made each value."""

    def __init__(self) -> None:
        self._known: dict[Hashable, int] = {}

    def of(self, made: Hashable) -> int:
        return self._known.setdefault(made, len(self._known))


class _Run:
    """Symbolic execution of graphs on value numbers, with a record of side effects in order."""

    def __init__(self, numbers: _Numbers) -> None:
        self._numbers = numbers
        self.effects: dict[str, list[int]] = {}

    def graph(self, graph: fx.Graph, given: dict[fx.Node, int]) -> list[int]:
        """Return the numbers of a graph's results; `given`, the inputs' numbers, is updated for writes."""
        known = dict(given)
        for node in graph.nodes:
            if node.op != "call_function":
                continue
            # the last operand of a start only orders the collective, and is not read
            args = node.args[:-1] if node.target in STARTS else node.args
            made = (node.target, _key(args, known), _key(node.kwargs, known))
            known[node] = number = self._numbers.of(made)
            if (effect := _effect(node)) is not None:
                self.effects.setdefault(effect, []).append(number)
            for written in written_operands(node):
                known[written] = self._numbers.of(("written", known[written], number))
        given.update({node: known[node] for node in given})
        (found,) = graph.output_node().args
        assert isinstance(found, (list, tuple))
        return [known[v] if isinstance(v, fx.Node) else self.literal(v) for v in found]

    def literal(self, value: Any) -> int:
        """Return the number of a result that no op computes."""
        return self._numbers.of(("literal", _constant(value)))


def _effect(node: fx.Node) -> str | None:
    """Return the kind of side effect whose order must be preserved for a call; None for a pure call."""
    target = node.target
    if starts_collective(node):
        return "collectives"
    if not isinstance(target, OpOverload):
        return None
    if torch.Tag.nondeterministic_seeded in target.tags:
        return "random draws"
    return "writes" if target._schema.is_mutable else None


def _key(value: Any, known: Mapping[fx.Node, int]) -> Hashable:
    """Return an argument as a key: values by number, all else by type and text."""
    if isinstance(value, fx.Node):
        return known[value]
    if isinstance(value, (list, tuple)):
        return tuple(_key(one, known) for one in value)
    if isinstance(value, dict):
        return tuple((name, _key(one, known)) for name, one in value.items())
    if isinstance(value, slice):
        return "slice", _key((value.start, value.stop, value.step), known)
    return _constant(value)


def _constant(value: Any) -> Hashable:
    return type(value).__name__, repr(value)
