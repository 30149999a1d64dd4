"""The order of the collectives in the halves of a traced program: the same on all ranks.

Ranks trace the same ops in the same order. But what the partitioner saves depends on sizes, which may differ
between ranks, and it orders a backward by what is saved:

    joint graph     %a = all_reduce(..)     %b = all_reduce(..)
    backward        %b, then %a             as %a happens to be needed late on this rank; put back as %a, %b
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import fx

from fxdp.ir.graphs import ancestors
from fxdp.ir.ops.packed_sums import start_sums
from fxdp.ir.ops.parameter_shards import STARTS
from fxdp.lowering.forward_backward_pair import ForwardBackward

_WAITS = ("wait_tensor", "wait_tensors")


def collectives(graph: fx.Graph) -> list[str]:
    """The names of the nodes that start collectives, in the order in which they run."""
    return [node.name for node in graph.nodes if starts_collective(node)]


def put_in_order(gm: fx.GraphModule, names: Sequence[str]) -> None:
    """Run the collectives in the order of `names`, each after what it needs; nothing moves without need."""
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
    """The order as text, to be compared between ranks."""
    graphs = {"forward": pair.forward_graph, "backward": pair.backward_graph}
    return [f"{half}: {name}" for half, gm in graphs.items() if gm for name in collectives(gm.graph)]


def must_stay(graph: fx.Graph) -> bool:
    """Whether Inductor may not reorder a half: for memory's sake it would.

    Sums that are under way together, while the rest is computed, it would start right before their waits, one
    after another. It takes care that collectives of torch's keep their order, but it does not know our
    gathers of sharded parameters, and would move them against the others on one rank and not on another, as
    sizes have it: both would wait forever.
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
    """Whether a call starts a collective, or waits for one."""
    return starts_collective(node) or any(map(starts_collective, node.all_input_nodes))


def starts_collective(node: fx.Node) -> bool:
    """Whether a call starts a collective."""
    return (
        node.target in STARTS
        or node.target is start_sums
        or (
            getattr(node.target, "namespace", "") == "_c10d_functional"
            and getattr(node.target, "_opname", "") not in _WAITS
        )
    )
