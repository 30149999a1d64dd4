"""Assign a pipeline stage to every node of a program."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from fxdp.errors import StageError
from fxdp.ir.graph.draws import number_draws
from fxdp.ir.graph.level import Level
from fxdp.ir.graph.metadata import meta
from fxdp.ir.types.mesh import Mesh
from fxdp.pipeline.cut.cut import assign
from fxdp.pipeline.cut.phases import Phases, fault_lines, find_phases, own_statistics
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
        if phases.rounds.coupled:
            phases = self._coupled(gm.graph, phases)
        if self.block is not None:
            number_draws(gm.graph)
        assign(gm.graph, phases, self.stages, keeps_sums=self.block is not None)
        for node in phases.epilogue:
            meta(node).once = True
        for node in phases.rounds.once:
            stages = (meta(operand).stage for operand in node.all_input_nodes)
            meta(node).stage = next((stage for stage in stages if stage is not None), None)
        return gm

    def _coupled(self, graph: fx.Graph, phases: Phases) -> Phases:
        """Let blocks wait for one another in the midst of the model, with the backward as a part of it."""
        coupled = phases.rounds.coupled
        if self.stages not in (1, ()):
            raise StageError(
                f"fxdp.Bitwise(block={self.block}) with stages: the model needs values of the global batch "
                f"in the midst of a block:\n  {fault_lines(coupled)}\nUse a mesh without pp for this model, "
                f"or layers that treat samples alone (GroupNorm, LayerNorm){own_statistics(coupled)}"
            )
        without_tangents(graph)
        return find_phases(graph, self.microbatches, self.block)
