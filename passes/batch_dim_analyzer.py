"""Choose the placement of every value of the joint graph along the batch axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from fxdp.ir.graph.level import Level
from fxdp.ir.types.mesh import Mesh
from fxdp.ir.types.placements import Placement
from fxdp.placing.propagation import Choice, ShardingPropagation
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
    points : the axis of which each input's values are row numbers; None, or none at all, for other values.
    """

    batch: tuple[int | None, ...]
    single_device_rng: bool = False
    points: tuple[str | None, ...] = ()

    name = "batch-dim-analyzer"
    requires = Level.CAPTURED
    ensures = Level.PLACED

    def run(self, gm: fx.GraphModule, mesh: Mesh) -> fx.GraphModule:
        """Annotate the graph in place."""
        batch = self.batch if mesh.size > 1 else (None,) * len(self.batch)
        choices: dict[Any, Choice] = {}
        best, redistribute_at = None, dict[fx.Node, Placement]()
        for _ in range(_MAX_ROUNDS):
            propagation = ShardingPropagation(
                batch, self.single_device_rng, mesh.size == 1, redistribute_at, choices, self.points
            )
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
            ShardingPropagation(
                batch, self.single_device_rng, mesh.size == 1, best.redistribute_at, choices, self.points
            ).run(gm.graph)
        return gm
