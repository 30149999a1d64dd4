"""Place every value of the joint graph on the batch axis: the BatchDimAnalyzer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from fxdp.ir.level import Level
from fxdp.ir.mesh import Mesh
from fxdp.ir.placements import Placement
from fxdp.placing.sharing import shared_conversions
from fxdp.placing.walk import Choice, Walk

_MAX_ROUNDS = 3


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

    def run(self, gm: fx.GraphModule, mesh: Mesh) -> fx.GraphModule:
        """Annotate the graph in place."""
        batch = self.batch if mesh.size > 1 else (None,) * len(self.batch)
        choices: dict[Any, Choice] = {}
        best, convert_at = None, dict[fx.Node, Placement]()
        for _ in range(_MAX_ROUNDS):
            walk = Walk(batch, self.single_device_rng, mesh.size == 1, convert_at, choices)
            walk.run(gm.graph)
            if best is not None and walk.cost > best.cost:
                break
            best = walk
            wanted = {**shared_conversions(walk), **convert_at}
            if wanted == convert_at:
                return gm
            convert_at = wanted
        assert best is not None
        if best is not walk:
            Walk(batch, self.single_device_rng, mesh.size == 1, best.convert_at, choices).run(gm.graph)
        return gm
