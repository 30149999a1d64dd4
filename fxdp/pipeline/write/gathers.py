"""Write the all-gathers of a step: before the first micro-batch, or as a separate program.

in the step    %gather_0 = gather_0(%batch, ..)        at each step
separate       %gather_0 = gather_0(%batch, ..)        only when shards have changed
               return %w, ..
the step then  %w = %full[0]                           reads the results of the separate program
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from fxdp.pipeline.cut.partition import Part, Partition
from fxdp.pipeline.schedule.schedule import Schedule
from fxdp.pipeline.write.happens_before import check_order
from fxdp.pipeline.write.stage_shards import StageShards
from fxdp.pipeline.write.step_graph import StepGraph
from fxdp.runtime import p2p


def write_gathers(
    step: StepGraph,
    partition: Partition,
    schedule: Schedule,
    sharded: StageShards,
    batch: fx.Node,
    *,
    aligned: bool,
) -> None:
    """Gather the sharded parameters that the stages of this rank read.

    With `aligned` each is copied into memory of its own: where a gather puts a parameter depends on the mesh,
    and kernels of a few rows compute other bits from another alignment.
    """
    sharded.collect()
    for stage, part in _own(partition, schedule, step.rank):
        name = f"gather_{stage}"
        made = step.module(name, (batch, *sharded.gathered(part)), name)
        step.keep_items(made, part.gives)
        for value in part.gives if aligned else ():
            step.keep(value, None, step.function(p2p.aligned, (step.value(value, None),), f"aligned_{value}"))


def write_gather_step(
    step: StepGraph, partition: Partition, schedule: Schedule, *, aligned: bool
) -> fx.Graph:
    """Write a program of only the all-gathers; the results are the inputs that `take_gathered` expects.

    Raises
    ------
    VerifierError : a stream reads a value without a wait; a bug in fxdp.
    """
    batch, sharded = step.input("batch"), StageShards(step, partition, schedule)
    write_gathers(step, partition, schedule, sharded, batch, aligned=aligned)
    step.end(tuple(step.value(name, None) for name in _gathered_names(partition, schedule, step.rank)))
    check_order(step.graph)
    return step.graph


def take_gathered(step: StepGraph, partition: Partition, schedule: Schedule, sharded: StageShards) -> None:
    """Read the results of the separate gather program from the input `full`."""
    sharded.skip_collecting()
    # empty on a rank whose stages read no weights, but an input there, too
    step.keep_items(step.input("full"), _gathered_names(partition, schedule, step.rank))


def _gathered_names(partition: Partition, schedule: Schedule, rank: int) -> list[str]:
    """Return the names of the values that a rank gathers; one that two stages read appears once."""
    return list(dict.fromkeys(n for _, part in _own(partition, schedule, rank) for n in part.gives))


def _own(partition: Partition, schedule: Schedule, rank: int) -> Iterator[tuple[int, Part]]:
    for stage, part in enumerate(partition.gathers):
        if part is not None and schedule.placement[stage] == rank:
            yield stage, part
