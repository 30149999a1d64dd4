"""A model compiled down to the parts that one rank runs, their sizes still open.

entire         one part, forward and backward in one graph; autograd asks for the backward when a loop does
scheduled     a prologue, a part per stage, epilogues; the backward runs inside of the call
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from fxdp.capture.captured import Captured
from fxdp.ir.dtensor_specs import annotated, data_mesh
from fxdp.ir.graph_text import graph_text
from fxdp.ir.mesh import Mesh
from fxdp.options import Options
from fxdp.pipeline.cut.partition import Part, Partition, backward_parts
from fxdp.pipeline.schedule import csv
from fxdp.pipeline.schedule.schedule import Schedule
from fxdp.pipeline.write.microbatches import MicrobatchSizes
from fxdp.pipeline.write.step_graph import StepGraph
from fxdp.pipeline.write.writer import Recompute, Writer
from fxdp.reports.plan import program_text


@dataclass(frozen=True)
class ScheduledStep:
    """How the parts of a program run inside of one call."""

    schedule: Schedule
    loss: int | None
    """The output whose backward the step contains; None without a backward."""
    not_differentiated: frozenset[int] = frozenset()
    """Other outputs that depend on parameters: the step has no backward for them."""


@dataclass
class Program:
    """A model compiled down to one rank's parts; executables are made from it."""

    captured: Captured
    gm: fx.GraphModule
    """The program before it is cut."""
    mesh: Mesh
    options: Options
    causes: fx.GraphModule
    """The program before bucketing: one collective per value."""
    partition: Partition
    step: ScheduledStep | None = None
    """None for a program that is not cut."""
    seconds: dict[str, float] = field(default_factory=dict)
    nodes: int = 0
    choice: tuple[str, ...] = ()
    """What was chosen by memory and why, in words; none where nothing was to be chosen."""
    predicted: int = 0
    """The bytes of its peak, where there is a limit."""
    most_samples: int | None = None
    """With more on all ranks together another program may send less; None: it sends the same of any batch."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parts, in no order of time."""
        cut = self.partition
        every = (cut.prologue, *cut.gathers, *cut.parts, *cut.epilogues)
        return tuple(part for part in every if part is not None)

    @property
    def text(self) -> str:
        """The golden text of the program, the same on all ranks."""
        return program_text(self.gm, self.mesh.shape)

    @property
    def digest(self) -> str:
        """A hash of the program that ranks compare, constants to the last digit."""
        text = graph_text(self.gm, {"ranks": self.mesh.size}, causes=False, exact=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def scheduled(self) -> ScheduledStep:
        """How the parts run inside of one call, of a program that has more than one."""
        assert self.step is not None, "a program that is not cut has no schedule"
        return self.step

    def schedule_lines(self) -> list[str]:
        """The schedule that was chosen or read, which ranks compare."""
        return [] if self.step is None else csv.write(self.step.schedule).splitlines()

    @property
    def run_schedule(self) -> Schedule:
        """The schedule as ranks run it: a stage sends the gradient for which another rank waits before it
        computes those of its weights; the last one leaves before the weights of two micro-batches.

        Where a step computes again what it could keep, memory is dear: no stage holds more than it must.
        """
        schedule = self.scheduled().schedule
        placement = schedule.placement
        awaited = {
            e.source for e in self.partition.edges
            if e.backward and not e.once and placement[e.source] != placement[e.target]
        }  # fmt: skip
        split = [s for s in awaited if backward_parts(self.partition, s)[1]]
        return schedule.gradients_first(split, holds_more=self.options.checkpoint == "never")

    @property
    def gathers_apart(self) -> bool:
        """Whether parameters are gathered when rows have changed, and not at each call."""
        return self.options.keeps_unsharded and any(part is not None for part in self.partition.gathers)

    def step_graph(self, layout: MicrobatchSizes, rank: int) -> StepGraph:
        """What the program of a pipeline rank is written into."""
        return StepGraph(rank, layout.sizes, self.mesh.sharding)

    def writer(self, layout: MicrobatchSizes, rank: int) -> Writer:
        """What writes the step of one pipeline rank."""
        return Writer(
            self.step_graph(layout, rank),
            self.partition,
            self.run_schedule,
            layout.bounds,
            self.captured.batch,
            self.options.gradients == "everywhere",
            Recompute(self.options.checkpoint, self.options.microbatches),
            self.mesh.size,
            self.gathers_apart,
        )

    def graph(self, sizes: Mapping[str, int], device_mesh: DeviceMesh | None = None) -> fx.GraphModule:
        """The program of the global batch with its collectives and a `DTensorSpec` on each tensor's node."""
        return annotated(self.causes, data_mesh(self.mesh, device_mesh), sizes)
