"""Choose the placement of every value of the joint graph along the batch axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from fxdp.ir.graph.level import Level
from fxdp.ir.types.meanings import Meaning
from fxdp.ir.types.mesh import Mesh
from fxdp.ir.types.placements import Placement
from fxdp.placing.facts import Facts
from fxdp.placing.propagation import Choice, ShardingPropagation
from fxdp.placing.selections import BornAxes
from fxdp.placing.sharing import shared_redistributions

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
            wanted = {**shared_redistributions(propagation), **redistribute_at}
            if wanted == redistribute_at:
                return gm
            redistribute_at = wanted
        assert best is not None
        if best is not propagation:
            propagation_at(best.redistribute_at).run(gm.graph)
        return gm
