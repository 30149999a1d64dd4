"""Make the order of collectives in a partitioned program equal on all ranks.

Ranks trace the same ops in the same order. But the partitioner decides by sizes, which may differ between
ranks, which values to save, and orders a backward by the saved values:

    joint graph     %a = all_reduce(..)     %b = all_reduce(..)
    backward        %b, then %a             if %a is needed late on this rank; restored to %a, %b
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import fx

from fxdp.ir.graph.graphs import ancestors
from fxdp.ir.ops.packed_sums import start_sums
from fxdp.ir.ops.parameter_shards import STARTS
from fxdp.lowering.forward_backward_pair import ForwardBackward

_WAITS = ("wait_tensor", "wait_tensors")


def collectives(graph: fx.Graph) -> list[str]:
    """Return the names of the nodes that start collectives, in the order in which they run."""
    return [node.name for node in graph.nodes if starts_collective(node)]


def put_in_order(gm: fx.GraphModule, names: Sequence[str]) -> None:
    """Move collectives into the order of `names`, each after the nodes it needs, if the order differs."""
    graph = gm.graph
    place = {name: i for i, name in enumerate(names)}
    wanted = sorted(filter(starts_collective, graph.nodes), key=lambda node: place.get(node.name, len(place)))
    if [node.name for node in wanted] == collectives(graph):
        return
    inputs = graph.find_nodes(op="placeholder")
    order: dict[fx.Node, None] = dict.fromkeys(inputs)
    for node in wanted:
        needed = ancestors([node])
        order |= dict.fromkeys(other for other in graph.nodes if other in needed)
    order |= dict.fromkeys(graph.nodes)
    for before, node in pairwise(order):
        before.append(node)
    graph.lint()


def order_lines(pair: ForwardBackward) -> list[str]:
    """Return the order of collectives as text, for comparison between ranks."""
    graphs = {"forward": pair.forward_graph, "backward": pair.backward_graph}
    return [f"{half}: {name}" for half, gm in graphs.items() if gm for name in collectives(gm.graph)]


def must_stay(graph: fx.Graph) -> bool:
    """Return whether Inductor must keep the order of a graph, instead of reordering to save memory.

    Inductor would start reductions that are in flight together right before their waits, one after another.
    Inductor preserves the order of torch's collectives, but does not know fxdp's gathers of sharded
    parameters. Depending on sizes, Inductor would move a gather across collectives on one rank and not on
    another, and both ranks would wait forever.
    """
    in_flight: set[fx.Node] = set()
    for node in graph.nodes:
        if starts_collective(node):
            in_flight.add(node)
        if getattr(node.target, "_opname", "") in _WAITS:
            in_flight.difference_update(node.all_input_nodes)
        if len(in_flight) > 1 or node.target in STARTS:
            return True
    return False


def communicates(node: fx.Node) -> bool:
    """Return whether a call starts a collective, or waits for one."""
    return starts_collective(node) or any(map(starts_collective, node.all_input_nodes))


def starts_collective(node: fx.Node) -> bool:
    """Return whether a call starts a collective."""
    return (
        node.target in STARTS
        or node.target is start_sums
        or (
            getattr(node.target, "namespace", "") == "_c10d_functional"
            and getattr(node.target, "_opname", "") not in _WAITS
        )
    )
