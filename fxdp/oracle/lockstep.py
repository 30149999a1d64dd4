"""Run the program of all ranks in lock-step, and compare each node with one device.

Every node holds a list with one value per rank, and a collective combines the list. After each node, the
values of the ranks are combined according to the node's placement and compared with the result of the
captured graph on the global batch. The first difference names the node, so a wrong rule, a dropped reduction
or a size that should be global is found in seconds. Random values are taken from the ranks: the reference
uses the numbers drawn by the ranks, and two ranks must not draw equal numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from fxdp.ir import redistributions
from fxdp.ir.graph.draws import graph_draws, node_draws
from fxdp.ir.graph.graphs import attribute_of, results_of
from fxdp.ir.graph.metadata import is_host_size, meta
from fxdp.ir.graph.signature import Input, InputSpec, OutputSpec, Size, Tangent
from fxdp.ir.op_kinds import mixes
from fxdp.ir.tensor_difference import difference
from fxdp.ir.types.mesh import Mesh
from fxdp.ir.types.placements import ParamShard, Partial, Placement, Replicate, Shard
from fxdp.ir.types.sizes import axis
from fxdp.ir.types.value_types import NodeType, ScalarType, TensorType, local_shape
from fxdp.oracle.fault import Fault, make_fault
from fxdp.oracle.rank_draws import RankGenerators, draw_alike, repeated_draw
from fxdp.oracle.reference import Reference, execute
from fxdp.oracle.results import cancelled, magnitude, scaled_floor
from fxdp.oracle.ties import is_tie, moved_operands
from fxdp.oracle.virtual_ranks import LateValues, VirtualRanks

_ERRORS = (RuntimeError, IndexError, TypeError, ValueError, ArithmeticError, NotImplementedError)


@dataclass
class LockStep:
    """Interpret `local` on virtual ranks and `captured` on one device, comparing each node.

    Parameters
    ----------
    local : a graph of level LOCAL.
    captured : the same program at level CAPTURED, with the same node names.
    sizes : every rank's batch size; the sum is the global batch size.
    symbols : values of further dynamic sizes.
    tolerance : the largest relative error (of the largest value) that counts as equal.
    mesh : the arrangement of the ranks along axes; None for a single axis.
    points : the axis of which each input's values are row numbers; ranks get their own numbers of rows.
    single_device_rng : True if the ranks' generators have equal states, as with `rng="single-device"`.
    tolerances : different tolerances for single nodes, by name.
    """

    local: fx.GraphModule
    captured: fx.GraphModule
    sizes: Sequence[int]
    symbols: Mapping[str, int] = field(default_factory=dict)
    tolerance: float = 1e-9
    single_device_rng: bool = False
    tolerances: Mapping[str, float] = field(default_factory=dict)
    mesh: Mesh | None = None
    points: tuple[str | None, ...] = ()
    faults: list[Fault] = field(default_factory=list)
    errors: dict[fx.Node, float] = field(default_factory=dict)
    """The relative error of each compared node."""
    ties: list[fx.Node] = field(default_factory=list)
    """Nodes for which rounding decides the result; the ranks continued with the result of one device."""

    def run(self, specs: Mapping[InputSpec, Any]) -> dict[OutputSpec, Tensor]:
        """Run all nodes and return the combined results of the ranks.

        `specs` holds the *global* value of each input and tangent. Faults are collected in `faults`.
        """
        self._start()
        self._specs = specs
        for node in self.local.graph.nodes:
            if node.op == "output":
                return self._results(node)
            if isinstance(meta(node).spec, Tangent):
                continue  # on first use: then its rows, of an axis born inside, are known
            try:
                self._values[node] = self._run(node)
                self._ranks.learn(node, self._values[node], self._values)
                if node.op != "placeholder":
                    self._check(node)
            except _ERRORS as error:
                self._fault(node, f"cannot run: {error}")
                return {}
            if self.faults:
                return {}
        raise AssertionError("a graph ends in an output node")

    def _start(self) -> None:
        self.faults.clear()
        self.errors.clear()
        self.ties.clear()
        self._one = Reference(self.captured, self.sizes, self.symbols)
        self._ranks = VirtualRanks(self.sizes, self._one.sizes, self.mesh)
        self._values: dict[fx.Node, list[Any]] = LateValues(self._placeholder)
        self._floors: dict[fx.Node, float] = {}
        own = len(self.sizes) > 1 and not self.single_device_rng
        seeded = own and graph_draws(self.local.graph)
        self._generators = RankGenerators(len(self.sizes)) if seeded else None

    # ---- running the ranks -------------------------------------------------------------------------------

    def _run(self, node: fx.Node) -> list[Any]:
        if node.op == "placeholder":
            return self._placeholder(node)
        if node.op == "get_attr":
            value = self._one.values[node.name] = attribute_of(self.local, node)
            return [value] * self._ranks.world
        if node.target in redistributions.REDISTRIBUTIONS:
            source, *rest = node.args
            numbers = [self._values[a][0] if isinstance(a, fx.Node) else a for a in rest]
            return self._ranks.redistribute(node, self._read(source), numbers)
        if node_draws(node) and self._generators is None:
            return draw_alike(self._ranks.world, lambda rank: self._call(node, rank))
        return [self._call(node, rank) for rank in range(self._ranks.world)]

    def _read(self, source: Any) -> list[Any]:
        """Return the operand of a redistribution on each rank: a value, or the list of values of a bucket."""
        if isinstance(source, fx.Node):
            return self._values[source]
        return [[self._values[value][rank] for value in source] for rank in range(self._ranks.world)]

    def _call(self, node: fx.Node, rank: int) -> Any:
        if self._generators is not None and node_draws(node):
            with self._generators.of(rank):
                return execute(node, lambda n: self._values[n][rank])
        return execute(node, lambda n: self._values[n][rank])

    def _placeholder(self, node: fx.Node) -> list[Any]:
        spec = meta(node).spec
        if isinstance(spec, Size):
            return [self._ranks.spec(spec.name, rank) for rank in range(self._ranks.world)]
        assert spec is not None
        full = self._one.values[node.name] = self._specs[spec]
        sharded = isinstance(meta(node).placement, ParamShard)
        placement = meta(node).placement if sharded or isinstance(spec, (Input, Tangent)) else None
        parts = self._ranks.split(full, placement, meta(node).type)  # type: ignore[arg-type]
        into = self.points[spec.index] if isinstance(spec, Input) and spec.index < len(self.points) else None
        return parts if into is None else self._ranks.entered(parts, axis(into))

    # ---- comparing ---------------------------------------------------------------------------------------

    def _check(self, node: fx.Node) -> None:
        if is_host_size(node) or node.op == "get_attr":
            return
        if node_draws(node):
            self._one.values[node.name] = self._combined(node)
            pair = None if self.single_device_rng else repeated_draw(self._values[node], meta(node).placement)
            if pair is not None:
                self._fault(node, f"ranks {pair[0]} and {pair[1]} draw the same random numbers")
        elif self._has_full(node):
            self._compare(node, self._one.values[node.name])

    def _has_full(self, node: fx.Node) -> bool:
        """Compute a node's global value; return False if the value depends on the rule of the node."""
        found = self._one.node(node)
        if found is not None:
            self._one.execute(found)
            return True
        sources = [s for s in node.all_input_nodes if not isinstance(meta(s).type, ScalarType)]
        if any(s.name not in self._one.values for s in sources):
            return False
        if node.target in redistributions.REDISTRIBUTIONS:
            if not isinstance(node.args[0], fx.Node):
                return False  # a bucket; its values are compared at their uses
            self._one.values[node.name] = self._one.values[sources[0].name]
            return True
        placement = meta(node).placement
        placements = placement if isinstance(placement, tuple) else (placement,)
        if any(isinstance(one, Shard) for one in placements):
            return False  # an inserted op on local parts, such as positions from the rank's first sample
        self._one.values[node.name] = execute(node, self._full_or_number)
        return True

    def _full_or_number(self, node: fx.Node) -> Any:
        if isinstance(meta(node).type, ScalarType):
            return self._values[node][0]
        return self._one.values[node.name]

    def _combined(self, node: fx.Node) -> Any:
        placement, values = meta(node).placement, self._values[node]
        if isinstance(placement, tuple):
            return tuple(
                None if p is None else self._ranks.combine([v[i] for v in values], p, meta(node).types[i])
                for i, p in enumerate(placement)
            )
        assert placement is not None
        return self._ranks.combine(values, placement, meta(node).type)

    def _compare(self, node: fx.Node, full: Any) -> None:
        placement, values, types = meta(node).placement, self._values[node], meta(node).type
        if isinstance(types, ScalarType):
            self._compare_numbers(node, full)
        elif not isinstance(types, tuple):
            self._compare_one(node, full, values, types, placement)
        else:
            assert isinstance(placement, tuple)
            for i, (type_, p) in enumerate(zip(types, placement, strict=True)):
                if isinstance(type_, TensorType):
                    self._compare_one(node, full[i], [v[i] for v in values], type_, p)

    def _compare_numbers(self, node: fx.Node, full: Any) -> None:
        """Compare a number that the program read from a tensor."""
        for rank, value in enumerate(self._values[node]):
            if abs(value - full) > self._tolerance(node) * abs(full):
                self._fault(node, f"rank {rank} reads {value}, one device {full}")
                return

    def _compare_one(self, node: fx.Node, full: Any, values: list[Any], type_: Any, placement: Any) -> None:
        if not isinstance(full, Tensor) or placement is None:
            return
        for rank, value in enumerate(() if isinstance(placement, ParamShard) else values):
            shape = tuple(self._ranks.number(n, rank) for n in local_shape(type_, placement))
            if tuple(value.shape) != shape:
                self._fault(node, f"rank {rank} has shape {tuple(value.shape)}, expected {shape}")
                return
        error = self._error(node, full, values, placement, type_)
        if not error <= self._tolerance(node) and self._is_tie(node, full, values, placement, type_):
            self.ties.append(node)
            self._values[node] = self._ranks.split(full, placement, type_)
            error = 0.0
        self.errors[node] = max(error, self.errors.get(node, 0.0))
        if not error <= self._tolerance(node):
            self._fault(node, f"differs from one device by {error:.3g} (relative)", error)

    def _error(
        self, node: fx.Node, full: Tensor, values: list[Tensor], placement: Placement, type_: NodeType
    ) -> float:
        if isinstance(placement, Partial):  # the terms of the sum count, and not the sum, which may cancel
            largest = cancelled(self._tolerance(node)) * max(map(magnitude, values))
            self._floors[node] = max(self._floor(node), largest)
        if isinstance(placement, Replicate):
            return max(difference(v, full, self._floor(node)) for v in values)
        return difference(self._ranks.combine(values, placement, type_), full, self._floor(node))

    def _is_tie(
        self, node: fx.Node, full: Tensor, values: list[Tensor], placement: Placement, type_: NodeType
    ) -> bool:
        """Return whether both results are right: only the rounding of an operand decides between them."""
        read = [n for n in node.all_input_nodes if isinstance(self._values[n][0], Tensor)]  # without sizes
        operands = [n for n in moved_operands(node) if n in read]
        known = all(n.name in self._one.values for n in read)  # pieces of a bucket are unknown
        if not operands or not known or not isinstance(placement, (Shard, Replicate)):
            return False
        sizes = [max(magnitude(self._one.values[n.name]), self._floor(n)) for n in operands]
        found = self._ranks.combine(values, placement, type_)
        return is_tie(node, self._full_or_number, found, full, self._tolerance(node) * max(sizes))

    def _tolerance(self, node: fx.Node) -> float:
        return self.tolerances.get(node.name, self.tolerance)

    def _floor(self, node: fx.Node) -> float:
        """Return the error floor: a share of the largest operand (`cancelled`), as sums may cancel.

        An op that only moves or adds its operands (a view of such a sum, several sums side by side), and a
        node inserted by fxdp (a bucket of sums), inherit the largest floor of the operands. Products and
        quotients convert the floors to their own units.
        """
        if node not in self._floors:
            tensors = [n for n in node.all_input_nodes if isinstance(self._values[n][0], Tensor)]
            terms = (magnitude(value) for n in tensors for value in self._values[n])
            floor = cancelled(self._tolerance(node)) * max(terms, default=0.0)
            if not tensors:  # one of several results
                floor = max([0.0, *map(self._floor, node.all_input_nodes)])
            elif len(tensors) == 1 or mixes(node.target) or self._one.node(node) is None:
                floor = max([floor, *map(self._floor, tensors)])
            else:
                floors = [self._floor(n) for n in tensors]
                per_rank = zip(*(self._values[n] for n in tensors), strict=True)
                floor = max([floor, *(scaled_floor(node, floors, values) for values in per_rank)])
            self._floors[node] = floor
        return self._floors[node]

    def _fault(self, node: fx.Node, what: str, error: float = float("inf")) -> None:
        self.faults.append(make_fault(node, what, error, self.errors))

    # ---- results -----------------------------------------------------------------------------------------

    def _results(self, node: fx.Node) -> dict[OutputSpec, Tensor]:
        results: dict[OutputSpec, Tensor] = {}
        values: Sequence[fx.Node] = node.args[0]  # type: ignore[assignment]
        placements = meta(node).operands or [meta(v).placement for v in values]
        for spec, value, placement in zip(meta(node).results, values, placements, strict=True):
            if spec is not None:
                own, type_ = self._values[value], meta(value).type
                results[spec] = self._ranks.combine(own, placement, type_)  # type: ignore[arg-type]
        return results

    def floors(self) -> dict[OutputSpec, float]:
        """Return for each result the size below which cancellation dominates (see `difference`)."""
        pairs = results_of(self.local.graph)
        return {spec: self._floor(value) for spec, value in pairs if spec is not None}
