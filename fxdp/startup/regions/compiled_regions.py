"""Divide a graph into regions: the layers of a model one by one, and the parts between layers.

    graph       embed, h.0 ..., h.1 ..., h.2 ..., loss
    regions     [embed]  [layer]  [layer]  [layer]  [loss]        three kinds: a layer is compiled once

A layer is a module of a list, and a call knows its module. Two regions are of one kind if their graphs,
inputs and results are equal, so that the code of one serves both.

Collectives of buckets run between regions if possible (`between.py`), op by op.

Values that cost nothing (constants, sizes) are recomputed in each region that reads them. Seeds of random ops
come first: seeds are distinguished by an index, which would make each layer different.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from fxdp.ir.graph.draws import node_draws
from fxdp.ir.graph.graphs import attribute_of
from fxdp.ir.ops.parameter_shards import STARTS
from fxdp.lowering.inductor.collective_order import starts_collective
from fxdp.startup.regions.between import (
    InsideError,
    calls_between,
    data_of,
    is_part,
    places_between,
    with_parts,
)
from fxdp.startup.regions.call_text import line
from fxdp.startup.regions.layer_labels import Label, labels
from fxdp.torch_compat import aten, prims

_MOST_OF_ALL = 0.75
"""The maximal share of calls left to compile: several compilations take longer than one of equal size."""

_MADE_ANEW = frozenset({aten.full.default, aten.scalar_tensor.default, prims.iota.default})
_SEEDS = frozenset({prims.inductor_seeds.default, prims.inductor_lookup_seed.default})


class NoRegionsError(Exception):
    """Raised if a graph cannot be divided into regions."""


@dataclass(frozen=True)
class CompiledRegion:
    """Calls of a graph, as a graph of its own."""

    graph: fx.Graph
    takes: tuple[fx.Node, ...]
    """The operands from outside: inputs of the full graph, then results of earlier regions."""
    fixed: int
    """The number of operands, at the beginning, that keep their addresses between steps."""
    gives: tuple[fx.Node, ...]
    kept: tuple[int, ...]
    """The results read outside with their traced strides; may include more than the full graph's results."""
    kind: str
    """The kind; regions of one kind share code."""
    between: bool = False
    """True if the calls run between regions, op by op."""


_Made: TypeAlias = "tuple[CompiledRegion, Sequence[fx.Node]]"
"""A region, and its calls in the full graph."""


def regions(
    gm: fx.GraphModule, visible: Sequence[int], fixed: int = 0, hides: bool = True
) -> list[CompiledRegion]:
    """Return the regions of a graph, in order; empty if nothing repeats.

    Parameters
    ----------
    visible : the results that keep their strides.
    fixed : the number of inputs, at the beginning, that keep their addresses between steps.
    hides : keep collectives overlapped with compute.

    Raises
    ------
    NoRegionsError : the graph reads nested graphs, or sizes that no input gives.
    """
    between = calls_between(gm.graph)
    found = _Half(gm, visible, fixed, between, hides).regions()
    return found or (_Half(gm, visible, fixed, set(), hides).regions() if between else [])


