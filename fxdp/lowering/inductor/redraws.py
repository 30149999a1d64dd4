"""Numbers that the backward would draw a second time are saved by the forward instead.

The partitioner recomputes what is cheap, and with `torch._functorch.config.activation_memory_budget` or
`aggressive_recomputation` nearly everything. A random op that ran again would draw other numbers; of
Inductor's own the seeds are drawn, a few bytes, and the numbers made of them may well be recomputed.
"""

from __future__ import annotations

import operator

from torch import fx

from fxdp.ir.draws import draws


def save_draws(forward: fx.GraphModule, backward: fx.GraphModule, first_saved: int) -> None:
    """Cut the drawing nodes of `backward` and read their results from `forward`, which saves them.

    `first_saved` counts the results of `forward` before those that it saves.
    """
    saved: list[fx.Node] = []
    own = {node.name: node for node in forward.graph.nodes}
    for node in _cuts(backward.graph):
        saved.append(_saved(forward.graph, own, node))
        with backward.graph.inserting_before(next(iter(backward.graph.nodes))):
            given = backward.graph.placeholder(node.name)
        given.meta = dict(node.meta)
        node.replace_all_uses_with(given)
        backward.graph.erase_node(node)
        given.name = node.name
    if saved:
        results = list(forward.graph.output_node().args[0])  # type: ignore[arg-type]
        forward.graph.output_node().args = ((*results[:first_saved], *saved, *results[first_saved:]),)


def _cuts(graph: fx.Graph) -> list[fx.Node]:
    """The drawn values; of a tuple those that are picked."""
    found: list[fx.Node] = []
    for node in graph.nodes:
        if node.op == "call_function" and draws(node.target, node.args, node.kwargs):
            picks = [user for user in node.users if user.target is operator.getitem]
            found += picks or [node]
    return found


def _saved(graph: fx.Graph, own: dict[str, fx.Node], node: fx.Node) -> fx.Node:
    if node.name in own:
        return own[node.name]
    source, index = node.args  # a pick that the forward had no use for
    assert isinstance(source, fx.Node)
    with graph.inserting_after(own[source.name]):
        made = graph.call_function(operator.getitem, (own[source.name], index))
    made.meta, made.name = dict(node.meta), node.name  # both halves know a value by its name
    return made
