"""A half in segments: the layers of a model one by one, and what lies between them.

    half        embed, h.0 ..., h.1 ..., h.2 ..., loss
    segments    [embed]  [layer]  [layer]  [layer]  [loss]        three kinds: a layer is compiled once

Nothing is known here of modules: layers are found as runs of the same ops on values of the same shapes. Two
segments are of a kind if they are the same graphs, with the same inputs and results, so one's code serves
the other. What Inductor would fuse across the border of two layers stays apart: a border lies where fewest
values cross it, in a transformer between two residual sums.

Collectives of buckets stand between segments where they can (`between.py`), and run as they are.

Values that cost nothing (constants, sizes) are made anew where they are read. Seeds of random draws come
first: a seed is told from the next by a number, which would make each layer another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from fxdp.ir.graphs import attribute_of
from fxdp.ir.ops.parameter_shards import STARTS
from fxdp.ir.repetitions import Repetitions, longest_run
from fxdp.lowering.inductor.between import (
    InsideError,
    calls_between,
    data_of,
    is_part,
    places_between,
    with_parts,
)
from fxdp.lowering.inductor.call_text import line, token
from fxdp.torch_compat import aten, prims

_SHORTEST = 16
"""Nodes in a layer: a call of code takes some microseconds, which a layer of few ops would not be worth."""
_LEAST_WORK = 8
"""Of these, those that compute: what a forward saves of its weights is a long run of views."""
_LEAST = 3
"""Layers in a run: for two, the time that a second compilation takes is not worth a call either."""

_MOST_OF_ALL = 0.75
"""The share of calls that may be left to compile: several compilations take longer than one of as many."""

_MADE_ANEW = frozenset({aten.full.default, aten.scalar_tensor.default, prims.iota.default})
_SEEDS = frozenset({prims.inductor_seeds.default, prims.inductor_lookup_seed.default})


class NoRegionsError(Exception):
    """A half that stays in one piece."""


@dataclass(frozen=True)
class CompiledRegion:
    """Some calls of a half, as a graph of its own."""

    graph: fx.Graph
    takes: tuple[fx.Node, ...]
    """What of the half it is given: inputs, then results of segments before it."""
    fixed: int
    """How many of these keep their addresses between steps; they come first."""
    gives: tuple[fx.Node, ...]
    kept: tuple[int, ...]
    """The results that others read with the strides that they were traced with; more than this half's."""
    kind: str
    """Segments of the same kind run the same code."""
    between: bool = False
    """Whether it is what stands between others, and runs as it is."""


_Made: TypeAlias = "tuple[CompiledRegion, Sequence[fx.Node]]"
"""A segment, and its calls in the half."""


def regions(
    gm: fx.GraphModule, visible: Sequence[int], fixed: int = 0, hides: bool = True
) -> list[CompiledRegion]:
    """A half in segments, in their order; none where nothing repeats.

    Parameters
    ----------
    visible : the results that keep their strides.
    fixed : so many inputs, the first, keep their addresses between steps.
    hides : collectives that work hides stay so.

    Raises
    ------
    NoRegionsError : the half reads graphs, or sizes that nothing gives.
    """
    between = calls_between(gm.graph)
    found = _Half(gm, visible, fixed, between, hides).regions()
    return found or (_Half(gm, visible, fixed, set(), hides).regions() if between else [])