class _Half:
    """The calls of a graph in order, without calls that are recomputed in each region."""

    def __init__(
        self, gm: fx.GraphModule, visible: Sequence[int], fixed: int, between: set[fx.Node], hides: bool
    ) -> None:
        nodes = list(gm.graph.nodes)
        attributes = gm.graph.find_nodes(op="get_attr")
        if not all(isinstance(attribute_of(gm, n), Tensor) for n in attributes):
            raise NoRegionsError("it reads graphs or objects")
        self._results = list(gm.graph.output_node().args[0])  # type: ignore[arg-type]
        self._visible = {self._results[i] for i in visible}
        self._output = gm.graph.output_node()
        self._free: set[fx.Node] = set()
        for node in nodes:
            if self._is_free(node):
                self._free.add(node)
        given = [n for n in nodes if n.op == "placeholder"]
        self._fixed = set(given[:fixed])
        sizes = [n for n in given if isinstance(n.meta.get("val"), torch.SymInt)]
        self._sizes = {n.meta["val"].node.expr: n for n in sizes}
        calls = [n for n in nodes if n.op == "call_function" and n not in self._free and not is_part(n)]
        self._position = {node: i for i, node in enumerate(nodes)}
        self._between, self._hides = [n for n in calls if n in between], hides
        self._apart = between
        calls = [n for n in calls if n not in between]
        self._calls = sorted(calls, key=lambda n: n.target not in _SEEDS)
        self._seeds = sum(n.target in _SEEDS for n in calls)
        self._order = [n for n in nodes if n.op == "call_function"]

    def regions(self) -> list[CompiledRegion]:
        """Return all regions in order; empty if nothing repeats."""
        found, alone = self._merged()
        if len({one.kind for one, _ in found}) == len(found):
            return []
        while True:
            full = [[n for call in piece for n in with_parts(call)] for _, piece in found]
            try:
                places = places_between(self._between, full, self._position, hides=self._hides)
                break
            except InsideError as error:
                parts = self._parted(found[error.region][1], error.call)
                if found[error.region][0].kind not in alone or len(parts) == 1:
                    return []
                # compiled in two parts without loss, because no other region has this kind
                found[error.region : error.region + 1] = parts
                alone.update(one.kind for one, _ in parts)
        if sum({one.kind: len(piece) for one, piece in found}.values()) > _MOST_OF_ALL * len(self._calls):
            return []
        between = [[self._as_it_is(calls)] if calls else [] for calls in places]
        own = [[], *([one] for one, _ in found)]
        return [one for before, after in zip(own, between, strict=True) for one in (*before, *after)]

    def _merged(self) -> tuple[list[_Made], set[str]]:
        """Return layers and the parts between layers, and the kinds with only one region.

        Adjacent regions whose kinds occur only once are merged.
        """
        made = [(self._region(piece), piece) for piece in self._pieces()]
        many = Counter(one.kind for one, _ in made)
        found: list[_Made] = []
        kinds = set[str]()
        for alone, group in groupby(made, key=lambda pair: many[pair[0].kind] == 1):
            beside: list[_Made] = list(group)
            if alone and len(beside) > 1:
                together = [call for _, piece in beside for call in piece]
                beside = [(self._region(together), together)]
            kinds.update(one.kind for one, _ in beside if alone)
            found += beside
        return found, kinds

    def _parted(self, calls: Sequence[fx.Node], at: fx.Node) -> list[_Made]:
        """Split a region in two: the calls before `at`, and the calls after."""
        place = self._position
        parts = [n for n in calls if place[n] < place[at]], [n for n in calls if place[n] > place[at]]
        return [(self._region(part), part) for part in parts if part]

    def _as_it_is(self, calls: Sequence[fx.Node]) -> CompiledRegion:
        """Return calls between regions as a region of a separate kind that runs op by op."""
        one = self._region(calls)
        return replace(one, between=True, kind=f"between\n{one.kind}")

    def _is_free(self, node: fx.Node) -> bool:
        # results of the full graph must be computed by a region
        if node.op != "call_function" or self._output in node.users:
            return False
        number = isinstance(node.meta.get("val"), (torch.SymInt, int))
        return (number or node.target in _MADE_ANEW) and all(
            n in self._free or (n.op == "placeholder" and not isinstance(n.meta.get("val"), Tensor))
            for n in node.all_input_nodes
        )

    def _pieces(self) -> list[list[fx.Node]]:
        """Return the calls layer by layer, and those between layers.

        A call that stands later than its layer joins the layer if all operands are there, as a view of a
        weight that the forward saves.
        """
        layer, at = labels(self._calls, self._order), {node: i for i, node in enumerate(self._calls)}
        pieces: list[list[fx.Node]] = []
        open_: dict[Label | None, int] = {}
        made_in: dict[fx.Node, int] = {}
        for node in [*self._calls[: self._seeds], *self._order]:
            need = max((made_in.get(n, -1) for n in self._data(node)), default=-1)
            if node in at and node not in made_in:
                found = open_.get(layer.get(node), -1)
                if found < max(need, 0) or (found < len(pieces) - 1 and _is_ordered(node)):
                    found = open_[layer.get(node)] = len(pieces)
                    pieces.append([])
                elif found < len(pieces) - 1:
                    self._position[node] = self._position[pieces[found][-1]]
                need = found
                pieces[found].append(node)
            made_in.setdefault(node, need)
        return pieces

    def _region(self, calls: Sequence[fx.Node]) -> CompiledRegion:
        """Build the region of these calls, including the selections from their results."""
        calls = [n for call in calls for n in with_parts(call)]
        own = set(calls)
        takes = list(dict.fromkeys(a for n in calls for a in self._read(n) if a not in own))
        takes.sort(key=lambda n: (n not in self._fixed, n.op != "placeholder"))  # in the full graph's order
        takes += [s for s in self._sizes_in([*takes, *calls]) if s not in takes]
        outside = {n: [u for u in n.users if u not in own and self._takes(u, n)] for n in calls}
        gives = [n for n in calls if not self._free.issuperset(outside[n])]
        kept = [i for i, n in enumerate(gives) if n in self._visible or set(outside[n]) - {self._output}]
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in takes:
            copies[node] = graph.placeholder(f"given_{len(copies)}")
            copies[node].meta.update(node.meta)
        for node in calls:
            self._copy(node, graph, copies)
        graph.output(tuple(copies[n] for n in gives))
        fixed = len(self._fixed.intersection(takes))
        kind = "\n".join([*map(line, graph.nodes), str(kept), str(fixed)])
        return CompiledRegion(graph, tuple(takes), fixed, tuple(gives), tuple(kept), kind)

    def _read(self, node: fx.Node) -> Iterator[fx.Node]:
        """Yield the operands of a call; for a recomputed operand, yield the operands of its computation."""
        for source in self._data(node):
            if source in self._free:
                yield from self._read(source)
            else:
                yield source

    def _takes(self, node: fx.Node, value: fx.Node) -> bool:
        """Return whether a call reads a value; a call between regions has no operands that only order."""
        return node not in self._apart or value in data_of(node)

    def _data(self, node: fx.Node) -> Iterable[fx.Node]:
        return data_of(node) if node in self._apart else node.all_input_nodes

    def _sizes_in(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        """Return the inputs of the full graph that give the sizes of these values."""
        symbols = {s for n in nodes for s in _symbols(n.meta.get("val"))}
        if unknown := symbols - self._sizes.keys():
            raise NoRegionsError(f"no input gives {sorted(map(str, unknown))}")
        return [self._sizes[s] for s in sorted(symbols, key=str)]

    def _copy(self, node: fx.Node, graph: fx.Graph, copies: dict[fx.Node, fx.Node]) -> None:
        for source in self._data(node):
            if source not in copies:
                self._copy(source, graph, copies)
        given = (*node.args[:-1], []) if node in self._apart and node.target in STARTS else node.args
        args, kwargs = fx.map_arg((given, node.kwargs), copies.__getitem__)
        # named after the op, not after the original node, so that layers are equal for Inductor's cache, too
        made = graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        made.meta.update(node.meta)
        copies[node] = made


def _is_ordered(node: fx.Node) -> bool:
    """Return whether a call must stay in order with others of its kind."""
    return starts_collective(node) or node.is_impure() or node_draws(node)


def _symbols(value: Any) -> Iterator[Any]:
    """Yield the symbols in the sizes of a value."""
    if isinstance(value, (tuple, list)):
        for one in value:
            yield from _symbols(one)
    elif isinstance(value, Tensor):
        yield from _symbols([*value.shape, *value.stride(), value.storage_offset()])
    elif isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        yield from value.node.expr.free_symbols
