"""The code of a graph in regions: the compiled code of each kind, and the order of calls.

values   inputs of the graph | constants | results of regions, one region after the other
call     code 1   takes values 7, 3, 4   frees 7   appends the next values
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from torch import Tensor, fx

from fxdp.ir.graph.graph_form import graph_bytes, graph_of_bytes
from fxdp.ir.graph.graphs import attribute_of
from fxdp.lowering.forward_backward_pair import Boxed
from fxdp.lowering.inductor.start import Start
from fxdp.lowering.inductor.strides import results
from fxdp.lowering.op_by_op import op_by_op
from fxdp.startup.artifacts.compiled_code import code_bytes, code_of_bytes
from fxdp.startup.regions.compiled_regions import CompiledRegion

_FULL, _REGIONS, _AS_IT_IS = b"w", b"s", b"g"
"""Prefixes of serialized code: one piece, regions, or a graph that runs op by op."""


class AsItIs:
    """A graph that runs op by op, with the calling convention of Inductor's code."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.gm = gm
        self._run = op_by_op(gm)

    def __call__(self, inputs: list[Any]) -> Any:
        """Return the results; `inputs` is emptied."""
        return self._run(inputs)


@dataclass(frozen=True)
class RegionCall:
    """The call of a region: the code to run, and the places of its operands among the values."""

    code: int
    takes: tuple[int, ...]
    frees: tuple[int, ...]
    """The places without a later reader: the code then holds the only reference, and can free the value."""


@dataclass(frozen=True)
class RegionCode:
    """Code that runs region by region, with the calling convention of Inductor's code."""

    codes: tuple[Any, ...]
    calls: tuple[RegionCall, ...]
    results: tuple[int, ...]
    """The places of the graph's results."""
    constants: tuple[Any, ...]
    """The values after the inputs: tensors held by the graph, and results that are no tensors."""

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """Return the graph's results; `inputs` is emptied."""
        values = [*inputs, *self.constants]
        inputs.clear()
        for call in self.calls:
            given = [values[i] for i in call.takes]
            for i in call.frees:
                values[i] = None
            values += self.codes[call.code](given)  # unnamed, so that the list holds the only references
        return [values[i] for i in self.results]


def half_bytes(code: Boxed) -> bytes:
    """Serialize compiled code, in regions or not.

    Raises
    ------
    TypeError : the code holds tensors of its own.
    """
    if isinstance(code, AsItIs):
        return _AS_IT_IS + graph_bytes(code.gm)
    if not isinstance(code, RegionCode):
        return _FULL + code_bytes(code)
    if any(isinstance(c, Tensor) for c in code.constants):
        raise TypeError("the half holds tensors of its own")
    return _REGIONS + pickle.dumps(replace(code, codes=tuple(map(half_bytes, code.codes))))


def half_of_bytes(content: bytes, start: Start) -> Boxed:
    """Load serialized code, ready to run."""
    with start.building():
        return _of_bytes(content)


def _of_bytes(content: bytes) -> Boxed:
    if content.startswith(_FULL):
        return code_of_bytes(content.removeprefix(_FULL))
    if content.startswith(_AS_IT_IS):
        return AsItIs(graph_of_bytes(content.removeprefix(_AS_IT_IS), "Between"))
    code: RegionCode = pickle.loads(content.removeprefix(_REGIONS))
    return replace(code, codes=tuple(map(_of_bytes, code.codes)))


@dataclass(frozen=True)
class RegionPlan:
    """A graph as calls of regions, before any region is compiled."""

    kinds: tuple[CompiledRegion, ...]
    """One region of each kind; its code serves all calls of the kind."""
    calls: tuple[RegionCall, ...]
    results: tuple[int, ...]
    constants: tuple[Any, ...]

    def compile(self, compile_one: Callable[[CompiledRegion], Boxed]) -> RegionCode:
        """Compile one region of each kind."""
        return RegionCode(tuple(map(compile_one, self.kinds)), self.calls, self.results, self.constants)


def plan_regions(gm: fx.GraphModule, regions: Sequence[CompiledRegion]) -> RegionPlan:
    """Number the values of a graph, and determine the places that each region's call takes and frees."""
    kinds: dict[str, CompiledRegion] = {}
    for one in regions:
        kinds.setdefault(one.kind, one)
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    attributes = [n for n in gm.graph.nodes if n.op == "get_attr"]
    literals = [v for v in results(gm) if not isinstance(v, fx.Node)]
    made = [n for one in regions for n in one.gives]
    place = {n: i for i, n in enumerate([*inputs, *attributes, *literals, *made]) if isinstance(n, fx.Node)}
    constants = (*(attribute_of(gm, n) for n in attributes), *literals)
    # a literal is identified by position: 1, 1.0 and True are equal
    numbers = count(len(inputs) + len(attributes))
    wanted = tuple(place[v] if isinstance(v, fx.Node) else next(numbers) for v in results(gm))
    kept = {*wanted, *(place[n] for n in attributes)}
    last = {place[n]: i for i, one in enumerate(regions) for n in one.takes}
    codes = {kind: i for i, kind in enumerate(kinds)}
    calls = []
    for i, one in enumerate(regions):
        takes = tuple(place[n] for n in one.takes)
        frees = tuple(p for p in takes if last[p] == i and p not in kept)
        calls.append(RegionCall(codes[one.kind], takes, frees))
    return RegionPlan(tuple(kinds.values()), tuple(calls), wanted, constants)