class _Half:
    """The calls of a half in their order, without those that are made anew where they are read."""

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
        self._calls = [n for n in calls if n.target in _SEEDS] + [n for n in calls if n.target not in _SEEDS]

    def regions(self) -> list[CompiledRegion]:
        """All of them in their order; none where nothing repeats."""
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
                # it is compiled in two parts: nothing is lost, as no other is like it
                found[error.region : error.region + 1] = parts
                alone.update(one.kind for one, _ in parts)
        if sum({one.kind: len(piece) for one, piece in found}.values()) > _MOST_OF_ALL * len(self._calls):
            return []
        between = [[self._as_it_is(calls)] if calls else [] for calls in places]
        own = [[], *([one] for one, _ in found)]
        return [one for before, after in zip(own, between, strict=True) for one in (*before, *after)]

    def _merged(self) -> tuple[list[_Made], set[str]]:
        """Layers and what lies between them, and the kinds of which there is one only.

        What is one of its kind is compiled together with what lies beside it.
        """
        made = [(self._region(piece), piece) for piece in self._pieces(self._calls)]
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
        """A segment as two: what comes before a call, and what comes after it."""
        place = self._position
        parts = [n for n in calls if place[n] < place[at]], [n for n in calls if place[n] > place[at]]
        return [(self._region(part), part) for part in parts if part]

    def _as_it_is(self, calls: Sequence[fx.Node]) -> CompiledRegion:
        """What stands between segments; never of a kind with one of them."""
        one = self._region(calls)
        return replace(one, between=True, kind=f"between\n{one.kind}")

    def _is_free(self, node: fx.Node) -> bool:
        # what the half itself returns must be made by some segment
        if node.op != "call_function" or self._output in node.users:
            return False
        number = isinstance(node.meta.get("val"), (torch.SymInt, int))
        return (number or node.target in _MADE_ANEW) and all(
            n in self._free or (n.op == "placeholder" and not isinstance(n.meta.get("val"), Tensor))
            for n in node.all_input_nodes
        )

    def _pieces(self, calls: list[fx.Node]) -> Iterator[list[fx.Node]]:
        """The calls in runs of layers, and what is left between them."""
        run = longest_run([token(n) for n in calls], shortest=_SHORTEST, least=_LEAST)
        layer = [] if run is None else calls[run.start : run.start + run.period]
        if run is None or sum(not getattr(n.target, "is_view", False) for n in layer) < _LEAST_WORK:
            if calls:
                yield calls
            return
        run = self._turned(calls, run)
        yield from self._pieces(calls[: run.start])
        for start in range(run.start, run.end, run.period):
            yield calls[start : start + run.period]
        yield from self._pieces(calls[run.end :])

    def _turned(self, calls: Sequence[fx.Node], run: Repetitions) -> Repetitions:
        """The run with its borders where fewest values cross them."""
        place = {node: i for i, node in enumerate(calls)}
        starts, ends = Counter[int](), Counter[int]()
        for node, i in place.items():
            users = (u for n in with_parts(node) for u in n.users)
            last = max((place[u] for u in users if u in place), default=i)
            starts[i + 1] += 1
            ends[last + 1] += 1
        crossing, across = [], 0
        for i in range(len(calls) + 1):
            across += starts[i] - ends[i]
            crossing.append(across)
        # a turn leaves the beginning of the first layer over: without a begun one at the end it costs a layer
        iterations = range(run.period if run.count > _LEAST else run.more + 1)
        iteration = min(iterations, key=lambda t: crossing[run.start + t + run.period])
        covered = run.period * run.count + run.more - iteration
        return Repetitions(run.start + iteration, run.period, covered // run.period, covered % run.period)

    def _region(self, calls: Sequence[fx.Node]) -> CompiledRegion:
        """These calls, with the parts of what they return, as a graph."""
        calls = [n for call in calls for n in with_parts(call)]
        own = set(calls)
        takes = list(dict.fromkeys(a for n in calls for a in self._read(n) if a not in own))
        takes.sort(key=lambda n: (n not in self._fixed, n.op != "placeholder"))  # as in the half
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
        """What a call reads, with what is read where that is made anew."""
        for source in self._data(node):
            if source in self._free:
                yield from self._read(source)
            else:
                yield source

    def _takes(self, node: fx.Node, value: fx.Node) -> bool:
        """Whether a call reads a value: what stands between segments is not told when to start."""
        return node not in self._apart or value in data_of(node)

    def _data(self, node: fx.Node) -> Iterable[fx.Node]:
        return data_of(node) if node in self._apart else node.all_input_nodes

    def _sizes_in(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        """The half's inputs that give the sizes of these values."""
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
        # named after the op, not after the half's node: so layers are the same to Inductor's cache, too
        made = graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        made.meta.update(node.meta)
        copies[node] = made


def _symbols(value: Any) -> Iterator[Any]:
    """The symbols of which the sizes of a value are made."""
    if isinstance(value, (tuple, list)):
        for one in value:
            yield from _symbols(one)
    elif isinstance(value, Tensor):
        yield from _symbols([*value.shape, *value.stride(), value.storage_offset()])
    elif isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        yield from value.node.expr.free_symbols
