"""Names of a part's collectives, as in the plan, for the ranges of a profile."""

from __future__ import annotations

from torch import fx

from fxdp.ir import redistributions
from fxdp.ir.graph.metadata import meta
from fxdp.ir.ops import exchanged_sizes
from fxdp.ir.ops.collectives import (
    start_all_gather,
    start_all_reduce,
    start_broadcast,
    start_moments,
    start_reduce_scatter,
)
from fxdp.ir.ops.parameter_shards import STARTS
from fxdp.ir.types.mesh import Mesh
from fxdp.lowering.eager import forward_nodes
from fxdp.runtime.ranges import Names

_STARTED_BY: dict[object, str] = {
    start_all_reduce: "all_reduce",
    start_moments: "all_gather_into_tensor",
    start_broadcast: "broadcast",
    start_all_gather: "all_gather_into_tensor",
    start_reduce_scatter: "reduce_scatter_tensor",
}
"""The torch op by which each function starts its communication."""


def message_names(planned: fx.Graph, emitted: fx.Graph, mesh: Mesh) -> tuple[Names, Names]:
    """Return the collectives of a part's forward and backward, in order, with their names in the plan.

    `planned` is the graph at LOCAL, `emitted` the graph that runs. Emission renames nodes in place, so both
    have the same order of collectives.
    """
    first = forward_nodes(emitted)
    forward: list[tuple[str, str]] = []
    backward: list[tuple[str, str]] = []
    started_by = {**_STARTED_BY, exchanged_sizes.start: "all_gather_into_tensor"}
    starts = [node for node in emitted.nodes if node.target in started_by or node.target in STARTS]
    for plan, run in zip(_travelling(planned, mesh), starts, strict=False):
        cause = meta(plan).cause
        name = plan.name if cause is None else f"{plan.name}: {cause.text or cause.consumer}"
        op = started_by.get(run.target) or str(getattr(run.target, "_opname", ""))
        (forward if run in first else backward).append((op, name))
    return forward, backward


def _travelling(graph: fx.Graph, mesh: Mesh) -> list[fx.Node]:
    found = ((node, redistributions.redistribution_of(node)) for node in graph.nodes)
    return [node for node, way in found if way and way.communicates and mesh.size_along(way.axis) > 1]
