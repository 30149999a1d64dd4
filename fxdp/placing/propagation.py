"""Propagation of placements through the joint graph, in order, with the cost of redistributions."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from fxdp.errors import PlacementError
from fxdp.ir.graph.draws import draws, draws_again
from fxdp.ir.graph.graphs import results_of
from fxdp.ir.graph.metadata import UNKNOWN, Location, is_host_size, meta, value_bytes
from fxdp.ir.graph.signature import Gradient, Input, Mutation, Output, Tangent
from fxdp.ir.types.placements import Partial, Placement, R, Shard
from fxdp.ir.types.sizes import batch_factor
from fxdp.ir.types.value_types import ScalarType, TensorType
from fxdp.placing.chooser import cheapest, choose, redistribution_cost
from fxdp.placing.facts import Facts
from fxdp.placing.gpu_draws import check_draw
from fxdp.placing.memory_order import memory_gaps, memory_order
from fxdp.placing.op_view import op_view
from fxdp.rules.families.random import drawn_for_full_batch
from fxdp.rules.registry import Alternative, Op, Operand, is_cheap, registry

_MAX_STEPS = 16  # limit of ops recomputed in full to save a gather


@dataclass(frozen=True, slots=True)
class Choice:
    """Decision of a rule and the chooser for one op signature."""

    alternative: Alternative
    rule: str
    random: bool


@dataclass(slots=True)
class _Value:
    """Placements in which a node's value exists, the first being the node's own.

    Attributes
    ----------
    replicable : the value depends on replicated values only, so the full value can be computed instead of
        gathered.
    source, gather_bytes, steps : for a sharded value that a cheap op computes from a single operand that is
        not full, this `source`; the bytes of the smallest value on the chain of sources; the length of the
        chain.
    """

    placements: tuple[Placement, ...]
    replicable: bool = False
    source: fx.Node | None = None
    gather_bytes: int | None = None
    steps: int = 0


@dataclass(slots=True)
class ShardingPropagation:
    """One propagation over a graph in order, with all results."""

    batch: tuple[int | None, ...]
    single_device_rng: bool
    one_rank: bool
    redistribute_at: Mapping[fx.Node, Placement]
    choices: dict[Any, Choice]
    facts: Facts = field(default_factory=Facts)
    values: dict[fx.Node, _Value] = field(default_factory=dict)
    outputs: dict[int, fx.Node] = field(default_factory=dict)
    redistributions: list[tuple[fx.Node, Placement]] = field(default_factory=list)
    gathered: bool = False
    cost: float = 0.0

    def run(self, graph: fx.Graph) -> None:
        """Place all nodes."""
        self.outputs = {spec.index: value for spec, value in results_of(graph) if isinstance(spec, Output)}
        for node in graph.nodes:
            self.place(node)

    def place(self, node: fx.Node) -> None:
        """Place one node after its operands."""
        if node.op == "placeholder":
            self._place_placeholder(node)
        elif node.op == "output":
            self._place_results(node)
        elif node.op == "call_function":
            self._place_call(node)

    def delivered(self, node: fx.Node) -> Placement:
        """Return the placement of a program's output: sharded on the first batch dim, if any, else R."""
        type_ = meta(node).type
        assert isinstance(type_, TensorType)
        dim = next((d for d, n in enumerate(type_.shape) if batch_factor(n) is not None), None)
        if dim is None or self.one_rank:
            return R
        own = self.values[node].placements[0]
        return own if isinstance(own, Shard) and own.dim == dim else Shard(dim)

    def _place_placeholder(self, node: fx.Node) -> None:
        spec = meta(node).spec
        if isinstance(spec, Tangent):
            return  # placed on first use: it has the placement of its output, which comes later
        placement: Placement = R
        if isinstance(spec, Input) and self.batch[spec.index] is not None:
            placement = Shard(self.batch[spec.index] or 0)
            self.facts.learn_input(node, spec.index, placement)
        self._settle(node, placement, "input", replicable=placement == R)

    def _place_tangent(self, node: fx.Node, spec: Tangent) -> None:
        self._settle(node, self.delivered(self.outputs[spec.index]), "tangent")

    def _place_call(self, node: fx.Node) -> None:
        known = meta(node)
        if is_host_size(node):
            return
        if node.target is operator.getitem:
            self._place_getitem(node)
            return
        op, sources = op_view(node, self._operand)
        choice = self._choose(op, node)
        known.operands = choice.alternative.inputs
        known.rewrite, known.decomposition = choice.alternative.rewrite, choice.alternative.decomposition
        self.cost += known.decomposition.bytes if known.decomposition else 0
        known.reason, known.rematerialized = choice.rule, False
        for source, wanted in zip(sources, known.operands, strict=True):
            self._require(source, wanted)
        if isinstance(known.type, ScalarType) or known.type is None:
            return
        outputs = choice.alternative.outputs
        known.placement = outputs if isinstance(known.type, tuple) else outputs[0]
        repeatable = not choice.random and known.decomposition is None
        replicable = repeatable and all(self.values[s].replicable for s in sources)
        own = outputs[0] if not isinstance(known.type, tuple) else R
        self._set(node, own or R, replicable)
        if isinstance(own, Shard) and not replicable and is_cheap(node.target):
            self._learn_source(node, sources)
        self.facts.learn(node)

    def _place_getitem(self, node: fx.Node) -> None:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        placements = meta(source).placement
        assert isinstance(placements, tuple)
        placement = placements[node.args[1]] or R  # type: ignore[index]
        reason = meta(source).reason or "getitem"
        self._settle(node, placement, reason, replicable=self.values[source].replicable)
        self.facts.learn(node)

    def _settle(self, node: fx.Node, placement: Placement, reason: str, *, replicable: bool = False) -> None:
        known = meta(node)
        known.placement, known.reason, known.operands, known.rematerialized = placement, reason, (), False
        self._set(node, placement, replicable)

    def _set(self, node: fx.Node, placement: Placement, replicable: bool) -> None:
        placements: tuple[Placement, ...] = (placement,)
        wanted = self.redistribute_at.get(node)
        if wanted is not None and wanted != placement:
            self.redistributions.append((node, wanted))
            self.cost += redistribution_cost(placements, wanted, value_bytes(node))
            self.gathered |= isinstance(placement, Shard)
            # a reader of the terms beside their sum would need a second reduction: the terms are given up
            placements = (wanted,) if isinstance(placement, Partial) else (placement, wanted)
        if replicable and R not in placements:
            placements = (*placements, R)
        self.values[node] = _Value(placements, replicable)

    def _learn_source(self, node: fx.Node, sources: list[fx.Node]) -> None:
        """Find the source for recomputing the node's full value, instead of gathering the node."""
        value = self.values[node]
        parts = list(dict.fromkeys(s for s in sources if R not in self.values[s].placements))
        # two gathers instead of one save nothing
        if len(parts) > 1:
            return
        # all operands are full: recomputing the node sends nothing
        if not parts:
            value.placements, meta(node).rematerialized = (*value.placements, R), True
            return
        source = self.values[parts[0]]
        if isinstance(source.placements[0], Shard) and source.steps < _MAX_STEPS:
            value.source, value.steps = parts[0], source.steps + 1
            bytes_ = value_bytes(parts[0]) if source.gather_bytes is None else source.gather_bytes
            value.gather_bytes = bytes_ if bytes_ < value_bytes(node) else None

    def _derive(self, node: fx.Node) -> None:
        """Recompute the node's full value from a source that has been gathered since."""
        chain = [node]
        while R not in self.values[chain[-1]].placements:
            source = self.values[chain[-1]].source
            if source is None:
                return
            chain.append(source)
        self._compute_full(chain[:-1])

    def _compute_full(self, chain: list[fx.Node]) -> None:
        for node in chain:
            meta(node).rematerialized = True
            self.values[node].placements = (*self.values[node].placements, R)

    def _require(self, node: fx.Node, wanted: Placement | None) -> None:
        value = self.values[node]
        if wanted is None or wanted in value.placements or isinstance(meta(node).type, tuple):
            return
        self.cost += redistribution_cost(value.placements, wanted, value_bytes(node), value.gather_bytes)
        own = value.placements[0]
        if isinstance(own, Shard) and wanted == R and value.gather_bytes is not None:
            self._gather_source(node)
            return
        self.gathered |= isinstance(own, Shard) and wanted == R
        self.redistributions.append((node, wanted))
        value.placements = (*value.placements, wanted)

    def _gather_source(self, node: fx.Node) -> None:
        """Gather the smallest value on the chain to the node, and recompute the rest of the chain in full."""
        chain, wanted = [node], self.values[node].gather_bytes
        while self.values[chain[-1]].gather_bytes is not None:
            chain.append(self.values[chain[-1]].source)  # type: ignore[arg-type]
        assert value_bytes(chain[-1]) == wanted
        self._require(chain[-1], R)
        self._compute_full(chain[:-1])

    def _place_results(self, node: fx.Node) -> None:
        known = meta(node)
        wanted: list[Placement] = []
        for value, spec in zip(node.args[0], known.results, strict=True):  # type: ignore[arg-type]
            placement = R
            known_spec = meta(value).spec
            if isinstance(known_spec, Tangent) and value not in self.values:
                self._place_tangent(value, known_spec)  # of a parameter that the model returns unchanged
            if isinstance(spec, Output):
                placement = self.delivered(value)  # type: ignore[assignment]
            elif isinstance(spec, (Gradient, Mutation)) and isinstance(spec.of, Input):
                dim = self.batch[spec.of.index]
                placement = R if dim is None else Shard(dim)  # type: ignore[assignment]
            self._require(value, placement)
            wanted.append(placement)
        known.operands = tuple(wanted)

    def _operand(self, index: int, source: fx.Node) -> Operand:
        known = meta(source)
        if isinstance(known.spec, Tangent) and source not in self.values:
            self._place_tangent(source, known.spec)
        assert isinstance(known.type, TensorType)
        value = self.values[source]
        # before the first gather no source can be full, and each search walks up the graph
        if self.gathered and value.source is not None and R not in value.placements:
            self._derive(source)
        return self.facts.operand(index, source, value.placements, value.gather_bytes)

    def _choose(self, op: Op, node: fx.Node) -> Choice:
        keywords = dict(op.kwargs)
        if self.single_device_rng and (
            draws(op.target, op.args, keywords) or draws_again(op.target, op.args, keywords)
        ):
            check_draw(node)
            branches = list(
                drawn_for_full_batch(op, memory_order(node), memory_gaps(node), one_rank=self.one_rank)
            )
            return Choice(cheapest(op, branches)[0], "drawn_for_full_batch", True)
        # an op is identified by its operands' types and placements, so equal layers share one answer
        found = self.choices.get(op)
        if found is None:
            found = self.choices[op] = _choose(op, self.one_rank, meta(node).location)
        return found


def _choose(op: Op, one_rank: bool, location: Location) -> Choice:
    registered = registry.get(op.target)
    seeded = draws(op.target, op.args, dict(op.kwargs))
    if registered is None:
        return Choice(op.alternative(), UNKNOWN, seeded)
    alternatives = () if one_rank else tuple(registered.rule(op))
    # an op that must not run replicated (each part has its own statistics) has no alternative by way of R
    if one_rank or registered.full:
        return Choice(choose(op, alternatives)[0], registered.name, seeded)
    if not alternatives:
        raise PlacementError(
            f'{op.target} at {location}: fxdp.Pipeline(batch_stats="microbatch") needs a batch in parts '
            f'here, but no dim of {op.output.shape} splits with the batch. Use batch_stats="global"'
        )
    return Choice(cheapest(op, alternatives)[0], registered.name, seeded)
