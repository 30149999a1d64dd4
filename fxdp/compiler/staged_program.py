"""A model compiled down to the parts of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import cast

from torch.distributed.device_mesh import DeviceMesh

from fxdp.compiler.emit import LocalProgram
from fxdp.pipeline.cut import Partition
from fxdp.pipeline.cut.partition import halves_of
from fxdp.pipeline.schedule import Edge, Schedule
from fxdp.pipeline.write.microbatches import MicrobatchSizes
from fxdp.pipeline.write.step_graph import Sent, StepGraph
from fxdp.pipeline.write.writer import Recompute, Writer
from fxdp.reports.plan import CommRow, Plan, communication
from fxdp.reports.stages import stage_rows


@dataclass
class StagedProgram(LocalProgram):
    """A model compiled down to the parts of a step, their sizes still open."""

    partition: Partition = field(default_factory=lambda: cast(Partition, None))
    schedule: Schedule = field(default_factory=lambda: cast(Schedule, None))
    loss: int | None = None
    """The output whose backward the step contains; None without a backward."""
    not_differentiated: frozenset[int] = frozenset()
    """Other outputs that depend on parameters: the step has no backward for them."""

    @property
    def run_schedule(self) -> Schedule:
        """The schedule as ranks run it: a stage sends the gradient for which another rank waits before it
        computes those of its weights.
        """
        placement = self.schedule.placement
        awaited = {
            e.source for e in self.partition.edges
            if e.backward and not e.once and placement[e.source] != placement[e.target]
        }  # fmt: skip
        return self.schedule.gradients_first([s for s in awaited if halves_of(self.partition, s)[1]])

    def writer(self, layout: MicrobatchSizes, rank: int) -> Writer:
        """What writes the program of one pipeline rank."""
        return Writer(
            StepGraph(rank, layout.sizes),
            self.partition,
            self.run_schedule,
            layout.bounds,
            self.captured.batch,
            self.options.gradients == "everywhere",
            Recompute(self.options.checkpoint, self.options.microbatches),
            self.mesh.size,
        )

    def plan(self, sizes: Mapping[str, int], device_mesh: DeviceMesh | None = None) -> Plan:
        """The plan of a step: collectives of the data axes, and what all pipeline ranks send one another.

        `sizes` are those of the rank's whole batch; without `b`, all data ranks have equally many samples.
        """
        equal = sizes["B"] // self.mesh.size
        layout = MicrobatchSizes.of(
            {"b": equal, "offset": 0, "b_max": equal, **sizes}, self.options.microbatches
        )
        sent: list[Sent] = []
        for rank in range(len(self.schedule.ranks)):
            writer = self.writer(layout, rank)
            writer.write()
            sent += writer.step.sent
        edges = tuple(Edge(e.name, e.source, e.target, e.backward, e.once) for e in self.partition.edges)
        return replace(
            super().plan(sizes, device_mesh),
            communication=(*self._collectives(sizes), *self._transfers(sent)),
            schedule=self.schedule,
            edges=edges,
            stages=stage_rows(self.gm, self.partition, self.schedule, sent),
        )

    def _collectives(self, sizes: Mapping[str, int]) -> list[CommRow]:
        if self.mesh.size == 1:
            return []
        parts = [self.partition.prologue, *self.partition.parts, *self.partition.epilogues]
        return [row for p in parts if p is not None for row in communication(p.gm, sizes, self.mesh)]

    def _transfers(self, sent: list[Sent]) -> list[CommRow]:
        """One row per value, from and to, and direction; all micro-batches together."""
        edges = {e.name: e for e in self.partition.edges}
        groups: dict[tuple[str, int, int, bool], list[Sent]] = {}
        for item in sent:
            groups.setdefault((item.name, item.source, item.target, item.backward), []).append(item)
        rows = []
        for (name, source, target, backward), items in groups.items():
            edge = edges.get(name)
            skip = f", skip {edge.skip}" if edge is not None and edge.skip else ""
            cause = f"{name} from pipeline rank {source} to {target}{skip}"
            site = "" if edge is None else str(edge.site)
            size, phase = sum(item.bytes for item in items), "backward" if backward else "forward"
            rows.append(CommRow("send", size, len(items), cause, site, phase, by=self.mesh.backend))
        return rows
