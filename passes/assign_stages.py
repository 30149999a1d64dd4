"""Assign a pipeline stage to every node of a program."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from fxdp.ir.graph.draws import number_draws
from fxdp.ir.graph.level import Level
from fxdp.ir.graph.metadata import meta
from fxdp.ir.types.mesh import Mesh
from fxdp.pipeline.cut.cut import assign
from fxdp.pipeline.cut.phases import find_phases
from fxdp.pipeline.cut.rounds import without_tangents


@dataclass(frozen=True)
class AssignStages:
    """Give every node that runs on a single stage the number of this stage, and a phase of the step.

    before: `%mm: f32[B, 256] {dp=S(0)} = aten.mm(%x, %t)`
    after:  `%mm: f32[B, 256] {stage=1 dp=S(0)} = aten.mm(%x, %t)`

    Cheap values that depend on inputs alone, and views of parameters, get no stage: each stage
    recomputes the ones that it reads.

    Parameters
    ----------
    stages : number of stages, balanced by cost; or the names of the modules at which stages 1, 2, ... begin.
    microbatches : number of parts into which a step splits each rank's batch.
    block : the samples in a block of the global batch, if the parts of a step are such blocks.

    Raises
    ------
    StageError : see `fxdp.pipeline.cut.cut.assign` and `fxdp.pipeline.cut.phases.find_phases`.
    """

    stages: int | tuple[str, ...] = 1
    microbatches: int = 1
    block: int | None = None

    name = "assign-stages"
    requires = Level.LOCAL
    ensures = Level.STAGED

    def run(self, gm: fx.GraphModule, mesh: Mesh) -> fx.GraphModule:
        """Annotate the graph in place."""
        phases = find_phases(gm.graph, self.microbatches, self.block)
        if phases.rounds.coupled:  # blocks wait for one another, with the backward as a part of the rounds
            without_tangents(gm.graph)
            phases = find_phases(gm.graph, self.microbatches, self.block)
        if self.block is not None:
            number_draws(gm.graph)
        assign(gm.graph, phases, self.stages, keeps_sums=self.block is not None)
        for node in phases.epilogue:
            meta(node).once = True
        return gm
