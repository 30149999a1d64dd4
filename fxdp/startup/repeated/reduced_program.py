"""Reduce an emitted program to a few of its repeated layers, as the input of tracing and partitioning.

    full       embed  F0 F1 F2 .. Fn  head  head'  Gn .. G2 G1 G0  embed'
    reduced    embed  F0 F1 F2 Fm Fn  head  head'  Gn Gm G2 G1 G0  embed'

Repeated layers are runs of equal ops on values of equal type, in forward and backward. Every omitted layer
reads the same values of the adjacent layer, of parameters of its own and of shared values, and so do the
layers on both sides. So the reduced program is the same program with fewer layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, groupby
from typing import Any

from torch import Tensor, fx

from fxdp.ir.graph.draws import node_draws
from fxdp.ir.graph.graph_form import NoTextError, tensor_text
from fxdp.ir.graph.graphs import results_of
from fxdp.ir.graph.metadata import copy_meta, meta
from fxdp.ir.graph.signature import Gradient, InputSpec, Mutation
from fxdp.ir.ops import collectives
from fxdp.ir.ops.full_batch_draws import is_twin
from fxdp.ir.ops.parameter_shards import STARTS
from fxdp.startup.repeated.region_windows import Regions, find_regions, operands
from fxdp.startup.repeated.repeated_program import Member, OtherLayersError
from fxdp.torch_compat import OpOverload, graph_module

_KEPT = 4
"""The number of repeated layers that stay: three in a row must still be equal after Inductor's passes.

A first and a last layer, which have different neighbors and may be treated differently, are not counted.
"""
_FEWEST = 4
"""The minimal number of omitted layers: finding and restoring fewer takes more time than is saved."""
_SHORTEST = 6
"""The minimal number of nodes of a layer in forward or backward."""

_Key = tuple[tuple[object, int], int]
"""The identity of a node within a layer, and the number of the layer."""


@dataclass(frozen=True)
class ReducedProgram:
    """A program of few layers, with the correspondence to the full program."""

    gm: fx.GraphModule
    full: fx.GraphModule
    copies: Mapping[fx.Node, fx.Node]
    """Map from nodes of the full program to nodes of the reduced program."""
    keys: Mapping[fx.Node, _Key]
    """Keys of the full program's nodes that belong to a layer."""
    nodes: Mapping[_Key, fx.Node]
    first: int
    """The last layer before the omitted layers."""
    more: int
    """The number of omitted layers."""
    alike: range
    """The repeated layers, as numbered in the reduced program."""

    def short(self, number: int) -> int:
        """Return the number in the reduced program of a layer that stays."""
        return number if number <= self.first else number - self.more

    def given(self) -> dict[fx.Node, Member]:
        """Return the inputs of the reduced program that belong to layers."""
        found = {}
        for node, ((what, family), number) in self.keys.items():
            if what == "given" and node in self.copies:
                found[self.copies[node]] = family, self.short(number)
        return found

    def standing_for(self, node: fx.Node, number: int) -> fx.Node:
        """Return the node of the reduced program's layer `number` for a full program's node.

        A node in no layer has one copy in the reduced program, for all layers.

        Raises
        ------
        OtherLayersError : there is no such node.
        """
        if node in self.keys:
            real = number if number <= self.first else number + self.more
            node = self.nodes.get((self.keys[node][0], real), self.full.graph.output_node())
        return self.copy(node)

    def copy(self, node: fx.Node) -> fx.Node:
        """Return the reduced program's copy of a node that stays.

        Raises
        ------
        OtherLayersError : the node does not stay.
        """
        if node not in self.copies:
            raise OtherLayersError(f"%{node.name} is in no layer that stays")
        return self.copies[node]


def shortened(gm: fx.GraphModule, values: Mapping[InputSpec, Any]) -> ReducedProgram:
    """Return the program without most of its layers.

    Raises
    ------
    OtherLayersError : few layers are equal, or layers communicate or draw random numbers.
    """
    return _Shortened(gm, values).run()


