"""The gathers of a step's program: in it, before the first micro-batch, or as a program of their own.

in it      %gather_0 = gather_0(%batch, ..)        at each step
its own    %gather_0 = gather_0(%batch, ..)        when rows have changed
           return %w, ..
the step   %w = %entire[0]                          takes what that gave
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from fxdp.pipeline.cut.partition import Part, Partition
from fxdp.pipeline.schedule.schedule import Schedule
from fxdp.pipeline.write.happens_before import check_order
from fxdp.pipeline.write.stage_shards import StageShards
from fxdp.pipeline.write.step_graph import StepGraph


def write_gathers(
    step: StepGraph, partition: Partition, schedule: Schedule, sharded: StageShards, batch: fx.Node
) -> None:
    """Gather what the stages of this rank read."""
    sharded.collect()
    for stage, part in _own(partition, schedule, step.rank):
        name = f"gather_{stage}"
        step.keep_items(step.module(name, (batch, *sharded.gathered(part)), name), part.gives)


def write_gather_step(step: StepGraph, partition: Partition, schedule: Schedule) -> fx.Graph:
    """A program that does nothing else; its results are those that `take_gathered` takes.

    Raises
    ------
    VerifierError : a stream that does not wait for what it reads; a bug in fxdp.
    """
    batch, sharded = step.input("batch"), StageShards(step, partition, schedule)
    write_gathers(step, partition, schedule, sharded, batch)
    step.end(tuple(step.value(name, None) for name in gathered_names(partition, schedule, step.rank)))
    check_order(step.graph)
    return step.graph


def take_gathered(step: StepGraph, partition: Partition, schedule: Schedule, sharded: StageShards) -> None:
    """Take what such a program gave as an input of this one."""
    sharded.skip_collecting()
    # nothing on a rank whose stages read no weights; it is an input there, too
    step.keep_items(step.input("full"), gathered_names(partition, schedule, step.rank))


def gathered_names(partition: Partition, schedule: Schedule, rank: int) -> list[str]:
    """The names of what a rank gathers; two of its stages may read the same."""
    return list(dict.fromkeys(n for _, part in _own(partition, schedule, rank) for n in part.gives))


def _own(partition: Partition, schedule: Schedule, rank: int) -> Iterator[tuple[int, Part]]:
    for stage, part in enumerate(partition.gathers):
        if part is not None and schedule.placement[stage] == rank:
            yield stage, part
