"""Erase the iterations of loops over the samples after the loops were vectorized."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

from torch import fx

from fxdp.capture.export.loop_iterations import SPLITS, memory_of
from fxdp.capture.export.unread_numbers import unread_assertions
from fxdp.ir.graph.graphs import spread

CONSTANT = "lifted_tensor_"
"""Prefix in export's names of tensors made from Python values; equal buffers may differ later."""


def erase_iterations(
    gm: fx.GraphModule, unread: dict[fx.Node, None], writes: Mapping[fx.Node, Sequence[fx.Node]]
) -> None:
    """Erase nodes in `unread` without remaining readers, and nodes that only erased ones read; in place."""
    for node in list(unread):
        unread |= dict.fromkeys(n for n in node.all_input_nodes if n.target in SPLITS)
    picks = gm.graph.find_nodes(op="call_function", target=operator.getitem)
    unread |= dict.fromkeys(pick for pick in picks if not pick.users)
    unread |= dict.fromkeys(unread_assertions(gm.graph, unread))
    read = _read(gm.graph, unread, writes)
    for node in [node for node in reversed(gm.graph.nodes) if node in unread and node not in read]:
        gm.graph.erase_node(node)
        if node.op == "get_attr":  # an unread constant would still be an input of the trace
            path, _, name = str(node.target).rpartition(".")
            delattr(gm.get_submodule(path), name)


def _read(
    graph: fx.Graph, unread: Mapping[fx.Node, None], writes: Mapping[fx.Node, Sequence[fx.Node]]
) -> set[fx.Node]:
    """Return all nodes that the remaining nodes read, including writes into the read values."""
    stays = (node for node in graph.nodes if node not in unread)
    return spread(stays, lambda node: [*node.all_input_nodes, *writes.get(memory_of(node), ())])


def renumber_constants(gm: fx.GraphModule) -> None:
    """Renumber the remaining constants: numbers after a loop depended on the number of iterations."""
    reads = [node for node in gm.graph.find_nodes(op="get_attr") if CONSTANT in str(node.target)]
    numbers = {str(node.target): int(str(node.target).rpartition("_")[2]) for node in reads}
    in_order = sorted(numbers, key=numbers.__getitem__)  # ascending: no new name is an old name still in use
    for number, target in enumerate(in_order):
        path, _, name = target.rpartition(".")
        owner, new = gm.get_submodule(path), f"{CONSTANT}{number}"
        value, is_buffer = getattr(owner, name), name in dict(owner.named_buffers(recurse=False))
        delattr(owner, name)
        if is_buffer:
            owner.register_buffer(new, value, persistent=False)
        else:
            setattr(owner, new, value)
        for node in reads:
            if node.target == target:
                node.target = f"{path}.{new}" if path else new
