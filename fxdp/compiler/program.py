"""A model compiled down to the parts that one rank runs, with symbolic sizes.

not cut       one part, forward and backward in one graph; `loss.backward()` starts the backward
scheduled     a prologue, a part per stage, epilogues; the backward runs inside the call
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from fxdp.capture.captured import Captured
from fxdp.ir.graph.dtensor_specs import annotated, data_mesh
from fxdp.ir.graph.graph_text import graph_text
from fxdp.ir.types.mesh import Mesh
from fxdp.ir.types.sizes import Split
from fxdp.lowering.inductor.strides import traces_channels_last
from fxdp.options import Options
from fxdp.pipeline.cut.image_formats import images
from fxdp.pipeline.cut.partition import Part, Partition, backward_parts
from fxdp.pipeline.schedule import csv
from fxdp.pipeline.schedule.catalogue import make
from fxdp.pipeline.schedule.schedule import Schedule
from fxdp.pipeline.write.microbatches import MicrobatchSizes, Recompute
from fxdp.pipeline.write.step_graph import StepGraph
from fxdp.pipeline.write.writer import Writer
from fxdp.reports.plan import program_text


@dataclass(frozen=True)
class ScheduledStep:
    """The schedule by which the parts of a program run inside one call."""

    schedule: Schedule
    loss: int | None
    """Index of the output from which the step's backward starts; None without a backward."""
    not_differentiated: frozenset[int] = frozenset()
    """Indices of further outputs that depend on parameters: the step has no backward for these."""


@dataclass
class Program:
    """A model compiled down to one rank's parts, from which executables are made."""

    captured: Captured
    gm: fx.GraphModule
    """The program before the cut."""
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
    """The strategy that was chosen by memory, and the reason, as lines of text; empty without a choice."""
    predicted: int = 0
    """Predicted peak memory in bytes, if there is a limit."""
    most_samples: int | None = None
    """Samples on all ranks together above which another program may send less; None: valid for any batch."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """All parts, in no particular order."""
        return self.partition.everything

    @cached_property
    def images(self) -> frozenset[str]:
        """The names of values that parts pass to one another channels-last, where Inductor compiles these."""
        lays_out = self.options.fuses_blocks and traces_channels_last(torch.device(self.mesh.device_type))
        return images(self.gm.graph) if lays_out else frozenset()

    @property
    def text(self) -> str:
        """The golden text of the program, equal on all ranks."""
        return program_text(self.gm, self.mesh.shape)

    @property
    def digest(self) -> str:
        """Hash of the program with exact constants, which ranks compare."""
        text = graph_text(self.gm, {"ranks": self.mesh.size}, causes=False, exact=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def scheduled(self) -> ScheduledStep:
        """Return the scheduled step of a program that is cut."""
        assert self.step is not None, "a program that is not cut has no schedule"
        return self.step

    def schedule_lines(self) -> list[str]:
        """Return the chosen or given schedule as lines of text, which ranks compare."""
        return [] if self.step is None else csv.write(self.step.schedule).splitlines()

    def layout(self, sizes: Mapping[str, int], batches: Sequence[int] = ()) -> MicrobatchSizes:
        """Return the micro-batches, or blocks, of a rank's batch with these sizes.

        `batches`, the sizes by rank, say where a ragged batch is cut; without them the cuts are even.
        """
        rank, cuts = self.mesh.rank, batches.cuts if isinstance(batches, Split) else None
        if self.options.block is None:
            ends = None if cuts is None else cuts.ends
            return MicrobatchSizes.of(sizes, self.options.pipeline.microbatches, rank, ends)
        if cuts is not None:
            return MicrobatchSizes.of_ragged_blocks(sizes, self.options.block, rank, cuts)
        return MicrobatchSizes.of_blocks(sizes, self.options.block)

    @property
    def placement(self) -> tuple[int, ...]:
        """The pipeline rank of each stage."""
        return self.scheduled().schedule.placement

    def schedule_of(self, microbatches: int) -> Schedule:
        """Return the schedule for this number of micro-batches."""
        known = self.scheduled().schedule
        if known.microbatches == microbatches:
            return known
        name = known.name if self.partition.coupled else self.options.pipeline.schedule
        made = make(name, known.stages, len(known.ranks), microbatches)
        return made if known.trains else made.forward_only()

    @property
    def drawn_schedule(self) -> Schedule:
        """The schedule for plans: where blocks wait for one another, their rounds."""
        known = self.scheduled().schedule
        coupled = self.partition.coupled
        return self.partition.rounds_schedule(known.placement, known.microbatches) if coupled else known

    def run_schedule(self, microbatches: int) -> Schedule:
        """Return the schedule as ranks run it: gradients that a rank waits for come before those of weights.

        A stage sends the awaited gradient first; the last stage may postpone the weights of two
        micro-batches. If a step recomputes activations (`activation_checkpointing`), memory is scarce: no
        stage holds more than necessary.
        """
        schedule = self.schedule_of(microbatches)
        if self.options.fuses_blocks:  # in halves, ops would be fused otherwise than on a mesh without stages
            return schedule
        placement = schedule.placement
        awaited = {
            e.source for e in self.partition.edges
            if e.backward and not e.once and placement[e.source] != placement[e.target]
        }  # fmt: skip
        split = [s for s in awaited if backward_parts(self.partition, s)[1]]
        keeps = self.options.activation_checkpointing.mode == "never"
        return schedule.gradients_first(split, holds_more=keeps)

    @property
    def gathers_apart(self) -> bool:
        """True if parameters are gathered only after their shards have changed, and not at each call."""
        return self.options.keeps_unsharded and any(part is not None for part in self.partition.gathers)

    def step_graph(self, layout: MicrobatchSizes, rank: int) -> StepGraph:
        """Return an empty graph for the step of one pipeline rank."""
        return StepGraph(rank, layout.sizes, self.mesh.sharding, self.mesh.size > 1)

    def writer(self, layout: MicrobatchSizes, rank: int) -> Writer:
        """Return the writer of the step of one pipeline rank."""
        return Writer(
            self.step_graph(layout, rank),
            self.partition,
            self.run_schedule(layout.count),
            layout,
            self.captured.batch,
            [*zip(self.captured.axes.names, self.captured.axes.points, strict=True)],
            self.options.pipeline.gradients == "everywhere",
            Recompute(self.options.activation_checkpointing.mode, layout.count),
            self.mesh.size,
            self.gathers_apart,
        )

    def graph(self, sizes: Mapping[str, int], device_mesh: DeviceMesh | None = None) -> fx.GraphModule:
        """Return the global batch's program with its collectives, and a `DTensorSpec` on each tensor node."""
        return annotated(self.causes, data_mesh(self.mesh, device_mesh), sizes)
