"""Place every value of the joint graph on the batch axis: the BatchDimAnalyzer."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from fxdp.annotations import (
    Gradient,
    Input,
    Mutation,
    Output,
    Reason,
    ScalarType,
    Tangent,
    TensorType,
    is_host_size,
    note,
    tensor_operands,
)
from fxdp.mesh import DataMesh
from fxdp.pass_manager import Level
from fxdp.placements import P, Partial, Placement, R, Shard
from fxdp.rules.chooser import choose, conversion_cost, size_bytes
from fxdp.rules.iota import iota_dim
from fxdp.rules.randomness import draws
from fxdp.rules.registry import Alternative, Op, Operand, registry
from fxdp.rules.view import op_view
from fxdp.symbols import batch_factor

_MAX_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Choice:
    """What a rule and the chooser decided for one op signature."""

    alternative: Alternative
    rule: str
    random: bool


@dataclass(slots=True)
class Value:
    """The placements in which a node's value exists, the first being its own; `replicable` values
    are functions of replicated ones only, so their whole value can be computed rather than gathered."""

    placements: tuple[Placement, ...]
    replicable: bool = False


@dataclass(slots=True)
class Walk:
    """One pass over the graph in order, with everything it learns."""

    batch: tuple[int | None, ...]
    single_device_rng: bool
    one_rank: bool
    reduce_at: frozenset[fx.Node]
    choices: dict[Any, Choice]
    values: dict[fx.Node, Value] = field(default_factory=dict)
    iota: dict[fx.Node, int] = field(default_factory=dict)
    outputs: dict[int, fx.Node] = field(default_factory=dict)
    conversions: list[tuple[fx.Node, Placement]] = field(default_factory=list)
    cost: float = 0.0

    def run(self, graph: fx.Graph) -> None:
        """Place all nodes."""
        self.outputs = _outputs(graph)
        for node in graph.nodes:
            self.place(node)

    def place(self, node: fx.Node) -> None:
        """Place one node whose operands are placed."""
        if node.op == "placeholder":
            self._place_placeholder(node)
        elif node.op == "output":
            self._place_results(node)
        elif node.op == "call_function":
            self._place_call(node)

    def delivered(self, node: fx.Node) -> Placement:
        """How an output of the program is handed out: sharded on its first batch dim if it has one."""
        type_ = note(node).type
        assert isinstance(type_, TensorType)
        dim = next((d for d, n in enumerate(type_.shape) if batch_factor(n) is not None), None)
        if dim is None or self.one_rank:
            return R
        own = self.values[node].placements[0]
        return own if isinstance(own, Shard) and own.dim == dim else Shard(dim)

    def _place_placeholder(self, node: fx.Node) -> None:
        slot = note(node).slot
        if isinstance(slot, Tangent):
            return  # placed on first use: it has the placement of its output, which comes later
        placement: Placement = R
        if isinstance(slot, Input) and self.batch[slot.index] is not None:
            placement = Shard(self.batch[slot.index] or 0)
        self._settle(node, placement, Reason("input"), replicable=placement == R)

    def _place_tangent(self, node: fx.Node, slot: Tangent) -> None:
        self._settle(node, self.delivered(self.outputs[slot.index]), Reason("tangent"))

    def _place_call(self, node: fx.Node) -> None:
        known = note(node)
        if is_host_size(node):
            return
        if node.target is operator.getitem:
            self._place_getitem(node)
            return
        op, sources = op_view(node, self._operand)
        choice = self._choose(op)
        known.operands = choice.alternative.inputs
        known.rewrite = choice.alternative.rewrite
        known.reason = Reason(choice.rule, known.operands)
        for source, wanted in zip(sources, known.operands, strict=True):
            self._require(source, wanted)
        if isinstance(known.type, ScalarType) or known.type is None:
            return
        outputs = choice.alternative.outputs
        known.placement = outputs if isinstance(known.type, tuple) else outputs[0]
        replicable = not choice.random and all(self.values[s].replicable for s in sources)
        own = outputs[0] if not isinstance(known.type, tuple) else R
        self._set(node, own or R, replicable)
        dim = iota_dim(node, self.iota)
        if dim is not None:
            self.iota[node] = dim

    def _place_getitem(self, node: fx.Node) -> None:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        placements = note(source).placement
        assert isinstance(placements, tuple)
        placement = placements[node.args[1]] or R  # type: ignore[index]
        reason = note(source).reason or Reason("getitem")
        self._settle(node, placement, reason, replicable=self.values[source].replicable)

    def _settle(
        self, node: fx.Node, placement: Placement, reason: Reason, *, replicable: bool = False
    ) -> None:
        known = note(node)
        known.placement, known.reason, known.operands = placement, reason, ()
        self._set(node, placement, replicable)

    def _set(self, node: fx.Node, placement: Placement, replicable: bool) -> None:
        placements: tuple[Placement, ...] = (placement,)
        if node in self.reduce_at:
            self.conversions.append((node, R))
            self.cost += conversion_cost(placements, R, _bytes(node))
            placements = (R,)
        if replicable and R not in placements:
            placements = (*placements, R)
        self.values[node] = Value(placements, replicable)

    def _require(self, node: fx.Node, wanted: Placement | None) -> None:
        value = self.values[node]
        if wanted is None or wanted in value.placements or isinstance(note(node).type, tuple):
            return
        self.cost += conversion_cost(value.placements, wanted, _bytes(node))
        self.conversions.append((node, wanted))
        value.placements = (*value.placements, wanted)

    def _place_results(self, node: fx.Node) -> None:
        known = note(node)
        wanted: list[Placement] = []
        for value, slot in zip(node.args[0], known.results, strict=True):  # type: ignore[arg-type]
            placement = R
            if isinstance(slot, Output):
                placement = self.delivered(value)  # type: ignore[assignment]
            elif isinstance(slot, (Gradient, Mutation)) and isinstance(slot.of, Input):
                dim = self.batch[slot.of.index]
                placement = R if dim is None else Shard(dim)  # type: ignore[assignment]
            self._require(value, placement)
            wanted.append(placement)
        known.operands = tuple(wanted)

    def _operand(self, index: int, source: fx.Node) -> Operand:
        known = note(source)
        if isinstance(known.slot, Tangent) and source not in self.values:
            self._place_tangent(source, known.slot)
        assert isinstance(known.type, TensorType)
        return Operand(index, known.type, self.values[source].placements, self.iota.get(source))

    def _choose(self, op: Op) -> Choice:
        found = self.choices.get(op)
        if found is None:
            found = self.choices[op] = _choose(op, self.single_device_rng, self.one_rank)
        return found


def _outputs(graph: fx.Graph) -> dict[int, fx.Node]:
    result = graph.output_node()
    slots = note(result).results
    values = result.args[0]
    return {s.index: v for s, v in zip(slots, values, strict=True) if isinstance(s, Output)}  # type: ignore[arg-type]


def _bytes(node: fx.Node) -> int:
    type_ = note(node).type
    return size_bytes(type_) if isinstance(type_, TensorType) else 0


def _choose(op: Op, single_device_rng: bool, one_rank: bool) -> Choice:
    registered = registry.get(op.target)
    seeded = draws(op.target, op.args, dict(op.kwargs))
    if registered is None:
        return Choice(op.alternative(), "unknown", seeded)
    alternatives = () if one_rank or (seeded and single_device_rng) else registered.rule(op)
    return Choice(choose(op, alternatives)[0], registered.name, seeded)


def _roots(walk: Walk) -> frozenset[fx.Node]:
    """Where to reduce once what is now reduced several times further down.

    From each P -> R conversion walk up through ops that pass a Partial operand on without making it
    smaller; a node reached from two conversions is reduced where it is made (placement notes, 5). In the
    forward one conversion is enough: the sooner a sum is started, the more of them travel together.
    """
    reached: dict[fx.Node, int] = {}
    for node, wanted in walk.conversions:
        if wanted == R and isinstance(note(node).placement, Partial):
            for ancestor in _chain(node):
                reached[ancestor] = reached.get(ancestor, 0) + (1 if note(ancestor).backward else 2)
    shared = {n for n, count in reached.items() if count > 1}
    return frozenset(n for n in shared if not any(a in shared for a in _chain(n)[1:]))


def _chain(node: fx.Node) -> list[fx.Node]:
    chain = [node]
    while True:
        operands = zip(tensor_operands(chain[-1]), note(chain[-1]).operands, strict=False)
        partial = [s for s, wanted in operands if wanted == P and note(s).placement == P]
        if len(partial) != 1 or _bytes(partial[0]) > _bytes(chain[-1]):
            return chain
        chain.append(partial[0])


@dataclass(frozen=True)
class BatchDimAnalyzer:
    """After it every tensor node has a placement, the placements its operands need, and the reason.

    before: `%mm: f32[256, 10] = aten.mm(%t_1, %grad)`
    after:  `%mm: f32[256, 10] {dp=P(sum)} = aten.mm(%t_1, %grad)`

    No value moves yet: where a producer's placement differs from what a consumer needs,
    `insert-collectives` converts it. Sizes decide nothing by being equal numbers; only expressions in
    the batch `B` do.

    Parameters
    ----------
    batch : the batch dim of each input, None for an input without one.
    single_device_rng : draw random values whole on every rank, as one device would.
    """

    batch: tuple[int | None, ...]
    single_device_rng: bool = False

    name = "batch-dim-analyzer"
    requires = Level.CAPTURED
    ensures = Level.PLACED

    def run(self, gm: fx.GraphModule, mesh: DataMesh) -> fx.GraphModule:
        """Annotate the graph in place."""
        batch = self.batch if mesh.size > 1 else (None,) * len(self.batch)
        choices: dict[Any, Choice] = {}
        best, reduce_at = None, frozenset[fx.Node]()
        for _ in range(_MAX_ROUNDS):
            walk = Walk(batch, self.single_device_rng, mesh.size == 1, reduce_at, choices)
            walk.run(gm.graph)
            if best is not None and walk.cost > best.cost:
                break
            best = walk
            roots = reduce_at | _roots(walk)
            if roots == reduce_at:
                return gm
            reduce_at = roots
        assert best is not None
        if best is not walk:
            Walk(batch, self.single_device_rng, mesh.size == 1, best.reduce_at, choices).run(gm.graph)
        return gm
