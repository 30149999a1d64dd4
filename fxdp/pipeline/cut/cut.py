"""Assign a stage to each node: a contiguous cut of the forward, which the backward follows.

forward    stages are ranges of the forward's own nodes, in graph order
backward   the stage of the differentiated forward op, or that of the earliest operand if that is less:
           so values of the forward only move to later stages, values of the backward only to earlier ones
epilogue   the least stage among the operands, also for sums of a tied parameter's gradients over stages
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence

from torch import fx

from fxdp.errors import StageError
from fxdp.ir import redistributions
from fxdp.ir.graph.metadata import meta, sequence_number, value_bytes
from fxdp.ir.graph.regions import is_within, region_of, regions_of, similar_regions
from fxdp.ir.op_kinds import is_view
from fxdp.ir.types.value_types import TensorType
from fxdp.pipeline.cut.balance import balance
from fxdp.pipeline.cut.cost import node_cost
from fxdp.pipeline.cut.phases import Phases
from fxdp.pipeline.cut.rounds import place_once
from fxdp.torch_compat import aten

_ADD = aten.add.Tensor


def assign(graph: fx.Graph, phases: Phases, stages: int | Sequence[str], *, keeps_sums: bool = False) -> None:
    """Set `meta(node).stage` on every node that belongs to one stage.

    With `keeps_sums` gradients of a tied parameter are added in each micro-batch, in the order of one stage,
    and not once per step after the sums of each stage.

    Raises
    ------
    StageError : more stages than places to cut, or names of modules that the forward does not pass through.
    """
    forward = [n for n in graph.nodes if phases.is_own(n) and n not in phases.backward]
    starts = _starts(graph, forward, phases, stages)
    places = {n: i for i, n in enumerate(forward)} | _homes(graph, forward, phases)
    for node, place in places.items():
        meta(node).stage = sum(place >= start for start in starts)
    _keep_views_at_home(graph, phases)
    if not keeps_sums:
        _split_sums(graph, phases)
    place_once(graph, phases.rounds)
    _place_epilogue(graph, phases)


def _starts(
    graph: fx.Graph, forward: list[fx.Node], phases: Phases, stages: int | Sequence[str]
) -> list[int]:
    """Return the first nodes of stages 1, 2, ...: as named, or balanced with few crossing bytes."""
    if not isinstance(stages, int):
        return _named(forward, stages)
    try:
        return list(balance(_costs(graph, forward, phases), _crossing(forward), stages))
    except StageError as error:
        raise StageError(f"fxdp.Pipeline(stages={stages}): {error}") from error


def _costs(graph: fx.Graph, forward: list[fx.Node], phases: Phases) -> list[float]:
    """Return the cost of each forward node, including the backward nodes that follow to the same stage."""
    found = [node_cost(node) for node in forward] or [0.0]
    for node, home in _homes(graph, forward, phases).items():
        found[home] += node_cost(node)
    return found


def _homes(graph: fx.Graph, forward: list[fx.Node], phases: Phases) -> dict[fx.Node, int]:
    """Return for each backward node the forward node that determines the stage, as an index, for any cut.

    This is the differentiated op, or the home of a backward operand if that is earlier. Autograd numbers a
    sum of gradients like the last op of all, so the operands of a sum determine its home.
    """
    position = {node: i for i, node in enumerate(forward)}
    differentiated: dict[int, int] = {}
    for node, i in position.items():
        number = sequence_number(node)
        if number is not None:
            differentiated.setdefault(number, i)
    homes: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node not in phases.backward:
            continue
        operands = [a for a in node.all_input_nodes if a in homes or a in position]
        if node.target is operator.getitem or node.target is redistributions.wait:
            # does no work by itself: a tuple and its items must stay together
            homes[node] = homes.get(operands[0], position.get(operands[0], 0))
            continue
        bounds = [homes[a] for a in operands if a in homes]
        number = sequence_number(node)
        if number is not None and number in differentiated:
            bounds.append(differentiated[number])
        homes[node] = min(bounds or [max((position[a] for a in operands), default=max(0, len(forward) - 1))])
    return homes


def _crossing(forward: list[fx.Node]) -> list[float]:
    """Return the bytes that would cross a cut after each node; infinity where a cut is impossible."""
    position = {n: i for i, n in enumerate(forward)}
    change, blocked = [0.0] * (len(forward) + 1), [False] * len(forward)
    bases = {n: _base(n, position) for n in forward}
    last: dict[fx.Node, int] = {}
    for node in forward:
        for user in node.users:
            if user in position:
                base = bases[node]
                last[base] = max(last.get(base, 0), position[user])
    for base, end in last.items():
        start = position[base]
        if base.target in redistributions.COLLECTIVES or not isinstance(meta(base).type, TensorType):
            # a collective before its wait, or a tuple, cannot be sent
            blocked[start:end] = [True] * (end - start)
            continue
        change[start] += value_bytes(base)
        change[end] -= value_bytes(base)
    running = itertools.accumulate(change[: len(forward) - 1])
    return [float("inf") if closed else size for closed, size in zip(blocked, running, strict=False)]


def _base(node: fx.Node, position: dict[fx.Node, int]) -> fx.Node:
    """Return the value to send for a view: the base, unless the base is larger."""
    while is_view(node.target):
        source = node.all_input_nodes[0]
        if source not in position or value_bytes(source) > value_bytes(node):
            return node
        node = source
    return node


def _named(forward: list[fx.Node], names: Sequence[str]) -> list[int]:
    """Return the index of the first op in each of the named modules."""
    faults, starts = [], []
    for name in names:
        at = next((i for i, node in enumerate(forward) if is_within(region_of(node), name)), None)
        if at is None:
            near = similar_regions(name, regions_of(forward))
            hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
            faults.append(f"no op of the forward is in a module {name!r}{hint}")
        else:
            starts.append(at)
    if not faults and (starts != sorted(set(starts)) or 0 in starts):
        faults.append(
            f"the modules begin at ops {starts} of {len(forward)}: expected each after the one before, and "
            "the first after the model's own beginning (stage 0 begins by itself)"
        )
    if faults:
        listing = "\n  ".join(faults)
        raise StageError(f"fxdp.Pipeline(stages=[...]) names modules at which stages begin:\n  {listing}")
    return starts


def _keep_views_at_home(graph: fx.Graph, phases: Phases) -> None:
    """Move a view that only the results read to the base's stage, so that no stage sends the view."""
    output = graph.output_node()
    for node in graph.nodes:
        if meta(node).stage is None or not is_view(node.target) or node in phases.backward:
            continue
        base = node.all_input_nodes[0]
        if meta(base).stage is not None and all(user is output for user in node.users):
            meta(node).stage = meta(base).stage


