"""Summarize each stage of a program for people: rank, share of the work, parameters, bytes sent."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from fxdp.ir.graph.metadata import meta
from fxdp.ir.graph.regions import region_of
from fxdp.ir.graph.signature import Parameter
from fxdp.ir.types.value_types import type_bytes
from fxdp.pipeline.cut.cost import node_cost
from fxdp.pipeline.cut.partition import Partition
from fxdp.pipeline.schedule.schedule import Schedule
from fxdp.pipeline.write.step_graph import Sent
from fxdp.reports.rows import StageRow


def stage_rows(
    gm: fx.GraphModule, partition: Partition, schedule: Schedule, sent: Sequence[Sent]
) -> tuple[StageRow, ...]:
    """Return one row per stage; `sent` lists the transfers of all pipeline ranks in a step."""
    stages = range(partition.stages)
    costs = [_cost(gm, stage) for stage in stages]
    bytes_ = [0] * partition.stages
    for item in sent:
        bytes_[_sender(item, partition, schedule)] += item.bytes
    held, ranks, all_ = _held(partition), schedule.placement, sum(costs) or 1.0
    return tuple(StageRow(s, ranks[s], _begins(gm, s), costs[s] / all_, *held[s], bytes_[s]) for s in stages)


def _cost(gm: fx.GraphModule, stage: int) -> float:
    """Return the cost of forward and backward for a micro-batch, in the units of `fxdp.pipeline.cut.cost`."""
    own = (n for n in gm.graph.nodes if n.op == "call_function" and meta(n).stage == stage)
    return float(sum(node_cost(n) for n in own if not meta(n).once))


def _begins(gm: fx.GraphModule, stage: int) -> str:
    """Return the module of the stage's first op; empty for the model itself."""
    own = (n for n in gm.graph.nodes if meta(n).stage == stage and not meta(n).backward)
    return next(map(region_of, own), "")


def _held(partition: Partition) -> list[tuple[int, int]]:
    """Return elements and bytes of the parameters of each stage; the first stage that reads is the owner."""
    seen: set[Parameter] = set()
    found = []
    gathers = partition.gathers or (None,) * partition.stages
    for part, gather in zip(partition.parts, gathers, strict=True):
        elements = bytes_ = 0
        for spec, type_ in {**part.parameters, **(gather.parameters if gather else {})}.items():
            if spec not in seen:
                seen.add(spec)
                more = type_bytes(type_, {})
                elements, bytes_ = elements + more // type_.dtype.itemsize, bytes_ + more
        found.append((elements, bytes_))
    return found


def _sender(item: Sent, partition: Partition, schedule: Schedule) -> int:
    """Return the stage that made the value; for a message of several values, the rank's first stage."""
    for edge in partition.edges:
        if edge.name == item.name:
            return edge.source
    total = partition.totals.get(item.name)
    return schedule.placement.index(item.source) if total is None else total.stage