class _Shortened:
    """Search for repeated layers, and writer of the reduced program."""

    def __init__(self, gm: fx.GraphModule, values: Mapping[InputSpec, Any]) -> None:
        self.gm = gm
        self.values = values
        self.rows: list[dict[int, tuple[fx.Node, ...]]] = []
        self.keys: dict[fx.Node, _Key] = {}
        self.nodes: dict[_Key, fx.Node] = {}

    def run(self) -> ReducedProgram:
        calls = [n for n in self.gm.graph.nodes if n.op == "call_function"]
        pair = [n for n in calls if not meta(n).backward], [n for n in calls if meta(n).backward]
        for half, nodes in enumerate(pair):
            if nodes:
                self._find(half, nodes)
        self._find_given()
        alike = self._alike()
        more = len(alike) - _KEPT
        if more < _FEWEST:
            raise OtherLayersError(f"{len(alike)} layers are alike")
        first = alike[_KEPT // 2 - 1]
        if not all(_is_plain(n) for rows in self.rows for n in rows[first]):
            raise OtherLayersError("layers communicate, or draw random numbers")
        return self._written(first, more, alike)

    def _find(self, half: int, nodes: list[fx.Node]) -> None:
        found = find_regions(nodes, _known, shortest=_SHORTEST, least=_KEPT + _FEWEST)
        if found is None:
            raise OtherLayersError("no run of ops")
        region_windows = found if half == 0 else self._numbered(found)
        self.rows.append(region_windows.rows)
        for node, (i, k) in region_windows.places.items():
            self.keys[node] = (half, k), i
            self.nodes[(half, k), i] = node

    def _numbered(self, region_windows: Regions) -> Regions:
        """Number the backward's layers by the forward layers they read; the last layer comes first."""
        sums = Counter(
            i + max((self.keys[n][1] for node in row for n in operands(node) if n in self.keys), default=-i)
            for i, row in region_windows.rows.items()
        )
        (last, _), *_ = sums.most_common(1)
        return region_windows.numbered(lambda i: last - i)

    def _find_given(self) -> None:
        """Find the inputs that layers read at equal positions."""
        parameter_groups = count()
        for rows in self.rows:
            for nodes in zip(*rows.values(), strict=True):
                for column in zip(*map(operands, nodes), strict=True):
                    found = {i: n for i, n in zip(rows, column, strict=True) if n.op == "placeholder"}
                    if len(set(found.values())) == len(found) > 1:  # otherwise all layers share the input
                        self._add_family(found, parameter_groups)

    def _add_family(self, found: Mapping[int, fx.Node], parameter_groups: Iterator[int]) -> None:
        """Record the inputs that layers read at one position; a layer may read the adjacent layer's input."""
        known = {(what, j - i) for i, n in found.items() if n in self.keys for what, j in [self.keys[n]]}
        if len(known) > 1:
            raise OtherLayersError("a parameter has several places in its layer")
        (what, by), *_ = known or {(("given", next(parameter_groups)), 0)}
        for i, node in found.items():
            self.keys[node] = what, i + by
            self.nodes[what, i + by] = node

    def _alike(self) -> range:
        """Return the longest run of layers that read equal values, relative to their own number."""
        numbers = sorted(set.intersection(*(set(rows) for rows in self.rows)))
        best = range(0)
        for _, group in groupby(numbers, key=self._read_by):
            found = list(group)
            if len(found) > len(best):
                best = range(found[0], found[-1] + 1)
        return best

    def _read_by(self, number: int) -> object:
        """Return a description of all operands of a layer, relative to the layer's number."""
        calls = (node for rows in self.rows for node in rows[number])
        return [self._reads(source, number) for node in calls for source in operands(node)]

    def _reads(self, node: fx.Node, number: int) -> object:
        if node not in self.keys:
            return node
        what, layer = self.keys[node]
        if abs(number - layer) > 1:
            raise OtherLayersError(f"%{node.name} is read by layers far away")
        return what, number - layer, self._kind(node) if node.op == "placeholder" else ""

    def _kind(self, node: fx.Node) -> str:
        known = meta(node)
        try:
            value = self.values.get(known.spec)  # type: ignore[arg-type]
            lies = tensor_text(value) if isinstance(value, Tensor) else ""
        except NoTextError as error:
            raise OtherLayersError from error
        return f"{type(known.spec).__name__} {known.type} {known.placement} {lies}"

    def _written(self, first: int, more: int, alike: range) -> ReducedProgram:
        undefined_gradients = range(first + 1, first + more + 1)
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        kept = range(alike.start, alike.stop - more)
        found = ReducedProgram(self.gm, self.gm, copies, self.keys, self.nodes, first, more, kept)

        def copy_of(node: fx.Node, number: int | None) -> fx.Node:
            """Return the operand of a node in layer `number`, taken from the adjacent layers that remain."""
            place = self.keys.get(node)
            if place is None or number is None or number not in alike:
                return found.copy(node)
            return found.standing_for(node, found.short(number) - (number - place[1]))

        for node in self.gm.graph.nodes:
            _, number = self.keys.get(node, (None, None))
            if number not in undefined_gradients and node.op != "output":
                copies[node] = graph.node_copy(node, partial(copy_of, number=number))
        inputs = {meta(n).spec: n for n in self.gm.graph.find_nodes(op="placeholder")}
        results = []
        for spec, node in results_of(self.gm.graph):
            owner = inputs.get(spec.of) if isinstance(spec, (Gradient, Mutation)) else None
            _, number = self.keys.get(node if owner is None else owner, (None, None))
            if number not in undefined_gradients:
                results.append((spec, copy_of(node, None if owner is None else number)))
        made = graph.output(tuple(node for _, node in results))
        copy_meta(self.gm.graph.output_node(), made, results=tuple(spec for spec, _ in results))
        return replace(found, gm=graph_module(self.gm, graph))


def _known(node: fx.Node) -> object:
    """Return all metadata of a call that a trace reads, besides arguments."""
    known = meta(node)
    return str(known.type), str(known.placement), known.recompute, known.draws_for


def _is_plain(node: fx.Node) -> bool:
    """Return whether a call is a pure function: no communication, mutation or random numbers."""
    target = node.target
    communicates = target in STARTS or getattr(target, "__module__", "") == collectives.__name__
    writes = isinstance(target, OpOverload) and target._schema.is_mutable
    return not (communicates or writes or node_draws(node) or is_twin(target))
