"""Choose the placement of every value of the joint graph along the batch axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxdp.ir.graph.level import Level
from fxdp.ir.graph.metadata import meta, tensor_operands, value_bytes
from fxdp.ir.types.mesh import Mesh
from fxdp.ir.types.placements import P, Partial, Placement, R, Shard
from fxdp.ir.types.sizes import Meaning, batch_factor
from fxdp.ir.types.value_types import TensorType
from fxdp.placing.facts import Facts
from fxdp.placing.propagation import Choice, ShardingPropagation
from fxdp.placing.selections import BornAxes


def _shared_redistributions(propagation: ShardingPropagation) -> dict[fx.Node, Placement]:
    """Return the values to redistribute once instead of several times downstream, with placements.

    A partial value that two linear ops pass on is reduced before both; a sharded value that two cheap ops
    read, for results that are needed in full, is gathered before both.
    """
    reduced: list[tuple[list[fx.Node], Placement]] = []
    gathered: list[tuple[list[fx.Node], Placement]] = []
    for node, wanted in propagation.redistributions:
        own = meta(node).placement
        if isinstance(own, Partial):
            # in the forward, one is enough: the earlier sums start, the more can be combined
            twice = 1 if meta(node).backward or wanted != R else 2
            reduced += [(_chain(node), wanted)] * twice
        elif isinstance(own, Shard) and wanted == R:
            gathered.append((_sources(propagation, node), R))
    return {**_meetings(gathered, first=False), **_meetings(reduced, first=True)}


def _meetings(chains: list[tuple[list[fx.Node], Placement]], *, first: bool) -> dict[fx.Node, Placement]:
    """Return the values that several chains share: for each chain the first (or last) one in the graph.

    A shared sum is needed in full if any redistribution needs a full value, else as the shard on the first
    batch dim.
    """
    reached: dict[fx.Node, list[Placement]] = {}
    for chain, wanted in chains:
        for ancestor in chain:
            reached.setdefault(ancestor, []).append(wanted)
    shared = {n for n, found in reached.items() if len(found) > 1}
    chosen: dict[fx.Node, Placement] = {}
    for chain, _ in chains:
        met = [n for n in chain if n in shared]
        if met:
            # a chain runs upwards: sums are shared as far up as possible, gathers as far down
            node = met[-1 if first else 0]
            chosen[node] = R if R in reached[node] else _first_shard(node)
    return chosen


def _first_shard(node: fx.Node) -> Placement:
    type_ = meta(node).type
    assert isinstance(type_, TensorType)
    return next((Shard(d) for d, n in enumerate(type_.shape) if batch_factor(n) is not None), R)


def _chain(node: fx.Node) -> list[fx.Node]:
    """Return a partial value and its ancestors through linear ops that do not enlarge it."""
    chain = [node]
    while True:
        operands = zip(tensor_operands(chain[-1]), meta(chain[-1]).operands, strict=False)
        partial = [s for s, wanted in operands if wanted == P and meta(s).placement == P]
        # the sum of two terms needs one reduction, the two terms need two
        if len(partial) != 1 or value_bytes(partial[0]) > value_bytes(chain[-1]):
            return chain
        chain.append(partial[0])


def _sources(propagation: ShardingPropagation, node: fx.Node) -> list[fx.Node]:
    """Return a sharded value and its ancestors through cheap ops, as far as these are no larger."""
    chain = [node]
    while True:
        source = propagation.values[chain[-1]].source
        if source is None or value_bytes(source) > value_bytes(node):
            return chain
        chain.append(source)


_MAX_ROUNDS = 3


@dataclass(frozen=True)
class BatchDimAnalyzer:
    """Give every tensor node a placement, the placements that its operands need, and the reason.

    before: `%mm: f32[256, 10] = aten.mm(%t_1, %grad)`
    after:  `%mm: f32[256, 10] {dp=P(sum)} = aten.mm(%t_1, %grad)`

    No value moves yet: where a producer's placement differs from the one that a consumer needs,
    `insert-collectives` inserts the redistribution. Two sizes that happen to be equal numbers decide nothing;
    only expressions in the batch `B` do.

    Parameters
    ----------
    batch : the batch dim of each input, None for an input without one.
    single_device_rng : draw random values full on every rank, as one device would.
    meanings : what the values of each input say about an axis; None, or none at all, for other values.
    bears_axes : rows that each rank selects of its part become an axis (`fxdp/ir/types/born_axes.py`), whose
        sizes ranks exchange. A program in micro-batches has no size of all of these, and gathers.
    """

    batch: tuple[int | None, ...]
    single_device_rng: bool = False
    meanings: tuple[Meaning | None, ...] = ()
    bears_axes: bool = True

    name = "batch-dim-analyzer"
    requires = Level.CAPTURED
    ensures = Level.PLACED

    def run(self, gm: fx.GraphModule, mesh: Mesh) -> fx.GraphModule:
        """Annotate the graph in place."""
        batch = self.batch if mesh.size > 1 else (None,) * len(self.batch)
        choices: dict[Any, Choice] = {}
        born = BornAxes(gm.graph) if self.bears_axes and mesh.size > 1 else None

        def propagation_at(at: Mapping[fx.Node, Placement]) -> ShardingPropagation:
            if born is not None:
                born.forget()
            one_rank, facts = mesh.size == 1, Facts(self.meanings, born)
            return ShardingPropagation(batch, self.single_device_rng, one_rank, at, choices, facts)

        best, redistribute_at = None, dict[fx.Node, Placement]()
        for _ in range(_MAX_ROUNDS):
            propagation = propagation_at(redistribute_at)
            propagation.run(gm.graph)
            if best is not None and propagation.cost > best.cost:
                break
            best = propagation
            wanted = {**_shared_redistributions(propagation), **redistribute_at}
            if wanted == redistribute_at:
                return gm
            redistribute_at = wanted
        assert best is not None
        if best is not propagation:
            propagation_at(best.redistribute_at).run(gm.graph)
        return gm