def _split_sums(graph: fx.Graph, phases: Phases) -> None:
    """Move sums of gradients from different stages to the epilogue, after each stage's own sum."""
    output = graph.output_node()
    for node in reversed(graph.nodes):
        if node not in phases.backward or not _is_sum(node) or not _spans(node, phases):
            continue
        # only if no other op of the backward reads the sum, which exists only after the last micro-batch
        if all(user is output or user in phases.epilogue for user in node.users):
            phases.epilogue.add(node)
            phases.backward.discard(node)


def _is_sum(node: fx.Node) -> bool:
    """Return whether a node adds two values of the result's own type."""
    if node.target is not _ADD or node.kwargs:
        return False
    return all(isinstance(a, fx.Node) and meta(a).type == meta(node).type for a in node.args)


def _spans(node: fx.Node, phases: Phases) -> bool:
    """Return whether the sum, or a nested sum, adds values of different stages."""
    operands = [a for a in node.all_input_nodes if a in phases.backward]
    if len({meta(a).stage for a in operands}) > 1:
        return True
    return any(_is_sum(a) and len(a.users) == 1 and _spans(a, phases) for a in operands)


def _place_epilogue(graph: fx.Graph, phases: Phases) -> None:
    for node in graph.nodes:
        if node in phases.epilogue:
            stages = [s for a in node.all_input_nodes if (s := meta(a).stage) is not None]
            meta(node).stage = min(stages, default=0)
